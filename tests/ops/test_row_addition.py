"""The sum of rows on the CPU, and its kernel compiled for GPUs that are not here."""

import pytest
import torch
from offline_triton import compile_for

from octavo.ops.rows import add_rows


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("shape", [(2, 1000), (3, 7), (1, 5), (4, 0)])
def test_the_sums_are_those_of_float64(shape: tuple[int, int], mean: bool) -> None:
    rows, total = torch.randn(shape).bfloat16(), torch.full(shape[1:], torch.nan)
    add_rows(rows, total, mean=mean)
    expected = rows.double().mean(0) if mean else rows.double().sum(0)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.triton
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_the_kernel_compiles(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("octavo.ops.kernels.rows", exc_type=ImportError)
    compiled = compile_for(capability, kernel, monkeypatch)
    for mean in (True, False):
        kernel.add_rows(torch.zeros(8, 2048, dtype=torch.bfloat16), torch.zeros(2048), mean)
    assert len(compiled) == 2
    assert compiled.fit()
