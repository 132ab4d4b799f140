"""Fused blocks whose frozen layers have adapters around them, and an oracle in float64 that names the bytes they read.

The base is the oracle of `fused_oracle`; the products of adapters are PEFT's formula, B(A(x)) * scale, and autograd's
gradients of it. The adapter of the last layer of an MLP reads the bytes of h, and those of the layers before it the
bytes of their gradient.
"""

from collections.abc import Mapping
from typing import Any

import torch
from fused_oracle import (
    RECIPE,
    Block,
    NormThenLinears,
    Product,
    Start,
    Tensors,
    activation,
    mlp_layers,
    output_gradients,
)
from packed_layers import TOKENS, worst_row
from torch import Tensor, nn

from octavo import ops
from octavo.nn.module_tools import AdaptedLayer, Adapter

RANK, SCALE = 4, 1.5


class Wrapped(AdaptedLayer):
    """A frozen layer with one adapter, or with none that is on."""

    def __init__(self, base: nn.Linear, on: bool) -> None:
        super().__init__()
        self.base_layer, self.on = base, on
        generator = torch.Generator().manual_seed(base.out_features)
        self.a, self.b = (
            nn.Parameter(torch.randn(shape, generator=generator) * 0.3)
            for shape in ((RANK, base.in_features), (base.out_features, RANK))
        )

    def parts(self) -> tuple[nn.Module, list[Adapter]]:
        return self.base_layer, [Adapter(self.a, self.b, SCALE)] if self.on else []

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y + (x @ self.a.t() @ self.b.t() * SCALE).to(y.dtype) if self.on else y

    def added(self, x: Tensor) -> Tensor:
        """B(A(x)) * scale in float64."""
        return x @ self.a.double().t() @ self.b.double().t() * SCALE if self.on else x.new_zeros(())

    def gradients(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, A and B in float64."""
        leaves = [t.detach().double().requires_grad_() for t in (x, self.a, self.b)]
        y = leaves[0] @ leaves[1].t() @ leaves[2].t() * SCALE
        return torch.autograd.grad(y, leaves, dy.double())


def wrap(block: Block, without: str = "") -> Block:
    """Freeze the parameters of the block and put its layers in adapters, all on but the one of this name."""
    block.requires_grad_(False)
    names = [name for name, m in block.named_modules() if isinstance(m, nn.Linear)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(parent), leaf, Wrapped(block.get_submodule(name), name != without))
    return block


def run_adapted(block: Block, x: Tensor, residual: Tensor | None) -> Tensors:
    """Outputs, and the gradients of the inputs and of all adapters that are on."""
    inputs = {"x": x.clone().requires_grad_()}
    inputs |= {} if residual is None else {"residual": residual.clone().requires_grad_()}
    outputs = block(*inputs.values())
    pairs = {name: m for name, m in block.named_modules() if isinstance(m, Wrapped) and m.on}
    leaves = inputs | {f"{name}.{leaf}": getattr(m, leaf) for name, m in pairs.items() for leaf in "ab"}
    found = torch.autograd.grad(outputs, list(leaves.values()), output_gradients(outputs))
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"d {name}": g for name, g in zip(leaves, found, strict=True)}


def _through(layers: dict[str, Wrapped], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensors]:
    """The gradient of x [T, K] through the adapters, and those of A and B, from dy [T, sum of N]."""
    dx, named = torch.zeros_like(x, dtype=torch.float64), {}
    parts = dy.split([layer.base_layer.out_features for layer in layers.values()], 1)
    for (name, layer), part in zip(layers.items(), parts, strict=True):
        if layer.on:
            through, da, db = layer.gradients(x, part)
            dx += through
            named |= {f"d {name}.a": da, f"d {name}.b": db}
    return dx, named


def _product(layers: dict[str, Wrapped], x: Tensor) -> Product:
    return Product(x, [layer.base_layer for layer in layers.values()])


def exact_adapted(block: Block, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensors:
    """The result of `run_adapted`; `dtype` is that of the layers' outputs."""
    found = _exact(block, x, residual, dtype)
    return {name: t for name, t in found.items() if not name.startswith("d norm.")}  # a norm is frozen


def _exact(block: Block, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensors:
    start = Start(block, x, residual)
    n, with_norm = start.n.detach(), [start.total] if block.norm is not None else []
    if isinstance(block, NormThenLinears):
        layers = {f"layers.{i}": m for i, m in enumerate(block.layers)}
        product, sizes = _product(layers, n), [m.base_layer.out_features for m in block.layers]
        parts = zip(product.y.split(sizes, 1), layers.values(), strict=True)
        outputs = [*((y + m.added(n)).to(dtype) for y, m in parts), start.total]
        *dys, dtotal = output_gradients(tuple(outputs))
        dy = torch.cat(dys, 1)
        dn, named = _through(layers, n, dy)
        named |= start.gradients((dn + product.backward(dy)[0]).to(dtype), dtotal)
        return {f"output {i}": y for i, y in enumerate(outputs)} | named
    m = block.mlp
    names, last = mlp_layers(m)
    inner, outer = {f"mlp.{name}": getattr(m, name) for name in names}, {f"mlp.{last}": getattr(m, last)}
    first = _product(inner, n)
    added = [layer.added(n).expand(len(n), layer.base_layer.out_features) for layer in inner.values()]
    u = (first.y + torch.cat(added, 1)).to(dtype).double().requires_grad_()
    h = activation(m, *u.chunk(len(inner), 1))
    second = _product(outer, h.detach())
    h_q = second.x_q.data.double() * second.x_q.scale.double()
    outputs = [(second.y + outer[f"mlp.{last}"].added(h_q)).to(dtype), *with_norm]
    dy, *dtotal = output_gradients(tuple(outputs))
    dh, named = _through(outer, h_q, dy)
    (du,) = torch.autograd.grad(h, u, (dh + second.backward(dy)[0]).to(dtype).double())
    g = ops.quantize(du.float() * first.s_w.t() * first.m, RECIPE.dy)
    du_q = g.data.double() * (g.scale.double() / first.m.double()) / first.s_w.double().t()
    dn, of_inner = _through(inner, n, du_q)
    named |= of_inner | start.gradients((dn + first.backward(du)[0]).to(dtype), *dtotal)
    return {f"output {i}": y for i, y in enumerate(outputs)} | named


def check_layers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The gradients of x, A and B of each layer in adapters of PEFT, around one of these `weights`, against those of
    autograd in float64. dx may read dy in eight bits; adapters read float32."""
    generator = torch.Generator().manual_seed(1)
    for name, w in weights.items():
        layer: Any = model.get_submodule(f"base_model.model.{name}")
        x = torch.randn(TOKENS, w.shape[1], generator=generator).requires_grad_()
        dy = torch.randn(TOKENS, w.shape[0], generator=generator) * 1e-3
        pair = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        torch.nn.init.normal_(pair[1], std=0.05, generator=generator)  # PEFT begins with zeros
        found = torch.autograd.grad(layer(x), [x, *pair], dy)
        leaves = [t.detach().double().requires_grad_() for t in (x, *pair)]
        y = leaves[0] @ w.double().t() + leaves[0] @ leaves[1].t() @ leaves[2].t() * layer.scaling["default"]
        expected = torch.autograd.grad(y, leaves, dy.double())
        worst = [worst_row(g, e) for g, e in zip(found, expected, strict=True)]
        assert worst[0] > 26, (name, worst)
        assert min(worst[1:]) > 110, (name, worst)
