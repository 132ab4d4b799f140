"""The speed of each packing scheme over BF16, as it was measured, to say where a packed model is slower.

scheme_speeds.json holds, by tokens and scheme, the time of the linear layers of Llama-3-8B in BF16 over their time in
the scheme, with the quantization of their inputs (bench.gpu.schemes; `make docs` writes the file). expert_speeds.json
holds the same of two layers of experts, by the sizes of their matrices (bench.gpu.packed_experts).
"""

import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import torch

from octavo.artifact.packed.scheme import Scheme
from octavo.words import plural

SAME_CHIP = ("H100", "H200")  # parts of the names of GPUs that the file holds for


def slower_note(schemes: Counter[Scheme], device: torch.device) -> str:
    """The layers whose scheme was measured to be slower than BF16 on `device`; "" for none, or if nothing is known.

    Args:
        schemes: of the packed layers, with the number of layers of each.
        device: of the model. Other GPUs than Hopper's were not measured. A CPU emulates every scheme.
    """
    if not _is_measured(device):
        return ""
    notes = []
    for scheme, count in schemes.items():
        if figures := _slower(measured_speeds(), scheme):
            notes.append(f"{plural(count, 'layer')} of the scheme {scheme.name} ({figures})")
    if not notes:
        return ""
    return (
        f"these layers are slower than BF16 on this GPU: {'; '.join(notes)}, as measured with the layers of "
        "Llama-3-8B. docs/performance.md has the speed of each scheme"
    )


def slower_experts_note(scheme: Scheme, sizes: tuple[int, int], device: torch.device) -> str:
    """That experts of `scheme` were measured to be slower than BF16 on `device`; "" if not, or if nothing is known.

    Args:
        sizes: [N, K] of a gate and up matrix. The measured layer whose matrices are the most alike in size counts.
    """
    if not _is_measured(device):
        return ""
    shape, speeds = measured_experts_like(math.prod(sizes) / 2)
    figures = _slower(speeds, scheme)
    if not figures:
        return ""
    return (
        f"experts of the scheme {scheme.name} are slower than BF16 on this GPU: {figures}, as measured with "
        f"{shape['experts']} experts of {shape['width']:,} x {shape['mlp_width']:,}. Pack experts by channel instead"
    )


def _is_measured(device: torch.device) -> bool:
    return device.type == "cuda" and any(part in torch.cuda.get_device_name(device) for part in SAME_CHIP)


def _slower(speeds: Mapping[int, Mapping[str, float]], scheme: Scheme) -> str:
    """The speeds of a scheme below that of BF16, in words."""
    found = {tokens: of_tokens[scheme.name] for tokens, of_tokens in speeds.items() if scheme.name in of_tokens}
    return ", ".join(f"{speed:.2f}x at {plural(tokens, 'token')}" for tokens, speed in found.items() if speed < 1)


def measured_experts_like(size: float) -> tuple[Mapping[str, int], Mapping[int, Mapping[str, float]]]:
    """The measured layer of experts whose matrices are the nearest to `size` elements.

    Returns:
        Its sizes, and its speed over BF16 by the number of tokens and the scheme.
    """

    def differs(shape: Mapping[str, int]) -> float:
        return abs(math.log(size / (shape["width"] * shape["mlp_width"])))

    return min(measured_expert_speeds(), key=lambda found: differs(found[0]))


@functools.cache
def measured_expert_speeds() -> Sequence[tuple[Mapping[str, int], Mapping[int, Mapping[str, float]]]]:
    """The sizes of each measured layer of experts, and its speeds as in `measured_experts_like`."""
    found: dict[str, Any] = json.loads((files("octavo.runtime") / "expert_speeds.json").read_text())
    return [(layer["shape"], _by_tokens(layer["speeds"])) for layer in found["layers"]]


@functools.cache
def measured_speeds() -> Mapping[int, Mapping[str, float]]:
    """The speed over BF16 by the number of tokens and the name of the scheme."""
    found: dict[str, Any] = json.loads((files("octavo.runtime") / "scheme_speeds.json").read_text())
    return _by_tokens(found["speeds"])


def _by_tokens(speeds: Mapping[str, Mapping[str, float]]) -> Mapping[int, Mapping[str, float]]:
    return {int(tokens): of_tokens for tokens, of_tokens in speeds.items()}
