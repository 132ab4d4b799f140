"""Every registered operation: its fake implementation, its schema, and strided inputs."""

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import attention_fp8_oracle
import attention_oracle
import grouped_examples
import pytest
import rotary_examples
import torch
from bits import bits
from gemm_examples import operands
from quantize_oracle import matrix
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import octavo.nn.fused_loss
import octavo.ops.int8_gemm  # noqa: F401  registers int8_mm
from octavo.numerics import TENSOR, Cast, block, group
from octavo.observation.operands import BRIEF_WIDTH, WIDTH
from octavo.ops import quantize, quantize_matrices
from octavo.ops.gemm import operands_of
from octavo.ops.registration import OPERATIONS, check_matrix, check_tensor, operation
from octavo.ops.softmax_loss import IGNORED

CASTS = [Cast(), Cast(granularity=TENSOR), Cast("e5m2", group(32), "e8m0"), Cast(granularity=block(4, 4))]
ROW = Cast().spec


def cases(shape: tuple[int, int]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operations by name, and arguments with matrices of this shape."""
    m, k = shape
    x, seeds = matrix(shape, torch.bfloat16), (None, torch.tensor(5))
    row, column, vector, one = torch.rand(m, 1) + 0.1, torch.rand(1, k) + 0.1, torch.rand(k), torch.full((1, 1), 0.1)
    for cast, seed in product(CASTS, seeds):
        yield "quantize_transposed", (x, cast.spec, seed)
        for factors in ((None, None), (column, None), (None, row), (column, row)):
            yield "quantize", (x, cast.spec, *factors, seed)
    for seed in seeds:
        yield "quantize_scaled", (x, one, "e4m3", seed)
    yield "rotate", (x, None)
    for s_w in (None, column.t().contiguous()):
        yield "fold_scales", (row, row.exp2(), s_w)
    q = quantize(x, Cast())
    w = quantize(matrix((24, k), torch.bfloat16), Cast())
    for bias, residual in ((None, None), (torch.rand(24), torch.rand(m, 24).bfloat16())):
        yield "weight_only_mm", (x, w.data, w.scale, "row", bias, residual)
        a, b = quantize(x, Cast("int8")), quantize(w.dequantize(), Cast("int8"))
        yield "int8_mm", (a.data, a.scale, b.data, b.scale, bias, residual, torch.bfloat16)
    yield "observe", (torch.zeros(1, WIDTH).double(), 0, "x", [x], [], q.data, q.scale, ROW, None, None, None, None)
    yield "quantize_stack", ([x, x[: m // 2]], ROW)
    yield "row_scales", ([x, x[: m // 2]], ROW)
    yield "requantize", ([x, x], torch.cat((row, row)), "e4m3")
    yield "requantize_transposed", ([x, x], torch.cat((row, row)), "e4m3", "row", row)
    for fmt, shift in product(("e4m3", "e5m2"), (None, torch.arange(m, dtype=torch.int32))):
        for place in (None, torch.arange(m, dtype=torch.int32).flip(0).repeat(2) - 1):
            yield "transpose", (quantize(x, Cast(fmt)).data, shift, place, x)
    for center in (False, True):
        residual, bias, mean = (x, vector, row) if center else (None, None, None)
        for statistics in (False, True):
            yield "norm_quantize", (x, residual, vector, bias, 1e-5, Cast(scale="pow2").spec, center, statistics)
        yield "norm_backward", (x, x, vector, row, row, residual, center)
        yield "requantize_norm", (x, mean, row, vector, bias, row, "e4m3")
    for (kind, width), biased in product((("gelu", 1), ("swiglu", 2), ("geglu", 2)), (False, True)):
        u, factor = x.repeat(1, width), torch.rand(1, width * k)
        yield "activation_quantize", (u, kind, ROW)
        yield "activation_scales", (u, kind, ROW)
        h_scale = 1e6 * row  # so that no h saturates
        yield "activation_quantize_scaled", (u, kind, h_scale, ROW)
        for lines in (None, torch.arange(m, dtype=torch.int32) % 2):
            factors = factor if lines is None else torch.cat((factor, 2 * factor))
            spec = Cast("e5m2", scale="pow2").spec
            yield "activation_backward", (x, u, kind, spec, factors, row, ROW, h_scale, biased, lines)


def cases_of_experts() -> Iterator[tuple[str, tuple[Any, ...]]]:
    x, offsets = matrix((20, 32), torch.bfloat16), torch.tensor([3, 3, 20], dtype=torch.int32)
    w = matrix((3 * 48, 32), torch.bfloat16).view(3, 48, 32)
    yield "quantize_matrices", (w, Cast(relative_floor=2.0**-8).spec)
    a, b = quantize(x, Cast()), quantize_matrices(w, Cast())
    for pair in ("row", "mx"):
        q, stack, ends = grouped_examples.operands([3, 0, 17], 32, 48, pair=pair)
        yield "grouped_mm", (*operands_of(q, stack), ends, torch.bfloat16, "emulated", False)
        yield "grouped_weight_only_mm", (x, stack.data, stack.scale, stack.granularity.name, ends)
    # Beyond 448 E4M3 has NaN, which opcheck of torch 2.11 does not find equal to itself.
    h, x_t = (matrix((n, 20), torch.bfloat16).clamp(-448, 448).to(torch.float8_e4m3fn) for n in (48, 32))
    yield "grouped_mm_dw", (h, b.scale, x_t, offsets, torch.float32, "emulated", True)
    slot, row = torch.randperm(20).to(torch.int32), torch.randperm(20).to(torch.int32).view(10, 2) - 1
    factors = torch.rand(3, 32), torch.arange(20, dtype=torch.int32) % 3, torch.rand(20, 1)
    for given, factor in product((slot, None), (factors, (None, None, None))):
        yield "gather_quantize", (x, ROW, given, 1, *factor)
    for weight in (None, torch.rand(10, 2)):
        yield "combine", (x, row, weight)
    yield "combine_weight_gradient", (x[:10], x, row)
    buffers = torch.zeros(WIDTH).double(), torch.zeros(3, 3).double(), torch.zeros(3, BRIEF_WIDTH).double()
    yield "observe_experts", (*buffers, "x", [x[:10]], offsets, a.data, a.scale, ROW, slot, None, None, None, None)


def cases_of_gemm_and_attention() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for pair, added in product(("row", "mx"), ((None, None), (torch.ones(5), torch.ones(3, 5).bfloat16()))):
        a, b = operands(pair, 3, 64, 5)
        yield "scaled_mm", (*operands_of(a, b), *added, torch.bfloat16, False, False)
    for kind in attention_oracle.DTYPES:
        q, *cache = attention_oracle.given(kind, 2, 4, 2, 2, 16, 9)
        yield "cached_attention", (q, *cache, torch.tensor(3), torch.zeros(2, dtype=torch.int32), 0.25)
        k = torch.randn(2, 2, 2, 16).bfloat16()
        yield "append_kv", (k, k, *cache, torch.tensor(3), torch.zeros(2, dtype=torch.int64))
    x = [attention_fp8_oracle.quantized(t) for t in attention_fp8_oracle.given(2, 4, 2, 3, 3, 16)]
    data, scales = [t.data for t in x[:3]], [t.scale for t in x[:3]]
    yield "fp8_attention", (*data, *scales, 0.25, torch.bfloat16)
    stats = torch.full((2, 4, 3), 3.0)
    by_token = x[3].data.transpose(1, 2).contiguous()
    yield "fp8_attention_backward", (by_token, *data, by_token, stats, torch.ones(7), 0.25, torch.bfloat16)
    for kind, keep_k in product(rotary_examples.DTYPES, (False, True)):
        x, angles = (
            rotary_examples.projections(2, 3, 4, 2, 16, torch.bfloat16),
            rotary_examples.tables((1, 3, 16), k.dtype),
        )
        cache, weight = rotary_examples.cache(kind, 2, 2, 9, 16, 5), torch.ones(16, dtype=torch.bfloat16)
        norms = (weight, weight, 1e-6) if keep_k else (None, None, 1e-6)
        yield "rotate_append", (*x, *angles, *norms, *cache, keep_k)


def cases_of_loss() -> Iterator[tuple[str, tuple[Any, ...]]]:
    z, labels, one = matrix((5, 40), torch.bfloat16), torch.tensor([3, IGNORED, -1, 39, 0]), torch.tensor(1.0)
    for factor, lse, cap, fp8 in ((None, None, 0.0, False), (one, torch.ones(5), 0.0, False), (one, None, 30.0, True)):
        yield "cross_entropy", (z, labels, factor, lse, 1.0, cap, fp8)
    x, w = (matrix((n, 32), torch.bfloat16) for n in (5, 40))
    yield "multiply", (x, 0.5 * one)
    for wants_x, wants_w in product((False, True), repeat=2):
        options = torch.bfloat16, 2, wants_x, wants_w, 1.0, 0.0, "", wants_x
        yield "linear_cross_entropy", (x, w, labels % 40, one, *options)


def each(*groups: Iterator[tuple[str, tuple[Any, ...]]]) -> pytest.MarkDecorator:
    listed = [case for group in groups for case in group]
    return pytest.mark.parametrize(("name", "values"), listed, ids=[name for name, _ in listed])


def test_no_operation_has_a_default():
    # Inductor names the arguments that have one, and `_lower` takes its arguments by position.
    for name in OPERATIONS:
        schema = getattr(torch.ops.octavo, name).default._schema
        assert not [argument.name for argument in schema.arguments if argument.has_default_value()], name


def test_every_operation_is_tested_here():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("octavo::")}
    key = "CompositeImplicitAutograd"  # composite operations call these: tests/nn/test_composite_operations.py
    ours = {name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
    assert OPERATIONS.keys() == {name.removeprefix("octavo::").partition(".")[0] for name in ours}
    listed = *cases((5, 70)), *cases_of_experts(), *cases_of_gemm_and_attention(), *cases_of_loss()
    assert OPERATIONS.keys() - {"toy"} == {name for name, _ in listed}


def test_an_operation_is_registered():
    """As CONTRIBUTING describes it. Without `runs` it has no kernel: every device runs the reference."""

    def toy_reference(x: Tensor, factor: Tensor | None, cast: Cast) -> Tensor:
        return (x if factor is None else x * factor).to(cast.fmt.dtype)

    def check(x: Tensor, factor: Tensor | None, cast: Cast) -> None:
        check_matrix("toy", x)
        check_tensor("factor", factor, (x.shape[1],), torch.float32)

    def like(x: Tensor, factor: Tensor | None, cast: Cast) -> Tensor:
        return x.new_empty(x.shape, dtype=cast.fmt.dtype)

    toy = operation(check=check, like=like)(toy_reference)
    x, factor = torch.randn(3, 4), torch.rand(4)
    compiled = torch.compile(toy, backend="aot_eager", fullgraph=True)
    for given in (None, factor):
        expected = bits(toy_reference(x, given, Cast()))
        for call in (toy, toy.overload, compiled):
            assert torch.equal(bits(call(x, given, ROW)), expected)
    assert toy.overload(x.to("meta"), None, Cast("e5m2").spec).dtype == torch.float8_e5m2
    for values, message in (((x[0], None), "toy takes a matrix"), ((x, factor[:3]), r"factor must be .* \[4\], got")):
        with pytest.raises(ValueError, match=message):
            toy(*values, ROW)
    with pytest.raises(RuntimeError, match="called by itself, has no gradient"):
        toy(x.requires_grad_(), factor, Cast().spec).float().sum().backward()


def calls_of_operations(source: str) -> Iterator[tuple[str, list[ast.expr]]]:
    """Each operation that a file calls, or gives to `check_bytes`, as torch.ops.octavo.NAME, and its arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = ast.unparse(node.func) == "check_bytes"  # after the results that it expects
            function, *values = node.args[1:] if given else (node.func, *node.args)
            prefix, _, name = ast.unparse(function).rpartition(".")
            if prefix == "torch.ops.octavo":
                yield name, values


def test_files_that_only_a_gpu_runs_call_operations_with_all_their_arguments():
    root = Path(__file__).parents[2]
    files = [*root.glob("tests/**/*_gpu.py"), *root.glob("bench/gpu/**/*.py")]
    calls = [(path.name, *call) for path in files for call in calls_of_operations(path.read_text())]
    assert {name for _, name, _ in calls} >= {"norm_quantize", "transpose"}
    for path, name, values in calls:
        if not any(isinstance(value, ast.Starred) for value in values):
            count = len(getattr(torch.ops.octavo, name).default._schema.arguments)
            assert len(values) == count, f"{path} gives {name} {len(values)} arguments, and it takes {count}"


@each(cases((5, 70)), cases_of_experts(), cases_of_gemm_and_attention(), cases_of_loss())
def test_opcheck(name, values):
    checks = ["test_autograd_registration", "test_faketensor"]
    if name not in ("append_kv", "rotate_append"):
        checks.append("test_aot_dispatch_dynamic")
    if all(t.element_size() > 1 for t in tree_leaves(values) if isinstance(t, Tensor)):
        checks.append("test_schema")  # torch has no allclose for eight-bit inputs
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, values, test_utils=checks)


@each(*map(cases, ((1, 1), (17, 130), (0, 7))), cases_of_experts(), cases_of_gemm_and_attention(), cases_of_loss())
def test_results_on_the_meta_device(name, values):
    operation = getattr(torch.ops.octavo, name)
    fakes = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, values)
    for real, fake in zip(tree_leaves(operation(*values)), tree_leaves(operation(*fakes)), strict=True):
        if real is not None:
            assert fake.device.type == "meta"
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            assert (fake.is_contiguous(), real.is_contiguous()) == (True, True)


@each(cases((17, 130)), cases_of_experts())
def test_strided_inputs_give_the_same_contiguous_results(name, values):
    """And are left as they are. Compiled code relies on the strides of the fake implementation."""
    operation = getattr(torch.ops.octavo, name)
    by_columns = tree_map(lambda v: v.t().contiguous().t() if isinstance(v, Tensor) and v.ndim == 2 else v, values)
    for one, other in zip(tree_leaves(operation(*values)), tree_leaves(operation(*by_columns)), strict=True):
        if one is not None:
            assert other.is_contiguous()
            assert torch.equal(bits(one), bits(other))
    for one, other in zip(tree_leaves(values), tree_leaves(by_columns), strict=True):
        assert not isinstance(one, Tensor) or torch.equal(bits(one), bits(other))
