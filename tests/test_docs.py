"The pages in docs/: their code runs, their quotes are in the code, their links lead somewhere. `make docs` builds the site and checks it."
import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT/"docs/pages"
sys.path[:0] = [str(ROOT/"docs")]
import book  # noqa: E402


def test_code_of_the_how_to_pages_runs(tmp_path):
    "Blocks marked `python`, page by page; those marked `py` are fragments for a machine of yours."
    blocks = {p.name: "\n".join(re.findall(r"^```python\n(.*?)^```", p.read_text(), re.M | re.S)) for p in sorted(PAGES.rglob("*.md"))}
    program = tmp_path/"pages.py"
    program.write_text("".join(f"exec(compile({code!r}, {name!r}, 'exec'), {{'__name__': {name!r}}})\n"
                               for name, code in blocks.items() if code))
    assert sum(map(bool, blocks.values())) >= 7
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def said_in_code() -> str:
    "All strings of the package, adjacent ones joined; a gap where a value goes."
    found = []
    for p in (ROOT/"grpo_colab").glob("*.py"):
        for node in ast.walk(ast.parse(p.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str): found.append(node.value)
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
    return "\n".join(found)


def test_quoted_messages_are_in_the_code():
    said, quotes = said_in_code(), []
    for p in PAGES.rglob("*.md"):
        if p.name != "index.md": quotes += [(p.name, q.strip()) for q in re.findall(r"^> (.+)$", p.read_text(), re.M)]
    assert len(quotes) >= 11
    assert not (lost := [q for q in quotes if q[1] not in said]), lost


def test_names_from_trl():
    "In the table for TRL, every name with an underscore is a field."
    from grpo_colab.async_args import AsyncLoRAGRPOConfig
    table = (PAGES/"coming_from.md").read_text().split("## unsloth")[0]
    names = {n for code in re.findall(r"`([^`]+)`", table) for n in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", code)}
    assert len(names) > 12 and not (names - {f.name for f in fields(AsyncLoRAGRPOConfig)})


def test_links_and_navigation(tmp_path):
    "Every page is in the book, and links between pages lead to a page."
    nav = book.write(ROOT, tmp_path/"docs")
    listed = set(re.findall(r"(?:book|api)/(\w+)\.md", str(nav)))
    assert {p.stem for p in (ROOT/"nbs").glob("*.ipynb")} <= listed
    assert {p.stem for p in (PAGES/"howto").glob("*.md")} == set(book.HOW_TO)
    lost = []
    for p in (tmp_path/"docs").rglob("*.md"):
        text = re.sub(r"^(`{3,}).*?^\1", "", p.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            if not re.match(r"[a-z]+:|#", link) and not (p.parent/link.partition("#")[0]).exists():
                lost.append(f"{p.relative_to(tmp_path)}: {link}")
    assert not lost, "\n".join(lost)


def test_reference_says_what_a_comment_says(tmp_path):
    module = tmp_path/"one.py"
    module.write_text('"One."\n__all__ = ["twice"]\ndef twice(\n    x:int, # tokens\n    *,\n    by:int=2, # times\n'
                      ') -> int: # tokens\n    "Doubles."\n    return by*x\n')
    text = book.reference(module)
    assert "| <code>x</code> | <code>int</code> |  | tokens |" in text and "| <code>by</code> | <code>int</code> | <code>2</code> | times |" in text
    assert "| <code>returns</code> | <code>int</code> |  | tokens |" in text and "Doubles." in text


def test_broken_links_are_found(tmp_path):
    (tmp_path/"a.html").write_text('<a id="here"></a><a href="#here"></a><a href="b.html#gone"></a><a href="c.html"></a><a href="http://x"></a>')
    (tmp_path/"b.html").write_text("<p>")
    assert book.broken(tmp_path) == ["a.html: b.html#gone", "a.html: c.html"]
