"""README.md is nbs/index.ipynb as Markdown: `make readme` writes it, the tests tell when it is stale.

Cells that begin with `#| hide` are left out, and so are other directives. Pictures in outputs go to README_files/.
Links are mended for where the README lies: `04_engine.ipynb` becomes `nbs/04_engine.ipynb`, `../LICENSE` `LICENSE`.
"""
import posixpath
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'(\]\(|(?:src|href)=")(?![a-z]+:|[#/])([^)\s"]+)')


def render(root: Path = ROOT) -> dict[str, bytes]:
    "The README and its pictures: path below `root` -> content."
    source = root/"nbs/index.ipynb"
    if not source.exists(): raise FileNotFoundError(f"{source} is missing: README.md is made from it")
    nb = nbformat.read(source, as_version=4)
    nb.cells = [c for c in nb.cells if not re.match(r"#\|\s*(hide|default_exp)", c.source)]
    for cell in nb.cells: cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    names = {"unique_key": "README", "output_files_dir": "README_files"}
    text, extra = MarkdownExporter().from_notebook_node(nb, names)
    pictures = extra["outputs"]
    def mend(m):
        return m[0] if m[2] in pictures else m[1] + posixpath.normpath(posixpath.join("nbs", m[2]))
    text = re.sub(r"\n{3,}", "\n\n", LINK.sub(mend, text)).strip() + "\n"
    return {"README.md": text.encode(), **pictures}


def stale(root: Path = ROOT) -> list[str]:
    "The files of the README that are not what `render` makes."
    made = render(root)
    there = {str(p.relative_to(root)) for p in root.glob("README_files/*")}
    differ = [n for n, data in made.items() if not (root/n).exists() or (root/n).read_bytes() != data]
    return sorted(differ + list(there - set(made)))


def write(root: Path = ROOT):
    "Write the README, and remove pictures it no longer has."
    made = render(root)
    for old in root.glob("README_files/*"):
        if str(old.relative_to(root)) not in made: old.unlink()
    for name, data in made.items():
        (root/name).parent.mkdir(exist_ok=True)
        (root/name).write_bytes(data)
    print(f"README.md: {len(made['README.md'])} bytes, {len(made) - 1} pictures")


if __name__ == "__main__": sys.exit(write())
