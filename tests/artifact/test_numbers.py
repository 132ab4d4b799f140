"""Checks of the numbers in tensors."""

import pytest
import torch

from octavo.artifact.numbers import failing, is_finite

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_one_bad_number_is_found(dtype: torch.dtype, bad: float) -> None:
    for at in (0, 4097, 9998):
        x = torch.linspace(-1, 1, 9999).to(dtype) * torch.finfo(dtype).max
        assert is_finite(x)
        x[at] = bad
        assert not is_finite(x)


def test_each_code_of_e4m3_and_integers() -> None:
    for code in E4M3:
        assert bool(is_finite(code.view(1))) == bool(code.float().isfinite())
    assert is_finite(torch.arange(5))


def test_names_of_what_fails_in_their_order() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    assert failing({"a": no, "b": yes, "c": no}) == ["a", "c"]
    assert failing({}) == []
