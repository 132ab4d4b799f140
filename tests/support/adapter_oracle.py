"""Fused blocks whose frozen layers have adapters around them, for the oracle of `fused_oracle`.

The products of adapters are PEFT's formula, B(A(x)) * scale, and autograd's gradients of it. The adapter of the last
layer of an MLP reads the bytes of h, and those of the layers before it the bytes of their gradient.
"""

import torch
from packed_layers import TOKENS, worst_row
from torch import Tensor, nn

from octavo.nn.module_tools import AdaptedLayer, Adapter

RANK, SCALE = 4, 1.5


class Wrapped(AdaptedLayer):
    """A frozen layer with one adapter, or with none that is on."""

    def __init__(self, base: nn.Linear, on: bool) -> None:
        super().__init__()
        self.base_layer, self.on = base, on
        generator = torch.Generator().manual_seed(base.out_features)
        self.a, self.b = (
            nn.Parameter(torch.randn(shape, generator=generator) * 0.3, requires_grad=on)
            for shape in ((RANK, base.in_features), (base.out_features, RANK))
        )

    def parts(self) -> tuple[nn.Module, list[Adapter]]:
        return self.base_layer, [Adapter(self.a, self.b, SCALE)] if self.on else []

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        return y + (x @ self.a.t() @ self.b.t() * SCALE).to(y.dtype) if self.on else y

    def added(self, x: Tensor) -> Tensor:
        """B(A(x)) * scale in float64."""
        return x.double() @ self.a.detach().double().t() @ self.b.detach().double().t() * SCALE

    def gradients(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of x, A and B in float64."""
        leaves = [t.detach().double().requires_grad_() for t in (x, self.a, self.b)]
        y = leaves[0] @ leaves[1].t() @ leaves[2].t() * SCALE
        return torch.autograd.grad(y, leaves, dy.double())


def wrap(block, without: str = ""):
    """Freeze the parameters of the block and put its layers in adapters, all on but the one of this name."""
    block.requires_grad_(False)
    names = [name for name, m in block.named_modules() if isinstance(m, nn.Linear)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(block.get_submodule(parent), leaf, Wrapped(block.get_submodule(name), name != without))
    return block


def check_layers(model: nn.Module, weights) -> None:
    """The gradients of x, A and B of each layer in adapters of PEFT, around one of these `weights`, against those of
    autograd in float64. dx may read dy in eight bits; adapters read float32."""
    generator = torch.Generator().manual_seed(1)
    for name, w in weights.items():
        layer = model.get_submodule(f"base_model.model.{name}")
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
