"""Small models with stacks of experts' matrices that FSDP2 shards, and a comparison of the gathered bytes."""

from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo.nn import Experts, GroupedLinear
from octavo.nn.parallel_weights import GatheredWeight
from octavo.ops import quantize_matrices


class Block(nn.Module):
    """A router, experts, and two grouped linear layers: on halves of the rows, and on all rows. Nobody chooses expert
    1. Of the one matrix of the last layer, the second of two ranks has nothing."""

    stacks = (("experts", "gate_up_proj"), ("experts", "down_proj"), ("halves", "weight"), ("all", "weight"))

    def __init__(self, experts: int, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, mlp_width)
        self.halves, self.all = GroupedLinear(2, width, width), GroupedLinear(1, width, width)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).sigmoid()
        weight, index = torch.topk(torch.cat([score[:, :1], 0 * score[:, 1:2], score[:, 2:]], 1), 2, -1)
        offsets = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device=x.device)
        return x + self.all(self.halves(self.experts(x, index, weight), offsets), offsets[1:])


def model_of(experts, count=2, width=32, mlp_width=16, recipe="rowwise"):
    """Converted blocks. Rows are zero or tiny, so that the relative floor decides their scales."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(experts, width, mlp_width) for _ in range(count)))
    with torch.no_grad():
        model[0].experts.down_proj[0, 3] = 0
        model[0].experts.gate_up_proj[2, -3:] *= 1e-6
    octavo.convert(model, recipe, skip=("*gate",))
    return model


def stacks_of(model: nn.Sequential) -> list[str]:
    """The names of the stacks of all blocks."""
    return [f"{name}.{module}.{leaf}" for name, _ in model.named_children() for module, leaf in Block.stacks]


def gathered_equal(block: Any, whole: nn.Module) -> list[bool]:
    """True if the bytes, the scales and the numbers of each stack of `block`, between its all-gather and its reshard,
    are those of the `whole` block's matrices on the CPU."""
    same: list[bool] = []
    for name, leaf in Block.stacks:
        module = block.get_submodule(name)
        w: Any = getattr(module, leaf)
        assert isinstance(w, GatheredWeight)
        expected = quantize_matrices(getattr(whole.get_submodule(name), leaf).detach().cpu(), module.recipe.w)
        same.append(torch.equal(w.data_bytes.view(torch.uint8).cpu(), expected.data.view(torch.uint8)))
        same.append(torch.equal(w.scale.cpu(), expected.scale))
        same.append(torch.equal(w.dequantize().cpu(), expected.dequantize(w.dtype)))
    return same
