"""`make docs`: the notebooks as a book, with pages by hand and a reference made from the code, as a static site in _docs/.

    book.py                 write the pages, build the site, check every link in it
    book.py --check _docs   check the links of a site that is there

Notebooks are read, not run: code and saved outputs. Nothing in the site comes from another address.
"""
import ast
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

sys.path[:0] = [str(Path(__file__).resolve().parent)]
from pictures import PICTURES  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGES, WORK, SITE = ROOT/"docs/pages", ROOT/"_proc/docs", ROOT/"_docs"
COPIED = ("benchmarks", "examples", "nbs/images", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "settings.ini")  # what pages link to
#: the parts of the book, and up to which number each goes
PARTS = [("Start", 1), ("The trace", 2), ("The pieces", 7), ("The co-located trainer", 9), ("The adapter store", 10),
         ("The proxy", 12), ("The fleet", 13), ("Asynchronous", 15), ("The lab", 17), ("Programs", 99)]
HOW_TO = ["first_run", "my_model_and_reward", "lora_on_one_gpu", "out_of_memory", "many_gpus", "async_one_host", "async_jobs",
          "read_the_timeline", "wrong_sync", "change_the_loss", "router_rule"]


def part(name: str) -> str:
    "The part of the book that a notebook belongs to, by its name."
    if "bench" in name or name.startswith("19_"): return "Measured"
    return next(title for title, last in PARTS if int(name[:2]) <= last)


def title(text: str) -> str:
    "The first heading of a page."
    return re.search(r"^# (.+)$", text, re.M)[1].strip()


# ---- a notebook as a page

def _output(o: dict) -> str:
    data = o.get("data", {})
    text = lambda x: "".join(x)
    if figure := data.get("application/vnd.plotly.v1+json"):
        made = json.dumps({k: figure[k] for k in ("data", "layout")}, separators=(",", ":")).replace("</", "<\\/")
        return f'<div class="figure"><script type="application/json">{made}</script></div>'
    if "image/png" in data: return f'<img src="data:image/png;base64,{text(data["image/png"]).strip()}" alt="output">'
    if "text/html" in data: return "<div class='output'>" + re.sub(r"\n\s*\n", "\n", text(data["text/html"])) + "</div>"
    if "application/vnd.jupyter.widget-view+json" in data: return ""
    said = text(o.get("text", "")) or text(data.get("text/plain", ""))
    return f'<pre class="output">{html.escape(said.rstrip()).replace(chr(10), "&#10;")}</pre>' if said.strip() else ""


def _links(text: str) -> str:
    "Links to notebooks lead to their pages."
    text = re.sub(r"\]\(((?:\.\./)+)nbs/?\)", r"](\1book/index.md)", text).replace("../nbs/", "../book/")
    return re.sub(r"(\]\([^)\s]*?)\.ipynb(#[^)]*)?\)", r"\1.md\2)", text)


def page(path: Path) -> str:
    "A notebook in Markdown: prose, code without directives, saved outputs."
    found = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown": found.append(_links(source)); continue
        if cell["cell_type"] != "code" or re.match(r"#\|\s*(hide|default_exp)", source) or not source.strip(): continue
        code = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip("\n")
        found += [f"````python\n{code}\n````", *filter(None, map(_output, cell["outputs"]))]
    return "\n\n".join(found) + "\n"


# ---- the reference: what a module exports, with types, shapes and units from the comments

def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("#: ").strip() for t in tokens if t.type == tokenize.COMMENT}


def _cell(text: str) -> str: return html.escape(text, quote=False).replace("|", "&#124;").replace("\n", " ")
def _code(text: str) -> str: return f"<code>{_cell(text)}</code>" if text else ""


def _table(rows: list[tuple]) -> str:
    if not rows: return ""
    head = "| name | type | default | what it is |\n|---|---|---|---|\n"
    return head + "\n".join(f"| {_code(n)} | {_code(t)} | {_code(d)} | {_cell(c)} |" for n, t, d, c in rows) + "\n"


def _function(node, comments: dict, owner: str = "") -> str:
    a, name = node.args, owner + node.name
    given = [*a.posonlyargs, *a.args]
    defaults = dict(zip([p.arg for p in given][::-1], [ast.unparse(d) for d in a.defaults][::-1]))
    defaults |= {p.arg: ast.unparse(d) for p, d in zip(a.kwonlyargs, a.kw_defaults) if d}
    stars = [(f"*{a.vararg.arg}", a.vararg)] if a.vararg else []
    every = [(p.arg, p) for p in given] + stars + [(p.arg, p) for p in a.kwonlyargs]
    every += [(f"**{a.kwarg.arg}", a.kwarg)] if a.kwarg else []
    rows = [(n, ast.unparse(p.annotation) if p.annotation else "", defaults.get(n, ""), comments.get(p.end_lineno, ""))
            for n, p in every if n not in ("self", "cls")]
    if node.returns: rows.append(("returns", ast.unparse(node.returns), "", comments.get(node.returns.end_lineno, "")))
    return f"### `{name}` {{ #{name} }}\n\n{html.escape(ast.get_docstring(node) or '', quote=False)}\n\n{_table(rows)}\n"


def _class(node, comments: dict, source: list[str]) -> str:
    fields = []
    for n in node.body:
        if not isinstance(n, ast.AnnAssign): continue
        helped = [c.value for c in ast.walk(n) if isinstance(c, ast.Constant) and isinstance(c.value, str) and " " in c.value]
        said = comments.get(n.end_lineno) or comments.get(n.lineno) or " ".join(helped[:1])
        given = ast.unparse(n.value) if n.value else ""
        fields.append((n.target.id, ast.unparse(n.annotation), "" if "help" in given else given, said))
    text = f"## `{node.name}` {{ #{node.name} }}\n\n{html.escape(ast.get_docstring(node) or '', quote=False)}\n\n{_table(fields)}\n"
    methods = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return text + "".join(_function(n, comments, node.name + ".") for n in methods if not n.name.startswith("_"))


def reference(module: Path) -> str:
    "The page of a module; empty for one that exports nothing."
    source = module.read_text()
    tree, comments = ast.parse(source), _comments(source)
    notebook = re.search(r"File to edit: \.\./(nbs/\S+)\.ipynb", source)
    names = next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign)
                  and getattr(n.targets[0], "id", "") == "__all__"), [])
    found = [f"# {module.stem}\n\n> {html.escape(ast.get_docstring(tree) or module.stem, quote=False)}\n"]
    if notebook: found.append(f"Made from [{notebook[1][4:]}](../book/{notebook[1][4:]}.md).\n")
    for n in tree.body:
        if isinstance(n, ast.ClassDef) and n.name in names: found.append(_class(n, comments, source.splitlines()))
        elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = n.args.args[0].annotation if n.args.args else None
            patched = any("patch" in ast.unparse(d) for d in n.decorator_list) and first is not None
            if patched and not n.name.startswith("_"): found.append(_function(n, comments, ast.unparse(first) + "."))
            elif n.name in names: found.append(_function(n, comments))
    return "\n".join(found) if names else ""


# ---- the site

def notebooks(root: Path = ROOT) -> list[Path]:
    "Those of the book, in order."
    key = lambda p: re.match(r"(\d+)([a-z]*)_", p.name).groups()
    return sorted((p for p in (root/"nbs").glob("[0-9]*.ipynb")), key=lambda p: (int(key(p)[0]), key(p)[1]))


def write(root: Path = ROOT, work: Path = WORK) -> list:
    "Write all pages; returns the navigation."
    if work.exists(): shutil.rmtree(work)
    shutil.copytree(PAGES, work)
    for p in work.rglob("*.md"):
        p.write_text(re.sub(r"<!-- picture: (\w+) -->", lambda m: f"<div>{PICTURES[m[1]]()}</div>", p.read_text()))
    for name in COPIED:
        to = work/name.replace("nbs/", "book/")
        (shutil.copytree if (root/name).is_dir() else shutil.copy)(root/name, to)
    for old in (work/"examples").rglob("*.ipynb"): old.with_suffix(".md").write_text(page(old)); old.unlink()
    book, api = {}, []
    (work/"book/index.md").write_text(page(root/"nbs/index.ipynb"))
    for nb in notebooks(root):
        text = page(nb)
        (work/f"book/{nb.stem}.md").write_text(text)
        book.setdefault(part(nb.stem), []).append({title(text): f"book/{nb.stem}.md"})
    (work/"api").mkdir()
    for module in sorted((root/"grpo_colab").glob("[a-z]*.py")):
        if text := reference(module):
            (work/f"api/{module.stem}.md").write_text(text)
            api.append({module.stem: f"api/{module.stem}.md"})
    hand = lambda name: {title((PAGES/f"{name}.md").read_text()): f"{name}.md"}
    how = [hand(f"howto/{n}") for n in HOW_TO if (PAGES/f"howto/{n}.md").exists()]
    single = [hand(n) for n in ("architecture", "coming_from", "troubleshooting") if (PAGES/f"{n}.md").exists()]
    order = [t for t, _ in PARTS] + ["Measured"]
    return [{"Home": "index.md"}, *single[:1], {"How to": how}, *single[1:], {"What it is": "book/index.md"},
            *({t: book[t]} for t in order if t in book), {"Reference": api}, {"Changes": "CHANGELOG.md"}]


def config(nav: list, work: Path = WORK, site: Path = SITE) -> dict:
    "What MkDocs is told."
    mode = lambda scheme, other: dict(media=f"(prefers-color-scheme: {'dark' if scheme == 'slate' else 'light'})", scheme=scheme,
                                      toggle=dict(icon="material/brightness-6", name=f"To {other} colours"))
    return dict(site_name="grpo_colab", docs_dir=str(work), site_dir=str(site), use_directory_urls=False, nav=nav,
        theme=dict(name="material", font=False, features=["navigation.tabs", "navigation.sections", "navigation.footer", "content.code.copy"],
                   palette=[mode("default", "dark"), mode("slate", "light")]),
        extra_css=["extra.css"], extra_javascript=["figures.js"], plugins=["search"],
        markdown_extensions=["tables", "attr_list", "admonition", {"toc": dict(permalink=True)}, "pymdownx.superfences",
                             {"pymdownx.highlight": dict(anchor_linenums=False)}],
        validation=dict(omitted_files="ignore", absolute_links="warn", unrecognized_links="ignore"))


class _Anchors(HTMLParser):
    def __init__(self): super().__init__(); self.ids, self.links = set(), []
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ("id", "name") if a.get(k)}
        self.links += [a[k] for k in ("href", "src") if a.get(k)]


def broken(site: Path = SITE) -> list[str]:
    "Links and anchors of a built site that lead nowhere within it."
    pages = {}
    for p in site.rglob("*.html"):
        if p.name == "404.html" or "benchmarks" in p.parts: continue  # the first has absolute links, the others are reports
        pages[p.resolve()] = parser = _Anchors()
        parser.feed(p.read_text())
    wrong = []
    for p, parser in pages.items():
        for link in parser.links:
            if re.match(r"[a-z]+:|//", link): continue
            where, _, anchor = unquote(link).partition("#")
            to = (p.parent/where.split("?")[0]).resolve() if where else p
            if to.is_dir(): to = to/"index.html"
            lost = anchor and to in pages and anchor not in pages[to].ids and not anchor.startswith("__")
            if not to.exists() or lost: wrong.append(f"{p.relative_to(site.resolve())}: {link}")
    return sorted(set(wrong))


def build() -> list[str]:
    "Make the site; returns its broken links."
    import yaml
    from plotly.offline import get_plotlyjs
    nav = write()
    (WORK/"plotly.min.js").write_text(get_plotlyjs())
    told = WORK.parent/"mkdocs.yml"
    told.write_text(yaml.safe_dump(config(nav), sort_keys=False))
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-f", str(told)], check=True,
                   env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return broken()


if __name__ == "__main__":
    lost = broken(Path(sys.argv[2]).resolve()) if sys.argv[1:2] == ["--check"] else build()
    size = sum(p.stat().st_size for p in SITE.rglob("*") if p.is_file())/1e6
    print("\n".join(lost + [f"_docs: {len(list(SITE.rglob('*.html')))} pages, {size:.0f} MB, {len(lost)} broken links"]))
    sys.exit(bool(lost))
