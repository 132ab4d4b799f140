"""GPT-2: pre-norm decoder with LayerNorm, learned positions, one fused q/k/v projection, a GELU MLP, biases or none.

    x = wte[token] + wpe[position];  x = x + attention(ln_1(x));  x = x + c_proj(gelu(c_fc(ln_2(x))))

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; parameter names and the exact (erf) GELU as
in nanoGPT, `nn.Linear` where the first release had its transpose, an MLP four times as wide as the model.

On disk it is OPT (Zhang et al. 2022, arXiv:2205.01068), the same mathematics in `nn.Linear` form, which FP8 loaders
know: separate q, k and v, and two unused rows in front of the positions, where OPT had those of padding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.cache import KVCache, causal_attention
from octavo.models.decoder import Decoder, Dropout
from octavo.nn import GELU, NormLinear

ARCHITECTURE = "OPTForCausalLM"
POSITION_OFFSET = 2  # rows that OPT's position table has before position 0


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2. Raises ValueError where they do not fit together.

    Without `bias` the linear layers have none, and those of the norms stay 0 and are not trained: OPT, the form on
    disk, has no norm without one.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    context: int
    tied: bool = True
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if min(self.vocabulary, self.layers, self.width, self.heads, self.context) < 1:
            raise ValueError(f"every size of a GPT-2 must be at least 1, got {self}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")

    @property
    def mlp_width(self) -> int:
        return 4 * self.width

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json, as OPT; the caller adds the dtype and the tokenizer's special tokens."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "opt",
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "hidden_size": self.width,
            "word_embed_proj_dim": self.width,
            "ffn_dim": self.mlp_width,
            "activation_function": "gelu",
            "do_layer_norm_before": True,
            "enable_bias": self.bias,
            "layer_norm_elementwise_affine": True,
            "dropout": self.dropout,
            "attention_dropout": self.dropout,
            "layerdrop": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> GPT2Config:
        """Read the fields of an OPT config.json; what is absent has transformers' default.

        Raises ValueError for a missing size and for what this implementation does not have: other activations than
        gelu (OPT's own models use relu), post-norm, projected embeddings, other MLP widths than 4 * width.
        Dropout is ignored: it changes training only.
        """
        required = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        missing = [key for key in required if hf.get(key) is None]
        if missing:
            raise ValueError(f"an OPT config.json must have {', '.join(missing)}; got the keys {sorted(hf)}")
        config = cls(
            vocabulary=hf["vocab_size"],
            layers=hf["num_hidden_layers"],
            width=hf["hidden_size"],
            heads=hf["num_attention_heads"],
            context=hf["max_position_embeddings"],
            tied=hf.get("tie_word_embeddings", True),
            bias=hf.get("enable_bias", True),
        )
        for key, default, supported in (
            ("activation_function", "relu", "gelu"),
            ("do_layer_norm_before", True, True),
            ("_remove_final_layer_norm", False, False),
            ("layer_norm_elementwise_affine", True, True),
            ("word_embed_proj_dim", config.width, config.width),
            ("ffn_dim", 3072, config.mlp_width),
        ):
            value = hf.get(key, default)
            if value != supported:
                raise ValueError(f"this GPT-2 has {key}={supported!r} only, got {value!r}; load it with transformers")
        return config


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.heads
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, qkv: Tensor, cache: KVCache | None) -> Tensor:
        """[B, T, width] of what `c_attn` made of the block's input, [B, T, 3 * width]."""
        parts = qkv.view(*qkv.shape[:-1], 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()  # [B, heads, T, head_dim] each
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = causal_attention(q, k, v, dropout=self.dropout.now).transpose(1, 2).flatten(2)  # [B, T, width]
        return self.dropout(self.c_proj(y))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = GELU(config.width, config.mlp_width, bias=config.bias)
        self.dropout = Dropout(config.dropout)
        self.qkv = NormLinear(self, "ln_1", "attn.c_attn")

    def forward(self, x: Tensor, delta: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """The stream [B, T, width] and what is still to be added to it, in and out: each norm adds as it reads."""
        (qkv,), x = self.qkv(x, delta)
        delta, x = self.mlp(x, self.ln_2, self.attn(qkv, cache))
        return x, self.dropout(delta)


class Trunk(nn.Module):
    """All but the head: the modules under `transformer.` in the parameters' names."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout)


class GPT2(Decoder):
    """The language model. `forward(tokens int64 [B, T], cache=None)` returns logits [B, T, vocabulary]."""

    residual_projections = ("c_proj",)
    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = Trunk(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.bias.requires_grad_(config.bias)
        self.tie_weights()
        self.init_weights()

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        start = 0 if cache is None else cache.length
        self.check_tokens(tokens, start)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x, delta = self.transformer.dropout(self.transformer.wte(tokens) + self.transformer.wpe(positions)), None
        for block in self.transformer.h:
            x, delta = self.run_block(block, x, delta, cache)
        return self.lm_head(self.transformer.ln_f(x + delta))  # type: ignore[no-any-return]


# Our module's name to OPT's; the inverse is the same table read backwards.
_TRUNK = {
    "transformer.wte": "model.decoder.embed_tokens",
    "transformer.wpe": "model.decoder.embed_positions",
    "transformer.ln_f": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
}
_BLOCK = {
    "ln_1": "self_attn_layer_norm",
    "attn.c_proj": "self_attn.out_proj",
    "ln_2": "final_layer_norm",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_POSITIONS = "model.decoder.embed_positions.weight"


def split_for_hf(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The OPT tensors that hold `tensor`, our parameter `name` (or a `<module>.weight_scale` [rows, 1]), any dtype.

    c_attn splits into q, k and v by rows, as copies (a file format may refuse tensors that share memory), and the
    position table gets its two unused rows. Raises ValueError for a name that is not of this model and for a c_attn
    tensor whose rows do not divide by 3.
    """
    module, _, leaf = name.rpartition(".")
    if module in _TRUNK:
        if module == "transformer.wpe":
            tensor = torch.cat((tensor.new_zeros(POSITION_OFFSET, tensor.shape[1]), tensor))
        return {f"{_TRUNK[module]}.{leaf}": tensor}
    match = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module)
    if match and match[2] in _BLOCK:
        return {f"model.decoder.layers.{match[1]}.{_BLOCK[match[2]]}.{leaf}": tensor}
    if match and match[2] == "attn.c_attn":
        if tensor.ndim == 0 or tensor.shape[0] % 3:
            raise ValueError(
                f"{name} must have rows for q, k and v in equal parts, got the shape {tuple(tensor.shape)}"
            )
        parts = zip(_QKV, tensor.chunk(3), strict=True)
        return {f"model.decoder.layers.{match[1]}.{part}.{leaf}": rows.clone() for part, rows in parts}
    raise ValueError(f"{name!r} is not the name of a GPT-2 tensor, such as transformer.h.0.mlp.c_fc.weight")


def merge_from_hf(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `split_for_hf`, for a whole OPT checkpoint.

    Raises ValueError for a name that OPT does not have and for a q, k or v without the other two.
    """
    trunk = {theirs: ours for ours, theirs in _TRUNK.items()}
    block = {theirs: ours for ours, theirs in _BLOCK.items()}
    merged = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        match = re.fullmatch(r"model\.decoder\.layers\.(\d+)\.(.+)", module)
        if module in trunk:
            merged[f"{trunk[module]}.{leaf}"] = tensor[POSITION_OFFSET:] if name == _POSITIONS else tensor
        elif match and match[2] in block:
            merged[f"transformer.h.{match[1]}.{block[match[2]]}.{leaf}"] = tensor
        elif match and match[2] in _QKV:
            # Reached three times, with the same result: once for each of the three.
            fused = f"transformer.h.{match[1]}.attn.c_attn.{leaf}"
            if fused not in merged:
                merged[fused] = _fuse(tensors, f"model.decoder.layers.{match[1]}", leaf)
        else:
            raise ValueError(f"{name!r} is not the name of an OPT tensor, such as model.decoder.layers.0.fc1.weight")
    return merged


def _fuse(tensors: Mapping[str, Tensor], layer: str, leaf: str) -> Tensor:
    names = [f"{layer}.{part}.{leaf}" for part in _QKV]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"q, k and v must come together, {', '.join(missing)} is missing; load all files of the model")
    parts = [tensors[name] for name in names]
    if parts[0].element_size() == 1:  # torch.cat does not take the float8 dtypes everywhere
        return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.cat(parts)
