# Everything starts from a bare Python 3.11 or newer: each target sets up .venv first, which costs nothing the second time.
PYTHON ?= python3
bin := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lab readme docs types clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

setup:  ## make .venv with what training needs (GRPO_COLAB_BACKEND=cpu or gpu decides for the machine)
	@$(PYTHON) -m grpo_colab.install

demo: setup  ## train a toy policy with GRPO on real vLLM and write a report
	@$(bin)/grpo-colab demo

test:  ## prove the project: exports, README, every notebook, tests/
	@$(PYTHON) -m grpo_colab.install --dev
	@$(bin)/python tests/run_all.py

lab:  ## open the notebooks in JupyterLab
	@$(PYTHON) -m grpo_colab.install --extra dev --extra lab
	@$(bin)/jupyter lab nbs

readme:  ## write README.md from nbs/index.ipynb
	@$(PYTHON) -m grpo_colab.install --dev
	@$(bin)/python tests/readme.py

docs:  ## write the book, the how-to pages and the reference as a site to _docs/, and check its links
	@$(PYTHON) -m grpo_colab.install --extra docs
	@$(bin)/python docs/book.py

types:  ## check the types of what the modules export
	@$(PYTHON) -m grpo_colab.install --extra types
	@$(bin)/python -m mypy

clean:  ## remove .venv and every cache; reports and checkpoints in runs/ stay
	rm -rf .venv build dist _docs _proc *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
