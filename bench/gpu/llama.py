"""The Llama that the GPU benchmarks measure: Llama-3-8B's shape, and stacks of its blocks for a training step."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu.harness import sized
from octavo.models.llama import Block, LlamaConfig, rope_tables, rotate

LLAMA = LlamaConfig(
    vocabulary=128_256, layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, context=8192, tied=False,
    rope_theta=5e5,
)  # fmt: skip
SMALL = replace(LLAMA, vocabulary=512, layers=2, width=256, heads=2, kv_heads=1, mlp_width=512, context=256)
CONFIG = sized(LLAMA, SMALL)
TOKENS = CONFIG.context
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


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, kv_width, kv_width, width))

    def forward(self, n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], -1, cos.shape[1]) for y in (self.q(n), self.k(n), self.v(n)))
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, config.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, n: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(n)) * self.up(n))


class PlainBlock(nn.Module):
    """The same mathematics in plain PyTorch modules."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(config.width, eps=config.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x, cos, sin)
        return x


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
        self.blocks: list[nn.Module] = list(self.stack.layers)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of tokens [B, T] and targets [B, T]."""
        tables = rope_tables(self.config, torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.lm_head(self.norm(self.stack(self.embed(tokens), *tables)))
        return self.loss(logits.flatten(0, 1), targets.flatten())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)
