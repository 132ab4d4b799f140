"""The layers of a model, as far as its memory and time depend on them.

An `Architecture` is a sequence of equal blocks between an embedding and a head. A block is an attention and linear
layers. Layers with the same `group` read the same input, and run as one GEMM where they are fused:

    qkv   the projections to queries, keys and values       o      the projection of the attention's output
    up    the layers before the activation                  down   the layer after it
    other layers, such as routers and low-rank projections, have groups of their own
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo import architectures
from octavo.checkpoint.files import check_expert_counts


@dataclass(frozen=True)
class Layer:
    """Equal linear layers of K inputs and N outputs: a token runs through `active` of the `copies` (experts). With 0
    active the layer runs once a sequence, not once a token."""

    group: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def weights(self) -> int:
        return self.copies * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + (self.copies * self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Attention:
    """The features of a token over all heads of an attention; key and value heads may be shared by query heads.
    `cached` are those in the KV cache, where they are not the keys and values (DeepSeek's MLA)."""

    heads: int
    queries: int
    keys: int
    values: int
    output: int
    causal: bool = True
    cached: int | None = None
    normed: int = 0  # queries and keys that norms of heads read (Qwen3)

    @property
    def key_heads(self) -> int:
        return self.heads * self.keys // self.queries

    def cache_features(self, gpus: int) -> int:
        """The cached features on each of the GPUs that share the heads: at least one key head, and all of MLA's."""
        if self.cached is not None:
            return self.cached
        return (self.keys + self.values) // self.key_heads * -(-self.key_heads // gpus)


@dataclass(frozen=True)
class Block:
    """`count` equal blocks. `others` counts the parameters of norms and biases that are no linear layer."""

    count: int
    layers: tuple[Layer, ...]
    attention: Attention
    gated: bool
    others: int

    @property
    def weights(self) -> int:
        """Parameters of the linear layers' matrices in one block."""
        return sum(layer.weights for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + self.others

    def group(self, name: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.group == name)

    @property
    def groups(self) -> list[tuple[Layer, ...]]:
        """The layers that read the same input, in order. Experts are apart from a shared MLP."""
        kinds = dict.fromkeys((layer.group, layer.copies) for layer in self.layers)
        return [tuple(each for each in self.layers if (each.group, each.copies) == kind) for kind in kinds]

    @property
    def has_experts(self) -> bool:
        return any(layer.copies > 1 for layer in self.layers)

    @property
    def activated(self) -> int:
        """Features that the activation reads for a token: gate and up both."""
        return sum(layer.outputs * layer.active for layer in self.group("up"))

    @property
    def hidden(self) -> int:
        """Features inside the MLP that a token activates: the inputs of the layer after the activation."""
        return sum(layer.inputs * layer.active for layer in self.group("down"))


@dataclass(frozen=True)
class Architecture:
    """A model of this `width` of the residual stream. `context` is the longest sequence, or the only one of an image
    model, whose `vocabulary` is 0. `head`, `embeddings` and `others` count the parameters outside of the blocks; a head
    that is tied to the embedding has none. `fused`: Octavo quantizes inside its norms and activations (`rowwise`)."""

    name: str
    width: int
    context: int
    vocabulary: int
    blocks: tuple[Block, ...]
    head: int
    embeddings: int
    others: int
    tied: bool = False
    layer_norm: bool = False
    fused: bool = False

    @property
    def has_experts(self) -> bool:
        return any(block.has_experts for block in self.blocks)

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.outside

    @property
    def block_parameters(self) -> int:
        return sum(block.count * block.parameters for block in self.blocks)

    @property
    def outside(self) -> int:
        """Parameters outside the blocks."""
        return self.head + self.embeddings + self.others

    @property
    def block_weights(self) -> int:
        """Elements of the blocks' matrices: what a recipe quantizes."""
        return sum(block.count * block.weights for block in self.blocks)

    @property
    def depth(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with: of experts those that it runs through, and the head."""
        inside = sum(b.count * layer.inputs * layer.outputs * layer.active for b in self.blocks for layer in b.layers)
        return inside + self.width * self.vocabulary


# ---- The architecture that a config.json describes, by its model_type; nothing is imported to find it.
#
# The fields are those of transformers. A DiT (arXiv:2212.09748) has those of diffusers.


Fields = Mapping[str, Any]


def describe_architecture(name: str, fields: Fields) -> Architecture:
    """The architecture of a parsed config.json. A ValueError names a missing field, or a model_type that is near."""
    fields = fields.get("text_config") or fields
    kind = fields.get("model_type") or ("dit" if fields.get("_class_name") == "DiTTransformer2DModel" else None)
    families = dict.fromkeys(_like_llama(), _llama) | FAMILIES
    if kind not in families:
        near = difflib.get_close_matches(str(kind), families, n=1, cutoff=0.75)
        advice = f"the nearest is {near[0]}; " if near else ""
        raise ValueError(
            f"{name}: model_type must be one of {', '.join(families)}; got {kind!r}: {advice}write a config.json with "
            "the sizes of the model and one of these types"
        )
    check_expert_counts(fields, name)
    try:
        return families[kind](name, fields)
    except KeyError as error:
        raise ValueError(f"{name}: the config.json of a {kind} must state {error}; got {', '.join(fields)}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{name}: the sizes of a {kind} must be whole numbers of at least 1 ({error})") from error


def _like_llama() -> dict[str, architectures.Architecture]:
    """The architectures whose layers are those of Llama, or a mixture's, by model_type."""
    return {each.model_type: each for each in architectures.ARCHITECTURES.values() if each.block.rms}


def _llama(name: str, f: Fields) -> Architecture:
    """Llama and its relatives: RMSNorm, grouped-query attention, SwiGLU, or experts of it."""
    width, known = f["hidden_size"], _like_llama()[f["model_type"]]
    heads, kv_heads = f["num_attention_heads"], f.get("num_key_value_heads")
    if heads % (kv_heads or heads) or (width % heads and not f.get("head_dim")):
        raise ValueError(
            f"{name}: num_attention_heads must divide hidden_size and be a multiple of num_key_value_heads; "
            f"got {heads}, {width} and {kv_heads}"
        )
    head, bias = f.get("head_dim") or width // heads, f.get("attention_bias", False)
    q, kv, norms = heads * head, (kv_heads or heads) * head, len(known.block.head_norms)
    attention = Attention(heads, q, kv, kv, q, normed=q + kv if norms else 0)
    qkv_bias = bias or (known.qkv_bias and f.get("qkv_bias", True))
    k_and_v = (Layer("qkv", width, kv, qkv_bias),) * 2
    layers: tuple[Layer, ...] = (Layer("qkv", width, q, qkv_bias), *k_and_v, Layer("o", q, width, bias))
    depth, others = f["num_hidden_layers"], 2 * width + norms * head
    dense = (*layers, *_swiglu(width, f["intermediate_size"], bias=f.get("mlp_bias", False)))
    blocks = [Block(depth, dense, attention, gated=True, others=others)]
    if experts := f.get("num_local_experts") or f.get("num_experts") or 0:
        qwen = {} if f["model_type"] == "mixtral" else f  # Mixtral reads none of these fields
        hidden, used = qwen.get("moe_intermediate_size", f["intermediate_size"]), f["num_experts_per_tok"]
        layers += (Layer("router", width, experts), *_swiglu(width, hidden, copies=experts, active=used))
        if shared := qwen.get("shared_expert_intermediate_size"):
            layers += (Layer("router", width, 1), *_swiglu(width, shared))
        step, without = qwen.get("decoder_sparse_step", 1), qwen.get("mlp_only_layers") or ()
        sparse = sum(i not in without and (i + 1) % step == 0 for i in range(depth))
        blocks = [replace(blocks[0], count=depth - sparse), Block(sparse, layers, attention, gated=True, others=others)]
    return _language_model(name, f, blocks, fused=known.fusable, others=width)


def _swiglu(width: int, hidden: int, *, bias: bool = False, copies: int = 1, active: int = 1) -> tuple[Layer, ...]:
    up = Layer("up", width, hidden, bias, copies, active)
    return up, up, Layer("down", hidden, width, bias, copies, active)


def _language_model(name: str, f: Fields, blocks: Sequence[Block], *, fused: bool, others: int) -> Architecture:
    width, vocabulary = f["hidden_size"], f["vocab_size"]
    tied = bool(f.get("tie_word_embeddings", False))
    embedding = vocabulary * width
    return Architecture(
        name, width, f["max_position_embeddings"], vocabulary,
        tuple(block for block in blocks if block.count), head=0 if tied else embedding, embeddings=embedding,
        others=others, tied=tied, fused=fused,
    )  # fmt: skip


def _deepseek(name: str, f: Fields) -> Architecture:
    """DeepSeek-V3 (arXiv:2412.19437): multi-head latent attention; dense blocks, then blocks of experts."""
    width, heads = f["hidden_size"], f["num_attention_heads"]
    head = f["qk_nope_head_dim"] + f["qk_rope_head_dim"]
    latent, q_rank = f["kv_lora_rank"], f["q_lora_rank"]
    q, k, v = heads * head, heads * head, heads * f["v_head_dim"]
    attention = Attention(heads, q, k, v, v, cached=latent + f["qk_rope_head_dim"])
    projections = (
        Layer("qkv", width, q_rank or q),  # of low rank, or none
        Layer("qkv", width, latent + f["qk_rope_head_dim"]),
        *((Layer("q_b", q_rank, q),) if q_rank else ()),
        Layer("kv_b", latent, heads * (f["qk_nope_head_dim"] + f["v_head_dim"])),
        Layer("o", v, width),
    )
    norms, count = 2 * width + (q_rank or 0) + latent, min(f["first_k_dense_replace"], f["num_hidden_layers"])
    dense = Block(count, (*projections, *_swiglu(width, f["intermediate_size"])), attention, True, norms)
    experts, used, shared = f["n_routed_experts"], f["num_experts_per_tok"], f["n_shared_experts"]
    hidden = f["moe_intermediate_size"]
    mlp = (
        Layer("router", width, experts),
        *_swiglu(width, hidden, copies=experts, active=used),
        *_swiglu(width, hidden * shared),
    )
    sparse = Block(f["num_hidden_layers"] - dense.count, (*projections, *mlp), attention, True, norms + experts)
    return _language_model(name, f, (dense, sparse), fused=False, others=width)


def _gpt2(name: str, f: Fields) -> Architecture:
    width = f["n_embd"]
    sizes = {
        "hidden_size": width, "num_hidden_layers": f["n_layer"], "num_attention_heads": f["n_head"],
        "ffn_dim": f.get("n_inner") or 4 * width, "max_position_embeddings": f["n_positions"],
        "vocab_size": f["vocab_size"], "tie_word_embeddings": f.get("tie_word_embeddings", True),
    }  # fmt: skip
    return _opt(name, sizes, unread=0)


def _opt(name: str, f: Fields, unread: int = 2) -> Architecture:
    """OPT's model, which Octavo's GPT-2 is saved as. Its table of positions has two rows that no position reads."""
    width, heads, hidden = f["hidden_size"], f["num_attention_heads"], f["ffn_dim"]
    block = _encoder_block(f["num_hidden_layers"], width, heads, hidden, f.get("enable_bias", True), causal=True)
    model = _language_model(name, {"tie_word_embeddings": True, **f}, [block], fused=True, others=2 * width)
    return replace(model, embeddings=model.embeddings + (model.context + unread) * width, layer_norm=True)


def _encoder_block(count: int, width: int, heads: int, hidden: int, bias: bool = True, causal: bool = False) -> Block:
    """Attention and a GELU MLP, each after a LayerNorm."""
    projections = (Layer("qkv", width, width, bias),) * 3
    layers = (*projections, Layer("o", width, width, bias), Layer("up", width, hidden, bias))
    attention = Attention(heads, width, width, width, width, causal)
    return Block(count, (*layers, Layer("down", hidden, width, bias)), attention, gated=False, others=4 * width)


def _vit(name: str, f: Fields) -> Architecture:
    width, patch, channels = f["hidden_size"], f.get("patch_size", 16), f.get("num_channels", 3)
    patches = (f.get("image_size", 224) // patch) ** 2
    block = _encoder_block(f["num_hidden_layers"], width, f["num_attention_heads"], f["intermediate_size"])
    embeddings = width * (channels * patch**2 + 1) + width * (patches + 2)  # patches, positions, the class token
    return Architecture(
        name, width, patches + 1, 0, (block,), head=0, embeddings=embeddings, others=2 * width, layer_norm=True
    )


def _dit(name: str, f: Fields) -> Architecture:
    """DiT with adaLN-Zero: a layer of each block computes six vectors for its norms, once an image."""
    heads = f["num_attention_heads"]
    width = f.get("hidden_size") or heads * f["attention_head_dim"]
    patch, channels = f["patch_size"], f["in_channels"]
    tokens = (f["sample_size"] // patch) ** 2
    depth = f.get("num_hidden_layers") or f["num_layers"]
    block = _encoder_block(depth, width, heads, int(f.get("mlp_ratio", 4) * width))
    modulation = Layer("modulation", width, 6 * width, bias=True, active=0)
    block = Block(block.count, (*block.layers, modulation), block.attention, gated=False, others=0)
    patches = width * (channels * patch**2 + 1)
    time, classes = 256 * width + width + width * width + width, 1001 * width  # as the paper's ImageNet models
    out = 2 * (width * width + width) + (width + 1) * patch**2 * 2 * channels
    return Architecture(
        name, width, tokens, 0, (block,), head=0, embeddings=patches + time + classes, others=out,
        layer_norm=True,
    )  # fmt: skip


# Beside these, `octavo.architectures` has those like Llama.
FAMILIES: dict[str, Callable[[str, Fields], Architecture]] = {
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "opt": _opt,
    "vit": _vit,
    "dit": _dit,
}


def positive_sizes(architecture: Architecture) -> Architecture:
    """`architecture`; a ValueError if a size is no whole number, or below one."""
    sizes = [architecture.width, architecture.context, architecture.depth]
    sizes += [architecture.vocabulary] if architecture.vocabulary else []  # an image model has none
    sizes += [size for block in architecture.blocks for layer in block.layers for size in (layer.inputs, layer.outputs)]
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{architecture.name}: a model's sizes must be whole numbers of at least 1; got {size}")
    return architecture
