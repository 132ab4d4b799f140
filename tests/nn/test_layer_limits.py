"""Uses of PyTorch that the layers do not support raise an error that says what to do."""

import re

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import octavo
from octavo.nn import NormLinear


class Normed(nn.Module):
    """Two layers that run as one with their norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.both = NormLinear(self, "norm", "first", "second")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.both(x)[0], -1)


def layer(recipe: str = "rowwise") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 16))
    octavo.convert(model, recipe)
    return model


def fused() -> Normed:
    model = Normed()
    octavo.convert(model)
    return model


each = pytest.mark.parametrize("make", [layer, fused])
REFUSED = "octavo's layers do not support .*octavo.restore"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_sparse_inputs() -> None:
    rows = [torch.randn(3, 16), torch.randn(5, 16)]
    nested = [torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.strided, torch.jagged)]
    for x in (*nested, torch.randn(4, 16).to_sparse()):
        with pytest.raises(NotImplementedError, match=r"nested and sparse inputs: .*octavo\.restore"):
            layer()(x)


def test_an_input_of_another_width_names_the_layer() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(24, 8))
    octavo.convert(model)
    what = "the layer '1', a Linear with a weight [8, 24], takes an input [..., 24], got [3, 16]: give"
    with pytest.raises(ValueError, match=re.escape(what)):
        model(torch.randn(3, 32))
    with pytest.raises(ValueError, match=r"the layer 'first', a Linear .*, takes an input .* got \[3, 8\]"):
        fused()(torch.randn(3, 8))
    mixture = nn.Sequential(octavo.nn.GroupedLinear(2, 16, 8))
    octavo.convert(mixture)
    with pytest.raises(ValueError, match=r"the layer '0', a GroupedLinear .*, takes an input .* got \[3, 8\]"):
        mixture[0](torch.randn(3, 8), torch.tensor([1, 3], dtype=torch.int32))
    alone = nn.Linear(32, 16)
    octavo.convert(alone)
    for shape in ((3, 8), (0, 8), ()):
        with pytest.raises(ValueError, match=r"^a Linear with a weight \[16, 32\] takes an input"):
            alone(torch.randn(shape))
    with pytest.raises(
        TypeError, match=r"^a Linear takes float32, bfloat16 or float16, its input is torch.float64 \[32\]"
    ):
        alone(torch.randn(32, dtype=torch.float64))


@each
def test_transforms_of_torch_func(make) -> None:
    model, x = make(), torch.randn(3, 16)
    for transform in (
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
        lambda: torch.func.vmap(model)(x[None]),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.jacrev(model)(x),
    ):
        with pytest.raises(NotImplementedError, match=REFUSED):
            transform()
    assert torch.func.functional_call(model, dict(model.named_parameters()), (x,)).shape == model(x).shape


@each
def test_forward_mode(make) -> None:
    model = make()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        model(forward_ad.make_dual(torch.randn(3, 16), torch.randn(3, 16)))


@each
def test_double_backward(make) -> None:
    model, x = make(), torch.randn(3, 16, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert torch.equal(dx, again)
    with pytest.raises(NotImplementedError, match="double backward"):
        again.square().sum().backward()


def test_scripting() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script"):
        torch.jit.script(layer())


@each
def test_export_to_onnx(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(NotImplementedError, match="export to ONNX"):
        make()(torch.randn(3, 16))


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_a_dtype_that_no_layer_takes_names_the_layer(make, dtype: torch.dtype) -> None:
    model = nn.ModuleDict({"block": make()})
    octavo.convert(model)
    with pytest.raises(TypeError, match=r"the layer 'block\.(0|first)' takes float32.* its input is torch\."):
        model["block"](torch.ones(3, 16).to(dtype))


def test_a_weight_of_another_dtype_names_the_layer() -> None:
    model = layer().double()
    with pytest.raises(TypeError, match=r"the layer '0' .* its weight is torch\.float64"):
        model(torch.randn(3, 16))


def test_a_layer_that_quantizes_nothing_takes_float64() -> None:
    assert layer("bf16").double()(torch.randn(3, 16).double()).dtype == torch.float64


# ---- more than one process


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_tensor_parallelism_after_conversion(mesh, recipe: str, style: type) -> None:
    model = layer(recipe)
    with pytest.raises((NotImplementedError, AttributeError), match="tensor parallelism"):
        parallelize_module(model, mesh, {"0": style()})(torch.randn(3, 16))


def test_tensor_parallelism_before_conversion(mesh) -> None:
    model = parallelize_module(nn.Sequential(nn.Linear(16, 16)), mesh, {"0": ColwiseParallel()})
    octavo.convert(model)
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        model(torch.randn(3, 16))


def test_units_of_fully_shard_are_converted_before(mesh) -> None:
    model = nn.Sequential(fully_shard(nn.Linear(16, 16), mesh=mesh))
    with pytest.raises(ValueError, match="convert the model before fully_shard"):
        octavo.convert(model)
    model = nn.Sequential(nn.Linear(16, 16))
    octavo.convert(model)
    x = torch.randn(2, 3, 16)
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
        vars(module).pop("name", None)  # a read of it fails
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(4, 16))
