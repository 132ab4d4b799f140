"""Forward and backward passes of a stack of blocks (`bench.gpu.llama`), on random inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.llama import LlamaConfig, rope_tables


def draw_matrices(model: nn.Module) -> None:
    """Random numbers for all matrices: the same for models whose matrices come in the same order."""
    torch.manual_seed(0)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.02)


class Passes:
    """The passes of `model` over `tokens` tokens in BF16. Another `call` may compute the model, such as compiled code.

    Args:
        part: (index, count), the index-th of count parts of the sequence; all of it by default.
    """

    def __init__(
        self, model: nn.Module, config: LlamaConfig, tokens: int, device: Any, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.model = model
        self.call: Callable[..., Tensor] = model
        generator = torch.Generator(device).manual_seed(1)
        x, dy = (torch.randn(1, tokens, config.width, device=device, generator=generator) for _ in range(2))
        index, count = part
        self.x, self.dy = (t.to(torch.bfloat16).chunk(count, 1)[index].contiguous() for t in (x, dy))
        self.x.requires_grad_()
        self.tables = rope_tables(config, torch.arange(tokens, device=device))

    def run(self) -> list[Tensor]:
        """The output and the gradient of the input."""
        y = self.call(self.x, *self.tables)
        y.backward(self.dy)  # type: ignore[no-untyped-call]
        assert self.x.grad is not None
        return [y.detach(), self.x.grad]

    def drop(self) -> None:
        """Drop all gradients, as `zero_grad` drops them."""
        self.model.zero_grad()
        self.x.grad = None

    def step(self) -> list[Tensor]:
        """`run`, then `drop`."""
        found = self.run()
        self.drop()
        return found
