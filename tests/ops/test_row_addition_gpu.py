"""The kernel that adds rows, against float64."""

import pytest
import torch
from gpu_memory import poison

from octavo.ops.row_addition import add_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("columns", [1, 1023, 4096, 1_000_003])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_sums_are_those_of_float64(count: int, columns: int, mean: bool) -> None:
    rows, total = torch.randn(count, columns, device="cuda").bfloat16(), torch.full((columns,), torch.nan).cuda()
    for _ in range(2):
        poison()
        add_rows(rows, total, mean=mean)
        expected = rows.double().mean(0) if mean else rows.double().sum(0)
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


def test_two_rows_have_the_bits_of_pytorch() -> None:
    rows, total = torch.randn(2, 100_000, device="cuda").bfloat16(), torch.empty(100_000, device="cuda")
    add_rows(rows, total, mean=True)
    assert torch.equal(total, rows.float().sum(0) * 0.5)


def test_rows_beyond_32_bit_offsets() -> None:
    rows = torch.zeros(3, 800_000_000, dtype=torch.bfloat16, device="cuda")
    rows[:, -5:] = torch.tensor([1.0, 2.0, 4.0], device="cuda").bfloat16()[:, None]
    total = torch.empty(800_000_000, device="cuda")
    add_rows(rows, total, mean=False)
    assert total[-5:].tolist() == [7.0] * 5
    assert total[:-5].count_nonzero() == 0
