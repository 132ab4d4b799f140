"""The speed of each packing scheme over BF16, as it was measured, to say where a packed model is slower.

scheme_speeds.json holds, by tokens and scheme, the time of the linear layers of Llama-3-8B in BF16 over their time in
the scheme, with the quantization of their inputs (bench.gpu.schemes; `make docs` writes the file).
"""

import functools
import json
from collections import Counter
from collections.abc import Mapping
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
    if device.type != "cuda" or not any(part in torch.cuda.get_device_name(device) for part in SAME_CHIP):
        return ""
    notes = []
    for scheme, count in schemes.items():
        speeds = {tokens: found[scheme.name] for tokens, found in measured_speeds().items() if scheme.name in found}
        if slower := {tokens: speed for tokens, speed in speeds.items() if speed < 1}:
            figures = ", ".join(f"{speed:.2f}x at {plural(tokens, 'token')}" for tokens, speed in slower.items())
            notes.append(f"{plural(count, 'layer')} of the scheme {scheme.name} ({figures})")
    if not notes:
        return ""
    return (
        f"these layers are slower than BF16 on this GPU: {'; '.join(notes)}, as measured with the layers of "
        "Llama-3-8B. docs/performance.md has the speed of each scheme"
    )


@functools.cache
def measured_speeds() -> Mapping[int, Mapping[str, float]]:
    """The speed over BF16 by the number of tokens and the name of the scheme."""
    found: dict[str, Any] = json.loads((files("octavo.runtime") / "scheme_speeds.json").read_text())
    return {int(tokens): speeds for tokens, speeds in found["speeds"].items()}
