"""Every converted module as a program uses it: compiled, checkpointed, without rows, under autocast, in inference."""

import copy
from dataclasses import replace
from functools import partial

import peft
import pytest
import torch
import torch.nn.functional as F
from adapter_oracle import wrap
from fused_oracle import geglu, gelu, linears, swiglu, tokens
from linear_examples import QUANTIZED, K, N, SelfAttention, T, converted, converted_model, exact_gradients
from metrics import sqnr
from operation_counts import operations, saved_tensors
from tiny_models import with_slow
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.nn import Experts, GroupedLinear
from octavo.nn.fused import NormSpec, Stack, run_fused
from octavo.nn.linear_function import LinearCall, scale_folded
from octavo.nn.module_tools import plain_name
from octavo.nn.observer import Observer
from octavo.recipe import GEMMS, Recipe, rowwise

Inputs = tuple[Tensor, ...]


def both() -> Inputs:
    """x and the residual."""
    return tokens(33), tokens(33)


MODULES = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(80, 112), nn.GELU(), nn.Linear(112, 48)),
        lambda: (torch.randn(32, 80),),
    ),
    "convolution": (lambda: nn.Conv2d(24, 16, 4, 4), lambda: (torch.randn(2, 24, 8, 8),)),
    "Conv1D": (lambda: nn.Sequential(Conv1D(96, 64)), lambda: (torch.randn(32, 64),)),
    "attention": (SelfAttention, lambda: (torch.randn(2, 5, 32),)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 5, 32),),
    ),
    "norm and linear": (linears, both),
    "swiglu": (swiglu, both),
    "gelu": (gelu, both),
    "geglu": (geglu, both),
    "norm and linear in adapters": (lambda: wrap(linears(), without="layers.1"), both),
    "swiglu in adapters": (lambda: wrap(swiglu()), both),
    "experts": (
        lambda: Experts(5, 64, 48),
        lambda: (torch.randn(40, 64), torch.rand(40, 5).topk(2).indices, torch.rand(40, 2)),
    ),
    "grouped": (
        lambda: GroupedLinear(3, 64, 96),
        lambda: (torch.randn(40, 64), torch.tensor([7, 7, 40], dtype=torch.int32)),
    ),
}
ROTATED = [replace(rowwise(), rotate=gemms) for gemms in (("y",), ("dx",), ("dw",), GEMMS)]
RECIPES = {
    "linear": (*octavo.recipe.PRESETS, *ROTATED),
    "convolution": ("rowwise", "delayed"),
    "Conv1D": ("rowwise", "delayed"),
    "experts": ("rowwise", "blockwise", "mxfp8"),
    "grouped": ("rowwise", "blockwise", "mxfp8"),
}
CASES = [(name, recipe) for name in MODULES for recipe in RECIPES.get(name, ("rowwise",))]
QUICK = {("linear", recipe) for recipe in ("rowwise", "mxfp8", "nvfp4", "rowwise_dw_bf16", ROTATED[3])}
each = pytest.mark.parametrize(("name", "recipe"), with_slow(CASES, QUICK | MODULES.keys() - {"linear"}))
OF_ONE_SHAPE = ("convolution", "attention", "encoder", "experts", "grouped")


def made(name: str, recipe: str | Recipe) -> nn.Module:
    return converted_model(MODULES[name][0](), recipe)


def results(module: nn.Module, call, inputs: Inputs, *, autocast: bool = False) -> list[Tensor]:
    """The outputs, and the gradients of the inputs and parameters that have one."""
    given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = call(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [t for t in (*given, *module.parameters()) if t.requires_grad]
    torch.manual_seed(5)
    gradients = torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs], materialize_grads=True)
    return [*(y.detach() for y in outputs), *gradients]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@each
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_compiled_code_equals_eager_in_one_graph(name: str, recipe: str | Recipe, autocast: bool) -> None:
    """`delayed` has two: one for the first step, which has no scales, and one for all others."""
    torch.compiler.reset()
    eager = made(name, recipe)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        inputs = MODULES[name][1]()
        expected = results(eager, eager, inputs, autocast=autocast)
        with torch._dynamo.config.patch(error_on_recompile=step > (recipe == "delayed")):
            assert equal(results(model, compiled, inputs, autocast=autocast), expected)
        for each_model in (eager, model):
            octavo.scales.update_scales(each_model)
    scales = octavo.scales.scale_state(model)
    assert all(torch.equal(t, scales[key]) for key, t in octavo.scales.scale_state(eager).items())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", ROTATED[0]], ids=str)
def test_inductor_computes_nearly_the_same_and_compiles_in_seconds(recipe: str | Recipe) -> None:
    """With views between the stages of a rotation, Inductor simplified nested indices for more than ten minutes."""
    torch.compiler.reset()
    model, inputs = made("linear", recipe), MODULES["linear"][1]()
    expected = results(model, model, inputs)
    for eager, compiled in zip(expected, results(model, torch.compile(model, fullgraph=True), inputs), strict=True):
        assert sqnr(eager, compiled) > 30


@pytest.mark.slow
def test_compiled_with_two_sizes_of_weights() -> None:
    """Sizes that vary are symbols, for which the backward pass took strides of dy. It has others than y here."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        call = LinearCall(recipe, x.dtype, observer=observer)  # observed, and so traced
        norm = NormSpec(1e-5, center=False), w[0].detach(), None
        return torch.cat(run_fused(x, x.exp(), norm, Stack([w], [None]), call), 2).transpose(0, 2).contiguous()

    recipe = rowwise().fusable
    observer = Observer(1, torch.device("cpu"))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for rows, inputs in ((16, 32), (64, 128), (64, 64)):
        leaves = [torch.randn(*size, inputs, requires_grad=True) for size in ((2, rows), (64,))]
        dy = torch.randn_like(run(*leaves))
        found = [torch.autograd.grad(call(*leaves), leaves, dy) for call in (run, compiled)]
        assert all(map(torch.equal, *found))


@each
def test_checkpointed_activations_give_the_same_gradients(name: str, recipe: str | Recipe) -> None:
    model = made(name, recipe)
    for _ in range(2):  # the second step of `delayed` scales by its history
        inputs = MODULES[name][1]()
        again = results(model, lambda *given: checkpoint(model, *given, use_reentrant=False), inputs)
        assert equal(again, results(model, model, inputs))
        octavo.scales.update_scales(model)


@each
def test_no_rows(name: str, recipe: str | Recipe) -> None:
    model, inputs = made(name, recipe), MODULES[name][1]()
    nothing = tuple(0 * t if t.dtype == torch.int32 else t[:0] for t in inputs)
    expected, found = results(model, model, inputs), results(model, model, nothing)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.shape in (other.shape, (0, *other.shape[1:]))
        assert not one.any()


@each
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_and_training_give_the_same_outputs(name: str, recipe: str | Recipe, mode) -> None:
    model, inputs = made(name, recipe), MODULES[name][1]()
    expected = results(model, model, inputs)
    with mode():
        outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert not any(y.requires_grad for y in outputs)
    assert equal(list(outputs), expected[: len(outputs)])
    found = operations(mode()(lambda: model(*inputs)))
    model.requires_grad_(False)  # then nothing is computed for a backward pass
    assert found == operations(mode()(lambda: model(*inputs)))


@each
def test_autocast_decides_the_dtype_of_outputs_alone(name: str, recipe: str | Recipe) -> None:
    model, inputs = made(name, recipe), MODULES[name][1]()
    found, wide = results(model, model, inputs, autocast=True), results(model, model, inputs)
    gradients = len([t for t in inputs if t.is_floating_point()] + [p for p in model.parameters() if p.requires_grad])
    assert found[0].dtype == (torch.float32 if name == "encoder" else torch.bfloat16)  # which ends with a norm
    assert {t.dtype for t in (*found[-gradients:], *wide)} == {torch.float32}


@each
def test_strided_inputs_and_copies_of_a_model_change_nothing(name: str, recipe: str | Recipe) -> None:
    model, inputs = made(name, recipe), MODULES[name][1]()
    expected = results(model, model, inputs)
    turned = tuple(t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim > 1 else t for t in inputs)
    assert equal(results(model, model, turned), expected)
    other = copy.deepcopy(model)
    assert equal(results(other, other, inputs), expected)


@pytest.mark.parametrize(("name", "recipe"), [case for case in CASES if case[0] not in OF_ONE_SHAPE])
def test_any_rank(name: str, recipe: str | Recipe) -> None:
    model, inputs = made(name, recipe), MODULES[name][1]()
    for rows, shape in ((32, (2, 4, 4, -1)), (1, (-1,))):
        flat = tuple(t[:rows] for t in inputs)
        shaped = tuple(t.view(shape) for t in flat)
        found, expected = results(model, model, shaped), results(model, model, flat)
        assert found[0].shape == (*shaped[0].shape[:-1], expected[0].shape[-1])
        assert equal([one.view_as(other) for one, other in zip(found, expected, strict=True)], expected)


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_follow_inputs_and_parameters(name: str, recipe: str | Recipe, dtype: torch.dtype) -> None:
    model, inputs = made(name, recipe).to(dtype), MODULES[name][1]()
    given = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
    assert {t.dtype for t in results(model, model, given)} == {dtype}


# ---- The names of wrapped modules


def checkpointed(model: nn.Sequential) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["1.0"], modules_to_save=["2"]))


WRAPPERS = {
    "compile": torch.compile,
    "checkpoint": checkpointed,
    "FSDP": partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")),
    "DDP": DistributedDataParallel,
    "PEFT": with_adapters,
    "several": lambda model: torch.compile(DistributedDataParallel(with_adapters(checkpointed(model)))),
}


@pytest.mark.filterwarnings("ignore:.*FSDP", "ignore:.*NO_SHARD", "ignore:.*world size is 1")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_module_has_the_name_that_it_has_alone(wrapper: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 4))
    modules, tensors = dict(model.named_modules()), dict(model.named_parameters())
    wrapped = WRAPPERS[wrapper](model)
    named = [(name, module) for name, module in wrapped.named_modules() if "lora_" not in name]
    assert modules.keys() <= {plain_name(name) for name, _ in named}
    assert {plain_name(name) for name, _ in wrapped.named_parameters() if "lora_" not in name} == tensors.keys()
    linears = [(name, module) for name, module in named if type(module) is nn.Linear and ".default" not in name]
    assert all(modules[plain_name(name)] is module for name, module in linears)


# ---- The operations that compiled code calls in place of the layers' autograd functions


def graph_of(module: nn.Module, x: Tensor) -> list[torch.fx.Node]:
    """The calls of functions in the graph that Dynamo makes of `module`."""
    found: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, _):
        found.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    torch.compile(module, fullgraph=True, backend=backend)(x)
    return found


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_a_linear_layer_is_one_operation_to_dynamo(recipe: str) -> None:
    model = converted_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False)), recipe)
    nodes = graph_of(model, torch.randn(32, 64))
    assert [node.target for node in nodes] == [torch.ops.octavo.linear.default, F.relu, torch.ops.octavo.linear.default]


@pytest.mark.parametrize("build", [linears, swiglu, gelu])
def test_a_fused_module_is_one_operation_to_dynamo(build) -> None:
    nodes = graph_of(converted_model(build()), tokens(33))
    assert [node.target for node in nodes if "octavo" in str(node.target)] == [torch.ops.octavo.fused.default]
    assert not [node for node in nodes if "autograd_function" in str(node.target)]


# ---- The linear layer alone: under autocast, frozen, and built by a call


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_autocast_sets_the_output_dtype_and_nothing_else(recipe: str) -> None:
    """Inside autocast the float32 arithmetic of the operations must stay float32."""
    linear = converted(recipe, bias=True)
    x = torch.randn(T, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x).bfloat16())
    y.float().sum().backward()
    assert x.grad.dtype == linear.weight.grad.dtype == linear.bias.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("recipe", "changed"), [*((name, "weight") for name in octavo.recipe.PRESETS), ("rowwise_dw_bf16", "x")]
)
def test_what_changes_before_the_backward_pass_is_refused(recipe: str, changed: str) -> None:
    """As by `nn.Linear`: the gradients would be those of other numbers."""
    linear, x = converted(recipe), torch.randn(T, K)
    loss = linear(x.requires_grad_()).sum()
    with torch.no_grad():
        {"weight": linear.weight, "x": x}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_parts_are_not_computed_or_saved() -> None:
    """LoRA-like: a frozen weight gets no gradient, and the layer then keeps neither x nor its bytes."""
    linear = converted("rowwise")
    linear.weight.requires_grad_(False)
    x = torch.randn(T, K, requires_grad=True)
    assert (T, K) not in [t.shape for t in saved_tensors(lambda: linear(x))]
    linear(x).sum().backward()
    assert linear.weight.grad is None
    trained = converted("rowwise")
    dy = torch.randn(T, N)
    (dx,) = torch.autograd.grad(linear(x), x, dy)
    assert sqnr(exact_gradients(x.detach(), linear.weight, dy)[1], dx) > 27  # dB, of two operands in e4m3
    trained(x.detach()).sum().backward()  # no dx needed
    assert trained.weight.grad is not None


@pytest.mark.parametrize("recipe", ["rowwise", "delayed", octavo.recipe.rowwise()])
def test_a_layer_that_is_built_is_a_layer_that_is_converted(recipe):
    built = octavo.Linear(64, 48, recipe=recipe)
    torch.manual_seed(0)
    model = converted_model(nn.Sequential(nn.Linear(64, 48)), recipe)
    x = torch.randn(32, 64)
    y = built(input=x)
    assert torch.equal(y, model(x))
    assert not torch.equal(y, nn.functional.linear(x, built.weight, built.bias))
    y.sum().backward()
    assert built.weight.grad is not None
    assert octavo.restore(built) == [""]
    assert type(built) is nn.Linear


def test_scales_of_one_are_made_once_but_for_a_call_that_is_traced() -> None:
    """Those made in inference mode serve a backward pass, and a fake tensor serves no other call."""
    data = torch.zeros(48, 16, dtype=torch.float8_e4m3fn)
    with FakeTensorMode() as mode:
        assert isinstance(scale_folded(mode.from_tensor(data)).scale, FakeTensor)
    with torch.inference_mode():
        scale = scale_folded(data).scale
    assert torch.equal(scale, torch.ones(48, 1))
    assert not scale.is_inference()
    assert scale_folded(data.clone()).scale is scale
    assert scale_folded(data[:16]).scale.shape == (16, 1)
