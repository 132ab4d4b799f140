"""Tables of speedups that were made up, for machines that are not here."""

from collections.abc import Callable
from itertools import product

from octavo.ops import Backend
from octavo.rates.measured import Machine, Measurement, Shape, Table

UNKNOWN = Machine("Fast GPU 9000", "9.9", "13.0", "2.11.0+cu130", "0.1.0")
H100 = Machine("NVIDIA H100 80GB HBM3", "9.0", "13.0", "2.11.0+cu130", "0.1.0")
NATIVE = dict.fromkeys(("y", "dx", "dw"), Backend("cublaslt", "row x row scales"))
AXES = ((2048, 8192, 32768), (1024, 2048, 16384), (1024, 4096))


def row(shape: Shape, speedup: float, recipe: str = "rowwise") -> Measurement:
    return Measurement(recipe, *shape, bf16_ms=2 * speedup, fp8_ms=2.0)


def table_of(speedup: Callable[[int, int, int], float], machine: Machine = UNKNOWN) -> Table:
    return Table(machine, "made up", grid=tuple(row(shape, speedup(*shape)) for shape in product(*AXES)))
