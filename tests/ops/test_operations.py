"""Every registered operation: its fake implementation, its schema, and strided inputs."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from bits import bits
from operation_examples import Example, examples, of_experts, of_gemm_and_attention, of_loss, permutations, products
from quantize_oracle import matrix
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from octavo.numerics import Cast
from octavo.ops.registration import OPERATIONS, check_matrix, check_tensor, operation

ROW = Cast().spec


def cases(shape: tuple[int, int]) -> Iterator[Example]:
    x = matrix(shape, torch.bfloat16)
    yield from (*examples(x), *products(x))


def others() -> Iterator[Example]:
    yield from (*of_experts(), *permutations(10, 2, 3, 32, torch.bfloat16))


def each(*groups: Iterable[Example]) -> pytest.MarkDecorator:
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
    listed = *cases((5, 70)), *others(), *of_gemm_and_attention(), *of_loss()
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
    """Each operation that a file calls as torch.ops.octavo.NAME, or by its name as `check` does, and its arguments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            prefix, _, name = ast.unparse(node.func).rpartition(".")
            match node.args:
                case [ast.Constant(value=str(given)), ast.Tuple(elts=values), *_] if name == "check":
                    yield given, values
                case values if prefix == "torch.ops.octavo":
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


# One of those that differ in numbers and strings alone, such as formats and granularities. Other tests take them all.
EVERY = [*cases((5, 70)), *others(), *of_gemm_and_attention(), *of_loss()]
KINDS = {
    f"{name} {tree_map_only((Tensor, str), lambda value: getattr(value, 'dtype', str), values)}": (name, values)
    for name, values in EVERY
}


@each(KINDS.values())
def test_opcheck(name, values):
    checks = ["test_autograd_registration", "test_faketensor"]
    if values is dict(KINDS.values())[name] and name not in ("add_product", "append_kv", "rotate_append"):
        checks.append("test_aot_dispatch_dynamic")
    if all(t.element_size() > 1 for t in tree_leaves(values) if isinstance(t, Tensor)):
        checks.append("test_schema")  # torch has no allclose for eight-bit inputs
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, values, test_utils=checks)


@each(*map(cases, ((1, 1), (17, 130), (0, 7))), others(), of_gemm_and_attention(), of_loss())
def test_results_on_the_meta_device(name, values):
    operation = getattr(torch.ops.octavo, name)
    fakes = tree_map_only(Tensor, lambda t: t.to("meta"), values)
    for real, fake in zip(tree_leaves(operation(*values)), tree_leaves(operation(*fakes)), strict=True):
        if real is not None:
            assert fake.device.type == "meta"
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            assert (fake.is_contiguous(), real.is_contiguous()) == (True, True)


# Sizes that a check demands.
CONSTANTS = {"append_kv": {2}, "rotate_append": {2}, "fp8_attention_backward": {7}, "gather_quantize": {2}}


@pytest.mark.parametrize("cases", [KINDS.values(), pytest.param(EVERY, marks=pytest.mark.slow)], ids=["kinds", "all"])
def test_sizes_stay_variables_in_compiled_code(cases):
    """`len` of a tensor would make its size a constant, and code would be compiled again for each number of tokens."""
    for name, values in cases:
        sizes = ShapeEnv()
        with FakeTensorMode(shape_env=sizes, static_shapes=False) as mode:
            getattr(torch.ops.octavo, name)(*tree_map_only(Tensor, mode.from_tensor, values))
        fixed = {int(found) for found in sizes.replacements.values() if found.is_number}
        assert fixed <= CONSTANTS.get(name, set()), name


@each(cases((17, 130)), others(), of_gemm_and_attention())
def test_strided_inputs_give_the_same_contiguous_results(name, values):
    """And are left as they are, but for those that are written to. Compiled code relies on the fake's strides."""
    operation = getattr(torch.ops.octavo, name).default
    before = tree_map_only(Tensor, Tensor.clone, values)
    by_columns = tree_map_only(Tensor, lambda t: t.t().contiguous().t() if t.ndim == 2 else t.clone(), values)
    for one, other in zip(tree_leaves(operation(*values)), tree_leaves(operation(*by_columns)), strict=True):
        if one is not None:
            assert other.is_contiguous()
            assert torch.equal(bits(one), bits(other))
    for argument, *given in zip(operation._schema.arguments, before, values, by_columns, strict=True):
        if argument.alias_info is None:
            first, *others = map(tree_leaves, given)
            for one, *same in zip(first, *others, strict=True):
                assert not isinstance(one, Tensor) or all(torch.equal(bits(one), bits(other)) for other in same)
