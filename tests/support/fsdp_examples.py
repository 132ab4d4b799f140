"""Small models that FSDP2 shards, and their comparison with one rank."""

import copy

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.distributed import fp8_all_gather
from octavo.nn import NormLinear, SwiGLU

WIDTH = 32


class Block(nn.Module):
    """Two layers that share a norm, a plain layer, and an MLP. `rows` of the plain layer need not divide evenly."""

    def __init__(self, rows: int = WIDTH, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.left, self.right = nn.Linear(width, rows), nn.Linear(width, rows)
        self.plain = nn.Linear(rows, width)
        self.both = NormLinear(self, "norm", "left", "right")
        self.mlp = SwiGLU(width, rows)

    def forward(self, x: Tensor) -> Tensor:
        (left, right), x = self.both(x)
        return self.mlp.forward_residual(x, self.mlp_norm, self.plain(left * right))


def blocks(rows: int = WIDTH, count: int = 2, width: int = WIDTH) -> nn.Sequential:
    """A model of blocks. Rows of one weight are zero or tiny, so that the relative floor decides their scales."""
    model = nn.Sequential(*(Block(rows, width) for _ in range(count)))
    with torch.no_grad():
        for block in model:
            block.left.weight[1:2] = 0
            block.mlp.down_proj.weight[-3:] *= 1e-6
    return model


def converted(recipe="rowwise", rows: int = WIDTH, count: int = 2, seed: int = 0) -> nn.Sequential:
    """Blocks with the same numbers at each call; of recipes with blocks, one whose rows two ranks share by these."""
    torch.manual_seed(seed)
    square = getattr(recipe, "name", recipe) in ("blockwise", "mxfp8", "groupwise")
    model = blocks(256, count=1) if square else blocks(rows, count)
    octavo.convert(model, recipe, skip=("*plain", "*down_proj") if square else ())
    return model


def batch(seed: int = 0, rows: int = 6, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def sharded(model: nn.Module, **options) -> nn.Module:
    """A copy of `model` in which each child and the whole are units of FSDP2."""
    model = copy.deepcopy(model)
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)
    return model


def gathered(model: nn.Module, **options) -> nn.Module:
    """As `sharded`, and all its weights are gathered in eight bits."""
    model = sharded(model, **options)
    report = fp8_all_gather(model)
    assert report.gathered
    assert not report.wide
    return model


def train(model: nn.Module, step=None, steps: int = 3) -> list[Tensor]:
    """The losses of AdamW steps, and the parameters after them, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    results = []
    for i in range(steps):
        loss = backward(model, i) if step is None else step(model, i)
        results.append(loss.detach())
        optimizer.step()
        octavo.scales.update_scales(model)
        optimizer.zero_grad()
    return [*results, *whole(model.parameters())]


def backward(model: nn.Module, seed: int, rows: int = 6) -> Tensor:
    p = next(model.parameters())
    loss = model(batch(seed, rows, p.shape[-1]).to(p.device)).float().square().mean()
    loss.backward()
    return loss


def whole(tensors) -> list[Tensor]:
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in tensors]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
