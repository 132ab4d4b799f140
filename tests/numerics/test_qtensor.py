"""Quantized tensors and granularities, against loops over their elements."""

import itertools
import math

import numpy as np
import pytest
import torch

from octavo.numerics import FORMATS, ROW, TENSOR, QTensor, block, group
from octavo.numerics.qtensor import Granularity, parse_granularity

E4M3 = FORMATS["e4m3"]


def data(*shape: int) -> torch.Tensor:
    return torch.randn(shape).mul(50).to(torch.float8_e4m3fn)


def quantized(granularity: Granularity, *shape: int, scale: torch.Tensor | None = None) -> QTensor:
    given = torch.ones(granularity.scale_shape(shape)) if scale is None else scale
    return QTensor(data(*shape), given, E4M3, granularity)


def by_row(scale: torch.Tensor, granularity: Granularity = ROW) -> QTensor:
    return quantized(granularity, 3, 5, scale=scale)


REFUSED = [  # a call, and the words of its error
    (
        lambda: QTensor(data(3, 5), torch.ones(3, 1), FORMATS["e5m2"], ROW),
        r"e5m2 data must be torch\.float8_e5m2, got torch\.float8_e4m3fn",
    ),
    *(
        (lambda d=dtype: by_row(torch.ones(3, 1, dtype=d)), f"a scale must be float32 or float8_e8m0fnu, got {dtype}")
        for dtype in (torch.float64, torch.bfloat16, torch.uint8)
    ),
    *(
        (lambda s=shape, g=granularity: by_row(torch.ones(s), g), rf"data \[3, 5\] must have shape {required}, got")
        for granularity, shape, required in [
            (ROW, (3,), r"\[3, 1\]"), (ROW, (1, 3), r"\[3, 1\]"), (TENSOR, (), r"\[1, 1\]"),
            (group(2), (3, 2), r"\[3, 3\]"), (block(2, 2), (3, 5), r"\[2, 3\]"),
        ]
    ),
    (lambda: by_row(torch.ones(3, 1, device="meta")), "data is on cpu and its scale on meta"),
    (lambda: QTensor(data(3, 5), torch.ones(3, 1), "e4m3", ROW), "takes a Format and a Granularity, got 'e4m3' and"),
    *(
        (lambda name=name: getattr(quantized(ROW, 3, 5), name), f"a QTensor has no '{name}': take that of q.dequantize")
        for name in ("to", "cpu", "numpy", "dtype")
    ),
    *(
        (lambda dtype=dtype: quantized(ROW, 3, 5).dequantize(dtype), "takes a dtype of floating point, got")
        for dtype in (torch.int8, "bf16")
    ),
    *(
        (lambda g=g: quantized(g, 6, 10).t(), rf"\[6, 10\] with {g.name} scales: quantize the transposed matrix")
        for g in (ROW, group(4), block(2, 4))
    ),
    (lambda: quantized(TENSOR, 2, 3, 5).t(), "only a matrix"),
    *(
        (lambda name=name: parse_granularity(name), f"unknown granularity {name!r}: choose tensor, row, .*block:R")
        for name in ("", "rows", "Row", "group", "group:", "group:-1", "group:4.5", "block:128", "block:2x", "fp8")
    ),
    *(
        (lambda name=name: parse_granularity(name), "at least one row and one column")
        for name in ("group:0", "block:0x4", "block:4x0")
    ),
    *(
        (lambda s=s: Granularity(*s), "only one row can span all columns, got a block of {} x {}".format(*s))
        for s in ((None, 64), (None, 1), (64, None), (2, None))
    ),
    *(
        (lambda s=s: Granularity(*s), "at least one row and one column, got {} x {}".format(*s))
        for s in ((0, 4), (4, 0), (-1, 4), (0, None), (None, 0))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refusals(call, message):
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        call()


def test_fields_cannot_be_set():
    with pytest.raises(AttributeError):
        quantized(ROW, 3, 5).scale = torch.zeros(3, 1)


@pytest.mark.parametrize("granularity", [TENSOR, ROW, group(4), block(2, 3)], ids=lambda g: g.name)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_dequantize_multiplies_data_by_its_scale(granularity, scale_dtype):
    raw = data(7, 10)
    shape = granularity.scale_shape((7, 10))
    scale = torch.exp2(torch.arange(np.prod(shape)) - 3.0).view(shape)
    q = QTensor(raw, scale.to(scale_dtype), E4M3, granularity)
    rows, cols = granularity.block((7, 10))
    expected = np.array([[raw[i, j].item() * scale[i // rows, j // cols].item() for j in range(10)] for i in range(7)])
    assert q.shape == (7, 10)
    assert np.array_equal(q.dequantize().numpy(), expected.astype(np.float32))
    half = q.dequantize(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, torch.from_numpy(expected).to(torch.bfloat16))


def test_dequantize_rounds_to_the_dtype_once():
    scale = torch.tensor([[1.0 + 2.0**-9]])  # 1.125 * scale lies beside a bf16 tie that rounding scale first would miss
    raw = torch.tensor([[1.125]]).to(torch.float8_e4m3fn)
    exact = 1.125 * (1 + 2.0**-9)
    assert QTensor(raw, scale, E4M3, TENSOR).dequantize(torch.bfloat16).item() == torch.tensor(exact).bfloat16().item()


def test_nan_scale_poisons_its_block_and_no_other():
    q = QTensor(data(3, 5), torch.tensor([[1.0], [torch.nan], [1.0]]), E4M3, ROW)
    assert q.dequantize().isnan().any(1).tolist() == [False, True, False]
    assert q.dequantize()[1].isnan().all()


@pytest.mark.parametrize(("number", "scale"), [(math.inf, 1.0), (-math.inf, 1.0), (1.0, math.inf)])
def test_what_is_infinite_is_not_made_finite(number, scale):
    raw = torch.tensor([[number]]).to(torch.float8_e5m2)
    assert QTensor(raw, torch.tensor([[scale]]), FORMATS["e5m2"], TENSOR).dequantize().item() == number * scale


@pytest.mark.parametrize("granularity", [TENSOR, block(4, 4)], ids=lambda g: g.name)
def test_t_transposes_what_it_stands_for_without_moving_bytes(granularity):
    raw = data(6, 10)
    shape = granularity.scale_shape((6, 10))
    q = QTensor(raw, torch.arange(1.0, 1 + np.prod(shape)).view(shape), E4M3, granularity)
    assert torch.equal(q.t().dequantize(), q.dequantize().t())
    assert q.t().data.data_ptr() == raw.data_ptr()


ALL = [TENSOR, ROW, group(4), group(64), block(2, 3), block(128, 128), block(16, 1), block(1, 1)]
SHAPES = [(1,), (5,), (1, 1), (3, 5), (17, 130), (129, 8), (2, 3, 5), (1, 7, 129), (2, 2, 3, 9)]


def slow_blocks(granularity: Granularity, shape: tuple[int, ...]) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """The block of each element, by a loop over the elements."""
    sizes = [1] * len(shape)
    if granularity == TENSOR:
        sizes = list(shape)
    else:
        sizes[-1] = granularity.cols or shape[-1]
        if len(shape) > 1:
            sizes[-2] = granularity.rows or shape[-2]
    members: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for index in itertools.product(*map(range, shape)):
        members.setdefault(tuple(i // s for i, s in zip(index, sizes, strict=True)), []).append(index)
    return members


@pytest.mark.parametrize("granularity", ALL, ids=lambda g: g.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_shape_amax_and_expand_equal_a_loop_over_elements(granularity, shape):
    x = torch.randn(shape)
    members = slow_blocks(granularity, shape)
    expected_shape = tuple(max(axis) + 1 for axis in zip(*members, strict=True))
    assert granularity.scale_shape(shape) == expected_shape

    values = x.tolist()

    def at(index: tuple[int, ...]) -> float:
        value = values
        for i in index:
            value = value[i]
        return value

    expected = torch.empty(expected_shape)
    for place, indices in members.items():
        expected[place] = max(abs(at(i)) for i in indices)
    assert torch.equal(granularity.amax(x), expected)

    scale = torch.arange(math.prod(expected_shape), dtype=torch.float32).view(expected_shape)
    spread = torch.empty(shape)
    for place, indices in members.items():
        spread[tuple(torch.tensor(axis) for axis in zip(*indices, strict=True))] = scale[place]
    assert torch.equal(granularity.expand(scale, shape).expand(shape), spread)


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (ROW, (0, 7), (0, 1)), (group(4), (0, 7), (0, 2)), (block(2, 4), (0, 9), (0, 3)), (group(4), (3, 0), (3, 0)),
        (ROW, (2, 0, 7), (2, 0, 1)), (ROW, (0,), (1,)), (ROW, (0, 0), (0, 1)), (ROW, (3, 0), (3, 1)),
        (ROW, (2, 3, 0), (2, 3, 1)), (block(2, 4), (6, 5, 9), (6, 3, 3)),
    ],
)  # fmt: skip
def test_scale_shapes_of_empty_tensors(granularity, shape, expected):
    """A row scale is [M, 1] whatever K is: a GEMM multiplies its [M, N] result by it."""
    assert granularity.scale_shape(shape) == expected


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0,), (0, 0), (2, 0, 7), ()])
def test_a_tensor_scale_is_one_number_even_of_an_empty_tensor(shape):
    """The module says "tensor: one block, scale[1, 1]", and delayed scaling has that scale before it sees a tensor."""
    assert TENSOR.scale_shape(shape) == (1,) * len(shape)


@pytest.mark.parametrize("granularity", ALL, ids=lambda g: g.name)
def test_amax_is_nan_in_the_block_that_holds_one_and_only_there(granularity):
    x = torch.ones(17, 130)
    x[3, 70], x[16, 129] = torch.nan, torch.inf
    amax = granularity.amax(x)
    for place, indices in slow_blocks(granularity, (17, 130)).items():
        held = {float(x[i]) if not x[i].isnan() else "nan" for i in indices if i in ((3, 70), (16, 129))}
        expected = torch.nan if "nan" in held else (torch.inf if held else 1.0)
        assert torch.equal(amax[place], torch.tensor(expected)) or (amax[place].isnan() and math.isnan(expected))


def test_names():
    names = ["tensor", "row", "group:4", "group:64", "block:2x3", "block:128x128", "block:16x1", "group:1"]
    assert [granularity.name for granularity in ALL] == names
    assert [parse_granularity(name) for name in names] == ALL
    assert parse_granularity("block:1x128") == group(128)


def test_which_transpose_and_which_apply_outside_a_gemm():
    every = (TENSOR, ROW, group(64), block(128, 128), block(1, 128))
    assert [g.name for g in every if g.transposes] == ["tensor", "block:128x128"]
    assert [g.outer for g in (TENSOR, ROW, group(64), block(128, 128))] == [True, True, False, False]
