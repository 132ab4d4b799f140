"""Linear layers that readers fuse into one GEMM: q, k and v; gate and up, which Mixtral calls w1 and w3.

vLLM holds their weights as one tensor, which has one scheme. It refuses a folder in which one of them is packed and
another is not, so the layers of a group are packed by one scheme, or all left in BF16.
"""

from collections.abc import Iterable, Mapping

from octavo.artifact.packed.scheme import Scheme

TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),  # BERT's
)


def groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the layers `names`, in their order, by the GEMM that readers run them in; most are alone."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        together = next((leaves for leaves in TOGETHER if leaf in leaves), (leaf,))
        found.setdefault((parent, together), []).append(name)
    return [tuple(layers) for layers in found.values()]


def check_groups(names: Iterable[str], schemes: Mapping[str, Scheme]) -> None:
    """Raise a ValueError unless the layers of each group have one scheme, or none.

    Args:
        names: of all linear layers.
        schemes: of the packed layers, by name.
    """
    for group in groups(names):
        chosen = {name: schemes[name].name if name in schemes else "BF16" for name in group}
        if len(set(chosen.values())) > 1:
            parent = group[0].rpartition(".")[0]
            each = ", ".join(f"{name.rpartition('.')[2]} {how}" for name, how in chosen.items())
            raise ValueError(
                f"{parent}: layers that readers run as one GEMM need one scheme, they have {each}: name all of them "
                "in --skip or --layer"
            )
