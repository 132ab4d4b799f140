"""The pages: README's length, its table and all links; the navigation of the site, which `make docs` builds."""

import re
import runpy

import pytest
from code_blocks import DOCS, PAGES, ROOT

from bench.report import pages
from bench.report.filler import load

README, INDEX = ((ROOT / page).read_text() for page in ("README.md", "docs/index.md"))
CONF = runpy.run_path(str(ROOT / "docs" / "conf.py"))  # imports nothing of Sphinx


def test_readme_is_short_has_the_table_of_the_results_and_leads_to_the_index() -> None:
    assert len(README.splitlines()) <= 160
    assert all(part in (ROOT / page).read_text() for (page, _), part in pages.parts(load()).items()), "run make docs"
    assert "](docs/performance/gains.svg)" in README
    assert "](docs/index.md)" in README


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        if heading:
            headings = [line.lstrip("# ").lower() for line in linked.read_text().splitlines() if line.startswith("#")]
            slugs = [re.sub(r"[^\w\- ]", "", each).replace(" ", "-") for each in headings]  # as GitHub makes anchors
            assert heading in slugs, target


def test_the_map_of_the_source_has_its_files_and_their_lengths() -> None:
    """Twelve files of training and eight of serving. A length may differ from the page's by a quarter."""
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", INDEX, re.MULTILINE)
    assert len(rows) == 12 + 8
    for path, said in rows:
        lines = len((ROOT / "src" / "octavo" / path).read_text().splitlines())
        assert abs(lines - int(said)) <= int(said) / 4, f"docs/index.md: {path} has {lines} lines"


def test_the_index_page_of_the_package_has_absolute_links() -> None:
    described = runpy.run_path(str(ROOT / "setup.py"))["with_absolute_links"](README)
    assert re.findall(r"\]\((?!https://)", described) == []
    raw, page = "https://raw.githubusercontent.com/OWNER/octavo/main", "https://github.com/OWNER/octavo/blob/main"
    assert f"]({raw}/docs/performance/gains.svg)" in described
    assert f"[how]({page}/docs/scaling.md)" in described


def test_pre_commit_has_the_ruff_of_the_environment() -> None:
    pinned = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    used = re.search(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned
    assert used
    assert pinned[1] == used[1]


# ---- The site


def navigation(text: str) -> dict[str, list[str]]:
    """The pages of each part of the navigation, as docs/conf.py makes it from docs/index.md."""
    source = [text]
    CONF["add_navigation"](None, "index", source)
    table = r"^```\{toctree\}\n:hidden:\n:caption: ([^\n]+)\n\n(.*?)\n```$"
    tables = re.findall(table, source[0], re.DOTALL | re.MULTILINE)
    return {caption: pages.split() for caption, pages in tables}


def test_every_page_is_in_the_navigation_once() -> None:
    parts = navigation(INDEX)
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
