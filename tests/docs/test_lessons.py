"""The concepts and the lessons. No number in their prose is typed: a code block, its output, or a picture of the page
has it. The quantizer in C beside the third lesson gives the bytes and scales of `octavo.quantize`.
"""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch
from code_blocks import DOCS, ROOT, read_blocks

import octavo

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


# ---- The quantizer in C


SOURCE = ROOT / "docs" / "learn" / "quantizer.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("c") / "quantizer.so"
    flags = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", built, SOURCE, "-lm"], check=True)
    return ctypes.CDLL(str(built))


def every_bf16():
    """Each finite number of BF16 of at most 448 once, in a row whose scale is 1."""
    numbers = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).float()
    return numbers[numbers.abs() <= 448].unsqueeze(0)


def rows_of_all_sizes():
    x = torch.randn(64, 200) * torch.logspace(-44, 30, 64).unsqueeze(1)
    x[3] = 0
    x[4, ::2] = -0.0
    return x.bfloat16().float()


@pytest.mark.parametrize("make", [every_bf16, rows_of_all_sizes])
def test_the_bytes_and_scales_are_those_of_octavo(library, make):
    x = make().contiguous()
    data, scale = torch.full(x.shape, 255, dtype=torch.uint8), torch.full((len(x), 1), -1.0)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, data, scale)]
    library.quantize_rows(pointers[0], *map(ctypes.c_size_t, x.shape), *pointers[1:])
    expected = octavo.quantize(x, "e4m3", "row")
    assert torch.equal(scale, expected.scale)
    assert torch.equal(data, expected.data.view(torch.uint8))
