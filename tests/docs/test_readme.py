"""README: its length, its table and its links."""

import re
import runpy

import pytest
from code_blocks import DOCS, PAGES, ROOT

from bench.report import pages
from bench.report.filler import load

README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 160


def test_its_table_is_that_of_the_results() -> None:
    assert pages.with_gains(README, load()) == README, "run make docs"
    assert "](docs/performance/gains.svg)" in README


def test_every_page_is_linked() -> None:
    assert "](docs/index.md)" in README
    for page in DOCS:
        linked = re.findall(rf"^- \[.*?\]\({re.escape(page.removeprefix('docs/'))}\)", INDEX, re.MULTILINE)
        assert len(linked) == (page != "docs/index.md"), f"{page} must stand in the lists of docs/index.md, once"


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
