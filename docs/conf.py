"""The settings of Sphinx for `make site`, which builds docs/*.md into build/site.

The pages are plain Markdown, as GitHub shows it. The navigation is made from the lists of docs/index.md.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Octavo"
extensions = ["myst_parser"]
exclude_patterns = ["figures", "performance"]
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

# What a browser loads by itself when it opens a page or a style sheet. Links that a reader clicks are allowed.
NETWORK = re.compile(
    r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^>]*>|@import|url\(\s*["']?(?:https?:)?//"""
)


def add_navigation(app: "Sphinx", name: str, source: list[str]) -> None:
    """Append the lists of docs/index.md as hidden tables of contents, each under its heading."""
    if name != "index":
        return
    for part in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^- \[.*?\]\((\S+)\.md\)", part, re.MULTILINE)
        caption = part.partition("\n")[0]
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def check_offline(app: "Sphinx", exception: Exception | None) -> None:
    """Refuse a site that loads anything from the network when it is opened."""
    for path in Path(app.outdir).rglob("*"):
        if exception is None and path.suffix in (".html", ".css") and (found := NETWORK.search(path.read_text())):
            raise RuntimeError(f"{path} loads from the network: {found[0]}")


def setup(app: "Sphinx") -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", check_offline)
