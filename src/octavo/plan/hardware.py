"""GPUs: memory and rates of the data sheet, and the rates that were measured on them.

A data sheet's rate of matrix products is a peak that none reaches. Where nothing was measured, the plan takes the share
of it that was measured on an H100 for the same shapes, and says so.
"""

import difflib
import functools
import json
from dataclasses import dataclass
from importlib.resources import files

COPY_SHARE = (
    2996 / 3350
)  # of the data sheet's bandwidth, that a copy reaches on an H100 (bench/results/gpu_ceilings.json)
ATTENTION_SHARE = 483 / 989.4  # of the data sheet's BF16 rate: the two kernels in bench/results/gpu_stack.json


@dataclass(frozen=True)
class Gpu:
    """A GPU. Bytes, bytes a second and FLOP/s; `fp8` is None where there is no FP8 GEMM.

    Attributes:
        architecture: its key in `octavo.ops.gpu_architecture`, which decides the GEMMs.
        fp32: without tensor cores.
        link: bytes a second and direction to the other GPUs of the node, over NVLink, Infinity Fabric or PCIe.
        grid: the file of octavo.nn.speedup with the measured times of linear layers; None if none were measured.
        copy: measured bytes a second of a copy, reads and writes.
        attention: measured FLOP/s of the products of an attention's forward and backward pass.
        source, measured: where the figures come from.
    """

    key: str
    name: str
    architecture: str
    memory: float
    bandwidth: float
    bf16: float
    fp8: float | None
    fp32: float
    link: float
    source: str
    grid: str | None = None
    copy: float | None = None
    attention: float | None = None
    measured: str = ""

    @property
    def copy_rate(self) -> float:
        return self.copy or self.bandwidth * COPY_SHARE

    @property
    def instruction_rate(self) -> float:
        """Instructions a second for one element each: a multiplication with an addition is one, and two FLOPs."""
        return self.fp32 / 2

    @property
    def attention_rate(self) -> float:
        return self.attention or self.bf16 * ATTENTION_SHARE

    @property
    def origins(self) -> dict[str, str]:
        """For each rate, whether it was measured or follows from the data sheet."""
        sheet = "data sheet, times the share that an H100 reaches"
        return {
            "matrix products": "measured" if self.grid else sheet,
            "attention": "measured" if self.attention else sheet,
            "memory": "measured" if self.copy else sheet,
            "links": "data sheet",
        }


@functools.cache
def known_gpus() -> dict[str, Gpu]:
    """All GPUs by the name that `--gpu` takes."""
    rows = json.loads((files("octavo.plan") / "gpus.json").read_text())
    return {key: Gpu(key, **row) for key, row in rows.items()}


def find_gpu(name: str) -> Gpu:
    """The GPU of this name; case, spaces and dashes do not matter.

    Raises:
        ValueError: the table has no such GPU; the message names the nearest.
    """
    gpus, plain = known_gpus(), "".join(c for c in name.lower() if c.isalnum())
    if plain in gpus:
        return gpus[plain]
    near = difflib.get_close_matches(plain, gpus, n=1, cutoff=0.3)
    advice = f"; the nearest is {near[0]}" if near else ""
    raise ValueError(f"--gpu must be one of {', '.join(gpus)}; got {name!r}{advice}")
