"""Norm+linear and MLP as one function each: against float64 on the very bytes that the formulas name, against the
layers that they replace, and in every way they are used.

The oracle does the mathematics of `octavo.nn.fused` in float64, with PyTorch's own norms, activations and autograd,
and quantizes where the formulas say so; it rounds to the dtype of the layer where a tensor passes through memory.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import octavo
from octavo import ops
from octavo.nn import GELU, NormLinear, SwiGLU
from octavo.recipe import Recipe, rowwise

RECIPE = rowwise()
UNFOLDED = [name for name in octavo.PRESETS if name != "rowwise"]
FUSED = {"norm_quantize", "activation_quantize"}  # operations that nothing but the fused functions call


class NormThenLinears(nn.Module):
    def __init__(self, norm: nn.Module, k: int, sizes: tuple[int, ...], biases: tuple[bool, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=bias) for n, bias in zip(sizes, biases, strict=True))
        self.fused = NormLinear(norm, *self.layers)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        outputs, total = self.fused(x, residual)
        return *outputs, total

    def separate(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        """The same, one module after the other."""
        total = x if residual is None else x + residual
        n = self.norm(total)
        return *(layer(n) for layer in self.layers), total


class NormThenMLP(nn.Module):
    def __init__(self, norm: nn.Module | None, mlp: SwiGLU) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        return (self.mlp(x),) if self.norm is None else self.mlp(x, self.norm, residual)

    def separate(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        """The same, one module after the other."""
        total = x if residual is None else x + residual
        n = total if self.norm is None else self.norm(total)
        m = self.mlp
        if isinstance(m, GELU):
            y = m.c_proj(F.gelu(m.c_fc(n)))
        else:
            y = m.down_proj(F.silu(m.gate_proj(n)) * m.up_proj(n))
        return (y,) if self.norm is None else (y, total)


Block = NormThenLinears | NormThenMLP


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


def linears(kind: str = "rms", k: int = 64, sizes: tuple[int, ...] = (40, 17), bias: bool = True) -> NormThenLinears:
    return NormThenLinears(make_norm(kind, k), k, sizes, (bias,) * len(sizes))


def swiglu(kind: str = "rms", k: int = 64, f: int = 96, bias: bool = False) -> NormThenMLP:
    return NormThenMLP(make_norm(kind, k), SwiGLU(k, f, bias=bias))


def gelu(kind: str = "layer", k: int = 64, f: int = 96, bias: bool = True) -> NormThenMLP:
    return NormThenMLP(make_norm(kind, k), GELU(k, f, bias=bias))


BUILDERS = pytest.mark.parametrize("build", [linears, swiglu, gelu])


def tokens(t: int, k: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of sizes so unlike that the eps of a norm counts for some."""
    return (torch.randn(t, k) * torch.randn(t, 1).exp() * 0.1).to(dtype)


def run(block: Block, forward: Callable, x: Tensor, residual: Tensor | None, autocast: bool = False) -> dict:
    """Outputs and all gradients, by name. The gradients of the outputs are the same in each call."""
    inputs = {"x": x.clone().requires_grad_()}
    if residual is not None:
        inputs["residual"] = residual.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = forward(*inputs.values())
    parameters = dict(block.named_parameters())
    wanted = [*inputs.values(), *parameters.values()]
    gradients = torch.autograd.grad(outputs, wanted, output_gradients(outputs))
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"d {name}": g for name, g in zip([*inputs, *parameters], gradients, strict=True)}


def output_gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(y.shape, generator=generator) * 1e-3 for y in outputs]
    return [n.to(y.dtype) for n, y in zip(noise, outputs, strict=True)]


def sqnr(exact: Tensor, got: Tensor) -> float:
    exact, got = exact.detach().double(), got.detach().double()
    assert exact.shape == got.shape
    noise = (exact - got).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise.clamp(min=1e-300)))


def check(exact: dict, got: dict, least: float) -> None:
    assert exact.keys() == got.keys()
    for name, tensor in exact.items():
        assert sqnr(tensor, got[name]) > least, (name, sqnr(tensor, got[name]))


def check_equal(required: dict, found: dict) -> None:
    assert required.keys() == found.keys()
    for name, tensor in required.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def operations(call: Callable[[], object]) -> Counter[str]:
    """How often each operation of ours is called."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "octavo":
                seen[func._schema.name.removeprefix("octavo::")] += 1
            return func(*args, **(kwargs or {}))

    seen: Counter[str] = Counter()
    with Count():
        call()
    return seen


def is_fused(block: Block, x: Tensor, residual: Tensor | None = None) -> bool:
    return bool(FUSED & operations(lambda: block(x, residual)).keys())


# ---- the oracle


@dataclass
class Product:
    """x @ w^T + bias of the recipe's bytes, the weights stacked, and what its gradients must be: all float64."""

    x: Tensor
    weights: list[Tensor]
    bias: list[Tensor | None]

    def __post_init__(self) -> None:
        self.x_q = ops.quantize(self.x.float(), RECIPE.y.x)
        parts = [ops.quantize(w.detach(), RECIPE.y.w) for w in self.weights]
        self.w, self.s_w = torch.cat([p.data.double() for p in parts]), torch.cat([p.scale for p in parts])
        mantissa, exponent = torch.frexp(self.x_q.scale)
        self.m, self.power = 2 * mantissa, torch.exp2(exponent.double() - 1)

    @property
    def y(self) -> Tensor:
        x, w = self.x_q.data.double() * self.x_q.scale.double(), self.w * self.s_w.double()
        given = [b.detach().double() for b in self.bias if b is not None]
        return x @ w.t() + (torch.cat(given) if given else 0)

    def backward(self, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradient of x, and those of the weights."""
        g = ops.quantize(dy.float() * self.s_w.t() * self.m, RECIPE.dx.dy)
        dx = g.data.double() * (g.scale.double() / self.m.double()) @ self.w
        c = self.power * g.scale.double()
        h = (g.data.double() * (c / c.max())).float().to(torch.float8_e4m3fn).double()  # [T,N]
        dw = h.t() @ self.x_q.data.double() * (c.max() / self.s_w.double())
        return dx, list(dw.split([w.shape[0] for w in self.weights]))

    def gradients(self, names: list[str], dy: Tensor, dw: list[Tensor]) -> dict:
        """The parameters' gradients by name."""
        named = {f"d {name}.weight": d for name, d in zip(names, dw, strict=True)}
        db = dy.double().sum(0).split([w.shape[0] for w in self.weights])
        return named | {
            f"d {name}.bias": d for name, b, d in zip(names, self.bias, db, strict=True) if b is not None
        }


class Start:
    """x + residual and its norm, and the way back."""

    def __init__(self, block: Block, x: Tensor, residual: Tensor | None) -> None:
        self.total = x if residual is None else (x.double() + residual.double()).to(x.dtype)
        self.with_residual, self.leaf = residual is not None, self.total.double().requires_grad_()
        self.norm = None if block.norm is None else exact_norm(block.norm, x.dtype)
        self.n = self.leaf if self.norm is None else self.norm(self.leaf)

    def gradients(self, dn: Tensor, dtotal: Tensor | None) -> dict:
        if self.norm is None:
            return {"d x": dn}
        parameters = dict(self.norm.named_parameters())
        dx, *rest = torch.autograd.grad(self.n, [self.leaf, *parameters.values()], dn.double())
        dx = dx + dtotal.double()
        named = {"d x": dx} | ({"d residual": dx} if self.with_residual else {})
        return named | {f"d norm.{name}": d for name, d in zip(parameters, rest, strict=True)}


def exact_norm(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    if isinstance(norm, nn.LayerNorm):
        return copy.deepcopy(norm).double()
    eps = norm.variance_epsilon if isinstance(norm, LlamaRMSNorm) else norm.eps
    exact = nn.RMSNorm(norm.weight.shape[0], eps=torch.finfo(dtype).eps if eps is None else eps).double()
    exact.weight.data.copy_(norm.weight.data)
    return exact


def exact_linears(block: NormThenLinears, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> dict:
    start = Start(block, x, residual)
    product = Product(start.n.detach(), [m.weight for m in block.layers], [m.bias for m in block.layers])
    outputs = [*(y.to(dtype) for y in product.y.split([m.out_features for m in block.layers], 1)), start.total]
    *dys, dtotal = output_gradients(outputs)
    dy = torch.cat(dys, 1)
    dn, dw = product.backward(dy)
    names = [f"layers.{i}" for i in range(len(block.layers))]
    named = {f"output {i}": y for i, y in enumerate(outputs)} | start.gradients(dn.to(dtype), dtotal)
    return named | product.gradients(names, dy, dw)


def exact_mlp(block: NormThenMLP, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> dict:
    start, m = Start(block, x, residual), block.mlp
    inner, outer = (("c_fc",), "c_proj") if isinstance(m, GELU) else (("gate_proj", "up_proj"), "down_proj")
    layers, last = [getattr(m, name) for name in inner], getattr(m, outer)
    first = Product(start.n.detach(), [layer.weight for layer in layers], [layer.bias for layer in layers])
    u = first.y.to(dtype).double().requires_grad_()
    h = F.gelu(u) if isinstance(m, GELU) else F.silu(u.chunk(2, 1)[0]) * u.chunk(2, 1)[1]
    second = Product(h.detach(), [last.weight], [last.bias])
    outputs = [second.y.to(dtype)] + ([] if block.norm is None else [start.total])
    dy, *dtotal = output_gradients(outputs)
    dh, dw_out = second.backward(dy)
    (du,) = torch.autograd.grad(h, u, dh.to(dtype).double())
    dn, dw_in = first.backward(du)
    named = {f"output {i}": y for i, y in enumerate(outputs)} | start.gradients(dn.to(dtype), *dtotal or (None,))
    named |= first.gradients([f"mlp.{name}" for name in inner], du.to(dtype), dw_in)
    return named | second.gradients([f"mlp.{outer}"], dy, dw_out)


def exact(block: Block, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> dict:
    oracle = exact_linears if isinstance(block, NormThenLinears) else exact_mlp
    return oracle(block, x, residual, dtype)
