"""The places in an architecture where folding is possible: the module that writes a tensor, and all that read it.

    residual -> input_layernorm -> q, k, v     v -> attention -> o -> residual
    residual -> post_attention_layernorm -> gate, up      up -> (* act(gate)) -> down -> residual

The computation between the writer and the readers of a pair commutes with a factor for each channel: attention mixes
tokens, and a gate multiplies elementwise. ReLU commutes with positive factors. GELU does not, so there is no pair
across it. A norm whose output is also a residual (BERT, and OPT with norms after its layers) is in no pair, because not
all of its readers are linear layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError
from octavo.hf.source import Source
from octavo.models import GPT2
from octavo.nn.transformers_fusion import PROJECTIONS

ROTATED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED = f"{', '.join(ROTATED)}; and to smooth, OPTForCausalLM and BERT-like encoders"


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
    """The places of one model, by the names of its modules.

    Attributes:
        pairs: the tensors that can be smoothed.
        norms: for rotation, norm -> the linear layers that read it, in order; the last norm and the head are included.
        writers: the layers that write to the residual stream.
        heads: (v, o) of each layer.
        embedding, head: the modules, which may share their weight.
        width, head_dim: of the residual stream, and of a head of the values.
    """

    pairs: tuple[Pair, ...]
    norms: Mapping[str, tuple[str, ...]]
    writers: tuple[str, ...]
    heads: tuple[tuple[str, str], ...]
    embedding: str
    head: str
    width: int
    head_dim: int


def read_map(source: Source, *, rotate: bool) -> Map:
    """The places of `source`.

    Raises:
        ArtifactError: the architecture cannot be folded, or not rotated. The message says why.
    """
    where, config = source.description / "config.json", source.config
    architecture = str((config.get("architectures") or ["of no named architecture"])[0])
    if isinstance(source.meta_model.model, GPT2):
        raise ArtifactError(f"{where} is of a run of octavo's GPT-2: fold takes {SUPPORTED}")
    names = {name for name, _ in source.meta_model.model.named_modules()}
    if architecture in ROTATED:
        return _decoder(config)
    if rotate and architecture.startswith(("OPT", "Bert")):
        raise ArtifactError(
            f"{where}: {architecture} has LayerNorm, whose mean and bias a rotation does not leave in place: only "
            f"models with RMSNorm are rotated ({', '.join(ROTATED)})"
        )
    if architecture == "OPTForCausalLM":
        return _smoothed(_opt(config, names))
    if architecture.startswith("Bert"):
        return _smoothed(_bert(names))
    raise ArtifactError(f"{where}: {architecture} cannot be folded; supported are {SUPPORTED}")


def check_rotation(found: Map, where: Path) -> None:
    """Raise an ArtifactError unless Hadamard matrices exist for the width and the heads."""
    for what, size in (("width", found.width), ("head width", found.head_dim)):
        if size % 2:
            raise ArtifactError(f"{where}: its {what} {size} is odd, and there is no Hadamard rotation for that")


def _decoder(config: Mapping[str, Any]) -> Map:
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    pairs = []
    norms: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        mlp = f"{layer}.mlp"
        norms[f"{layer}.input_layernorm"] = tuple(f"{layer}.{name}" for name in PROJECTIONS)
        norms[f"{layer}.post_attention_layernorm"] = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        pairs += [Pair(norm, norms[norm]) for norm in list(norms)[-2:]]
        pairs += [
            Pair(f"{layer}.self_attn.v_proj", (f"{layer}.self_attn.o_proj",), head_dim),
            Pair(f"{mlp}.up_proj", (f"{mlp}.down_proj",)),
        ]
    norms["model.norm"] = ("lm_head",)
    return Map(
        pairs=tuple(pairs),
        norms=norms,
        writers=tuple(f"{layer}.{name}" for layer in layers for name in ("self_attn.o_proj", "mlp.down_proj")),
        heads=tuple((f"{layer}.self_attn.v_proj", f"{layer}.self_attn.o_proj") for layer in layers),
        embedding="model.embed_tokens",
        head="lm_head",
        width=config["hidden_size"],
        head_dim=head_dim,
    )


def _opt(config: Mapping[str, Any], names: set[str]) -> list[Pair]:
    pairs = []
    for layer in _layers(names, ".self_attn.v_proj"):
        if config.get("do_layer_norm_before", True) and config.get("layer_norm_elementwise_affine", True):
            pairs += [
                Pair(f"{layer}.self_attn_layer_norm", tuple(f"{layer}.{name}" for name in PROJECTIONS)),
                Pair(f"{layer}.final_layer_norm", (f"{layer}.fc1",)),
            ]
        pairs.append(Pair(f"{layer}.self_attn.v_proj", (f"{layer}.self_attn.out_proj",)))
        if config.get("activation_function", "relu") == "relu":
            pairs.append(Pair(f"{layer}.fc1", (f"{layer}.fc2",)))
    return pairs


def _bert(names: set[str]) -> list[Pair]:
    return [
        Pair(f"{layer}.attention.self.value", (f"{layer}.attention.output.dense",))
        for layer in _layers(names, ".attention.self.value")
    ]


def _layers(names: set[str], ending: str) -> list[str]:
    return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))


def _smoothed(pairs: list[Pair]) -> Map:
    """The places of a model that is never rotated."""
    return Map(tuple(pairs), {}, (), (), "", "", 0, 0)
