"Packaging: everything comes from settings.ini, which nbdev and `make setup` read too."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="], interpolation=None)
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
lib = cfg["lib_name"]
readme = here/"README.md"

setup(
    name=lib,
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    url=cfg["git_url"] or None,
    keywords=cfg["keywords"].split(),
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research",
                 "Programming Language :: Python :: 3"],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[lib, lib + ".*"]),
    package_data={lib: ["py.typed"]},
    install_requires=cfg["requirements"].split(),
    extras_require={k.removesuffix("_requirements"): cfg[k].split() for k in cfg if k.endswith("_requirements")},
    entry_points={"console_scripts": cfg["console_scripts"].split("\n"), "nbdev": [f"{lib}={lib}._modidx:d"]},
    zip_safe=False,
)
