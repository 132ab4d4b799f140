"""The site: its navigation has every page, and what it installs is pinned. `make docs` builds it with strict links."""

import re
import runpy

import pytest
from code_blocks import DOCS, ROOT

CONF = runpy.run_path(str(ROOT / "docs" / "conf.py"))  # imports nothing of Sphinx


def navigation(text: str) -> dict[str, list[str]]:
    """The pages of each part of the navigation, as docs/conf.py makes it from docs/index.md."""
    source = [text]
    CONF["add_navigation"](None, "index", source)
    table = r"^```\{toctree\}\n:hidden:\n:caption: ([^\n]+)\n\n(.*?)\n```$"
    tables = re.findall(table, source[0], re.DOTALL | re.MULTILINE)
    return {caption: pages.split() for caption, pages in tables}


def test_every_page_is_in_the_navigation_once() -> None:
    parts = navigation((ROOT / "docs" / "index.md").read_text())
    assert {"Start", "Learn", "Concepts"} <= parts.keys()
    found = [f"docs/{page}.md" for pages in parts.values() for page in pages]
    written = {f"docs/api/{name}.md" for name in CONF["packages"]()}
    assert {"docs/api/octavo.md", "docs/api/octavo.nn.md"} <= written
    assert sorted(found) == sorted((set(DOCS) | written) - {"docs/index.md"})


def test_a_docstring_becomes_restructured_text() -> None:
    lines = ["The `rows` of *x* and s_.", "", "    y = x @ w", "", "Args:", "    a: `beta`^age, a", "        number."]
    CONF["as_restructured_text"](None, "function", "f", None, None, lines)
    assert lines == [
        "The ``rows`` of \\*x\\* and s\\_.", "", "::", "", "    y = x @ w", "", "Args:",
        "    a: ``beta``\\ ^age, a", "        number.", "",
    ]  # fmt: skip


def test_other_pages_stay_as_they_are() -> None:
    source = ["## A\n- [B](b.md)\n"]
    CONF["add_navigation"](None, "training", source)
    assert source == ["## A\n- [B](b.md)\n"]
    page = "# Title\n\n## A\n\n- [B](b.md): words\n- [C](c/d.md), e\n\ntext [F](f.md)\n"
    assert navigation(page) == {"A": ["b", "c/d"]}


def test_a_page_that_loads_from_the_network_is_refused(tmp_path) -> None:
    class App:
        outdir = tmp_path

    (tmp_path / "a.html").write_text('<a href="https://example.org">a link</a><script src="b.js"></script>')
    CONF["check_offline"](App, None)
    for text in ('<script src="https://x.org/a.js">', '<link rel="stylesheet" href="//x.org/a.css">'):
        (tmp_path / "a.html").write_text(text)
        with pytest.raises(RuntimeError, match=r"x\.org"):
            CONF["check_offline"](App, None)


def test_the_packages_of_the_site_are_pinned() -> None:
    lines = (ROOT / "docs" / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))
