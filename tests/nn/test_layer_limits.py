"""Uses of PyTorch, and inputs, that the layers do not take raise an error that says what to do."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from linear_examples import converted_model as converted
from tiny_models import SIZES, built
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import GptOssConfig, GptOssModel

import octavo
from octavo.nn import GEGLU, Experts, GroupedLinear, NormLinear, SwiGLU, use_fp8_attention
from octavo.nn.attention_layers import GradientScales, attend_fp8
from octavo.nn.fused_loss import linear_cross_entropy
from octavo.nn.module_tools import PrecomputedProjections
from octavo.nn.selection import promote
from octavo.recipe import rowwise, rowwise_dw_bf16, tensorwise


class Normed(nn.Module):
    """Two layers that run as one with their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.both = NormLinear(self, "norm", "first", "second")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.both(x)[0], -1)


def layer(recipe: str = "rowwise") -> nn.Sequential:
    return converted(nn.Sequential(nn.Linear(16, 16)), recipe)


def fused() -> Normed:
    return converted(Normed())


each = pytest.mark.parametrize("make", [layer, fused])
ROWS, TEXT, IMAGE = torch.randn(3, 16), torch.randn(2, 5, 32), nn.Conv2d(24, 16, 4, 4)
INDEX, OFFSETS = torch.zeros(3, 2, dtype=torch.int64), torch.tensor([1, 3], dtype=torch.int32)
WIDTH = r"takes an input .* got \[3, 8\]"


def attend(**options) -> object:
    return converted(nn.MultiheadAttention(32, 4, batch_first=True))(TEXT, TEXT, TEXT, **options)


def grouped(recipe, offsets: Tensor = OFFSETS) -> object:
    module = GroupedLinear(2, 16, 8)
    module.recipe = recipe
    return module(ROWS, offsets)


def linears(*shapes: tuple[int, int], bias: bool = False) -> object:
    return GroupedLinear.from_linears([nn.Linear(k, n, bias=bias) for k, n in shapes])


def geglu() -> object:
    block = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(8, 16)})
    block["a"].parallel = "a way"
    return GEGLU(block, "a", "b")(ROWS)


def attend_twice() -> None:
    q, k, v = (torch.randn(1, 2, 8, 8).bfloat16().requires_grad_() for _ in range(3))
    (dq,) = torch.autograd.grad(attend_fp8(q, k, v, GradientScales()).float().sum(), q, create_graph=True)
    dq.sum().backward()


def freeze(*batches: Tensor, recipe: str = "delayed") -> object:
    return octavo.scales.freeze_scales(converted(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), recipe), batches)


def seed(model: nn.Module) -> object:
    return octavo.scales.seed_scales(model, SimpleNamespace(input_histories={}))


# Each call, and words of its error.
REFUSED = [
    (lambda: converted(nn.Sequential(nn.Linear(32, 16), nn.Linear(24, 8)))(torch.randn(3, 32)),
     re.escape("the layer '1', a Linear with a weight [8, 24], takes an input [..., 24], got [3, 16]: give")),
    (lambda: fused()(torch.randn(3, 8)), f"the layer 'first', a Linear .*, {WIDTH}"),
    (lambda: converted(nn.Sequential(GroupedLinear(2, 16, 8)))[0](torch.randn(3, 8), OFFSETS),
     f"the layer '0', a GroupedLinear .*, {WIDTH}"),
    *((lambda shape=shape: converted(nn.Linear(32, 16))(torch.randn(shape)),
       r"^a Linear with a weight \[16, 32\] takes an input") for shape in ((3, 8), (0, 8), ())),
    (lambda: converted(nn.Linear(32, 16))(torch.randn(32, dtype=torch.float64)),
     r"^a Linear takes float32, bfloat16 or float16, its input is torch.float64 \[32\]"),
    *((lambda recipe=recipe: layer(recipe)(None), "the layer '0' takes a tensor, got NoneType")
      for recipe in ("bf16", "rowwise", "delayed")),
    (lambda: layer().double()(ROWS), r"the layer '0' .* its weight is torch\.float64"),
    *((lambda make=make, dtype=dtype: converted(nn.ModuleDict({"block": make()}))["block"](ROWS.to(dtype)),
       r"the layer 'block\.(0|first)' takes float32.* its input is torch\.")
      for make in (layer, fused) for dtype in (torch.float64, torch.int32, torch.complex64)),
    (lambda: layer()(ROWS.to_sparse()), r"nested and sparse inputs: .*octavo\.restore"),
    (lambda: torch.jit.script(layer()), r"torch\.jit\.script"),
    (lambda: fused().both._replicate_for_data_parallel(), r"nn\.DataParallel: take DistributedDataParallel"),
    (lambda: octavo.scales.scale_state(octavo.convert(nn.Linear(16, 16))), r"octavo\.scales takes a torch\.nn\.Module"),
    (lambda: octavo.scales.saturation(None, [ROWS]), r"octavo\.scales takes a torch\.nn\.Module, got None"),
    (lambda: attend(attn_mask=torch.zeros(4, 5)), r"must be \[5, 5\], got \[4, 5\]"),
    (lambda: attend(key_padding_mask=torch.zeros(2, 4)), r"must be \[2, 5\], got \[2, 4\]"),
    (lambda: attend(is_causal=True), "pass the causal mask as attn_mask too"),
    (attend_twice, "double backward"),
    (lambda: use_fp8_attention(layer()), "Sequential has no causal attention"),
    (lambda: use_fp8_attention(built("bamba")), "BambaForCausalLM has no causal attention"),
    (lambda: use_fp8_attention(built("gemma2")), r"model.layers.0.self_attn has sinks or a softcap, which FP8"),
    (lambda: use_fp8_attention(GptOssModel(GptOssConfig(**SIZES))), "layers.0.self_attn has sinks or a softcap"),
    *((lambda shape=shape: converted(copy.deepcopy(IMAGE))(torch.randn(shape)),
       r"takes \[B, 24, \*sizes\] with sizes of at least \[4, 4\], got")
      for shape in ((2, 24, 3, 8), (2, 4, 8, 8), (8, 8))),
    (lambda: Experts(4, 16, 8)(ROWS, INDEX, torch.rand(3, 1)), r"got \[3, 2\] and \[3, 1\]"),
    (lambda: Experts(4, 16, 8)(ROWS, INDEX[1:], torch.rand(2, 2)), r"got \[2, 2\] and \[2, 2\]"),
    *((lambda recipe=recipe, offsets=offsets: grouped(recipe, offsets), r"offsets must be torch.int32 \[2\], got")
      for recipe in (None, rowwise()) for offsets in (OFFSETS[:1], OFFSETS.long())),
    *((lambda recipe=recipe: grouped(recipe), f"grouped layers run recipes with row scales.*got {recipe}:")
      for recipe in (tensorwise(), rowwise_dw_bf16())),
    (lambda: linears((4, 8), (4, 6)), r"got \[\[6, 4\], \[8, 4\]\]: leave"),
    (lambda: linears((4, 8), bias=True), r"got \[\[8, 4\]\] with biases: leave"),
    (linears, r"got \[\]: leave"),
    (lambda: SwiGLU(16, 16)(ROWS, residual=ROWS), "a residual needs a norm: pass both, or add it to x"),
    (geglu, "cuts the first layer of a GEGLU between up and gate"),
    (lambda: layer()(PrecomputedProjections(ROWS, [], [])), "another one was given its output"),
    (lambda: promote(layer()[0], "fp32"), "a layer can move to bf16 or e5m2; got 'fp32'"),
    (lambda: promote(nn.Linear(4, 4), "bf16"), "takes a layer of a model .* has converted; got Linear"),
    (lambda: promote(Experts(4, 16, 8), "bf16"), "octavo.convert has converted; got Experts"),
    (lambda: freeze(ROWS, recipe="rowwise"), r"scales can be frozen: octavo.convert\(model, 'delayed'\)"),
    (freeze, r"0 \(2 such layers\) saw no input"),
    (lambda: freeze(torch.zeros(2, 16)), "the input of 0 holds inf or NaN, or zeros alone"),
    (lambda: freeze(torch.full((2, 16), torch.inf)), "the input of 0 holds inf or NaN, or zeros alone"),
    (lambda: octavo.scales.saturation(layer("delayed"), [ROWS]), "no layer of Sequential holds a scale of its input"),
    (lambda: seed(layer("delayed")), "no amax of the input of 0 .1 such. in SimpleNamespace"),
    (lambda: octavo.scales.seed_scales(layer("delayed"), None), "no amax of the input of 0 .1 such. in NoneType"),
    (lambda: seed(nn.Linear(4, 4)), "has no scale histories"),
    (lambda: linear_cross_entropy(ROWS, ROWS, torch.zeros(3)), "needs an int64 label for each token; got 3 tokens"),
    (lambda: linear_cross_entropy(ROWS, ROWS, torch.full((len(ROWS),), -1)), "labels are from 0 to .* got -1"),
    (lambda: linear_cross_entropy(ROWS, ROWS, torch.full((len(ROWS),), len(ROWS))), "or ignore_index=-100; got"),
    *((lambda given=given: linear_cross_entropy(ROWS, ROWS, INDEX[:, 0], **given), "takes a chunk of at least 1 and")
      for given in ({"chunk": 0}, {"chunk": -1}, {"recipe": "fp8"})),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_the_layers_do_not_take(call, words: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError, IndexError), match=words):
        call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_inputs(layout: torch.layout) -> None:
    with pytest.raises(NotImplementedError, match=r"nested and sparse inputs: .*Encoder whole.*octavo\.restore"):
        layer()(torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=layout))


@each
def test_transforms_of_torch_func_and_forward_mode(make) -> None:
    model, x = make(), torch.randn(3, 16)
    for transform in (
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
        lambda: torch.func.vmap(model)(x[None]),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.jacrev(model)(x),
    ):
        with pytest.raises(NotImplementedError, match="octavo's layers do not support .*octavo.restore"):
            transform()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        model(forward_ad.make_dual(x, x))
    assert torch.func.functional_call(model, dict(model.named_parameters()), (x,)).shape == model(x).shape


@each
def test_double_backward(make) -> None:
    model, x = make(), torch.randn(3, 16, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert torch.equal(dx, again)
    with pytest.raises(NotImplementedError, match="double backward"):
        again.square().sum().backward()
    for second in (torch.autograd.functional.hessian, torch.autograd.functional.jvp):  # these take a missing path for 0
        with pytest.raises(NotImplementedError, match="double backward"):
            second(lambda x: model(x).square().sum(), x, *[x] * (second is torch.autograd.functional.jvp))
    with pytest.raises(NotImplementedError, match="batches of gradients"):
        torch.autograd.functional.jacobian(model, x, vectorize=True)


@each
def test_export_to_onnx(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(NotImplementedError, match="export to ONNX"):
        make()(torch.randn(3, 16))


def test_a_layer_that_quantizes_nothing_takes_float64() -> None:
    assert layer("bf16").double()(torch.randn(3, 16).double()).dtype == torch.float64


# ---- more than one process


@pytest.fixture
def mesh(one_rank):
    return init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_tensor_parallelism_after_conversion(mesh, recipe: str, style: type) -> None:
    model = layer(recipe)
    with pytest.raises((NotImplementedError, AttributeError), match="tensor parallelism"):
        parallelize_module(model, mesh, {"0": style()})(torch.randn(3, 16))


def test_tensor_parallelism_before_conversion(mesh) -> None:
    model = converted(parallelize_module(nn.Sequential(nn.Linear(16, 16)), mesh, {"0": ColwiseParallel()}))
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        model(torch.randn(3, 16))


def test_units_of_fully_shard_are_converted_before(mesh) -> None:
    model = nn.Sequential(fully_shard(nn.Linear(16, 16), mesh=mesh))
    with pytest.raises(ValueError, match="convert the model before fully_shard"):
        octavo.convert(model)
    model, x = converted(nn.Sequential(nn.Linear(16, 16))), torch.randn(2, 3, 16)
    y = model(x)
    fully_shard(model[0], mesh=mesh)
    assert torch.equal(model(x), y)  # and no warning of FSDP's that the output is a view
    with pytest.raises(ValueError, match="it still runs rowwise"):
        octavo.convert(model, "tensorwise")
    with pytest.raises(ValueError, match="restore works on a model before fully_shard"):
        octavo.restore(model)


@each
def test_compiled_code_does_not_read_the_names_of_layers(make):
    """torch.compile would guard on them and compile each block of a model anew; past its limit a block runs eagerly."""
    model = make()
    for module in model.modules():
        vars(module).pop("_layer_name", None)  # a read of it fails
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 16))
