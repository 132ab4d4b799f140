"""The model of the tensor core's sums: the precision that it keeps and loses."""

import numpy as np
import pytest
import torch
from gemm_examples import operands, wide
from tensor_core import tensor_core_mm

from octavo.numerics import FORMATS, ROW, Cast, QTensor
from octavo.ops import quantize


def integers(m: int, k: int, low: int = -8, high: int = 9) -> QTensor:
    torch.manual_seed(k)
    data = torch.randint(low, high, (m, k)).to(torch.float8_e4m3fn)
    return QTensor(data, torch.exp2(torch.arange(-2.0, m - 2)).view(m, 1), FORMATS["e4m3"], ROW)


@pytest.mark.parametrize("k", [1, 32, 100, 512])
def test_24_bits_are_exact(k):
    a, b = integers(5, k), integers(6, k)
    exact = torch.from_numpy(wide(a) @ wide(b).T).float()
    assert torch.equal(tensor_core_mm(a, b, bits=24), exact)
    assert torch.equal(tensor_core_mm(a, b, bits=24, promote_every=None), exact)


def relative_error(k: int, promote_every: int | None) -> np.ndarray:
    """The relative error of sums of positive terms, which truncation can only lower."""
    torch.manual_seed(7)
    a, b = (quantize(torch.rand(8, k) + 0.1, Cast()) for _ in range(2))
    exact = wide(a) @ wide(b).T
    return (exact - tensor_core_mm(a, b, promote_every=promote_every).double().numpy()) / exact


def test_one_instruction_loses_less_than_its_last_bit():
    error = relative_error(32, None)
    assert (error >= -1e-6).all()
    assert error.max() <= 2.0**-13  # 14 significant bits, truncated
    assert 2.0**-16 < error.mean() < 2.0**-14  # truncation loses half of it, and a significand lies between 1 and 2


def test_fast_accumulation_loses_with_k_and_promotion_does_not():
    fast = {k: relative_error(k, None).mean() for k in (256, 1024, 4096)}
    promoted = {k: relative_error(k, 128).mean() for k in (256, 1024, 4096)}
    assert 2.5 < fast[1024] / fast[256] < 6
    assert 2.5 < fast[4096] / fast[1024] < 6
    assert 2.0**-14 < fast[256] < 8 * 2.0**-14
    assert max(promoted.values()) < 2 * 2.0**-14
    assert promoted[4096] < 1.2 * promoted[256]
    assert fast[4096] > 10 * promoted[4096]


def test_the_model_refuses_block_scales():
    with pytest.raises(ValueError, match="takes tensor or row scales, got group:64 and group:64"):
        tensor_core_mm(*operands("group64", 3, 64, 5))


@pytest.mark.parametrize("promote_every", [-32, 0, 1, 31, 33, 100])
def test_promotion_happens_between_instructions(promote_every):
    message = f"promote_every must be a positive multiple of 32, got {promote_every}"
    with pytest.raises(ValueError, match=message):
        tensor_core_mm(*operands("row", 3, 64, 5), promote_every=promote_every)


@pytest.mark.parametrize("promote_every", [32, 96, 128, 4096])
def test_any_multiple_of_an_instruction_will_do(promote_every):
    """An accumulator of 24 bits loses nothing of small integers, however often it is promoted."""
    a, b = integers(5, 200), integers(6, 200)
    exact = torch.from_numpy(wide(a) @ wide(b).T).float()
    assert torch.equal(tensor_core_mm(a, b, bits=24, promote_every=promote_every), exact)
