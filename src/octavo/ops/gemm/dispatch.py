"""The GEMMs of PyTorch's `scaled_mm` on each GPU, recorded in dispatch.json.

Octavo's tests run on Hopper GPUs. For the other architectures the lines come from PyTorch's sources and binaries, which
each line names, and nothing is measured. A line is either a GEMM or a refusal:

    gpus                 keys of `octavo.ops.gpu_architecture`; hopper_cuda_12.8: PyTorch is built for CUDA < 12.9
    scales               of a and b: granularity, and "e8m0" for scales that are not float32
    library              that has the kernel
    formats              of a and b
    out                  dtypes of y that the kernel writes
    fast_accumulation    whether the option has an effect; every GEMM accepts it
    refusal              PyTorch's own message
"""

import json
from dataclasses import dataclass
from importlib.resources import files

DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Line:
    """One line of dispatch.json for one architecture; `library` is "" for a refusal."""

    library: str = ""
    formats: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    fast_accumulation: bool = False
    refusal: str = ""


def _read_lines() -> dict[tuple[str, str], Line]:
    found: dict[tuple[str, str], Line] = {}
    rows = json.loads((files("octavo.ops.gemm") / "dispatch.json").read_text())["gemms"]
    for row in rows:
        line = Line(
            row.get("library", ""),
            tuple(row.get("formats", ())),
            tuple(row.get("out", "").split()),
            row.get("fast_accumulation", False),
            row.get("refusal", ""),
        )
        found |= {(gpu, row["scales"]): line for gpu in row["gpus"].split()}
    return found


# (architecture, scales of a and b) -> the line. A plain dictionary: torch.compile traces the look-up.
LINES = _read_lines()
