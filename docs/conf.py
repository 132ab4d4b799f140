"""The settings of Sphinx for `make docs`, which builds docs/*.md and the reference of the API into build/site.

The pages are plain Markdown, as GitHub shows it. The navigation is made from the lists of docs/index.md. The reference
has a page for each package with an `__all__`, in docs/api, which git does not hold.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Octavo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["figures", "performance"]
autosummary_generate = False  # the tables alone: a page has the whole package
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
html_theme = "furo"
html_title = "Octavo"
html_copy_source = False
html_use_index = False
html_show_search_summary = False  # summaries are fetched, which a browser refuses for files
html_show_copyright = False
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"
myst_heading_anchors = 4  # headings have GitHub's anchors

SOURCES = Path(__file__).parents[1] / "src" / "octavo"
# What a browser loads by itself when it opens a page or a style sheet. Links that a reader clicks are allowed.
NETWORK = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^>]*>|@import|url\(\s*["']?(?:https?:)?//"""
)


def packages() -> list[str]:
    """`octavo` and the packages that name in `__all__` what they offer."""
    rooms = sorted(path.parent.name for path in SOURCES.glob("*/__init__.py") if "\n__all__ = " in path.read_text())
    return ["octavo", *(f"octavo.{room}" for room in rooms)]


def write_reference(app: "Sphinx") -> None:
    """Write docs/api: a page for each package with a table of its names and their docstrings."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.rst"):
        path.unlink()
    indexed: set[int] = set()
    for name in packages():
        package = import_module(name)
        offered = {each: getattr(package, each) for each in package.__all__ if not each.startswith("__")}
        documented = [f"   {each}" for each, value in offered.items() if callable(value)]
        parts = [
            f"{name}\n{'=' * len(name)}\n",
            f".. automodule:: {name}\n   :no-members:\n",
            "\n".join([f".. currentmodule:: {name}\n\n.. autosummary::\n", *documented, ""]),
            *(entry(f"{name}.{each}", value, indexed) for each, value in offered.items()),
        ]
        (folder / f"{name}.rst").write_text("\n".join(parts))


def entry(path: str, value: Any, indexed: set[int]) -> str:
    """The directive of a public name. The first that shows an object is the one that links and the index lead to."""
    options = ["   :no-index:"] if id(value) in indexed else []
    indexed.add(id(value))
    if not callable(value):
        text = f"Names: {', '.join(f'``{key}``' for key in value)}." if isinstance(value, dict) else f"``{value!r}``"
        return "\n".join([f".. py:data:: {path}", *options, "", f"   {text}", ""])
    kind = "class" if isinstance(value, type) else "function"
    members = ["   :members:"] if kind == "class" else []
    return "\n".join([f".. auto{kind}:: {path}", *members, *options, ""])


def as_restructured_text(app: "Sphinx", what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place: `x` is code, what is indented after an empty line stays as it is typed."""
    found: list[str] = []
    paragraph: list[str] = []
    literal = section = False
    for line in [*lines, ""]:
        if line and not line.startswith(" "):
            literal, section = False, bool(re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line))
        elif line and not paragraph and not section and not literal:
            literal = True
            found += [] if found[-2:-1] == ["Example::"] else ["::", ""]
        if line and not literal:
            paragraph.append(line)
            continue
        found += escaped("\n".join(paragraph)).splitlines()
        found.append(line)
        paragraph = []
    lines[:] = found


def escaped(text: str) -> str:
    """Text in which nothing means anything to reStructuredText, but what stands between backticks, which is code."""
    parts = text.split("`")
    words = [re.sub(r"([*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    codes = [f"``{' '.join(part.split())}``" for part in parts[1::2]]  # on one line
    text = "".join(word + code for word, code in zip(words, [*codes, ""], strict=True))
    return re.sub(r"(?<=``)(?=[\w^])(?<=\w``|\)``)", r"\\ ", text)  # code ends at what is no letter: `beta`^age


def add_navigation(app: "Sphinx", name: str, source: list[str]) -> None:
    """Append the lists of docs/index.md as hidden tables of contents, each under its heading."""
    if name != "index":
        return
    for part in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^- \[.*?\]\((\S+)\.md\)", part, re.MULTILINE)
        caption = part.partition("\n")[0]
        if caption == "Reference":
            pages += [f"api/{name}" for name in packages()]
        if not pages:
            continue
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def check_offline(app: "Sphinx", exception: Exception | None) -> None:
    """Refuse a site that loads anything from the network when it is opened."""
    for path in Path(app.outdir).rglob("*"):
        if exception is None and path.suffix in (".html", ".css") and (found := NETWORK.search(path.read_text())):
            raise RuntimeError(f"{path} loads from the network: {found[0]}")


def setup(app: "Sphinx") -> None:
    app.connect("builder-inited", write_reference)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
    app.connect("source-read", add_navigation)
    app.connect("build-finished", check_offline)
