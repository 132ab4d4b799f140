"""The places in an architecture where folding is possible: the module that writes a tensor, and all that read it.

    residual -> input_layernorm -> q, k, v     v -> attention -> o -> residual
    residual -> post_attention_layernorm -> gate, up      up -> (* act(gate)) -> down -> residual

The computation between the writer and the readers of a pair commutes with a factor for each channel: attention mixes
tokens, and a gate multiplies elementwise. ReLU commutes with positive factors. GELU does not, so there is no pair
across it. A norm whose output is also a residual (BERT, and OPT with norms after its layers) is in no pair, because not
all of its readers are linear layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.architectures import ARCHITECTURES, BERT, OPT, Architecture, Block
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.scheme import Scheme
from octavo.hf.source import Source
from octavo.models import GPT2


@dataclass(frozen=True)
class Pair:
    """A norm or linear layer `writer`, and the linear layers `readers` of its output, through attention heads or not.

    `head` is the width of a head if several query heads share one that the writer writes, else 0.
    """

    writer: str
    readers: tuple[str, ...]
    head: int = 0


@dataclass(frozen=True)
class Map:
    """The places of one model, by the names of its modules. All but `pairs` is for rotation."""

    pairs: Sequence[Pair]  # the tensors that can be smoothed
    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # norm -> its readers, the head among them
    writers: Sequence[str] = ()  # the layers that write to the residual stream
    heads: Sequence[tuple[str, str]] = ()  # (v, o) of each layer
    embedding: str = ""
    head: str = ""  # it may share its weight with the embedding
    width: int = 0  # of the residual stream
    head_dim: int = 0  # of the values


def read_map(source: Source, *, rotate: bool) -> Map:
    """The places of `source`. An ArtifactError, which says why, if it cannot be folded, or not rotated."""
    where, config = source.description / "config.json", source.config
    architecture = str((config.get("architectures") or ["of no named architecture"])[0])
    rotated = ", ".join(f"{each.name}ForCausalLM" for each in ARCHITECTURES.values() if each.fusable)
    supported = f"{rotated}; and to smooth, OPTForCausalLM and BERT-like encoders"
    if isinstance(source.meta_model.model, GPT2):
        raise ArtifactError(f"{where} is of a run of octavo's GPT-2: fold takes {supported}")
    names = {name for name, _ in source.meta_model.model.named_modules()}
    known = ARCHITECTURES.get(architecture.removesuffix("ForCausalLM"))
    if known is not None and known.fusable:
        found = _decoder(known, config)
        for what, size in (("width", found.width), ("head width", found.head_dim)):
            if rotate and size % 2:
                raise ArtifactError(f"{where}: its {what} {size} is odd, and there is no Hadamard rotation for that")
        return found
    if rotate and architecture.startswith(("OPT", "Bert")):
        raise ArtifactError(
            f"{where}: {architecture} has LayerNorm, whose mean and bias a rotation does not leave in place: only "
            f"models with RMSNorm are rotated ({rotated})"
        )
    if architecture == "OPTForCausalLM":
        return Map(_pairs(OPT, _layers(names, OPT.qkv[2]), config))
    if architecture.startswith("Bert"):
        return Map(_pairs(BERT, _layers(names, BERT.qkv[2]), config))
    raise ArtifactError(f"{where}: {architecture} cannot be folded; supported are {supported}")


def _decoder(architecture: Architecture, config: Mapping[str, Any]) -> Map:
    block = architecture.block
    assert block is not None  # the architecture is fusable
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = [f"{architecture.layers}.{i}." for i in range(config["num_hidden_layers"])]
    pairs = _pairs(block, layers, config, head_dim)
    norms = {pair.writer: pair.readers for pair in pairs if pair.writer.endswith(block.norms)}
    return Map(
        pairs=pairs,
        norms=norms | {architecture.norm: (architecture.head,)},
        writers=[layer + name for layer in layers for name in (block.o, block.down)],
        heads=[(layer + block.qkv[2], layer + block.o) for layer in layers],
        embedding=architecture.embeddings[0],
        head=architecture.head,
        width=config["hidden_size"],
        head_dim=head_dim,
    )


def _pairs(block: Block, layers: Iterable[str], config: Mapping[str, Any], head_dim: int = 0) -> list[Pair]:
    before = config.get("do_layer_norm_before", True) and config.get("layer_norm_elementwise_affine", True)
    across = block.rms or (block.norms and config.get("activation_function", "relu") == "relu")
    pairs = []
    for layer in layers:
        for norm, readers in zip(block.norms if before else (), (block.qkv, block.up), strict=False):
            pairs.append(Pair(layer + norm, tuple(layer + name for name in readers)))
        pairs.append(Pair(layer + block.qkv[2], (layer + block.o,), head_dim))
        if across:
            pairs.append(Pair(layer + block.up[-1], (layer + block.down,)))
    return pairs


def _layers(names: set[str], module: str) -> list[str]:
    """The names of the layers that have such a module, each with a dot behind it."""
    return sorted(name.removesuffix(module) for name in names if name.endswith(f".{module}"))


# ---- Linear layers that readers fuse into one GEMM: q, k and v; gate and up, which Mixtral calls w1 and w3.
#
# vLLM holds their weights as one tensor, which has one scheme. It refuses a folder in which one of them is packed and
# another is not, so the layers of a group are packed by one scheme, or all left in BF16.


def fused_names() -> list[tuple[str, ...]]:
    """The last names of the layers that readers run as one GEMM, of all architectures."""
    found = []
    for each in ARCHITECTURES.values():
        layers = (each.block.qkv, each.block.up) if each.block is not None else ()
        found += [tuple(name.rpartition(".")[2] for name in names) for names in (*layers, each.expert_up)]
    return [names for names in dict.fromkeys(found) if len(names) > 1]


def groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the layers `names`, in their order, by the GEMM that readers run them in; most are alone."""
    fused = fused_names()
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        together = next((leaves for leaves in fused if leaf in leaves), (leaf,))
        found.setdefault((parent, together), []).append(name)
    return [tuple(layers) for layers in found.values()]


def check_groups(names: Iterable[str], schemes: Mapping[str, Scheme]) -> None:
    """Raise a ValueError unless the layers of each group of all linear layers `names` have one scheme, or none."""
    for group in groups(names):
        chosen = {name: schemes[name].name if name in schemes else "BF16" for name in group}
        if len(set(chosen.values())) > 1:
            parent = group[0].rpartition(".")[0]
            each = ", ".join(f"{name.rpartition('.')[2]} {how}" for name, how in chosen.items())
            raise ValueError(
                f"{parent}: layers that readers run as one GEMM need one scheme, they have {each}: name all of them "
                "in --skip or --layer"
            )
