"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped-query attention and SwiGLU, no biases.

    rmsnorm(x) = x / sqrt(mean(x^2) + eps) * weight                                     (arXiv:1910.07467)
    rope: pair (i, i + d/2) of a head turns by position * theta^(-2i/d)                 (arXiv:2104.09864)
    attention: `heads` query heads share `kv_heads` keys and values                     (arXiv:2305.13245)
    mlp(x) = down(silu(gate(x)) * up(x))                                                (arXiv:2002.05202)

The model is that of arXiv:2302.13971. Names and mathematics are those of `LlamaForCausalLM` in transformers, so a
state_dict travels both ways unchanged. Under BF16 autocast the linear layers run in BF16, and the residual stream stays
in FP32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.decoder import CausalAttention, Decoder, Dropout, KVCache, check_features, read_sizes, write_sizes
from octavo.nn import NormLinear, SwiGLU

ARCHITECTURE = "LlamaForCausalLM"
SIZES = ("vocabulary", "layers", "width", "heads", "mlp_width", "context")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama. Raises a ValueError if they do not fit together."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    context: int
    tied: bool = True
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(getattr(self, name) for name in (*SIZES, "kv_heads")) < 1:
            raise ValueError(f"every size of a Llama must be at least 1, got {self}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be an even multiple of heads, got width={self.width}, heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json; the caller adds the dtype and the tokenizer's special tokens."""
        return write_sizes(self, *SIZES) | {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            # transformers 5 reads the first, version 4 only the second: without it, it would silently take 10000.
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": self.dropout,
        }

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read the fields of a Llama config.json. An absent field has transformers' default; dropout is not read.
        Raises a ValueError for a missing size, and for a feature that this implementation lacks: RoPE scaling, biases,
        an activation other than silu, a head_dim other than width / heads."""
        sizes = read_sizes(hf, "a Llama", *SIZES)
        config = cls(
            **sizes,
            kv_heads=hf.get("num_key_value_heads") or sizes["heads"],
            tied=hf.get("tie_word_embeddings", False),
            rope_theta=_rope_theta(hf),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
        )
        supported = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "head_dim": config.head_dim}
        check_features(hf, "Llama", supported)
        return config


def _rope_theta(hf: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies, from the place where transformers 5 or transformers 4 puts it."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"this Llama has unscaled, full rotary positions only, got {rope}; load it with transformers")
    return float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))


def rope_tables(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 cosines and sines [..., head_dim] of positions [...], the halves repeated. (As buffers they would be lost
    when a model on the meta device is given its memory.)"""
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequency = 1.0 / config.rope_theta ** (pair / config.head_dim)
    angle = positions.float().unsqueeze(-1) * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + d/2) of x[B, T, heads, d] by its position's angle, in FP32; returns x's dtype. The tables
    are [T, d], or [B or 1, T, d]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for all heads
    low, high = x.float().chunk(2, dim=-1)
    return (torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def has_kernel(q: Tensor) -> bool:
    """True if one kernel applies rotary embedding and stores keys and values. It has no gradient."""
    return q.is_cuda and not q.requires_grad


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in FP32, whatever the dtype of x or of the weight; returns x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(CausalAttention):
    layer_after = "o_proj"

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config, layer, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        """[B, T, width] from the outputs of the projections: q [B, T, width], k and v [B, T, kv_width]."""
        if cache is not None and has_kernel(q):
            q, stored = cache.rotate_append(self.layer, q, k, v, cos, sin)
            y = stored.attend(q, cache.first, self.head_dim**-0.5)
            return self.o_proj(y.transpose(1, 2).flatten(2))
        q, k, v = (x.view(*x.shape[:2], -1, self.head_dim) for x in (q, k, v))  # [B, T, n, d]
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, cos, sin), rotate(k, cos, sin), v))  # [B, n, T, d]
        return self.dropout(self.o_proj(self.attend(q, k, v, cache)))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, eps=config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = self.make_mlp(config)
        self.dropout = Dropout(config.dropout)
        self.qkv = NormLinear(self, "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def make_mlp(self, config: LlamaConfig) -> Any:
        return SwiGLU(config.width, config.mlp_width)

    def forward(
        self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, cache: KVCache | None
    ) -> tuple[Tensor, Tensor]:
        """One block of the residual stream [B, T, width]. Takes and returns the stream, and the output of the last MLP,
        which is not yet added: the next norm adds it in the pass in which it reads the stream. None stands for 0."""
        (q, k, v), x = self.qkv(x, delta)
        if v.requires_grad:
            v = v.contiguous()  # attention saves v for backward: a view would hold all of q, k and v
        delta, x = self.mlp(x, self.post_attention_layernorm, self.self_attn(q, k, v, cos, sin, cache))
        return x, self.dropout(delta)


class Trunk(nn.Module):
    """All but the head: the modules under `model.` in the parameters' names."""

    def __init__(self, config: LlamaConfig, block: type[Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.dropout = Dropout(config.dropout)


class Llama(Decoder):
    """The language model, see `Decoder.forward`."""

    residual_projections = ("o_proj", "down_proj")
    block: ClassVar[type[Block]] = Block
    config: LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = Trunk(config, self.block)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.tie_weights()
        self.init_weights()

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.embed_tokens

    def run_block(self, block: nn.Module, *args: Any) -> Any:
        """The stream after a block, as x and what is added to it; a mixture takes more from its blocks."""
        return block(*args)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, kept: Tensor | None = None) -> Tensor:
        cos, sin = rope_tables(self.config, self.positions(tokens, cache))
        x, delta = self.model.dropout(self.model.embed_tokens(tokens)), None
        for block in self.model.layers:
            x, delta = self.run_block(block, x, delta, cos, sin, cache)
        return self.lm_head(self.model.norm(self.last_states(x, delta, cache, kept)))
