"""The arguments of cuBLASLt: padded operands, and scales in the order in which it reads them."""

import numpy as np
import pytest
import torch
from gemm_examples import operands, wide, worst_row
from grouped_examples import operands as grouped_operands
from grouped_examples import quantized_columns
from torch.nn.functional import ScalingType, SwizzleType

from octavo.numerics import ROW, TENSOR, Cast
from octavo.ops import library_gemms as cublaslt
from octavo.ops import quantize
from octavo.ops.dispatch import MX, SQUARE, STRIP
from octavo.ops.launching import Operands


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (129, 5), (300, 9), (16, 12)])
def test_swizzle_equals_the_documented_offsets(rows, cols):
    """128 x 4 tiles in row-major order; within one, row r and column c lie at (r % 32) * 16 + (r // 32) * 4 + c."""
    scale = torch.randint(1, 255, (rows, cols), dtype=torch.uint8)
    tiles_across = -(-cols // 4)
    expected = np.zeros(-(-rows // 128) * tiles_across * 512, np.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * tiles_across + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale[r, c]
    result = cublaslt._swizzle(scale.view(torch.float8_e8m0fnu))
    assert result.dtype == torch.float8_e8m0fnu
    assert np.array_equal(result.view(torch.uint8).numpy(), expected)
    given = cublaslt._scale(scale.view(torch.float8_e8m0fnu), MX)
    assert torch.equal(given.view(torch.uint8), result.view(torch.uint8))


@pytest.mark.parametrize("shape", [(16, 32), (1, 1), (17, 40), (130, 272)])
@pytest.mark.parametrize("granularity", [TENSOR, ROW, STRIP, SQUARE, MX], ids=lambda g: g.name)
@pytest.mark.parametrize("multiples", [(1, 16), (16, 16), (32, 128)], ids=str)
def test_pad_adds_zero_bytes_and_scales_of_one(multiples, granularity, shape):
    q = quantize(torch.ones(shape), Cast(granularity=granularity, scale="e8m0" if granularity == MX else "fp32"))
    data, scale = cublaslt._pad(q.data.t().contiguous().t(), q.scale, granularity, *multiples)
    assert tuple(data.shape) == tuple(-(-n // size) * size for n, size in zip(shape, multiples, strict=True))
    assert data.is_contiguous()
    raw = data.view(torch.uint8)
    assert torch.equal(raw[: shape[0], : shape[1]], q.data.view(torch.uint8))
    assert not raw[shape[0] :].any()
    assert not raw[:, shape[1] :].any()
    assert tuple(scale.shape) == granularity.scale_shape(tuple(data.shape))
    given, scale = q.scale.float(), scale.float()
    assert torch.equal(scale[: given.shape[0], : given.shape[1]], given)
    assert (scale[given.shape[0] :] == 1).all()
    assert (scale[:, given.shape[1] :] == 1).all()


def test_amd_reads_mx_scales_as_they_are(monkeypatch):
    """hipBLASLt takes unswizzled scales, M and N in multiples of 32, and K in multiples of 128."""
    calls = []
    monkeypatch.setattr(cublaslt, "AMD", True)
    monkeypatch.setattr(
        cublaslt.F, "scaled_mm", lambda a, b, *rest, **names: calls.append((a, b, rest, names)) or a.new_ones(32, 64)
    )
    cast = Cast(granularity=MX, scale="e8m0")
    a, b = quantize(torch.randn(5, 96), cast), quantize(torch.randn(40, 96), cast)
    y = cublaslt.scaled_mm_cublaslt(Operands.of(a, b), None, torch.bfloat16, False)
    ((a_data, b_data, (scale_a, _, scale_b, _), names),) = calls
    assert (tuple(a_data.shape), tuple(b_data.shape), tuple(y.shape)) == ((32, 128), (128, 64), (5, 40))
    assert (tuple(scale_a.shape), tuple(scale_b.shape)) == ((32, 4), (64, 4))
    assert torch.equal(scale_a[:5, :3].view(torch.uint8), a.scale.view(torch.uint8))
    assert names["swizzle_a"] == names["swizzle_b"] == SwizzleType.NO_SWIZZLE


@pytest.mark.parametrize(
    ("granularity", "given", "right", "shape", "stride"),
    [
        (TENSOR, (1, 1), False, (), ()),
        (ROW, (48, 1), False, (48, 1), (1, 1)),
        (ROW, (48, 1), True, (1, 48), (48, 1)),
        (STRIP, (48, 3), False, (48, 3), (1, 48)),
        (SQUARE, (3, 5), False, (8, 3), (1, 8)),
        (SQUARE, (3, 4), True, (4, 3), (1, 4)),
    ],
)
def test_order_of_float32_scales(granularity, given, right, shape, stride):
    scale = torch.arange(float(np.prod(given))).view(given)
    result = cublaslt._scale(scale, granularity, right=right)
    assert (tuple(result.shape), result.stride()[1:]) == (shape, stride[1:])
    assert result.stride()[:1] == stride[:1] or shape[:1] == (1,)  # a single row's stride means nothing
    if granularity == SQUARE:
        assert torch.equal(result.t()[:, : given[1]], scale)
        assert not result.t()[:, given[1] :].any()
    else:
        assert torch.equal(result.reshape(-1), (scale.t() if right else scale).reshape(-1))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="the checks of torch 2.11 refuse the scales that its GEMM needs")
@pytest.mark.parametrize(("m", "k", "n"), [(256, 512, 384), (5, 96, 40), (130, 272, 48)])
def test_pytorchs_checks_take_the_scales_of_mx(m, k, n):
    """On the meta device `scaled_mm` checks the sizes and the swizzling of the scales that NVIDIA's GEMM reads."""
    cast = Cast(granularity=MX, scale="e8m0")
    a, b = (quantize(torch.randn(rows, k), cast) for rows in (m, n))
    tensors = [t.to("meta") for t in (a.data, b.data, a.scale, b.scale)]
    y = cublaslt.scaled_mm_cublaslt(Operands(*tensors, MX, MX), None, torch.float32, False)
    assert (y.shape, y.dtype) == ((m, n), torch.float32)
    unswizzled = {"swizzle_a": SwizzleType.NO_SWIZZLE, "swizzle_b": SwizzleType.NO_SWIZZLE}
    with pytest.raises((RuntimeError, ValueError)):
        torch.nn.functional.scaled_mm(
            tensors[0], tensors[1].t(), tensors[2], ScalingType.BlockWise1x32, tensors[3], ScalingType.BlockWise1x32,
            **unswizzled, output_dtype=torch.bfloat16,
        )  # fmt: skip


SCALED_MM_ON_A_CPU = pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"), reason="not in torch 2.11 on a CPU"
)


@SCALED_MM_ON_A_CPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 32, 48), (5, 33, 7)])
def test_padding_is_cut_off_again_and_the_gemm_adds_the_bias(m, k, n, with_bias, dtype, monkeypatch):
    """On the CPU PyTorch's scaled_mm has tensor scales: enough to run the whole path. cuBLASLt has no bias of float32,
    and a padded GEMM has other columns."""
    given, scaled_mm = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: given.append(kwargs) or scaled_mm(*args, **kwargs))
    a, b = operands("tensor", m, k, n)
    bias = torch.randn(n) if with_bias else None
    y = cublaslt.scaled_mm_cublaslt(Operands.of(a, b), bias, dtype, False)
    exact = wide(a) @ wide(b).T + (0 if bias is None else bias.double().numpy())
    assert (y.shape, y.dtype) == ((m, n), dtype)
    assert worst_row(y, exact) < 2.0**-8
    assert y.is_contiguous()  # as the registered operation's fake says; a compiled graph relies on it
    (added,) = (each["bias"] for each in given)
    assert (added is not None) == (with_bias and n == 48 and dtype == torch.bfloat16)
    assert added is None or torch.equal(added, bias.bfloat16())


# ---- the grouped GEMM of MX


def scales(rows: int, cols: int) -> torch.Tensor:
    return torch.randint(1, 255, (rows, cols), dtype=torch.uint8).view(torch.float8_e8m0fnu)


def tiles(parts: list[torch.Tensor]) -> list[int]:
    """The swizzled scales of each group, one behind the other."""
    return [byte for part in parts for byte in cublaslt._swizzle(part).view(torch.uint8).tolist()]


@pytest.mark.parametrize("cols", [4, 6])
@pytest.mark.parametrize("sizes", [[1, 0, 127, 128, 129], [0, 300], [5, 0]], ids=str)
def test_each_group_of_rows_has_tiles_of_its_own(sizes, cols):
    scale, ends = scales(sum(sizes) + 3, cols), torch.tensor(sizes).cumsum(0).to(torch.int32)
    scale.view(torch.uint8)[sum(sizes) :] = 0  # of rows behind the groups, as the rows that fill a tile
    expected = tiles([scale[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True) if size])
    found = cublaslt._tiles_of_rows(scale, ends)
    assert found.shape[0] % 128 == 0
    assert found.shape[0] >= len(scale)
    assert found.flatten()[: len(expected)].view(torch.uint8).tolist() == expected


@pytest.mark.parametrize("rows", [128, 150])
@pytest.mark.parametrize("sizes", [[128, 384, 256], [128], [256, 128]], ids=str)
def test_the_tiles_of_a_group_of_columns_stand_together(sizes, rows):
    scale, ends = scales(rows, sum(sizes) // 32 + 1), torch.tensor(sizes).cumsum(0).to(torch.int32)
    starts = [(end - size) // 32 for size, end in zip(sizes, ends.tolist(), strict=True)]
    expected = tiles([scale[:, start : start + size // 32] for size, start in zip(sizes, starts, strict=True)])
    found = cublaslt._tiles_of_columns(scale, ends)
    assert found.shape[0] == -(-rows // 128) * 128
    assert found.flatten()[: len(expected)].view(torch.uint8).tolist() == expected


def test_the_grouped_gemm_of_mx_gets_what_it_takes(monkeypatch):
    """Matrices, scales and offsets as `_check_scales_blocked` of PyTorch demands."""
    calls = []

    def scaled_grouped_mm(a, b, scale_a, by_a, scale_b, by_b, **options):
        assert by_a == by_b == ScalingType.BlockWise1x32
        assert options["swizzle_a"] == options["swizzle_b"] == SwizzleType.SWIZZLE_32_4_4
        assert scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert a.is_contiguous()
        assert b.transpose(-2, -1).is_contiguous()
        calls.append((a.shape, b.shape, scale_a.shape, scale_b.shape))
        return a.new_zeros(1, dtype=torch.bfloat16)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_grouped_mm)
    a, b, offsets = grouped_operands([3, 0, 130], 96, 80, pair="mx")
    cublaslt.mx_grouped_mm(Operands.of(a, b), offsets)
    columns = quantized_columns([128, 128], "mx")
    cublaslt.mx_grouped_mm(Operands.of(*columns[:2]), columns[2])
    assert calls == [
        ((133, 96), (3, 96, 80), (5 * 128, 4), (3, 4 * 128)),
        ((96, 256), (256, 80), (128, 8), (128, 8)),
    ]
