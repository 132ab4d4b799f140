"""The matrices of each expert of a model of transformers, by their names in its files."""

from typing import NamedTuple

from octavo.hf.meta_model import MetaModel
from octavo.nn.expert_conversion import find_experts
from octavo.nn.experts import Experts


class ExpertMatrices(NamedTuple):
    """The names of an expert's matrices in the files: y = down(act(gate(x)) * up(x))."""

    gate: str
    up: str
    down: str


def expert_matrices(meta_model: MetaModel) -> dict[str, list[ExpertMatrices]]:
    """The experts of each module of the model whose mathematics is known, by number."""
    files, found = meta_model.experts, {}
    if files is None:
        return {}
    for name in find_experts(meta_model.model):
        inner, outer = (files.parts.get(f"{name}.{leaf}", []) for leaf in Experts.matrices)
        if outer and len(inner) == 2 * len(outer):
            parts = zip(inner[: len(outer)], inner[len(outer) :], outer, strict=True)  # the gates of all, then the ups
            found[name] = [ExpertMatrices(*(part.removesuffix(".weight") for part in each)) for each in parts]
    return found
