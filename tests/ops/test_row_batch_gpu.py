"""The kernels that quantize many matrices together, against the reference on the CPU: every byte and every amax."""

import pytest
import torch
from bits import assert_same_numbers
from gpu_memory import poison
from row_batch_examples import matrices, quantized

from octavo.numerics import ROW, Cast
from octavo.ops.row_batch import RowBatch, cast_rows

pytestmark = pytest.mark.gpu

CASTS = [Cast(relative_floor=2.0**-8), Cast(), Cast("e5m2", ROW, "pow2", relative_floor=0.25)]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 130, 2048, 4097])
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
def test_the_reference(cast: Cast, columns: int, dtype: torch.dtype, at_once: bool) -> None:
    parts = matrices(columns, dtype)
    expected = quantized(parts, cast, at_once=at_once)
    on_gpu = [x.cuda() for x in parts]
    for _ in range(3):
        poison()
        for actual, wanted in zip(quantized(on_gpu, cast, at_once=at_once), expected, strict=True):
            assert_same_numbers(actual, wanted)


def test_matrices_at_odd_addresses() -> None:
    flat = torch.randn(1 + 5 * 64, device="cuda")
    x, scale = flat[1:].view(5, 64), torch.full((5,), 0.01, device="cuda")
    data = torch.zeros(5, 64, device="cuda").to(torch.float8_e4m3fn)
    cast_rows(RowBatch([x], [0]), scale, None, data, Cast())
    expected = torch.zeros(5, 64).to(torch.float8_e4m3fn)
    cast_rows(RowBatch([x.cpu()], [0]), scale.cpu(), None, expected, Cast())
    assert_same_numbers(data, expected)
