"""GPT-2: pre-norm decoder with LayerNorm, learned positions and a GELU MLP, biases or none.

    x = embed_tokens[token] + embed_positions[position]
    x = x + attention(self_attn_layer_norm(x));  x = x + fc2(gelu(fc1(final_layer_norm(x))))

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the exact (erf) GELU as in nanoGPT, and an
MLP four times as wide as the model. Names and mathematics are those of `OPTForCausalLM` in transformers (Zhang et al.
2022, arXiv:2205.01068), which FP8 loaders know, so a state_dict travels both ways unchanged. The first two rows of the
position table are OPT's too, and no position reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from octavo.models.decoder import CausalAttention, Decoder, Dropout, KVCache, check_features, read_sizes, write_sizes
from octavo.nn import GELU, NormLinear

ARCHITECTURE = "OPTForCausalLM"
SIZES = ("vocabulary", "layers", "width", "heads", "context")
POSITION_OFFSET = 2  # rows that OPT's position table has before position 0


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2. Raises a ValueError if they do not fit together.

    Without `bias` the linear layers have none, and those of the norms stay 0 and are not trained: OPT has no norm
    without one.
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
        if min(getattr(self, name) for name in SIZES) < 1:
            raise ValueError(f"every size of a GPT-2 must be at least 1, got {self}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")

    @property
    def mlp_width(self) -> int:
        return 4 * self.width

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json, as OPT; the caller adds the dtype and the tokenizer's special tokens."""
        return write_sizes(self, *SIZES) | {
            "architectures": [ARCHITECTURE],
            "model_type": "opt",
            "word_embed_proj_dim": self.width,
            "ffn_dim": self.mlp_width,
            "activation_function": "gelu",
            "do_layer_norm_before": True,
            "enable_bias": self.bias,
            "layer_norm_elementwise_affine": True,
            "dropout": self.dropout,
            "attention_dropout": self.dropout,
            "layerdrop": 0.0,
            "pad_token_id": None,
        }

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read the fields of an OPT config.json. An absent field has transformers' default; dropout is not read. Raises
        a ValueError for a missing size, and for a feature that is missing here: other activations than gelu (OPT's own
        models use relu), post-norm, projected embeddings, other MLP widths than 4 * width."""
        sizes = read_sizes(hf, "an OPT", *SIZES)
        config = cls(**sizes, tied=hf.get("tie_word_embeddings", True), bias=hf.get("enable_bias", True))
        supported = {
            "activation_function": "gelu", "do_layer_norm_before": True, "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True, "word_embed_proj_dim": config.width, "ffn_dim": config.mlp_width,
        }  # fmt: skip
        check_features(hf, "GPT-2", supported, activation_function="relu", ffn_dim=3072)
        return config


class Attention(CausalAttention):
    layer_after = "out_proj"

    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__(config, layer, config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None) -> Tensor:
        """[B, T, width] from the outputs of the projections, [B, T, width] each."""
        q, k, v = (x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, d]
        return self.dropout(self.out_proj(self.attend(q, k, v, cache)))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.mlp_width, bias=config.bias)
        self.fc2 = nn.Linear(config.mlp_width, config.width, bias=config.bias)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.dropout = Dropout(config.dropout)
        self.qkv = NormLinear(self, "self_attn_layer_norm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.mlp = GELU(self, "fc1", "fc2")

    def forward(self, x: Tensor, delta: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor]:
        """One block of the residual stream [B, T, width]. Takes and returns the stream, and the output of the last MLP,
        which is not yet added: the next norm adds it in the pass in which it reads the stream. None stands for 0."""
        (q, k, v), x = self.qkv(x, delta)
        delta, x = self.mlp(x, self.final_layer_norm, self.self_attn(q, k, v, cache))
        return x, self.dropout(delta)


class Stack(nn.Module):
    """All but the head: the modules under `model.decoder.` in the parameters' names."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.embed_positions = nn.Embedding(POSITION_OFFSET + config.context, config.width)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.dropout = Dropout(config.dropout)


class GPT2(Decoder):
    """The language model, see `Decoder.forward`."""

    residual_projections = ("out_proj", "fc2")
    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.model: Any = nn.ModuleDict({"decoder": Stack(config)})
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.bias.requires_grad_(config.bias)
        self.tie_weights()
        self.init_weights()

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.decoder.embed_tokens

    def forward(self, tokens: Tensor, cache: KVCache | None = None, kept: Tensor | None = None) -> Tensor:
        decoder = self.model.decoder
        positions = POSITION_OFFSET + self.positions(tokens, cache)
        x, delta = decoder.dropout(decoder.embed_tokens(tokens) + decoder.embed_positions(positions)), None
        for block in decoder.layers:
            x, delta = block(x, delta, cache)
        return self.lm_head(decoder.final_layer_norm(self.last_states(x, delta, cache, kept)))
