"""The scaled GEMM against float64 on the same quantized operands, judged on the worst row."""

import numpy as np
import pytest
import torch

from octavo.numerics import FORMATS, ROW, TENSOR, Cast, QTensor, group
from octavo.ops import find_backend, quantize, scaled_mm
from octavo.ops.gemm import cublaslt, door
from octavo.ops.gemm.backend import MX, SQUARE, STRIP, Backend, _cuda_backend
from octavo.ops.gemm.reference import tensor_core_mm

# Every pair of casts that a preset gives to one of its GEMMs, by layout.
PAIRS = {
    "tensor": (Cast(granularity=TENSOR), Cast(granularity=TENSOR)),
    "tensor-e5m2": (Cast("e5m2", TENSOR), Cast(granularity=TENSOR)),
    "row": (Cast(scale="pow2"), Cast()),
    "row-pow2": (Cast("e5m2", scale="pow2"), Cast(scale="pow2")),
    "tensor-pow2": (Cast(granularity=TENSOR, scale="pow2"), Cast(granularity=TENSOR, scale="pow2")),
    "row-e5m2": (Cast("e5m2", scale="pow2"), Cast()),
    "strip-square": (Cast(granularity=STRIP), Cast(granularity=SQUARE)),
    "square-strip": (Cast(granularity=SQUARE), Cast(granularity=STRIP)),
    "strip-strip": (Cast(granularity=STRIP), Cast(granularity=STRIP)),
    "mx": (Cast(granularity=MX, scale="e8m0"), Cast(granularity=MX, scale="e8m0")),
    "group64": (Cast(granularity=group(64)), Cast(granularity=group(64))),
    "fnuz": (Cast("e5m2fnuz"), Cast("e4m3fnuz")),
    "mixed": (Cast(granularity=group(7)), Cast(granularity=TENSOR)),
}
SIZES = [(1, 1, 1), (3, 5, 7), (17, 130, 33), (129, 257, 65)]


def operands(pair: str, m: int, k: int, n: int) -> tuple[QTensor, QTensor]:
    torch.manual_seed(m + k + n)
    a = torch.randn(m, k) * torch.exp2(torch.randint(-12, 13, (m, 1)))
    b = torch.randn(n, k) * torch.exp2(torch.randint(-4, 5, (n, 1)))
    return quantize(a, PAIRS[pair][0]), quantize(b, PAIRS[pair][1])


def wide(q: QTensor) -> np.ndarray:
    """What the operand stands for, in float64, scales laid out by numpy."""
    scale = q.scale.double().numpy()
    for axis, b in enumerate(q.layout.block(tuple(q.shape))):
        scale = scale.repeat(b, axis).take(range(q.shape[axis]), axis)
    return q.data.double().numpy() * scale


def worst_row(y: torch.Tensor, exact: np.ndarray) -> float:
    error = np.linalg.norm(y.double().numpy() - exact, axis=1)
    size = np.linalg.norm(exact, axis=1)
    assert not error[size == 0].any()  # a row that underflowed in quantization is zero
    return float((error[size > 0] / size[size > 0]).max())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_float32_results_on_the_worst_row(pair, size):
    a, b = operands(pair, *size)
    y = scaled_mm(a, b, out_dtype=torch.float32)
    assert (y.shape, y.dtype) == ((size[0], size[2]), torch.float32)
    assert worst_row(y, wide(a) @ wide(b).T) < 1e-6


@pytest.mark.parametrize("pair", PAIRS)
def test_bf16_results_on_the_worst_row(pair):
    """A long reduction: sums kept in BF16 would lose all of these bounds."""
    a, b = operands(pair, 33, 2050, 40)
    assert worst_row(scaled_mm(a, b), wide(a) @ wide(b).T) < 2.0**-8  # half an ulp of each element, at most


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_element_is_within_half_an_ulp_and_the_error_of_its_sum(pair, with_bias, dtype, bits):
    m, k, n = 17, 130, 33
    a, b = operands(pair, m, k, n)
    if dtype == torch.float16:  # stay within its range
        a = QTensor(a.data, torch.ones_like(a.scale), a.format, a.layout)
        b = QTensor(b.data, torch.full_like(b.scale.float(), 2.0**-14).to(b.scale.dtype), b.format, b.layout)
        if "e5m2" in a.format.name:
            a = QTensor(a.data, torch.full_like(a.scale, 2.0**-10), a.format, a.layout)
    bias = torch.randn(n).to(dtype) if with_bias else None
    y = scaled_mm(a, b, bias=bias, out_dtype=dtype).double().numpy()
    exact = wide(a) @ wide(b).T
    total = np.abs(wide(a)) @ np.abs(wide(b)).T
    if bias is not None:
        exact, total = exact + bias.double().numpy(), total + np.abs(bias.double().numpy())
    tiny = float(FORMATS[{8: "bf16", 11: "fp16", 24: "fp32"}[bits]].smallest_normal)
    half_ulp = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), tiny))) - bits)
    assert np.isfinite(y).all()
    # k + 3 roundings of float32: the products' sum, two scales, the bias. (At a power of two an ulp doubles: 1.01.)
    assert (np.abs(y - exact) <= 1.01 * half_ulp + (k + 3) * 2.0**-24 * total).all()


def test_bias_is_added_before_the_one_rounding():
    ones = QTensor(torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1, 1), FORMATS["e4m3"], TENSOR)
    a = QTensor(ones.data, torch.tensor([[1 + 2.0**-8]]), FORMATS["e4m3"], TENSOR)  # a tie in bf16: alone it goes to 1
    y = scaled_mm(a, ones, bias=torch.tensor([2.0**-12]), out_dtype=torch.bfloat16)
    assert y.item() == 1 + 2.0**-7


def test_bf16_is_the_default_and_fast_accumulation_is_exact_here():
    a, b = operands("row", 17, 130, 33)
    y = scaled_mm(a, b)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, scaled_mm(a, b, fast_accumulation=True))
    assert torch.equal(y, scaled_mm(a, b, emulate=True))


def test_a_nan_scale_poisons_its_row_and_no_other():
    torch.manual_seed(0)
    x, w = torch.randn(5, 32), torch.randn(3, 32)
    x[2, 7], w[1, 0] = torch.inf, torch.nan
    nan = scaled_mm(quantize(x, Cast()), quantize(w, Cast())).isnan()
    expected = torch.zeros(5, 3, dtype=torch.bool)
    expected[2], expected[:, 1] = True, True
    assert torch.equal(nan, expected)


@pytest.mark.parametrize(
    "cast", [Cast(), Cast(granularity=TENSOR), Cast(granularity=group(4))], ids=lambda c: c.granularity.name
)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 4), (4, 8, 0), (3, 0, 4)])
def test_empty_operands(cast, m, k, n):
    """No tokens is an expert's ordinary day; an empty reduction sums to zero."""
    y = scaled_mm(quantize(torch.zeros(m, k), cast), quantize(torch.zeros(n, k), cast))
    assert torch.equal(y, torch.zeros(m, n, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(4, 9), (8, 4)])
def test_mismatched_reductions_are_refused(shape):
    a, b = quantize(torch.ones(3, 8), Cast()), quantize(torch.ones(shape), Cast())
    with pytest.raises(ValueError, match=rf"same K, got \[3, 8\] and \[{shape[0]}, {shape[1]}\]"):
        scaled_mm(a, b)


def test_shape_on_the_meta_device():
    a, b = (quantize(torch.empty(r, 8, device="meta"), Cast()) for r in (3, 5))
    y = scaled_mm(a, b, out_dtype=torch.float16)
    assert (y.device.type, tuple(y.shape), y.dtype) == ("meta", (3, 5), torch.float16)


# All but test_schema, whose allclose torch has not for FP8: that inputs are left alone is the next test.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_operands_are_left_alone():
    a, b = operands("group64", 17, 130, 33)
    bias = torch.ones(33)
    tensors = (a.data, a.scale, b.data, b.scale, bias)
    before = [t.clone() for t in tensors]
    scaled_mm(a, b, bias=bias, out_dtype=torch.float32)
    for then, now in zip(before, tensors, strict=True):
        assert torch.equal(then.view(torch.uint8), now.view(torch.uint8))


@pytest.mark.parametrize("pair", ["row", "mx"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(pair, with_bias):
    a, b = operands(pair, 3, 64, 5)
    bias = torch.ones(5) if with_bias else None
    args = (a.data, a.scale, a.layout.name, b.data, b.scale, b.layout.name, bias, torch.bfloat16, False, False)
    torch.library.opcheck(torch.ops.octavo.scaled_mm.default, args, test_utils=OPCHECKS)


# ---- which backend

ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("layouts", "runs_on"),
    [
        ((TENSOR, TENSOR), {ADA, HOPPER, BLACKWELL}),
        ((ROW, ROW), {HOPPER, BLACKWELL}),
        ((STRIP, SQUARE), {HOPPER}),
        ((SQUARE, STRIP), {HOPPER}),
        ((STRIP, STRIP), {HOPPER}),
        ((MX, MX), {BLACKWELL}),
        ((group(64), group(64)), set()),
        ((SQUARE, SQUARE), set()),
        ((ROW, TENSOR), set()),
    ],
)
def test_nvidia(layouts, runs_on):
    for capability in ((8, 0), ADA, HOPPER, BLACKWELL):
        for formats in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")):
            backend = _cuda_backend(capability, *layouts, formats, False)
            assert backend.name == ("cublaslt" if capability in runs_on else "none")
            if capability not in runs_on:
                assert f"{layouts[0].name} x {layouts[1].name} scales" in backend.reason


def test_nvidia_reasons_name_what_is_needed_and_what_is_there():
    assert _cuda_backend((8, 0), TENSOR, TENSOR, ("e4m3", "e4m3"), False).reason.endswith(
        "need compute capability 8.9 or newer, this GPU has 8.0"
    )
    assert _cuda_backend((10, 0), STRIP, STRIP, ("e4m3", "e4m3"), False).reason.endswith(
        "need compute capability 9.0 to 9.x, this GPU has 10.0"
    )


@pytest.mark.parametrize(("capability", "fnuz"), [((9, 4), True), ((9, 5), False)])
def test_amd(capability, fnuz):
    own, foreign = ("e4m3fnuz", "e4m3") if fnuz else ("e4m3", "e4m3fnuz")
    for layout in (TENSOR, ROW):
        assert _cuda_backend(capability, layout, layout, (own, own), True).name == "hipblaslt"
        refused = _cuda_backend(capability, layout, layout, (foreign, foreign), True)
        assert (refused.name, "FNUZ" if fnuz else "OCP") == ("none", refused.reason.split("takes ")[1].split(" ")[0])
    assert _cuda_backend(capability, STRIP, STRIP, (own, own), True).name == "none"


@pytest.mark.parametrize("hip", [False, True])
def test_no_gpu_takes_two_e5m2_operands(hip):
    backend = _cuda_backend(HOPPER, TENSOR, TENSOR, ("e5m2", "e5m2"), hip)
    assert (backend.name, "two E5M2 operands" in backend.reason) == ("none", True)


def test_fnuz_is_amds():
    assert _cuda_backend(HOPPER, ROW, ROW, ("e4m3fnuz", "e4m3"), False) == Backend(
        "none", "FNUZ formats run on AMD MI300 only"
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_a_gpu_it_is_emulated(device):
    backend = find_backend(torch.device(device), group(64), group(64), ("e4m3", "e4m3"))
    assert (backend.name, device in backend.reason) == ("emulated", True)


def test_a_gpu_without_the_kernel_raises_unless_emulation_is_asked_for(monkeypatch):
    monkeypatch.setattr(door, "find_backend", lambda *_: Backend("none", "this GPU is a toaster"))
    a, b = operands("group64", 3, 64, 5)
    with pytest.raises(RuntimeError, match="no FP8 GEMM here: this GPU is a toaster") as error:
        scaled_mm(a, b)
    assert "another recipe" in str(error.value)
    assert "emulate=True" in str(error.value)
    assert worst_row(scaled_mm(a, b, emulate=True, out_dtype=torch.float32), wide(a) @ wide(b).T) < 1e-6


# ---- the model of the tensor core


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
    """Of sums of positive terms, where truncation can only lose."""
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


# ---- how cuBLASLt reads scales


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (129, 5), (300, 9), (16, 12)])
def test_swizzle_equals_the_documented_offsets(rows, cols):
    """128 x 4 tiles in row-major order; within one, row r and column c lie at (r % 32) * 16 + (r // 32) * 4 + c."""
    torch.manual_seed(0)
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
    assert torch.equal(
        cublaslt._scale(scale.view(torch.float8_e8m0fnu), MX).view(torch.uint8), result.view(torch.uint8)
    )


@pytest.mark.parametrize("shape", [(16, 32), (1, 1), (17, 40), (130, 272)])
@pytest.mark.parametrize("layout", [TENSOR, ROW, STRIP, SQUARE, MX], ids=lambda g: g.name)
def test_pad_adds_zero_bytes_and_scales_of_one(layout, shape):
    q = quantize(torch.ones(shape), Cast(granularity=layout))
    data, scale = cublaslt._pad(q.data, q.scale, layout)
    assert tuple(data.shape) == tuple(-(-n // 16) * 16 for n in shape)
    assert data.is_contiguous()
    raw = data.view(torch.uint8)
    assert torch.equal(raw[: shape[0], : shape[1]], q.data.view(torch.uint8))
    assert not raw[shape[0] :].any()
    assert not raw[:, shape[1] :].any()
    assert tuple(scale.shape) == layout.scale_shape(tuple(data.shape))
    assert torch.equal(scale[: q.scale.shape[0]], q.scale)
    assert (scale[q.scale.shape[0] :] == 1).all()


def test_pad_makes_transposed_views_contiguous():
    data = torch.ones(32, 16).to(torch.float8_e4m3fn).t()
    assert cublaslt._pad(data, torch.ones(1, 1), TENSOR)[0].is_contiguous()


@pytest.mark.parametrize(
    ("layout", "given", "right", "shape", "stride"),
    [
        (TENSOR, (1, 1), False, (), ()),
        (ROW, (48, 1), False, (48, 1), (1, 1)),
        (ROW, (48, 1), True, (1, 48), (48, 1)),
        (STRIP, (48, 3), False, (48, 3), (1, 48)),
        (SQUARE, (3, 5), False, (8, 3), (1, 8)),
        (SQUARE, (3, 4), True, (4, 3), (1, 4)),
    ],
)
def test_order_of_float32_scales(layout, given, right, shape, stride):
    scale = torch.arange(float(np.prod(given))).view(given)
    result = cublaslt._scale(scale, layout, right=right)
    assert (tuple(result.shape), result.stride()[1:]) == (shape, stride[1:])
    assert result.stride()[:1] == stride[:1] or shape[:1] == (1,)  # a single row's stride means nothing
    if layout == SQUARE:
        assert torch.equal(result.t()[:, : given[1]], scale)
        assert not result.t()[:, given[1] :].any()
    else:
        assert torch.equal(result.reshape(-1), (scale.t() if right else scale).reshape(-1))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 32, 48), (5, 33, 7)])
def test_padding_is_cut_off_again(m, k, n, with_bias):
    """On the CPU PyTorch's scaled_mm has tensor scales: enough to run the whole path."""
    a, b = operands("tensor", m, k, n)
    bias = torch.randn(n) if with_bias else None
    y = cublaslt.scaled_mm(a.data, a.scale, TENSOR, b.data, b.scale, TENSOR, bias, torch.bfloat16, False)
    exact = wide(a) @ wide(b).T + (0 if bias is None else bias.double().numpy())
    assert (y.shape, y.dtype) == ((m, n), torch.bfloat16)
    assert worst_row(y, exact) < 2.0**-8
    assert y.is_contiguous()  # as the registered operation's fake says; a compiled graph relies on it
