"""`octavo.quantize`, the function for a single tensor."""

import re
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from codec_oracle import FP8, ML_DTYPES

import octavo

SHAPES = [(5,), (3, 70), (2, 3, 70), (2, 1, 3, 5)]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype)


def quantize_block(block: np.ndarray, name: str) -> tuple[np.ndarray, np.float32]:
    """Codes of a format and the scale of one block."""
    largest = np.float32(ml_dtypes.finfo(ML_DTYPES[name]).max)
    scale = np.abs(block).max() / largest
    shrunk = np.clip(block * (np.float32(1) / scale), -largest, largest)
    return shrunk.astype(ML_DTYPES[name]).view(np.uint8), scale


def blocks_of(x: np.ndarray, granularity: str) -> list[np.ndarray]:
    """The blocks of x that share a scale, in order; each is a view."""
    if granularity == "tensor":
        return [x]
    if granularity == "block:2x32":
        return [part for rows in np.split(x, [2, 4]) for part in np.split(rows, [32, 64], 1)]
    step = x.shape[-1] if granularity == "row" else int(granularity.partition(":")[2])
    rows = x.reshape(-1, x.shape[-1])
    return [row[at : at + step] for row in rows for at in range(0, x.shape[-1], step)]


def scale_shape(shape: tuple[int, ...], granularity: str) -> tuple[int, ...]:
    kind, _, size = granularity.partition(":")
    if kind == "group":
        return *shape[:-1], -(-shape[-1] // int(size))
    return {"tensor": (1,) * len(shape), "row": (*shape[:-1], 1), "block": (3, 3)}[kind]


KINDS = [(shape, granularity) for shape in SHAPES for granularity in ("tensor", "row", "group:32", "group:3")]
KINDS = [(*kind, "e4m3", torch.float32) for kind in [*KINDS, ((5, 70), "block:2x32")]]
KINDS += product([(8, 64)], ["row"], FP8, [torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize(("shape", "granularity", "fmt", "dtype"), KINDS, ids=str)
def test_each_block_has_its_bytes_and_its_scale(shape, granularity, fmt, dtype):
    x = tensor(shape, dtype)
    q = octavo.quantize(x, fmt, granularity)
    assert tuple(q.scale.shape) == scale_shape(shape, granularity)
    assert (q.data.shape, q.data.dtype) == (x.shape, octavo.numerics.FORMATS[fmt].dtype)
    expected = [quantize_block(block, fmt) for block in blocks_of(x.float().numpy(), granularity)]
    stored = blocks_of(q.data.view(torch.uint8).numpy(), granularity)
    assert q.scale.flatten().tolist() == [scale for _, scale in expected]
    assert all(np.array_equal(codes, block) for codes, (block, _) in zip(stored, expected, strict=True))


def poisoned(number: float) -> torch.Tensor:
    x = tensor((2, 3, 70))
    x[1, 0, 5] = x[1, 2, 3] = number
    return x


EYE = torch.eye(32)
DENSE = "quantize takes a dense tensor of float32, bfloat16 or float16, got "
NOT_DENSE = [
    EYE.to_sparse, EYE.to_sparse_csr, EYE.to_mkldnn, EYE.bool, EYE.int, EYE.double,
    lambda: torch.nested.nested_tensor([EYE, EYE[:3]], layout=torch.jagged),
    lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8),
    lambda: EYE.to("meta"), lambda: EYE.to(torch.float8_e4m3fn), lambda: EYE + 0j,
]  # fmt: skip
REFUSED = [
    *((make, {}, DENSE) for make in NOT_DENSE),
    (lambda: [1.0], {}, "quantize takes a tensor, got list: pass torch.tensor(x)"),
    *((lambda: EYE, {"granularity": g}, f"takes a name, such as 'row' or 'group:128', got {g}") for g in (128, None)),
    *(
        (lambda: torch.tensor(3.0), {"granularity": g}, "needs at least one dimension, got a scalar: pass x.view(1)")
        for g in ("tensor", "row", "group:32")
    ),
    *(
        (lambda shape=shape: tensor(shape), {"granularity": "block:2x32"},
         f"block:2x32 blocks need a matrix, got shape {list(shape)}: reshape it to two dimensions")
        for shape in ((), (5,), (2, 3, 70))
    ),
    *(
        (lambda n=n: poisoned(float(n)), {}, f"finite numbers: 2 of 420 are not, the first, {n}, at [1, 0, 5]")
        for n in ("nan", "inf", "-inf")
    ),
    (lambda: torch.tensor(torch.nan), {"granularity": "tensor"}, "1 of 1 are not, the first, nan, at []"),
    (lambda: EYE, {"format": "fp8"}, "'fp8': choose one of e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1"),
    (lambda: EYE, {"granularity": "channel"}, "'channel'"),
    (lambda: EYE, {"scale": "fp16"}, "'fp16': choose one of fp32, pow2, e8m0"),
    *((lambda: EYE, {"scale": s}, f"scales in {s} are of e2m1, got e4m3") for s in ("e8m0_floor", "e4m3")),
    (lambda: EYE, {"rounding": "down"}, "'down': choose one of nearest, stochastic"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about its own sparse and quantized tensors
@pytest.mark.parametrize(("make", "settings", "words"), REFUSED)
def test_what_is_refused_is_answered_in_a_sentence(make, settings, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        octavo.quantize(make(), **settings)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group:4"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (2, 0, 3), (0, 0)], ids=str)
def test_empty_tensors(shape, granularity):
    q = octavo.quantize(torch.zeros(shape), granularity=granularity)
    assert tuple(q.scale.shape) == scale_shape(shape, granularity)
    assert (tuple(q.data.shape), q.data.dtype) == (shape, torch.float8_e4m3fn)
    assert tuple(q.dequantize().shape) == shape
    assert (q.scale > 0).all()


def test_mx():
    x = tensor((3, 70))
    q = octavo.quantize(x, granularity="group:32", scale="e8m0")
    assert (tuple(q.scale.shape), q.scale.dtype) == ((3, 3), torch.float8_e8m0fnu)
    groups = np.pad(np.abs(x.numpy()), ((0, 0), (0, 26))).reshape(3, 3, 32).max(-1)
    exponents = np.ceil(np.log2(groups / 448)).astype(int)
    assert np.array_equal(q.scale.view(torch.uint8).numpy(), exponents + 127)


def test_stochastic_draws_follow_torch_manual_seed():
    x = tensor((8, 64))
    torch.manual_seed(1)
    first, second = (octavo.quantize(x, rounding="stochastic").data.view(torch.uint8) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(octavo.quantize(x, rounding="stochastic").data.view(torch.uint8), first)
    assert not torch.equal(first, second)


def test_a_parameter_gives_numbers_without_a_gradient():
    quantized = octavo.quantize(torch.nn.Parameter(torch.ones(2, 8)))
    assert not quantized.data.requires_grad
    assert not quantized.scale.requires_grad


def test_views_are_taken():
    x = tensor((2, 70, 3)).transpose(1, 2)
    q, expected = octavo.quantize(x), octavo.quantize(x.contiguous())
    assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(q.scale, expected.scale)


@pytest.mark.parametrize("scale", ["fp32", "pow2", "e8m0"])
@pytest.mark.parametrize("size", [3.35e38, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
def test_a_finite_tensor_is_finite_again(size: float, scale: str) -> None:
    x = torch.full((1, 32), size)
    q = octavo.quantize(x, "e4m3", "group:32", scale=scale)
    for dtype in (torch.float32, torch.bfloat16):
        y = q.dequantize(dtype)
        assert y.isfinite().all()
        torch.testing.assert_close(y.double(), x.double(), rtol=2**-4, atol=0)
