"""Every quantizer byte for byte against numpy and ml_dtypes, block by block."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.numerics import TENSOR, Cast, History, block, group
from octavo.ops import quantize, quantize_both, quantize_scaled, quantize_transposed
from octavo.recipe import PRESETS

KINDS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def casts_of_the_presets() -> list[Cast]:
    gemms = [gemm for preset in PRESETS.values() for gemm in (preset().y, preset().dx, preset().dw)]
    return list(dict.fromkeys(cast for gemm in gemms for cast in (gemm.x, gemm.w, gemm.dy) if cast is not None))


OTHERS = [
    Cast("e4m3fnuz"),
    Cast("e5m2fnuz", block(2, 3)),
    Cast(scale="e8m0"),
    Cast(granularity=group(7), relative_floor=0.1),
]
CASTS = [*casts_of_the_presets(), *OTHERS]
SHAPES = [(1, 1), (3, 5), (17, 130), (129, 257), (0, 7)]


def name_of(cast: Cast) -> str:
    parts = [cast.format, cast.granularity.name, cast.scale]
    return "-".join(parts + (["floor"] if cast.relative_floor else []) + (["history"] if cast.history else []))


def block_sizes(cast: Cast, shape: tuple[int, int]) -> tuple[int, int]:
    if cast.granularity == TENSOR:
        return max(shape[0], 1), shape[1]
    return cast.granularity.rows, cast.granularity.cols or shape[1]


def oracle_scale(x: np.ndarray, cast: Cast) -> np.ndarray:
    """One float32 scale a block, [M, K] -> [blocks down, blocks across]."""
    (m, k), (r, c) = x.shape, block_sizes(cast, x.shape)
    scale = np.empty((math.ceil(m / r), math.ceil(k / c)), np.float32)
    for i, j in np.ndindex(scale.shape):
        amax = np.abs(x[i * r : (i + 1) * r, j * c : (j + 1) * c]).max()
        scale[i, j] = max(amax / np.float32(ml_dtypes.finfo(KINDS[cast.format]).max), np.float32(2.0**-126))
    if cast.relative_floor:
        scale = np.maximum(scale, scale.max(initial=0) * np.float32(cast.relative_floor))
    if cast.scale != "fp32":
        scale = np.float32([[2.0 ** math.ceil(math.log2(s)) for s in row] for row in scale.tolist()]).reshape(
            scale.shape
        )
    return scale


def inverse(scale: np.ndarray, cast: Cast, shape: tuple[int, int]) -> np.ndarray:
    r, c = block_sizes(cast, shape)
    return (np.float32(1) / scale).repeat(r, 0).repeat(c, 1)[: shape[0], : shape[1]]


def oracle(x: np.ndarray, cast: Cast) -> tuple[np.ndarray, np.ndarray]:
    scale = oracle_scale(x, cast)
    top = np.float32(ml_dtypes.finfo(KINDS[cast.format]).max)
    shrunk = np.clip(x * inverse(scale, cast, x.shape), -top, top)
    return shrunk.astype(KINDS[cast.format]).view(np.uint8), scale


def check(q, data: np.ndarray, scale: np.ndarray, cast: Cast) -> None:
    assert (q.format, q.layout) == (cast.fmt, cast.granularity)
    assert q.scale.dtype == (torch.float8_e8m0fnu if cast.scale == "e8m0" else torch.float32)
    assert np.array_equal(q.scale.float().numpy(), scale)
    assert np.array_equal(q.data.view(torch.uint8).numpy(), data)


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows and columns of very different size, a zero row, and some zeros and negative zeros."""
    torch.manual_seed(shape[0] * 1000 + shape[1])
    x = (
        torch.randn(shape)
        * torch.exp2(torch.randint(-9, 10, (shape[0], 1)))
        * torch.exp2(torch.randint(-4, 5, (shape[1],)))
    )
    x[torch.rand(shape) < 0.05] = -0.0
    if shape[0] > 2:
        x[1] = 0
    return x.to(dtype)


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
def test_column_scale_multiplies_the_columns_first(cast):
    x = matrix((17, 130), torch.bfloat16)
    column_scale = torch.rand(1, 130) + 0.01
    scaled = x.float().numpy() * column_scale.numpy()
    check(quantize(x, cast, column_scale), *oracle(scaled, cast), cast)


@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_strided_inputs(cast):
    x = matrix((130, 17)).t()
    check(quantize(x, cast), *oracle(x.contiguous().numpy(), cast), cast)
    assert quantize(x, cast).data.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_quantize_transposed_is_quantize_of_the_transpose(cast, shape):
    if shape[0] == 0:
        cast = replace(cast, granularity=block(2, 3), history=None)  # an empty row has no amax; blocks may be none
    x = matrix(shape)
    q = quantize_transposed(x, cast)
    assert q.data.is_contiguous()
    if shape[0] == 0:
        assert (tuple(q.data.shape), tuple(q.scale.shape)) == ((7, 0), (4, 0))
    else:
        check(q, *oracle(np.ascontiguousarray(x.numpy().T), cast), cast)


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_quantize_both(cast, shape):
    x = matrix(shape)
    q, q_t = quantize_both(x, cast)
    check(q, *oracle(x.numpy(), cast), cast)
    check(q_t, *oracle(np.ascontiguousarray(x.numpy().T), cast), cast)
    assert q_t.data.is_contiguous()


# ---- stochastic rounding


def noise(seed: int, n: int) -> np.ndarray:
    """The documented hash, in numpy's own 32-bit integers."""

    def mix(h: np.ndarray) -> np.ndarray:
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
        return h ^ (h >> np.uint32(16))

    low, high = np.array([seed & 0xFFFFFFFF], np.uint32), np.array([seed >> 32], np.uint32)
    return (mix(np.arange(n, dtype=np.uint32) ^ mix(low ^ mix(high))) >> np.uint32(8)).astype(np.float64) / 2**24


def round_by(v: np.ndarray, dice: np.ndarray, cast: Cast) -> np.ndarray:
    """Codes of `v`, up where dice and the distance from the lower neighbour make a whole."""
    kind = KINDS[cast.format]
    codes = np.arange(128, dtype=np.uint8)
    values = codes.view(kind).astype(np.float64)
    values = values[np.isfinite(values)]
    magnitude = np.minimum(np.abs(v.astype(np.float64)), values[-1])
    low = np.searchsorted(values, magnitude, side="right") - 1
    high = np.minimum(low + 1, len(values) - 1)
    part = (magnitude - values[low]) / np.maximum(values[high] - values[low], 1e-300)
    code = np.where(part + dice >= 1, high, low)
    sign = np.signbit(v) & ((code != 0) | (not cast.format.endswith("fnuz")))
    return (code | np.where(sign, 128, 0)).astype(np.uint8)


@pytest.mark.parametrize(
    "cast", [Cast(), Cast("e5m2", group(32), "e8m0"), Cast("e4m3fnuz", TENSOR, "pow2")], ids=name_of
)
def test_stochastic_rounding_equals_numpy(cast):
    cast = replace(cast, rounding="stochastic")
    x = matrix((17, 130))
    for transposed in (False, True):
        torch.manual_seed(21)
        q = quantize_transposed(x, cast) if transposed else quantize(x, cast)
        torch.manual_seed(21)
        seed = int(torch.randint(2**62, ()))
        wanted = np.ascontiguousarray(x.numpy().T) if transposed else x.numpy()
        scale = oracle_scale(wanted, cast)
        dice = noise(seed, wanted.size).reshape(wanted.shape)
        check(q, round_by(wanted * inverse(scale, cast, wanted.shape), dice, cast), scale, cast)


def test_stochastic_rounding_follows_torch_manual_seed():
    cast, x = Cast(rounding="stochastic"), matrix((17, 130))
    torch.manual_seed(1)
    first, second = quantize(x, cast), quantize(x, cast)
    torch.manual_seed(1)
    again = quantize(x, cast)
    assert torch.equal(first.data.view(torch.uint8), again.data.view(torch.uint8))
    assert not torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))


# ---- scales known beforehand


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
    assert np.array_equal(
        q.data.view(torch.uint8).numpy(), np.clip(shrunk, -top, top).astype(KINDS[fmt]).view(np.uint8)
    )
    assert (amax.shape, amax.dtype, amax.item()) == ((1, 1), torch.float32, np.abs(x.float().numpy()).max())
    assert (q.layout, q.format, q.scale.item()) == (TENSOR, cast.fmt, scale.item())


def test_quantize_scaled_of_no_rows():
    """A mixture's expert may get no token; its delayed scale is [1, 1] all the same."""
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


def test_a_column_scale_that_overflows_poisons():
    q = quantize(torch.full((2, 3), 1e30), Cast(), torch.tensor([[1.0, 1e30, 1.0]]))
    assert q.dequantize().isnan().all()


# ---- the registered operations


@pytest.mark.parametrize(
    "x", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(4, 4, dtype=torch.int32), torch.tensor(1.0)]
)
def test_only_matrices_of_floats_are_taken(x):
    for call in (lambda: quantize(x, Cast()), lambda: quantize_scaled(x, torch.ones(1, 1), Cast(granularity=TENSOR))):
        with pytest.raises(ValueError, match="takes a matrix of float32, bfloat16 or float16, got"):
            call()


def test_float64_is_refused_as_the_message_says():
    """The error's own list leaves it out: rounding it to float32 first would be a second rounding, unannounced."""
    with pytest.raises(ValueError, match="takes a matrix of float32, bfloat16 or float16, got"):
        quantize(torch.ones(2, 2, dtype=torch.float64), Cast())


@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_shapes_on_the_meta_device(cast):
    real, fake = matrix((17, 130)), torch.empty(17, 130, device="meta")
    scale = torch.ones(1, 1)

    def parts(x, s):
        both = quantize_both(x, cast)
        scaled, amax = quantize_scaled(x, s, cast)
        return [quantize(x, cast), quantize_transposed(x, cast), *both, scaled], amax

    for one, other in zip(parts(real, scale)[0], parts(fake, scale.to("meta"))[0], strict=True):
        for a, b in ((one.data, other.data), (one.scale, other.scale)):
            assert b.device.type == "meta"
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    amax = parts(fake, scale.to("meta"))[1]
    assert (amax.shape, amax.dtype) == ((1, 1), torch.float32)


@pytest.mark.parametrize("cast", [Cast(), Cast("e5m2", group(32), "e8m0"), Cast(granularity=block(4, 4))], ids=name_of)
@pytest.mark.parametrize("stochastic", [False, True])
def test_opcheck_quantize(cast, stochastic):
    x, words = matrix((5, 70)), (cast.format, cast.granularity.name, cast.scale, cast.relative_floor)
    seed = torch.tensor(5) if stochastic else None
    column_scale = torch.rand(1, 70) if stochastic else None
    torch.library.opcheck(torch.ops.octavo.quantize.default, (x, *words, column_scale, seed))
    torch.library.opcheck(torch.ops.octavo.quantize_transposed.default, (x, *words, seed))


@pytest.mark.parametrize("cast", [Cast(), Cast(granularity=TENSOR), Cast(granularity=group(32))], ids=name_of)
def test_opcheck_of_a_strided_input(cast):
    """What is compiled believes the fake's strides."""
    words = (cast.format, cast.granularity.name, cast.scale, cast.relative_floor)
    x = matrix((70, 5)).t()
    torch.library.opcheck(torch.ops.octavo.quantize.default, (x, *words, None, None))
    torch.library.opcheck(torch.ops.octavo.quantize_transposed.default, (x, *words, None))


@pytest.mark.parametrize("seed", [None, torch.tensor(5)])
def test_opcheck_quantize_scaled(seed):
    args = (matrix((5, 70), torch.bfloat16), torch.full((1, 1), 0.1), "e4m3", seed)
    torch.library.opcheck(torch.ops.octavo.quantize_scaled.default, args)
