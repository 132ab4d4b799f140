"""Layers whose sizes a scheme cannot have: one message names all of them, with the options that pack the model."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from octavo.artifact.packed.scheme import Scheme
from octavo.hf.fused_groups import groups
from octavo.words import plural


def check_shapes(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a ValueError unless each weight [N, K] of `shapes` divides into the blocks of its scheme."""
    reasons = {name: scheme.misfit(*shapes[name]) for name, scheme in schemes.items()}
    check_reasons({name: reason for name, reason in reasons.items() if reason}, schemes)


def check_reasons(reasons: Mapping[str, str], schemes: Mapping[str, Scheme], other: str = "") -> None:
    """Raise a ValueError if there are `reasons` why layers cannot be packed.

    Args:
        reasons: by the name of the layer. The message has the first, and the options that pack all of them by channel,
            with the layers that readers fuse with them.
        schemes: of all packed layers.
        other: another remedy, with a comma before it.
    """
    if not reasons:
        return
    first, reason = next(iter(reasons.items()))
    more = f", and {plural(len(reasons) - 1, 'other layer')} cannot be packed either" if len(reasons) > 1 else ""
    changed = [name for group in groups(schemes) if not reasons.keys().isdisjoint(group) for name in group]
    options = [f"--layer '{glob}=channel'" for glob in _globs(changed, list(schemes))]
    by_channel = "--scheme channel" if len(changed) == len(schemes) else " ".join(options)
    raise ValueError(f"{first}: {reason}{more}: pack by channel ({by_channel}){other}, or leave in BF16 (--skip GLOB)")


def _globs(names: Sequence[str], every: Sequence[str]) -> list[str]:
    """Globs that match the layers `names` and no other of `every`; one for all layers of a kind where it can be."""
    found: dict[str, None] = {}
    for name in names:
        leaf = name.rpartition(".")[2]
        kinds = (f"*.{leaf}", f"*.experts.*.{leaf}")
        fitting = (
            glob
            for glob in kinds
            if fnmatchcase(name, glob) and all(one in names for one in every if fnmatchcase(one, glob))
        )
        found[next(fitting, name)] = None
    return list(found)
