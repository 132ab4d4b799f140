"""Small models that use the fused functions, and an oracle in float64.

The oracle does the mathematics of `octavo.nn.fused` with PyTorch's own norms, activations and autograd, quantizes where
the formulas say so, and rounds to the dtype of the layer where a tensor passes through memory. So it names the very
bytes that the functions must have used: what differs is the order of sums, and a byte here and there whose number lies
on the border of two codes.
"""

import copy
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from activation_oracle import h64
from metrics import sqnr
from operation_counts import operations
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo import ops
from octavo.nn import GEGLU, GELU, FusedMLP, NormLinear, SwiGLU
from octavo.recipe import rowwise

RECIPE = rowwise()
# Limits in dB of sqnr against the oracle. They leave room for another order of sums and for a byte here and there.
FLOAT32_DB = 55
BFLOAT16_DB = 38  # outputs are rounded to BF16
AUTOCAST_DB = 45  # outputs are rounded to BF16, gradients are not
SAME_BYTES_DB = 45  # two ways through the same bytes
NEAR_UNQUANTIZED_DB = 22  # an MLP of two quantized layers against none
QUANTIZED_DB = 40  # whatever is quantized to e4m3 stays below
Tensors = dict[str, Tensor]


class NormThenLinears(nn.Module):
    """A norm and the layers that it feeds, as `NormLinear` runs them, and one after the other."""

    def __init__(self, norm: nn.Module, k: int, sizes: tuple[int, ...], biases: tuple[bool, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=bias) for n, bias in zip(sizes, biases, strict=True))
        self.fused = NormLinear(self, "norm", *(f"layers.{i}" for i in range(len(sizes))))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs, total = self.fused(x, residual)
        return *outputs, total

    def separate(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        total = x if residual is None else x + residual
        n = self.norm(total)
        return *(layer(n) for layer in self.layers), total


class NormThenMLP(nn.Module):
    """A norm, or none, and an MLP, as `SwiGLU` or `GELU` runs them, and one after the other."""

    def __init__(self, norm: nn.Module | None, mlp: FusedMLP) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        return (self.mlp(x),) if self.norm is None else self.mlp(x, self.norm, residual)

    def separate(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        total = x if residual is None else x + residual
        n = total if self.norm is None else self.norm(total)
        inner, (outer,) = mlp_layers(self.mlp)
        u = torch.cat([getattr(self.mlp, name)(n) for name in inner], -1)
        y = getattr(self.mlp, outer)(h64(u, self.mlp.activation))
        return (y,) if self.norm is None else (y, total)


def owning(kind: type[GELU] | type[GEGLU], width: int, mlp_width: int, bias: bool) -> FusedMLP:
    class Own(kind):
        def __init__(self) -> None:
            super().__init__(self, "fc1", "fc2")
            inner = 2 * mlp_width if kind is GEGLU else mlp_width
            self.fc1, self.fc2 = nn.Linear(width, inner, bias=bias), nn.Linear(mlp_width, width, bias=bias)

    return Own()


Block = NormThenLinears | NormThenMLP


def mlp_layers(mlp: FusedMLP) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (("gate_proj", "up_proj"), ("down_proj",)) if isinstance(mlp, SwiGLU) else (("fc1",), ("fc2",))


def make_norm(kind: str, k: int) -> nn.Module | None:
    """A norm whose parameters are far from ones and zeros."""
    if kind == "none":
        return None
    norm = {
        "rms": lambda: nn.RMSNorm(k, eps=1e-3),
        "rms without eps": lambda: nn.RMSNorm(k),
        "llama": lambda: LlamaRMSNorm(k, eps=1e-3),
        "layer": lambda: nn.LayerNorm(k, eps=1e-3),
        "layer without bias": lambda: nn.LayerNorm(k, bias=False),
    }[kind]()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn(k) * 0.3)
    return norm


def linears(kind: str = "rms", k: int = 64, f: int = 40, bias: bool = True) -> NormThenLinears:
    """A norm and layers of f, 17 and 1 outputs."""
    return NormThenLinears(make_norm(kind, k), k, (f, 17, 1), (bias,) * 3)


def swiglu(kind: str = "rms", k: int = 64, f: int = 96, bias: bool = False) -> NormThenMLP:
    return NormThenMLP(make_norm(kind, k), SwiGLU(k, f, bias=bias))


def gelu(kind: str = "layer", k: int = 64, f: int = 96, bias: bool = True) -> NormThenMLP:
    return NormThenMLP(make_norm(kind, k), owning(GELU, k, f, bias))


def geglu(kind: str = "layer", k: int = 64, f: int = 96, bias: bool = True) -> NormThenMLP:
    return NormThenMLP(make_norm(kind, k), owning(GEGLU, k, f, bias))


def tokens(t: int, k: int = 64, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Tokens of such different sizes that the eps of a norm matters for some."""
    return (torch.randn(t, k) * torch.randn(t, 1).exp() * 0.1).to(device, dtype)


def run(block, forward, x, residual=None, *, autocast=False):
    """Outputs, and the gradients of the inputs and of what is trained, by name, for the same gradients of outputs."""
    inputs = {"x": x.clone().requires_grad_()}
    if residual is not None:
        inputs["residual"] = residual.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        outputs = forward(*inputs.values())
    parameters = {name: p for name, p in block.named_parameters() if p.requires_grad}
    leaves = [*inputs.values(), *parameters.values()]
    gradients = torch.autograd.grad(outputs, leaves, output_gradients(outputs))
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"d {name}": g for name, g in zip([*inputs, *parameters], gradients, strict=True)}


def output_gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(y.shape, generator=generator) * 1e-3 for y in outputs]
    return [n.to(y.device, y.dtype) for n, y in zip(noise, outputs, strict=True)]


def check(exact: Tensors, actual: Tensors, least: float) -> None:
    assert exact.keys() == actual.keys()
    for name, tensor in exact.items():
        assert sqnr(tensor, actual[name]) > least, (name, sqnr(tensor, actual[name]))


def check_equal(expected: Tensors, actual: Tensors) -> None:
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def is_fused(block: Block, x: Tensor) -> bool:
    """True if `block` calls the operations that only fused modules call."""
    return bool({"octavo::norm_quantize", "octavo::activation_quantize"} & operations(lambda: block(x)).keys())


# ---- the oracle


@dataclass
class Product:
    """x @ w^T + bias of the recipe's bytes for stacked layers by name, and what its gradients must be: all float64.

    Adapters around the layers (`adapter_oracle.Wrapped`) read x, or with `of_bytes` the numbers of its bytes.
    """

    x: Tensor
    layers: dict[str, nn.Module]
    of_bytes: bool = False

    def __post_init__(self) -> None:
        self.bases = [getattr(layer, "base_layer", layer) for layer in self.layers.values()]
        self.sizes = [base.out_features for base in self.bases]
        self.x_q = ops.quantize(self.x.float(), RECIPE.x)
        self.numbers = self.x_q.data.double() * self.x_q.scale.double()
        parts = [ops.quantize(base.weight.detach(), RECIPE.w) for base in self.bases]
        self.w, self.s_w = torch.cat([p.data.double() for p in parts]), torch.cat([p.scale for p in parts])
        mantissa, exponent = torch.frexp(self.x_q.scale)
        self.m, self.power = 2 * mantissa, torch.exp2(exponent.double() - 1)  # s_x = m * power, m in [1, 2)

    @property
    def adapters(self) -> list[tuple[str, nn.Module, Tensor, slice]]:
        """The name of each layer with one that is on, the layer, the input of its adapter, and its columns of y."""
        ends = [0, *accumulate(self.sizes)]
        on = [(i, name, layer) for i, (name, layer) in enumerate(self.layers.items()) if getattr(layer, "on", False)]
        read = self.numbers if self.of_bytes else self.x
        return [(name, layer, read, slice(ends[i], ends[i + 1])) for i, name, layer in on]

    @property
    def y(self) -> Tensor:
        bias = [torch.zeros(m.out_features) if m.bias is None else m.bias.detach() for m in self.bases]
        y = self.numbers @ (self.w * self.s_w.double()).t() + torch.cat(bias).double()
        for _, layer, read, columns in self.adapters:
            y[:, columns] += layer.added(read)
        return y

    def backward(self, dy: Tensor, dtype: torch.dtype, *, in_bytes: bool = False) -> tuple[Tensor, Tensors]:
        """The gradient of x, and those of the trained parameters by name. Adapters read dy, or the bytes made of it."""
        g = ops.quantize(dy.float() * self.s_w.t() * self.m, RECIPE.dy)
        g_numbers = g.data.double() * (g.scale.double() / self.m.double())
        dx = g_numbers @ self.w
        c = self.power * g.scale.double()
        h = (g.data.double() * (c / c.max())).float().to(torch.float8_e4m3fn).double()  # [T,N]
        dw = h.t() @ self.x_q.data.double() * (c.max() / self.s_w.double())
        db = dy.to(dtype).double().sum(0)
        gradients, leaves = zip(dw.split(self.sizes), db.split(self.sizes), strict=True), ("weight", "bias")
        named = {
            f"d {name}.{leaf}": gradient
            for name, base, both in zip(self.layers, self.bases, gradients, strict=True)
            for leaf, gradient in zip(leaves, both, strict=True)
            if base.weight.requires_grad and getattr(base, leaf) is not None
        }
        for name, layer, read, columns in self.adapters:
            through, da, db = layer.gradients(read, (g_numbers / self.s_w.double().t() if in_bytes else dy)[:, columns])
            dx, named = dx + through, named | {f"d {name}.a": da, f"d {name}.b": db}
        return dx, named


def exact_norm(norm: nn.Module) -> nn.Module:
    if isinstance(norm, nn.LayerNorm):
        return copy.deepcopy(norm).double()
    eps = norm.variance_epsilon if isinstance(norm, LlamaRMSNorm) else norm.eps
    exact = nn.RMSNorm(norm.weight.shape[0], eps=torch.finfo(torch.float32).eps if eps is None else eps).double()
    exact.weight.data.copy_(norm.weight.data)
    return exact


def exact(block: Block, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensors:
    """The result of `run` for a block converted by `rowwise`; `dtype` is that of the layers' outputs."""
    total = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    leaf, norm = total.double().requires_grad_(), None if block.norm is None else exact_norm(block.norm)
    n, totals = (leaf, []) if norm is None else (norm(leaf), [total])
    if isinstance(block, NormThenLinears):
        first = Product(n.detach(), {f"layers.{i}": layer for i, layer in enumerate(block.layers)})
        outputs = [*first.y.to(dtype).split(first.sizes, 1), *totals]
        gradients = output_gradients(tuple(outputs))
        dn, named = first.backward(torch.cat(gradients[:-1], 1), dtype)
    else:
        inner, outer = ({f"mlp.{n}": getattr(block.mlp, n) for n in names} for names in mlp_layers(block.mlp))
        first = Product(n.detach(), inner)
        u = first.y.to(dtype).double().requires_grad_()
        h = h64(u, block.mlp.activation)
        second = Product(h.detach(), outer, of_bytes=True)
        outputs = [second.y.to(dtype), *totals]
        gradients = output_gradients(tuple(outputs))
        dh, named = second.backward(gradients[0], dtype)
        (du,) = torch.autograd.grad(h, u, dh.to(dtype).double())
        dn, of_inner = first.backward(du, dtype, in_bytes=True)
        named |= of_inner
    named |= {f"output {i}": y for i, y in enumerate(outputs)}
    if norm is None:
        return named | {"d x": dn.to(dtype)}
    parameters = dict(norm.named_parameters())
    dx, *rest = torch.autograd.grad(n, [leaf, *parameters.values()], dn.to(dtype).double())
    named["d x"] = dx = dx + gradients[-1].double()
    if residual is not None:
        named["d residual"] = dx
    if block.norm.weight.requires_grad:
        named |= {f"d norm.{name}": d for name, d in zip(parameters, rest, strict=True)}
    return named


def exact_unquantized(block: Block, x: Tensor, residual: Tensor | None) -> Tensors:
    """The result of `run` for the unconverted block, in float64."""
    wide = copy.deepcopy(block).double()
    return run(wide, wide.separate, x.double(), None if residual is None else residual.double())


BUILDERS = pytest.mark.parametrize("build", [linears, swiglu, gelu, geglu])
