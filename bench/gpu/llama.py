"""The Llama that the GPU benchmarks measure: Llama-3-8B's shape, and stacks of its blocks for a training step."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.decoder import causal_attention
from octavo.models.llama import Block, LlamaConfig, rope_tables, rotate

CONFIG = LlamaConfig(
    vocabulary=128_256, layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, context=8192, tied=False,
    rope_theta=5e5,
)  # fmt: skip
TOKENS = 8192
WIDTH, KV_WIDTH, MLP_WIDTH = CONFIG.width, CONFIG.kv_heads * CONFIG.head_dim, CONFIG.mlp_width
GEMMS = {  # (outputs N, inputs K) of a layer, with q, k, v and gate, up as one
    "qkv": (WIDTH + 2 * KV_WIDTH, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate_up": (2 * MLP_WIDTH, WIDTH),
    "down": (WIDTH, MLP_WIDTH),
}
SHAPES = tuple(GEMMS.values())


class Fused(nn.Module):
    """The blocks of our Llama. Once they are converted, they norm, activate and quantize in one pass."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, width] and the tables of `rope_tables`."""
        delta = None
        for block in self.layers:
            x, delta = block(x, delta, cos, sin, None)
        return x if delta is None else x + delta


class PlainBlock(nn.Module):
    """The same mathematics in plain PyTorch modules."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=config.norm_eps) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, kv_width, kv_width, width))
        self.gate, self.up = (nn.Linear(width, config.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(config.mlp_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.o(attend(self.projections(x), cos, sin))
        return x + self.feed_forward(x)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """q [B, T, width], k and v [B, T, kv_width]."""
        n = self.norm1(x)
        return self.q(n), self.k(n), self.v(n)

    def feed_forward(self, x: Tensor) -> Tensor:
        n = self.norm2(x)
        return self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def attend(projections: Iterable[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention [B, T, width] of q [B, T, width], k and v [B, T, kv_width]."""
    q, k, v = (y.view(*y.shape[:2], -1, cos.shape[1]) for y in projections)
    heads = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    return causal_attention(*heads).transpose(1, 2).flatten(2)


class Plain(nn.Module):
    block: type[nn.Module] = PlainBlock

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block(config) for _ in range(config.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x, cos, sin)
        return x


class Engine(Plain):
    """`Plain`, once `use_transformer_engine` has replaced its blocks."""

    autocast: Callable[[], AbstractContextManager[None]]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with self.autocast():
            return Plain.forward(self, x, cos, sin)


class LanguageModel(nn.Module):
    """A stack of blocks (`Fused` or `Plain`) between an embedding and a head; its forward returns the loss."""

    def __init__(self, config: LlamaConfig, stack: Callable[[LlamaConfig], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.stack = stack(config)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.stack.layers)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of tokens [B, T] and targets [B, T]."""
        tables = rope_tables(self.config, torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.lm_head(self.norm(self.stack(self.embed(tokens), *tables)))
        return self.loss(logits.flatten(0, 1), targets.flatten())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)
