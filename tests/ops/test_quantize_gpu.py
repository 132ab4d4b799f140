"""Every quantizer and the byte transpose on CUDA against the CPU's, which other files here test against oracles.

Every byte of the data and every bit of the scales is equal, for finite inputs without exception. Each call is repeated
three times over poisoned memory, since some errors occur only now and then.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from bits import assert_same, assert_same_numbers, bits
from gpu_memory import check_bytes, poison
from quantize_oracle import CASTS, KINDS, OTHERS, factors, matrix, name_of

from octavo.numerics import FORMATS, TENSOR, Cast
from octavo.ops import quantize, quantize_scaled, quantize_transposed, transpose

pytestmark = pytest.mark.gpu

LARGE = (4096, 2048)
SIZES = [(1, 1), (3, 5), (17, 130), (129, 257), (1, 4097), (0, 7), (5, 0), (0, 0), LARGE]
DTYPES = [torch.bfloat16, torch.float32]
SEED = torch.tensor(0x0123456789ABCDEF)
STRAIGHT, TURNED = torch.ops.octavo.quantize, torch.ops.octavo.quantize_transposed
SCALED = torch.ops.octavo.quantize_scaled


def cases(sizes: list[tuple[int, int]]) -> pytest.MarkDecorator:
    """Every cast at every size; the large one for the casts of the presets."""
    pairs = [(cast, shape) for cast in CASTS for shape in sizes if shape != LARGE or cast not in OTHERS]
    return pytest.mark.parametrize(
        ("cast", "shape"), pairs, ids=lambda v: name_of(v) if isinstance(v, Cast) else str(v)
    )


@cache
def given_matrix(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """`matrix`, cached: no test here writes into it."""
    return matrix(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [quantize, quantize_transposed])
@cases(SIZES)
def test_quantize(cast, shape, function, dtype):
    x = given_matrix(shape, dtype)
    check_bytes(function(x, cast), function, x.cuda(), cast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("which", ["column_scale", "mantissa_of", "both"])
@cases([(3, 5), (129, 257), LARGE])
def test_quantize_with_factors(cast, shape, which, dtype):
    x, given = given_matrix(shape, dtype), factors(shape, which)
    moved = {name: factor.cuda() for name, factor in given.items()}
    check_bytes(quantize(x, cast, **given), quantize, x.cuda(), cast, **moved)


@pytest.mark.parametrize("size", [1e-10, 1e-35, 2.0**-140, 1e30])
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_tiny_and_huge_inputs(cast, size):
    """Subnormal float32 inputs and products too: a GPU that flushes them would show."""
    x = torch.randn(33, 257) * size
    check_bytes(quantize(x, cast), quantize, x.cuda(), cast, repeats=1)


@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_strided_inputs(cast):
    x = matrix((130, 17))
    for function in (quantize, quantize_transposed):
        check_bytes(function(x.t(), cast), function, x.cuda().t(), cast, repeats=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_a_poisoned_block_and_the_others(cast, value):
    x = matrix((129, 257))
    x[4, 70] = value
    assert quantize(x, cast).scale.float().isnan().sum() == 1
    for seed in (None, SEED):
        actual, expected = (
            STRAIGHT(t, cast.spec, None, None, None if seed is None else seed.to(t.device)) for t in (x.cuda(), x)
        )
        for one, other in zip(actual, expected, strict=True):
            assert_same_numbers(one, other)


# ---- stochastic rounding: the same seed, moved over


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cases([(1, 1), (17, 130), (129, 257), (0, 7), LARGE])
def test_stochastic_rounding(cast, shape, dtype):
    """The kernels take factors with rows only: other granularities run without, and small ones with them too."""
    x, given = given_matrix(shape, dtype), factors(shape, "both")
    both, no_factors = (given["column_scale"], given["mantissa_of"]), (None, None)
    on_gpu, seed = x.cuda(), SEED.cuda()
    for scales in (both, no_factors) if x.numel() < 100_000 else (both if cast.by_row else no_factors,):
        expected = STRAIGHT(x, cast.spec, *scales, SEED)
        scales = [None if s is None else s.cuda() for s in scales]
        check_bytes(expected, STRAIGHT, on_gpu, cast.spec, *scales, seed)
        check_bytes(TURNED(x, cast.spec, SEED), TURNED, on_gpu, cast.spec, seed)
        if x.numel() > 1:
            other_seed = STRAIGHT(on_gpu, cast.spec, *scales, seed + 1)[0]
            assert not torch.equal(bits(other_seed).cpu(), bits(expected[0]))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**62 - 1])
def test_stochastic_rounding_over_the_whole_range(fmt, seed):
    """Subnormal numbers of both, every binade, the neighbours of the grid's numbers, and numbers that saturate."""
    grid = torch.arange(256, dtype=torch.uint8).view(FORMATS[fmt].dtype).float()
    grid = grid[grid.isfinite()]
    near = [torch.nextafter(grid, torch.tensor(way)) for way in (-torch.inf, torch.inf)]
    sweeps = torch.linspace(-(2.0**-5), 2.0**-5, 300_000), torch.exp2(torch.linspace(-149, 20, 300_000))
    x = torch.cat([grid, *near, *sweeps]).view(1, -1)
    seed = torch.tensor(seed)
    expected = SCALED(x, torch.ones(1, 1), fmt, seed)
    check_bytes(expected, SCALED, x.cuda(), torch.ones(1, 1).cuda(), fmt, seed.cuda(), repeats=1)


@pytest.mark.parametrize("cast", [cast for cast in CASTS if cast not in OTHERS], ids=name_of)
def test_stochastic_rounding_takes_the_memory_of_its_result(cast):
    x, cast = torch.randn(LARGE, device="cuda").bfloat16(), replace(cast, rounding="stochastic")
    quantize(x, cast)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize(x, cast)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * x.numel()


def test_the_noise_repeats_after_2_to_32_elements():
    """The hash takes the lower 32 bits of an index, and the kernel's own offsets have more."""
    rows, columns = 2**17, 2**15
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("takes 13 GB of GPU memory")
    x = torch.zeros(rows + 2, columns, device="cuda", dtype=torch.bfloat16)
    x[:2] = x[-2:] = torch.randn(2, columns, device="cuda").bfloat16()
    data, scale = STRAIGHT(x, Cast().spec, None, None, SEED.cuda())
    assert torch.equal(bits(data[:2]), bits(data[-2:]))
    assert torch.equal(scale[:2], scale[-2:])
    assert_same(data[:2].contiguous(), STRAIGHT(x[:2].cpu(), Cast().spec, None, None, SEED)[0])


def test_the_draw_follows_torch_manual_seed():
    cast, x = Cast(rounding="stochastic"), matrix((17, 130)).cuda()
    torch.manual_seed(1)
    first, second = bits(quantize(x, cast).data), bits(quantize(x, cast).data)
    torch.manual_seed(1)
    assert torch.equal(bits(quantize(x, cast).data), first)
    assert not torch.equal(first, second)


# ---- scales known beforehand


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (17, 130), (129, 257), (0, 7), LARGE], ids=str)
@pytest.mark.parametrize("fmt", KINDS)
def test_quantize_scaled(fmt, shape, dtype):
    x, cast = given_matrix(shape, dtype), Cast(fmt, TENSOR)
    top = float(x.abs().amax()) if x.numel() else 1.0
    scale = torch.full((1, 1), top / FORMATS[fmt].max / 3 + 1e-6)  # a third of what would fit
    on_gpu, moved = x.cuda(), scale.cuda()
    check_bytes(quantize_scaled(x, scale, cast), quantize_scaled, on_gpu, moved, cast)
    check_bytes(SCALED(x, scale, fmt, SEED), SCALED, on_gpu, moved, fmt, SEED.cuda())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("fmt", KINDS)
def test_quantize_scaled_is_nan_throughout_where_x_is_not_finite(fmt, value):
    x = matrix((17, 130)).cuda()
    x[3, 4] = value
    actual, amax = quantize_scaled(x, torch.ones(1, 1, device="cuda"), Cast(fmt, TENSOR))
    assert actual.data.float().isnan().all()
    assert not amax.isfinite().any()


# ---- the byte transpose


@pytest.mark.parametrize("shape", [(1, 1), (17, 130), (129, 257), (0, 7), (7, 0), LARGE], ids=str)
@pytest.mark.parametrize("fmt", KINDS)
def test_transpose(fmt, shape):
    """Without a shift all bytes are kept, those of NaN too; with one, NaN may become another NaN."""
    data = torch.randint(256, shape, dtype=torch.uint8).view(FORMATS[fmt].dtype)
    shift = torch.randint(0, 24, shape[:1], dtype=torch.int32)
    shift[::5] = 0
    shift[3::7] = 2**31 - 1
    plain, shifted = transpose(data), transpose(data, shift)
    on_gpu, shift = data.cuda(), shift.cuda()
    check_bytes(plain, transpose, on_gpu)
    for _ in range(3):
        poison()
        actual = transpose(on_gpu, shift)
        assert (actual.is_contiguous(), actual.shape) == (True, shifted.shape)
        assert_same_numbers(actual, shifted)
    strided = on_gpu.view(torch.uint8).t().contiguous().t().view(data.dtype)
    assert_same(transpose(strided), plain)
