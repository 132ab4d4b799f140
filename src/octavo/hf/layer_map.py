"""The places in an architecture where folding is possible: the module that writes a tensor, and all that read it.

    residual -> input_layernorm -> q, k, v     v -> attention -> o -> residual
    residual -> post_attention_layernorm -> gate, up      up -> (* act(gate)) -> down -> residual

The computation between the writer and the readers of a pair commutes with a factor for each channel: attention mixes
tokens, and a gate multiplies elementwise. ReLU commutes with positive factors. GELU does not, so there is no pair
across it. A norm whose output is also a residual (BERT, and OPT with norms after its layers) is in no pair, because not
all of its readers are linear layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.architectures import ARCHITECTURES, Architecture, Block
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.scheme import Scheme
from octavo.hf.source import Source
from octavo.models import GPT2


class Pair(NamedTuple):
    """A norm or linear layer `writer`, and the linear layers `readers` of its output, through attention heads or not.

    `head` is the width of a head if several query heads share one that the writer writes, else 0.
    """

    writer: str
    readers: tuple[str, ...]
    head: int = 0


class Foldable(NamedTuple):
    """A model that can be folded: the names of its modules, those of each layer with a dot behind, and config.json."""

    architecture: Architecture
    block: Block
    layers: Sequence[str]
    config: Mapping[str, Any]

    @property
    def width(self) -> int:
        """That of the residual stream."""
        return int(self.config["hidden_size"])

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.width // self.config["num_attention_heads"])

    def norms(self) -> list[Pair]:
        """The norms in front of linear layers alone, and these."""
        before = self.config.get("do_layer_norm_before", True) and self.config.get(
            "layer_norm_elementwise_affine", True
        )
        block, norms = self.block, self.block.norms if before else ()
        groups = list(zip(norms, (block.qkv, block.up), strict=False))
        return [Pair(at + norm, tuple(at + name for name in read)) for at in self.layers for norm, read in groups]

    def pairs(self, norms: bool = True) -> list[Pair]:
        """The pairs whose tensor can be smoothed: without `norms` those alone that a rotation does not turn."""
        block, head = self.block, self.head_dim if self.architecture.fusable else 0
        across = block.rms or (block.norms and self.config.get("activation_function", "relu") == "relu")
        values = [Pair(at + block.qkv[2], (at + block.o,), head) for at in self.layers]
        return [
            *([*self.norms(), *values] if norms else []),
            *(Pair(at + block.up[-1], (at + block.down,)) for at in self.layers if across),
        ]


def find_foldable(source: Source, *, rotate: bool) -> Foldable:
    """The modules of `source`. An ArtifactError, which says why, if it cannot be folded, or not rotated."""
    where, config = source.description / "config.json", source.config
    architecture = str((config.get("architectures") or ["of no named architecture"])[0])
    rotated = ", ".join(f"{each.name}ForCausalLM" for each in ARCHITECTURES.values() if each.fusable)
    supported = f"{rotated}; and to smooth, OPTForCausalLM and BERT-like encoders"
    if isinstance(source.meta_model.model, GPT2):
        raise ArtifactError(f"{where} is of a run of octavo's GPT-2: fold takes {supported}")
    like_bert = architecture.startswith("Bert")
    known = ARCHITECTURES.get("Bert" if like_bert else architecture.removesuffix("ForCausalLM"))
    if rotate and architecture.startswith(("OPT", "Bert")):
        raise ArtifactError(
            f"{where}: {architecture} has LayerNorm, whose mean and bias a rotation does not leave in place: only "
            f"models with RMSNorm are rotated ({rotated})"
        )
    if known is None or not (known.fusable or like_bert or known.name == "OPT"):
        raise ArtifactError(f"{where}: {architecture} cannot be folded; supported are {supported}")
    names, values = (name for name, _ in source.meta_model.model.named_modules()), known.block.qkv[2]
    layers = [name.removesuffix(values) for name in names if name.endswith(f".{values}")]
    found = Foldable(known, known.block, layers, config)
    for what, size in (("width", found.width), ("head width", found.head_dim)) if rotate else ():
        if size % 2:
            raise ArtifactError(f"{where}: its {what} {size} is odd, and there is no Hadamard rotation for that")
    return found


# ---- Linear layers that readers fuse into one GEMM: q, k and v; gate and up, which Mixtral calls w1 and w3.
#
# vLLM holds their weights as one tensor, which has one scheme. It refuses a folder in which one of them is packed and
# another is not, so the layers of a group are packed by one scheme, or all left in BF16.


def groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the layers `names`, in their order, by the GEMM that readers run them in; most are alone."""
    fused = []  # the last names of the layers of each such GEMM, of all architectures
    for each in ARCHITECTURES.values():
        layers = each.block.qkv, each.block.up, each.expert_up
        fused += [tuple(name.rpartition(".")[2] for name in together) for together in layers]
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        together = next((leaves for leaves in fused if leaf in leaves and len(leaves) > 1), (leaf,))
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
