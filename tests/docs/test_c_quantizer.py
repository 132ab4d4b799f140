"""The quantizer in C beside the third lesson gives the bytes and scales of `octavo.quantize`."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from code_blocks import ROOT

import octavo

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
