"""Linear layers that consumers run as one GEMM: q, k and v; gate and up.

vLLM holds their weights as one tensor, which has one scheme: it refuses a folder in which one of them is packed and
another is not. So they are packed alike, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.artifact.packed.scheme import Scheme

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))  # the last are BERT's


def groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The layers `names` in groups that consumers run as one, in their order; most are alone."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        together = next((leaves for leaves in TOGETHER if leaf in leaves), (leaf,))
        found.setdefault((parent, together), []).append(name)
    return [tuple(layers) for layers in found.values()]


def check_groups(names: Iterable[str], schemes: Mapping[str, Scheme]) -> None:
    """Raise a ValueError unless the layers of each group have one scheme, or none.

    Args:
        names: every linear layer.
        schemes: of those that are packed.
    """
    for group in groups(names):
        chosen = {name: schemes[name].name if name in schemes else "BF16" for name in group}
        if len(set(chosen.values())) > 1:
            parent = group[0].rpartition(".")[0]
            each = ", ".join(f"{name.rpartition('.')[2]} {how}" for name, how in chosen.items())
            raise ValueError(
                f"{parent}: layers that consumers run as one GEMM need one scheme, they have {each}: name all of them "
                "in --skip or --layer"
            )
