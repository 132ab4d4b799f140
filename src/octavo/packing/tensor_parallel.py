"""A check that readers with tensor parallelism can split a packed model over several devices.

    q, k, v, gate, up, fc1      by output:  device i has rows    i*N/d .. (i+1)*N/d of w[N,K]
    o, down, fc2                by input:   device i has columns i*K/d .. (i+1)*K/d
    heads                       are not split; with more devices than heads of keys, several devices have the same head

Each device must have whole blocks of scales: 128 rows or columns for `block`, 32 columns for `mx`. A weight with one
scale for the tensor or for each row can be split anywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.artifact.packed.scheme import Scheme
from octavo.packing.misfits import check_reasons

_BY_OUTPUT = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "query", "key", "value", "intermediate.dense",
)  # fmt: skip
_BY_INPUT = ("o_proj", "out_proj", "down_proj", "fc2", "output.dense")
_WHOLE = ("project_in", "project_out")  # every device has all of it
_KEYS = ("k_proj", "v_proj")


def check_degrees(
    schemes: Mapping[str, Scheme],
    sizes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    degrees: Sequence[int],
) -> None:
    """Raise a ValueError unless the packed layers can be split over each of `degrees` devices.

    Args:
        schemes: of the packed layers, by name.
        sizes: [N, K] of each.
        config: the model's config.json.
        degrees: numbers of devices, each at least 1.

    The message names the layers, the degree and what to do instead.
    """
    for degree in degrees:
        if degree < 1:
            raise ValueError(f"a model is split over 1 device or more, not {degree}")
        heads = config.get("num_attention_heads")
        kept = _key_heads(config)
        if isinstance(heads, int) and heads % degree:
            raise ValueError(f"{heads} heads of attention do not divide over {degree} devices: {_others(heads)}")
        if kept is not None and kept % degree and degree % kept:
            raise ValueError(
                f"{kept} heads of keys and values neither divide over {degree} devices nor into them: {_others(kept)}"
            )
        found = {name: _misfit(name, scheme, sizes[name], degree, kept) for name, scheme in schemes.items()}
        check_reasons({name: reason for name, reason in found.items() if reason}, schemes, ", take a smaller degree")


def _key_heads(config: Mapping[str, Any]) -> int | None:
    kept = config.get("num_key_value_heads", config.get("num_attention_heads"))
    return kept if isinstance(kept, int) else None


def _others(count: int) -> str:
    return "take a degree of " + ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)


def _misfit(name: str, scheme: Scheme, size: tuple[int, ...], degree: int, kept: int | None) -> str:
    """The reason why a layer cannot be split, or "". A ValueError if readers may split it in another way."""
    if degree == 1 or name.endswith(_WHOLE):
        return ""
    by_output = name.endswith(_BY_OUTPUT)
    if not by_output and not name.endswith(_BY_INPUT):
        raise ValueError(
            f"{name}: how readers split this layer over {degree} devices is not known here: leave it in BF16 (--skip)"
        )
    parts = min(degree, kept) if kept is not None and name.endswith(_KEYS) else degree
    axis = 0 if by_output else 1
    granularity = scheme.weight.granularity
    block = (granularity.rows if by_output else granularity.cols) or 1
    if size[axis] % parts or (size[axis] // parts) % block:
        each = f"{list(size)} over {degree} devices gives each {size[axis] / parts:g} {('rows', 'columns')[axis]}"
        return f"{each}, which are no whole blocks of {block} ({scheme.name})"
    return ""
