"""Every quantizer byte for byte against numpy and ml_dtypes, block by block."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantize_oracle import CASTS, SHAPES, block_sizes, check, factors, matrix, name_of, oracle

from octavo.numerics import TENSOR, Cast
from octavo.ops import quantize, quantize_transposed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_quantize_equals_numpy(cast, shape):
    x = matrix(shape)
    check(quantize(x, cast), *oracle(x.numpy(), cast), cast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_sixteen_bit_inputs_are_quantized_as_their_float32_selves(cast, dtype):
    x = matrix((17, 130), dtype)
    check(quantize(x, cast), *oracle(x.float().numpy(), cast), cast)


@pytest.mark.parametrize("size", [1e-10, 1e-35, 2.0**-140, 1e30])
@pytest.mark.parametrize("cast", [Cast(), Cast(scale="pow2"), Cast("e5m2", TENSOR)], ids=name_of)
def test_tiny_and_huge_inputs(cast, size):
    torch.manual_seed(0)
    x = torch.randn(5, 33) * size
    check(quantize(x, cast), *oracle(x.numpy(), cast), cast)


@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_strided_inputs(cast):
    x = matrix((130, 17)).t()
    for q, expected in ((quantize(x, cast), x), (quantize_transposed(x, cast), x.t())):
        check(q, *oracle(expected.contiguous().numpy(), cast), cast)
        assert q.data.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_quantize_transposed_is_quantize_of_the_transpose(cast, shape):
    x = matrix(shape)
    check(quantize_transposed(x, cast), *oracle(np.ascontiguousarray(x.numpy().T), cast), cast)


# ---- factors of columns and rows


def scaled(x: np.ndarray, given: dict[str, torch.Tensor]) -> np.ndarray:
    """x * column_scale * mantissa in float32, in this order."""
    x = x * given["column_scale"].numpy() if "column_scale" in given else x
    return x * mantissa(given["mantissa_of"]) if "mantissa_of" in given else x


def mantissa(scale: torch.Tensor) -> np.ndarray:
    return np.frexp(scale.numpy())[0] * 2  # of numpy, from 0.5 to 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["column_scale", "mantissa_of", "both"])
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_columns_then_rows_are_multiplied_first(cast, which, dtype):
    x = matrix((17, 130), dtype)
    given = factors((17, 130), which)
    check(quantize(x, cast, **given), *oracle(scaled(x.float().numpy(), given), cast), cast)


def test_the_order_of_the_factors_is_seen():
    """The other order rounds differently, so the test above can tell them apart."""
    x, given = matrix((17, 130)).numpy(), factors((17, 130), "both")
    other = x * mantissa(given["mantissa_of"]) * given["column_scale"].numpy()
    assert (scaled(x, given) != other).any()


@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_factors_of_nothing_and_of_one(cast, shape):
    x, given = matrix(shape), factors(shape, "both")
    check(quantize(x, cast, **given), *oracle(scaled(x.numpy(), given), cast), cast)


def test_factors_and_input_are_left_alone():
    x, given = matrix((17, 130)), factors((17, 130), "both")
    before = {name: tensor.clone() for name, tensor in (given | {"x": x}).items()}
    for which in ("column_scale", "mantissa_of", "both"):
        quantize(x, Cast(), **factors((17, 130), which))
        quantize(x, Cast(), **{name: given[name] for name in factors((17, 130), which)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in (given | {"x": x}).items())


def test_factors_are_given_by_name():
    """By position, a column's and a row's factor would be confused."""
    with pytest.raises(TypeError, match="positional"):
        quantize(torch.ones(3, 3), Cast(), torch.ones(1, 3))


def test_a_strided_factor():
    x, factor = matrix((17, 130)), torch.rand(130, 34)[:, ::2]
    given = {"column_scale": factor[:, :1].t(), "mantissa_of": factor[:1].t()}
    check(quantize(x, Cast(), **given), *oracle(scaled(x.numpy(), given), Cast()), Cast())


@pytest.mark.parametrize("name", ["column_scale", "mantissa_of"])
def test_a_factor_that_overflows_poisons_its_block_and_no_other(name):
    x = torch.full((3, 4), 3e38)
    factor = torch.ones((1, 4) if name == "column_scale" else (3, 1))
    factor.view(-1)[1] = 1.75
    poisoned = quantize(x, Cast(), **{name: factor}).dequantize().isnan()
    assert poisoned.all(1).tolist() == ([True] * 3 if name == "column_scale" else [False, True, False])
    assert poisoned.any(1).tolist() == poisoned.all(1).tolist()


# ---- what is not finite


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_a_poisoned_block_is_nan_and_the_others_are_as_if_alone(cast, poison, rounding):
    cast = replace(cast, rounding=rounding)
    x = matrix((17, 130))
    x[4, 70] = poison
    q = quantize(x, cast)
    r, c = block_sizes(cast, (17, 130))
    inside = torch.zeros(17, 130, dtype=torch.bool)
    inside[4 // r * r : (4 // r + 1) * r, 70 // c * c : (70 // c + 1) * c] = True
    assert q.scale.float().isnan().sum() == 1
    assert q.dequantize()[inside].isnan().all()
    assert q.data.float()[inside].isnan().all()
    assert not q.dequantize()[~inside].isnan().any()
