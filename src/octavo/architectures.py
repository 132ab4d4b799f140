"""The architectures with modules that Octavo knows by name: one record each, for every package.

    x -> norms[0] -> q, k, v -> (head norms) -> attention -> o -> + x -> z
    z -> norms[1] -> up -> activation -> down -> + z

This is data alone, below every package: `octavo.nn` cannot import `octavo.hf`, and reads it too.

transformers names the classes of an architecture by its name: LlamaForCausalLM, LlamaDecoderLayer, LlamaAttention,
LlamaMLP, LlamaRMSNorm.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Block:
    """The names of a layer's modules, below the layer.

    Attributes:
        norms: in front of q, k and v, and in front of `up`.
        qkv, o: the projections to queries, keys and values, and of the attention's output.
        up: the layers before the activation, gate first; none where experts or modules of other names have them.
        down: the layer after the activation.
        head_norms: of queries and keys, over the elements of a head.
        rms: RMSNorm and a gated MLP (SwiGLU). Otherwise LayerNorm, and one layer before the activation.
    """

    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    o: str
    up: tuple[str, ...] = ()
    down: str = ""
    head_norms: tuple[str, ...] = ()
    rms: bool = False


@dataclass(frozen=True)
class Architecture:
    """The names of a model's modules, and what Octavo can do with them.

    Attributes:
        name: of its classes in transformers, without their endings.
        model_type: of its config.json.
        block: the modules of a layer.
        fusable: its layers, MLPs and attentions compute as Llama's and have their attributes. Then norms and MLPs run
            fused with quantization, attention with the cache, and `tensor_parallel` divides the model.
        own: the class of `octavo.models` with the same names.
        layers, norm, head: the list of layers, the last norm and the output layer, below the model.
        embeddings: of tokens, first, and of positions.
        expert_up: the layers gate and up of an expert in files, where they are not called as in `block`.
        qkv_bias: q, k and v have biases whatever `attention_bias` says.
        gguf: its name in GGUF; "" where it has no export.
    """

    name: str
    model_type: str
    block: Block
    fusable: bool = False
    own: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    embeddings: tuple[str, ...] = ("model.embed_tokens",)
    expert_up: tuple[str, ...] = ()
    qkv_bias: bool = False
    gguf: str = ""


LLAMA = Block(
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    rms=True,
)
QWEN3 = replace(LLAMA, head_norms=("self_attn.q_norm", "self_attn.k_norm"))
OPT = Block(
    norms=("self_attn_layer_norm", "final_layer_norm"),
    qkv=LLAMA.qkv,
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
# A norm of BERT comes after its layers, and its output is a residual too, so no norm stands in front of layers alone.
BERT = Block(
    norms=(),
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    o="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
)


def _mixture(block: Block) -> Block:
    """The block of a mixture: its MLP is a router and experts."""
    return replace(block, up=(), down="")


# By name. A test, or a program, adds a record here.
ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("Llama", "llama", LLAMA, fusable=True, own="Llama", gguf="llama"),
        Architecture("Mistral", "mistral", LLAMA, fusable=True, gguf="llama"),
        Architecture("Qwen2", "qwen2", LLAMA, fusable=True, qkv_bias=True, gguf="qwen2"),
        Architecture("Qwen3", "qwen3", QWEN3, fusable=True),
        Architecture("Mixtral", "mixtral", _mixture(LLAMA), expert_up=("w1", "w3")),
        Architecture("Qwen2Moe", "qwen2_moe", _mixture(LLAMA), qkv_bias=True),
        Architecture("Qwen3Moe", "qwen3_moe", _mixture(QWEN3)),
        Architecture(  # Octavo's GPT-2 is saved as OPT
            "OPT", "opt", OPT, own="GPT2", layers="model.decoder.layers", norm="model.decoder.final_layer_norm",
            embeddings=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        ),
        Architecture("Bert", "bert", BERT),
    )
}  # fmt: skip
