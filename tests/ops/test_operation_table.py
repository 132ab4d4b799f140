"""All operations by one table: when the kernel of each runs and what it gets, and what each refuses."""

import ast
import re
from inspect import signature
from itertools import chain
from pathlib import Path

import attention_fp8_oracle
import attention_oracle
import operation_examples as cases
import pytest
import torch
from bits import bits, tensors_of
from fused_op_examples import FLOAT, REFUSED
from norm_oracle import EPS
from quantize_oracle import matrix
from torch import Tensor, ones, zeros
from torch.utils._pytree import tree_leaves

from octavo import ops
from octavo.numerics import ROW, TENSOR, Cast, Granularity, QTensor, block, group
from octavo.ops.attention import ordered_attention
from octavo.ops.gemm import ordered_mm
from octavo.ops.int8_gemm import int8_mm
from octavo.ops.launching import LONGEST_ROW, Around, Factors
from octavo.ops.rows import RowBatch, cast_rows
from octavo.ops.softmax_loss import cross_entropy, cross_entropy_gradient, multiply

WITH_KERNELS = {name: operation for name, operation in cases.OPERATIONS.items() if operation.kernels}
E4M3, TENSORWISE = Cast(), Cast(granularity=TENSOR)
INT, E8 = torch.int32, torch.float8_e4m3fn
GROUP = Cast(granularity=group(4))


@pytest.fixture
def calls(monkeypatch):
    """A CPU runs each reference as the kernel of its operation; the arguments of each call are noted."""
    noted: list[tuple[str, tuple[object, ...]]] = []

    def note(operation):
        def kernel(*values):
            noted.append((operation.name, values))
            return operation.function(*values)

        return kernel

    for operation in WITH_KERNELS.values():
        monkeypatch.setitem(vars(operation), "kernel", note(operation))
    for module in cases.MODULES:
        for name, value in (("has_kernels", lambda *args: True), ("shared_memory", lambda device: 1 << 17)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    return noted


def test_each_kernel_has_the_parameters_of_its_reference():
    """Its file is read, since Triton may not be here. A kernel may have more, for tuning, with defaults."""
    assert len(WITH_KERNELS) >= 19
    for name, operation in WITH_KERNELS.items():
        path = Path(ops.__file__).parent / "kernels" / f"{operation.kernels}.py"
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        (found,) = (node.args for node in functions if node.name == name)
        count = len(signature(operation.function).parameters)
        assert len(found.args) - len(found.defaults) <= count <= len(found.args), name


# ---- when the kernels run


def stored(dtype: torch.dtype = torch.bfloat16, width: int = 16) -> list[Tensor | None]:
    """A cache: keys, values, their scales, and the number of tokens."""
    scale = ones(2) if dtype == torch.int8 else None
    return [zeros(1, 2, 9, width, dtype=dtype), zeros(1, 2, 9, width, dtype=dtype), scale, scale, torch.tensor(3)]


def in_order(dtype: torch.dtype = torch.bfloat16, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and the number of tokens."""
    keys, values, _, _, length = stored(dtype, width)
    return keys, values, length


def clipped() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def new(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def calls_of(shape: tuple[int, int], cast: Cast):
    """Each operation that quantizes x of this shape by a cast, and a call of it."""
    x, k = torch.randn(shape), torch.randn(shape[1])
    row, column = ones(shape[0], 1), ones(1, shape[1])
    yield "quantize", lambda: ops.quantize(x, cast, column_scale=column, mantissa_of=row)
    yield "quantize_stack", lambda: ops.quantize_stack([x, x], cast)
    yield "quantize_transposed", lambda: ops.quantize_transposed(x, cast)
    yield "gather_quantize", lambda: ops.gather_quantize(x, cast, Factors(mantissa_of=row))
    yield "norm_quantize", lambda: ops.norm_quantize(x, x, k, k, EPS, cast, center=True)
    yield "activation_quantize", lambda: ops.activation_quantize(torch.cat((x, x), 1), "swiglu", cast)
    factors, others = Factors(column, mantissa_of=row), {"h_cast": cast, "h_scale": row, "biased": True}
    yield "activation_backward", lambda: ops.activation_backward(x, x, "gelu", cast, factors, **others)


QUANTIZES = [name for name, _ in calls_of((1, 1), E4M3)]


@pytest.mark.parametrize("name", QUANTIZES)
@pytest.mark.parametrize(
    ("shape", "fmt", "ran"),
    [
        ((5, 70), "e4m3", True), ((5, 70), "e5m2", True), ((5, 70), "e4m3fnuz", False), ((5, 70), "e5m2fnuz", False),
        ((1, LONGEST_ROW), "e4m3", True), ((1, LONGEST_ROW + 1), "e4m3", False), ((0, 7), "e4m3", False),
        ((5, 0), "e4m3", False),
    ],
    ids=str,
)  # fmt: skip
def test_quantizing_kernels_run_for_their_formats_and_lengths(name, shape, fmt, ran, calls, monkeypatch):
    actual = dict(calls_of(shape, Cast(fmt)))[name]()
    ran |= name == "quantize_transposed" and shape == (1, LONGEST_ROW + 1)  # its rows have one element
    assert [called for called, _ in calls] == [name] * ran
    monkeypatch.undo()
    torch.manual_seed(0)
    for one, other in zip(tensors_of(actual), tensors_of(dict(calls_of(shape, Cast(fmt)))[name]()), strict=True):
        assert torch.equal(bits(one), bits(other))


def turns(heads: int, kv_heads: int, dim: int) -> None:
    q, k, angle = new(1, 1, heads * dim), new(1, 1, kv_heads * dim), new(1, 1, dim)
    ops.rotate_append(q, k, k, angle, angle, *stored(width=dim), clipped())


def requantizes(matrices: int, granularity: Granularity) -> None:
    ops.requantize_transposed([ones(4, 8)] * matrices, ones(1, 1), Cast(granularity=granularity))


def gradient_of(z: Tensor) -> tuple:
    rows = torch.ones(len(z), dtype=z.dtype)
    return z, zeros(len(z)).long(), torch.tensor(0.5, dtype=z.dtype), rows, rows, 1.0, 0.0, True, True


LOSS = None, None, 1.0, 0.0  # no gradient
SCALES = ones(4, 1)
RUNS = [  # a call, and whether the kernel runs
    ("quantize", lambda: ops.quantize(ones(4, 8), Cast("e4m3", block(4, 4)), column_scale=ones(1, 8)), False),
    ("quantize", lambda: ops.quantize(ones(4, 8), Cast("int8")), True),
    ("quantize", lambda: ops.quantize(ones(4, 8), Cast("int8", TENSOR)), False),
    ("quantize", lambda: ops.quantize(ones(4, 8), Cast(granularity=TENSOR, relative_floor=0.1)), False),
    ("quantize_scaled", lambda: ops.quantize_scaled(ones(4, 8), ones(1, 1), TENSORWISE), True),
    ("requantize", lambda: ops.requantize([ones(4, 8)], ones(4, 1), E4M3), True),
    ("requantize", lambda: requantizes(1, TENSOR), True),
    ("requantize", lambda: requantizes(1, block(128, 128)), True),
    ("requantize", lambda: requantizes(1, block(16, 16)), False),
    ("requantize", lambda: requantizes(2, block(64, 64)), False),
    ("requantize", lambda: requantizes(2, TENSOR), True),
    ("requantize_norm", lambda: ops.requantize_norm(ones(4, 8), None, SCALES, ones(8), None, SCALES, E4M3), True),
    ("norm_backward", lambda: ops.norm_backward(*[ones(4, 8)] * 2, ones(8), *[ones(4, 1)] * 2, None, True), True),
    ("activation_quantize", lambda: ops.activation_scales(ones(3, 8), "gelu", E4M3), True),
    ("activation_quantize", lambda: ops.activation_scales(ones(3, LONGEST_ROW + 1), "gelu", E4M3), False),
    ("activation_quantize", lambda: ops.activation_quantize(ones(3, 8), "gelu", E4M3, ones(3, 1)), True),
    ("quantize_stack", lambda: ops.row_scales([ones(4, 8)], E4M3), True),
    ("quantize_stack", lambda: ops.row_scales([ones(4, 8)], Cast("e4m3fnuz")), False),
    ("rotate", lambda: ops.rotate(ones(3, 8)), True),
    ("rotate", lambda: ops.rotate(ones(3, 7)), False),
    ("rotate", lambda: ops.rotate(ones(3, 2 * LONGEST_ROW)), True),
    ("index_of_largest", lambda: ops.index_of_largest(ones(3, 7)), True),
    ("index_of_largest", lambda: ops.index_of_largest(ones(0, 7)), False),
    ("transpose", lambda: ops.transpose(zeros(4, 8).to(E8)), True),
    ("transpose", lambda: ops.transpose(zeros(4, 8).to(torch.float8_e4m3fnuz)), False),
    ("fold_scales", lambda: ops.fold_scales(ones(4, 1), ones(4, 1), None), True),
    ("fold_scales", lambda: ops.fold_scales(ones(0, 1), ones(0, 1), None), False),
    ("index_slots", lambda: ops.sort_by_expert(zeros(0, 2).long(), 3), True),
    ("index_groups", lambda: ops.aligned_groups(zeros(3, dtype=INT), 0), True),
    ("combine", lambda: ops.combine(ones(4, 8), zeros(2, 2, dtype=INT), None), True),
    ("combine", lambda: ops.combine(ones(4, 0), zeros(2, 2, dtype=INT), None), False),
    ("cached_attention", lambda: ops.cached_attention(new(1, 4, 1, 16), *stored()), True),
    ("cached_attention", lambda: ops.cached_attention(new(1, 4, 1, 16), *stored(torch.int8)), True),
    ("cached_attention", lambda: ops.cached_attention(new(1, 4, 1, 16).float(), *stored(torch.float32)), False),
    ("cached_attention", lambda: ops.cached_attention(new(1, 4, 1, 16), *stored(torch.float16)), False),
    ("cached_attention", lambda: ops.cached_attention(new(1, 40, 2, 16), *stored()), False),  # 40 queries of a head
    ("cached_attention", lambda: ops.cached_attention(new(1, 4, 1, 264), *stored(width=264)), False),
    ("ordered_attention", lambda: ordered_attention(new(1, 40, 2, 16), *in_order()), True),
    ("ordered_attention", lambda: ordered_attention(new(1, 4, 1, 16).float(), *in_order(torch.float32)), False),
    ("ordered_attention", lambda: ordered_attention(new(1, 4, 1, 264), *in_order(width=264)), False),
    ("ordered_mm", lambda: ordered_mm(new(3, 8), new(4, 8)), True),
    ("int8_mm", lambda: int8_mm(*[QTensor(zeros(4, 8).to(torch.int8), ones(4, 1), Cast("int8").fmt, ROW)] * 2), True),
    ("append_kv", lambda: ops.append_kv(*[new(1, 2, 1, 16)] * 2, *stored(), clipped()), True),
    ("append_kv", lambda: ops.append_kv(*[new(1, 2, 0, 16)] * 2, *stored(), clipped()), False),
    ("cross_entropy", lambda: cross_entropy(ones(2, 8), zeros(2).long(), *LOSS), True),
    ("cross_entropy", lambda: cross_entropy(ones(2, 8).double(), zeros(2).long(), *LOSS), False),
    ("cross_entropy", lambda: cross_entropy(ones(0, 8), zeros(0).long(), *LOSS), False),
    ("cross_entropy_gradient", lambda: cross_entropy_gradient(*gradient_of(ones(2, 8))), True),
    ("cross_entropy_gradient", lambda: cross_entropy_gradient(*gradient_of(ones(2, 8).double())), False),
    ("multiply", lambda: multiply(ones(2, 8), torch.tensor(0.5)), True),
    ("multiply", lambda: multiply(ones(0, 8), torch.tensor(0.5)), False),
    ("rotate_append", lambda: turns(4, 2, 16), True),
    ("rotate_append", lambda: turns(2, 2, 264), False),
    ("turn_heads", lambda: ops.turn_heads(*[new(1, 2, 1, 16)] * 2, *[new(1, 1, 16)] * 2, False), True),
    ("turn_heads", lambda: ops.turn_heads(*[new(1, 2, 1, 264)] * 2, *[new(1, 1, 264)] * 2, True), False),
]


@pytest.mark.parametrize(("name", "call", "ran"), RUNS, ids=lambda v: v if isinstance(v, str) else "")
def test_kernels_run_where_they_can(name, call, ran, calls):
    call()
    assert [called for called, _ in calls] == [name] * ran


def test_every_operation_with_kernels_is_in_the_table():
    assert {*QUANTIZES, *(name for name, _, _ in RUNS)} == WITH_KERNELS.keys()


def test_kernels_get_contiguous_tensors(calls):
    x, k, row = torch.randn(70, 5).t(), torch.randn(70, 2)[:, 0], ones(1, 1).expand(5, 1)
    ops.norm_quantize(x, x, k, k, EPS, E4M3, center=True)
    ops.norm_backward(x, x, k, row, row, x, True)
    u, column = torch.randn(140, 5).t(), ones(1, 1).expand(1, 140)
    factors = Factors(column, mantissa_of=row)
    ops.activation_backward(x, u, "swiglu", E4M3, factors, h_cast=E4M3, h_scale=row, biased=True)
    ops.quantize_stack([x, x], E4M3)
    ops.quantize_transposed(x.contiguous(), E4M3, zeros(6, dtype=INT)[::2])
    scale, first = ones(2, 2)[:, 0], zeros(2, 2, dtype=INT)[:1, 0]
    ops.cached_attention(new(1, 4, 1, 16), *stored(torch.int8)[:2], scale, scale, torch.tensor(3), first=first)
    ops.append_kv(*[new(1, 2, 1, 16)] * 2, *stored(torch.int8)[:2], scale, scale, torch.tensor(3), clipped())
    q, angle, norm = new(1, 1, 32), new(1, 16, 1).transpose(1, 2), new(16, 2)[:, 0]
    ops.rotate_append(q, q, q, angle, angle, *stored(), clipped(), q_norm=norm, k_norm=norm)
    tensors = [value for _, values in calls for value in tree_leaves(values) if isinstance(value, Tensor)]
    assert len(tensors) == 4 + 6 + 5 + 2 + 2 + 7 + 8 + 11
    assert all(t.is_contiguous() for t in tensors)


def test_the_tensor_after_reaches_no_kernel(calls):
    ops.transpose(zeros(4, 8).to(E8), after=ones(1, 1).expand(3, 3))
    ops.rotate(ones(3, 8), ones(3))
    assert [len(values) for _, values in calls] == [3, 1]


# ---- what is refused

ROWS = r"takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', .*got e4m3 .*: change the cast"


@pytest.mark.parametrize("cast", REFUSED, ids=str)
def test_casts_that_fused_kernels_do_not_do_are_refused(cast):
    x, k, row = ones(3, 6), ones(6), ones(3, 1)
    made = dict(calls_of((3, 6), cast))
    made["requantize_norm"] = lambda: ops.requantize_norm(x, row, row, k, None, row, cast)
    for name in ("activation_quantize", "activation_backward", "norm_quantize", "requantize_norm", "gather_quantize"):
        with pytest.raises(ValueError, match=f"{name} {ROWS}"):
            made[name]()
    factors = Factors(ones(1, 6), mantissa_of=row)
    with pytest.raises(ValueError, match="activation_backward " + ROWS):
        ops.activation_backward(x, x, "gelu", E4M3, factors, h_cast=cast, h_scale=row, biased=False)


def attends(**changed: Tensor | None) -> None:
    names = ("q", "keys", "values", "k_scale", "v_scale")
    given = dict(zip(names, attention_oracle.given("fp8", 2, 4, 2, 1, 16, 9), strict=True))
    ops.cached_attention(**given | {"length": torch.tensor(3)} | changed)


def rotates(**changed: Tensor) -> None:
    names = ("q", "k", "v", "cos", "sin", "keys", "values", "k_scale", "v_scale", "length", "clipped")
    made = attention_oracle.projections(2, 3, 4, 2, 16, torch.bfloat16)
    angles = attention_oracle.tables((1, 3, 16), torch.float32)
    cache = attention_oracle.new_cache("bf16", 2, 2, 4, 16, 3)
    ops.rotate_append(**dict(zip(names, (*made, *angles, *cache), strict=True)) | changed)


def fp8_attends(*parts: slice, heads: slice = slice(None), **changed: Tensor) -> None:
    q, k, v, _ = map(attention_fp8_oracle.quantized, attention_fp8_oracle.given(1, 4, 2, 8, 8))
    keys = parts[0] if parts else slice(None)
    given = {"q": q.data[:, heads], "k": k.data[:, :, keys], "v": v.data[:, :, keys]}
    ops.fp8_attention(**given | {"q_scale": q.scale, "k_scale": k.scale, "v_scale": v.scale} | changed)


def one_row(x, w: QTensor, norm=None, gated: bool = False) -> None:
    ops.weight_only_mm(x, w, around=Around(norm, 0.1, gated))


def by_row(*shape: int) -> QTensor:
    return ops.quantize(ones(shape), E4M3)


def grouped(k: int = 48, cast: Cast = E4M3) -> None:
    a = ops.quantize(ones(8, 48), cast)
    ops.grouped_mm(a, ops.quantize_matrices(ones(2, 32, k), E4M3), torch.tensor([3, 8], dtype=INT))


def grouped_dw(b: tuple[int, int] = (8, 48), rows: int = 8, **options: Granularity) -> None:
    a, b = zeros(8, 48).to(E8), zeros(b).to(E8)
    ops.grouped_mm_dw(a, ones(2, rows, 1), b, torch.tensor([3, 8], dtype=INT), **options)


def groups_of_weights(x: Tensor, scale: Tensor | None = None) -> None:
    w = ops.quantize_matrices(ones(2, 16, 32), E4M3)
    w = w if scale is None else QTensor(w.data, scale, w.format, TENSOR)
    ops.grouped_weight_only_mm(x, w, torch.tensor([3, 8], dtype=INT))


F32 = "torch.float32"
BAD = [  # a call, and the message of its error
    *(
        (lambda x=x, call=call: call(x()), "takes a matrix of float32, bfloat16 or float16, got")
        for call in (lambda x: ops.quantize(x, E4M3), lambda x: ops.quantize_scaled(x, ones(1, 1), TENSORWISE))
        for x in (lambda: ones(4), lambda: ones(2, 3, 4), lambda: ones(4, 4).int(), lambda: ones(2, 2).double())
    ),
    (lambda: ops.quantize(ones(4, 6), E4M3, column_scale=ones(4, 1)), rf"column_scale must be {F32} \[1, 6\]"),
    (lambda: ops.quantize_matrices(zeros(4, 4), E4M3), r"takes \[E, N, K\] of float32"),
    (lambda: ops.quantize_matrices(zeros(2, 4, 4), Cast(rounding="stochastic")), "takes a cast by row"),
    (lambda: ops.row_scales([ones(7, 13)], TENSORWISE), "row_scales takes a cast by row"),
    (
        lambda: ops.requantize([ones(7, 13)], ones(6, 1), E4M3),
        r"the scales of \[\[7, 13\]\] by row, got scales \[6, 1\]",
    ),
    (lambda: ops.requantize([ones(7, 13)], ones(7, 1), TENSORWISE), "requantize takes a cast by row"),
    (
        lambda: ops.requantize_transposed([ones(7, 13)], ones(1, 1), E4M3),
        r"need the scales of \[\[7, 13\]\] by row, got scales \[1, 1\]",
    ),
    *((lambda call=call: call([ones(3, 8), ones(3, 16)]), r"columns, got \[\[3, 8\], \[3, 16\]\]") for call in (
        lambda x: ops.quantize_stack(x, E4M3), lambda x: ops.row_scales(x, E4M3),
        lambda x: ops.requantize(x, ones(6, 1), E4M3), lambda x: ops.requantize_transposed(x, ones(6, 1), E4M3),
    )),
    (lambda: ops.transpose(zeros(4).to(E8)), r"a matrix of an eight-bit format, got torch.float8_e4m3fn \[4\]"),
    *((lambda x=x: ops.index_of_largest(x), r"index_of_largest takes a matrix \[M, N\]")
      for x in (ones(3), ones(3, 0), ones(3, 4, dtype=INT))),
    *((lambda x=x: ops.rotate(x()), r"rotate takes a tensor \[\.\.\., n\] of float32, bfloat16 or float16, got")
      for x in (lambda: ones(()), lambda: ones(2, 4).double(), lambda: ones(2, 4).int())),
    (lambda: ops.gather_quantize(ones(4, 8), E4M3, Factors(ones(2, 8))), "column_scale needs group"),
    (
        lambda: ops.combine(ones(4, 8), zeros(4, dtype=INT), None),
        r"row must be int32 \[T, top_k\], got torch.int32 \[4\]",
    ),
    *((lambda s=s: ops.norm_quantize(ones(3, 6), ones(s), ones(6), None, EPS, E4M3, center=True),
       rf"residual must be {FLOAT} \[3, 6\], got") for s in ((1, 6), (3, 1), (6,))),
    (lambda: ops.activation_scales(ones(3, 8), "relu", E4M3), "'relu': choose one of swiglu, geglu, gelu"),
    (lambda: ops.activation_scales(ones(3, 7), "swiglu", E4M3), rf"swiglu takes .* divide by 2, got {F32} \[3, 7\]"),
    (lambda: cross_entropy(ones(8, 3).t(), zeros(3).long(), *LOSS), "a contiguous matrix of a float dtype"),
    (lambda: attends(q=zeros(2, 3, 1, 16)), r"q must be \[2, a multiple of 2, T, 16\]"),
    (lambda: attends(keys=zeros(2, 2, 9, 16).to(torch.float8_e5m2)), "keys must be contiguous"),
    (lambda: attends(k_scale=None), "k_scale goes with eight-bit"),
    (lambda: ordered_attention(new(1, 4, 1, 16), *in_order(torch.int8)), "k_scale goes with eight-bit"),
    (lambda: ordered_mm(by_row(3, 8), by_row(4, 9)), r"a must be .*fn \[3, 9\], got"),
    (lambda: rotates(q=zeros(2, 3, 24).bfloat16()), "q must be"),
    (lambda: ops.turn_heads(*[new(1, 2, 1, 15)] * 2, *[new(1, 1, 15)] * 2, False), r"q must be .* \[1, 2, 1, 14\]"),
    (lambda: rotates(clipped=zeros(4).long()[::2]), "rotate_append writes to clipped, which must be contiguous"),
    (
        lambda: ops.append_kv(*[zeros(1, 2, 1, 16).bfloat16()] * 2, *stored(), zeros(4).long()[::2]),
        "append_kv writes to clipped, which must be contiguous",
    ),
    (lambda: rotates(k_scale=ones(2)), "k_scale goes with"),
    (lambda: fp8_attends(heads=slice(3)), "q must be"),
    (lambda: fp8_attends(slice(4)), "with S >= T"),
    (lambda: fp8_attends(k_scale=ones(2)), "k_scale must be float32 with one element"),
    (lambda: ops.scaled_mm(by_row(3, 8), by_row(4, 9)), r"same K, got \[3, 8\] and \[4, 9\]"),
    (lambda: ops.scaled_mm(by_row(3, 8), by_row(4, 8), bias=ones(1)), rf"bias must be {FLOAT} \[4\], got {F32} \[1\]"),
    (lambda: grouped(k=64), r"the same K, got \[8, 48\] and \[2, 32, 64\]"),
    (lambda: grouped(cast=Cast(granularity=block(4, 4))), r"row scales, .* got block:4x4 and row"),
    (lambda: grouped_dw((48, 8)), r"the same M, got \[8, 48\] and \[48, 8\]"),
    (lambda: grouped_dw(granularity=block(4, 4)), "equal groups of 32, 64 or 128, got block:4x4"),
    (lambda: grouped_dw(granularity=group(32)), rf"scale_a must be {F32} or .* \[8, 2\], got"),
    (lambda: grouped_dw(rows=7), rf"scale must be {F32} \[2, 8, 1\], got"),
    (lambda: ops.weight_only_mm(ones(2, 8), ops.quantize(ones(4, 8), Cast("e5m2"))), "e4m3, got e5m2"),
    (lambda: ops.weight_only_mm(ones(2, 9), by_row(4, 8)), rf"same K, got {F32} \[2, 9\] and \[4, 8\]"),
    (lambda: one_row(ones(2, 8), by_row(4, 8), ones(8)), r"x \[1, K\] .* got \[2, 8\] and \[4, 8\]"),
    (lambda: one_row(ones(1, 8), by_row(3, 8), gated=True), r"an even number of rows, got .* \[3, 8\]"),
    (lambda: one_row(ones(1, 8), by_row(4, 8), ones(4)), r"norm must be .* \[8\]"),
    (lambda: one_row(ones(1, 8), ops.quantize(ones(4, 8), GROUP), gated=True), "with scales by group:4"),
    (lambda: groups_of_weights(ones(8, 31)), rf"w \[E, N, K\] with the same K, got {F32} \[8, 31\]"),
    (lambda: groups_of_weights(ones(8, 32), scale=ones(1, 1, 1)), "scales of their own, got e4m3 with tensor scales"),
    (
        lambda: int8_mm(ops.quantize(ones(4, 32), Cast("int8")), ops.quantize(ones(4, 32), E4M3)),
        r"int8_mm takes matrices in int8 .* got b in e4m3 with row scales",
    ),
    (lambda: int8_mm(*[ops.quantize(ones(4, 32), Cast("int8", TENSOR))] * 2), "got a in int8 with tensor scales"),
    (lambda: int8_mm(*(ops.quantize(ones(4, k), Cast("int8")) for k in (32, 64))), "with the same K"),
    (
        lambda: cast_rows(RowBatch([ones(5, 24)], [0]), ones(1).expand(5), None, zeros(5, 24).to(E8), E4M3),
        "needs a contiguous scale",
    ),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("call", "message"), BAD, ids=lambda v: v[:24] if isinstance(v, str) else "")
def test_refusals(call, message, device):
    with torch.device(device), pytest.raises(ValueError, match=message):
        call()


def test_compiled_code_refuses_it_too():
    def call():
        return ops.norm_quantize(ones(3, 6), ones(1, 6), ones(6), None, EPS, E4M3, center=True).total

    with pytest.raises(Exception, match=r"residual must be torch.float32"):
        torch.compile(call, backend="eager", fullgraph=True)()


# Those of a quantized tensor, which it checks itself, and what no caller of ours gives wrongly.
OF_OTHERS = {"seed", "after", "scale", "scale_a", "scale_b"}
UNCHECKED = {
    "quantize_scaled": "x", "rotate": "x",
    "weight_only_mm": "w", "grouped_weight_only_mm": "w", "int8_mm": "a b", "scaled_mm": "a b",
    "grouped_mm": "a b", "grouped_mm_dw": "a b", "add_product": "y u b",
    "multiply": "x factor", "fp8_attention": "q_scale k_scale v_scale", "fp8_attention_backward": "scales",
    "index_slots": "experts order", "index_groups": "slot",
}  # fmt: skip


def refusal(operation, values: tuple[object, ...]) -> str:
    """The message of an operation's check for these arguments of its schema; "" if it takes them."""
    try:
        operation.check(*operation._read(values))
    except ValueError as error:
        return str(error)
    return ""


def test_each_tensor_of_an_operation_has_one_dtype_and_one_shape():
    """The check of every operation refuses integers in place of numbers, and one more dimension, and says of what."""
    x, rows = matrix((5, 70), torch.bfloat16), cases.permutations(10, 2, 3, 32, torch.bfloat16)
    others = cases.of_experts(), rows, cases.of_gemm_and_attention(), cases.of_loss()
    found = chain(cases.examples(x), cases.products(x), *others)
    refused: dict[tuple[str, str], list[str]] = {}
    for name, values in found:
        arguments = cases.OPERATIONS[name].overload._schema.arguments if name in cases.OPERATIONS else ()
        for i, argument in enumerate(arguments):
            value, key = values[i], (name, argument.name)
            if isinstance(value, Tensor) and key not in refused and argument.name not in OF_OTHERS:
                others = [(*values[:i], other, *values[i + 1 :]) for other in (value.to(torch.int16), value[None])]
                refused[key] = [refusal(cases.OPERATIONS[name], each) for each in others]
    assert len(refused) > 100
    for (name, argument), messages in refused.items():
        words = rf"{argument} must be .*, got|takes .* got|^need .* got|^q must be \[B, H, T, D\].* got"
        assert all(re.search(words, message) for message in filter(None, messages)), (name, messages)
    unchecked = {f"{name} {argument}" for (name, argument), messages in refused.items() if not all(messages)}
    assert unchecked == {f"{name} {argument}" for name, listed in UNCHECKED.items() for argument in listed.split()}
