"""No number in the prose of the concepts is typed: a code block, its output, or a picture of the page has it."""

import re

import pytest
from code_blocks import DOCS, ROOT, read_blocks

PAGES = [page for page in DOCS if page.startswith(("docs/concepts/", "docs/learn/"))]
NUMBER = re.compile(r"(?<![\w.^/\-])\d[\d,]*(?:\.\d+)?(?![\w^/])")  # not a part of a name such as E4M3, 2^10 or 1/8


def numbers(text: str) -> set[float]:
    return {float(match[0].rstrip(",").replace(",", "")) for match in NUMBER.finditer(text)}


def prose(text: str) -> str:
    """The text of a page without its code, its links' targets and the alternative texts of its pictures."""
    for pattern in (r"^```.*?^```$", r"!\[.*?\]", r"\]\(.*?\)", r"`.*?`", r"arXiv:[\d.]+"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return text


@pytest.mark.parametrize("page", PAGES)
def test_the_numbers_of_the_prose_are_computed(page: str) -> None:
    text = (ROOT / page).read_text()
    computed = numbers(" ".join(block.text for block in read_blocks(page)))
    for picture in re.findall(r"\]\((\S+\.svg)\)", text):
        drawn = ((ROOT / page).parent / picture).read_text()
        computed |= numbers(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", drawn)))
    small = set(range(11))  # and what is counted on ten fingers
    assert numbers(prose(text)) - computed - small == set()


def test_a_typed_number_is_found() -> None:
    assert numbers(prose("E4M3 has 28.5 dB of 1/8 at 2^10, as `x = 77` and [90 dB](scales.md#12) say.")) == {28.5, 90}


def test_the_quantizer_has_thirty_lines_at_most() -> None:
    quantizer = read_blocks("docs/learn/3_quantizer.md")[0].text
    assert "def quantize(" in quantizer
    assert len(quantizer.splitlines()) <= 30
