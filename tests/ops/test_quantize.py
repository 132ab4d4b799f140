"""Every quantizer byte for byte against numpy and ml_dtypes, block by block."""

from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from interpreted_triton import run_kernel
from quantize_oracle import CASTS, KINDS, SHAPES, block_sizes, check, inverse, matrix, name_of, oracle, oracle_scale

from octavo.numerics import TENSOR, Cast, History, group
from octavo.numerics.formats import encode
from octavo.numerics.scaling import uniform_noise
from octavo.ops import quantize, quantize_scaled, quantize_transposed


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), *(((17, 130), half) for half in (torch.bfloat16, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_quantize_equals_numpy(cast, shape, dtype):
    x = matrix(shape, dtype)
    check(quantize(x, cast), *oracle(x.float().numpy(), cast), cast)


@pytest.mark.parametrize("size", [2.0**-33, 1e-10, 1e-30, 1e-35, 2.0**-140, 1e30])
@pytest.mark.parametrize("cast", [Cast(), Cast(scale="pow2"), Cast("e5m2", TENSOR)], ids=name_of)
def test_tiny_and_huge_inputs(cast, size):
    x = torch.randn(5, 33) * size
    check(quantize(x, cast), *oracle(x.numpy(), cast), cast)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_quantize_transposed_is_quantize_of_the_transpose(cast, shape):
    x = matrix(shape)
    check(quantize_transposed(x, cast), *oracle(np.ascontiguousarray(x.numpy().T), cast), cast)


@pytest.mark.triton
@pytest.mark.parametrize("placed", [0, 1100])
def test_the_kernel_of_long_columns(kernels, placed):
    """Numbers of E4M3 times powers of two, since the interpreter rounds other numbers in its own way."""
    drawn = np.random.default_rng(0)
    exact = drawn.standard_normal((600, 130)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    exact[7] = 448.0  # of each column but those below
    x = exact * 2.0 ** drawn.integers(-9, 9, 130).astype(np.float32)
    x[:, 3] = 0.0
    place = drawn.integers(-1, 600, placed).astype(np.int32) if placed else None
    given = torch.from_numpy(x), Cast(scale="pow2"), None, None if place is None else torch.from_numpy(place)
    data, scale = kernels.submit(run_kernel, "quantization", "quantize_transposed", *given).result()
    placed_x = x if place is None else np.where(place[:, None] < 0, np.float32(0), x[place])
    wanted, wanted_scale = oracle(np.ascontiguousarray(placed_x.T), Cast(scale="pow2"))
    np.testing.assert_array_equal(scale.numpy(), wanted_scale)
    np.testing.assert_array_equal(data.float().numpy(), wanted.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


# ---- factors of columns and rows


def factors(shape: tuple[int, int], which: str) -> dict[str, torch.Tensor]:
    """Random factors that are not powers of two, so that the order of the products shows in their last bits."""
    both = {"column_scale": torch.rand(1, shape[1]) + 0.01, "mantissa_of": torch.rand(shape[0], 1) * 3 + 0.1}
    return {name: factor for name, factor in both.items() if which in (name, "both")}


def scaled(x: np.ndarray, given: dict[str, torch.Tensor]) -> np.ndarray:
    """x * column_scale * mantissa in float32, in this order."""
    x = x * given["column_scale"].numpy() if "column_scale" in given else x
    return x * mantissa(given["mantissa_of"]) if "mantissa_of" in given else x


def mantissa(scale: torch.Tensor) -> np.ndarray:
    return np.frexp(scale.numpy())[0] * 2  # of numpy, from 0.5 to 1


@pytest.mark.parametrize(
    ("shape", "which", "dtype"),
    [
        *product([(17, 130)], ["column_scale", "mantissa_of", "both"], [torch.float32, torch.bfloat16]),
        *((shape, "both", torch.float32) for shape in ((0, 7), (5, 0), (1, 1))),
    ],
)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_columns_then_rows_are_multiplied_first(cast, shape, which, dtype):
    x, given = matrix(shape, dtype), factors(shape, which)
    check(quantize(x, cast, **given), *oracle(scaled(x.float().numpy(), given), cast), cast)


def test_the_order_of_the_factors_is_seen():
    """The other order rounds differently, so the test above can tell them apart."""
    x, given = matrix((17, 130)).numpy(), factors((17, 130), "both")
    other = x * mantissa(given["mantissa_of"]) * given["column_scale"].numpy()
    assert (scaled(x, given) != other).any()


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


# ---- stochastic rounding (its noise and what that does: tests/numerics)


@pytest.mark.parametrize(
    "cast", [Cast(), Cast("e5m2", group(32), "e8m0"), Cast("e4m3fnuz", TENSOR, "pow2")], ids=name_of
)
def test_stochastic_rounding_is_that_of_encode_by_the_noise_of_the_seed(cast):
    cast = replace(cast, rounding="stochastic")
    x = matrix((17, 130))
    for transposed in (False, True):
        torch.manual_seed(21)
        q = quantize_transposed(x, cast) if transposed else quantize(x, cast)
        torch.manual_seed(21)
        seed = torch.randint(2**62, ())
        expected = np.ascontiguousarray(x.numpy().T) if transposed else x.numpy()
        scale = oracle_scale(expected, cast)
        shrunk = torch.from_numpy(expected * inverse(scale, cast, expected.shape))
        codes = encode(shrunk, cast.fmt, uniform_noise(expected.shape, seed))
        check(q, codes.to(torch.uint8).numpy(), scale, cast)


# ---- a given scale


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_scaled_saturates_and_reports_amax(fmt, dtype):
    cast = Cast(fmt, TENSOR, history=History())
    x = matrix((17, 130), dtype)
    top = np.float32(ml_dtypes.finfo(KINDS[fmt]).max)
    scale = x.abs().amax().float().view(1, 1) / float(top) / 3  # a third of what would fit
    q, amax = quantize_scaled(x, scale, cast)
    shrunk = x.float().numpy() * (np.float32(1) / scale.numpy())
    assert (np.abs(shrunk) > 2 * top).any()
    expected = np.clip(shrunk, -top, top).astype(KINDS[fmt]).view(np.uint8)
    assert np.array_equal(q.data.view(torch.uint8).numpy(), expected)
    assert (amax.shape, amax.dtype, amax.item()) == ((1, 1), torch.float32, np.abs(x.float().numpy()).max())
    assert (q.granularity, q.format, q.scale.item()) == (TENSOR, cast.fmt, scale.item())


def test_quantize_scaled_of_no_rows():
    """An expert may get no tokens; its delayed scale is still [1, 1]."""
    q, amax = quantize_scaled(torch.zeros(0, 16), torch.ones(1, 1), Cast(granularity=TENSOR))
    assert (tuple(q.data.shape), amax.item()) == ((0, 16), 0.0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantize_scaled_is_nan_throughout_where_x_is_not_finite(poison, fmt, rounding):
    x = torch.ones(5, 7)
    x[3, 4] = poison
    q, amax = quantize_scaled(x, torch.ones(1, 1), Cast(fmt, TENSOR, rounding=rounding))
    assert not amax.isfinite()
    assert q.data.float().isnan().all()
