"""The base of the decoder-only language models: logits[B, T, V] from tokens[B, T] through a stack of residual blocks.

    x = embed(tokens);  x = x + attention(norm(x));  x = x + mlp(norm(x));  logits = lm_head(norm(x))

The head may be tied to the embedding (Press and Wolf 2017, arXiv:1608.05859). Weights are drawn from a normal
distribution with a standard deviation of 0.02. For the two projections of a block that write to the residual stream it
is smaller by a factor of 1/sqrt(2 * layers). So the stream's variance does not grow with depth (Radford et al. 2019,
GPT-2, section 2.3).

In training, dropout (Srivastava et al. 2014) applies where GPT-2 has it: to the embeddings, to the probabilities of an
attention, and to the outputs of attention and MLP. It draws from torch's global random generator.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn import Experts
from octavo.nn.attention_layers import GradientScales, attend_fp8

# ---- Causal attention, and the KV cache that a decoder reads.
#
# Token t attends to tokens 0..t, and the keys and values of a token never change once computed. So a decoder that emits
# one token at a time saves K and V of every layer (Shazeer 2019, arXiv:1911.02150, section 2.4), and computes them for
# the new tokens only.


KVCache = Any  # an `octavo.inference.kv_cache.ModelKVCache`


class Dropout(nn.Dropout):
    """An `nn.Dropout` that draws no random number if its probability is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.p else x


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v, where token t sees the tokens 0..t, and the layers before it. A subclass has
    the layer after it. In training each probability is dropped with that of the configuration."""

    layer_after: ClassVar[str]  # whose input is the result of PyTorch's attention (`octavo.nn.attention_layers`)

    def __init__(self, config: Any, layer: int, kv_width: int, *, bias: bool) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.width // config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=bias)
        self.k_proj = nn.Linear(config.width, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.width, kv_width, bias=bias)
        self.dropout = Dropout(config.dropout)
        self.fp8_gradients: GradientScales | None = None  # set by `octavo.nn.use_fp8_attention`

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
        """The attention of q [B, heads, T, head_dim], k and v [B, kv_heads, T, head_dim], [B, T, width]. Query head h
        reads key head h * kv_heads // heads. Without a cache it is computed in E4M3 where `fp8_gradients` takes it."""
        p = self.dropout.p if self.training else 0.0
        if cache is not None:
            y = cache.append(self.layer, k, v).attend(q, cache.first, self.head_dim**-0.5)
        elif self.fp8_gradients is not None and self.fp8_gradients.takes(q, k, p):
            y = attend_fp8(q, k, v, self.fp8_gradients)
        else:
            gqa = q.shape[1] != k.shape[1]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=gqa)
        return y.transpose(1, 2).flatten(2)


# ---- The configuration of a decoder, and the fields of a config.json that say the same.


_FIELDS = {
    "vocab_size": "vocabulary",
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "mlp_width",
    "max_position_embeddings": "context",
}


def read_sizes(hf: Mapping[str, Any], kind: str, *names: str) -> dict[str, Any]:
    """The sizes of these names in the config.json of a `kind` of model. A ValueError names those that are missing."""
    fields = {field: name for field, name in _FIELDS.items() if name in names}
    if missing := [field for field in fields if hf.get(field) is None]:
        raise ValueError(f"{kind} config.json must have {', '.join(missing)}; got the keys {sorted(hf)}")
    return {name: hf[field] for field, name in fields.items()}


def write_sizes(config: Any, *names: str) -> dict[str, Any]:
    """The fields of config.json for the sizes of these names, and those that all our models have."""
    fields = {field: getattr(config, name) for field, name in _FIELDS.items() if name in names}
    return fields | {"tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None}


def check_features(hf: Mapping[str, Any], kind: str, supported: Mapping[str, Any], **absent: Any) -> None:
    """Raise a ValueError unless each field has the value that `kind` supports. Without the field this is the value, or
    the one in `absent`."""
    for field, only in supported.items():
        found = absent.get(field, only) if hf.get(field) is None else hf[field]
        if found != only:
            raise ValueError(f"this {kind} has {field}={only!r} only, got {found!r}; load it with transformers")


# ---- The base of the decoder-only language models.


INIT_STD = 0.02


class Decoder(nn.Module, ABC):
    """Base of the language models: tying and initialization."""

    residual_projections: ClassVar[tuple[str, ...]]  # the last names of the layers that write to the residual stream
    lm_head: nn.Linear

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_load_state_dict_post_hook(_retie_after_load)  # type: ignore[no-untyped-call]

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """The token embedding, whose weight [V, width] a tied head shares."""

    @abstractmethod
    def forward(self, tokens: Tensor, cache: KVCache | None = None, kept: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of int64 tokens [B, T]. With a cache, the T tokens follow those that it holds, and only the
        logits [B, n, V] of the tokens with the indices `kept`, int64 [n], are computed; None keeps the last."""

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's Parameter, if the configuration ties them; not of a packed head."""
        if self.config.tied and isinstance(self.lm_head, nn.Linear):
            self.lm_head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters anew, for example after `to_empty`; nothing on the meta device."""
        if self.embedding.weight.is_meta:
            return
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.rpartition(".")[2] in self.residual_projections
                nn.init.normal_(module.weight, std=residual_std if residual else INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Experts):
                nn.init.normal_(module.gate_up_proj, std=INIT_STD)
                nn.init.normal_(module.down_proj, std=residual_std)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()

    def positions(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """The positions of the tokens [B, T] in their texts: int64 [1, T], or [B, T] if the cache has padding. Raises a
        ValueError unless the tokens are int64 [B, T] that fit in the context."""
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 [B, T], got {tokens.dtype} {tuple(tokens.shape)}")
        start = 0 if cache is None else cache.tokens
        if start + tokens.shape[1] > self.config.context:
            raise ValueError(
                f"the model's context is {self.config.context} tokens, got {tokens.shape[1]} after {start} cached; "
                "pass fewer tokens"
            )
        return torch.arange(tokens.shape[1], device=tokens.device)[None] if cache is None else cache.positions(tokens)

    def last_states(self, x: Tensor, delta: Any, cache: KVCache | None, kept: Tensor | None) -> Tensor:
        """x + delta of the tokens whose logits `forward` computes, [B, n, width], contiguous. A slice [B, 1, width] of
        more tokens would make the head B products, which read its weight B times."""
        if cache is None:
            return x + delta
        if kept is None:
            return x[:, -1:] + delta[:, -1:]
        return x.index_select(1, kept) + delta.index_select(1, kept)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        # A move from the meta device gives every module its own Parameter, and so undoes the tie.
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.tie_weights()
        return self


def _retie_after_load(module: Any, incompatible: Any) -> None:
    """Accept a tied checkpoint that stores the shared matrix once, and share it again after `assign=True`."""
    if module.config.tied and "lm_head.weight" in incompatible.missing_keys:
        incompatible.missing_keys.remove("lm_head.weight")
    module.tie_weights()


def logits_of(output: object) -> Tensor:
    """The logits [B, T, V] that a forward pass returned: a tensor, or an output object of transformers."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(f"a language model must return logits, got {type(output).__name__}")
    return logits
