"""The report of a conversion: the layers that run in FP8, those that do not and why, and every other matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.nn.coverage import Coverage
from octavo.ops import Backend
from octavo.recipe import Recipe
from octavo.words import plural


@dataclass(frozen=True)
class Row:
    """One linear layer in a conversion: its [N, K], why it was skipped (empty where it was converted), and how many
    times faster FP8 was predicted to be (`only_if_faster`; else None)."""

    name: str
    shape: tuple[int, int]
    reason: str
    gain: float | None = None


@dataclass(frozen=True)
class Conversion:
    """The report of `convert`; `str()` of it is a table.

    Args:
        recipe: what the converted layers run.
        rows: one for each linear layer of the model.
        backends: what y, dx and dw run on, by these names.
        coverage: the share of the parameters that FP8 computes, and each matrix that stays in high precision.
        gains: where the predicted gains come from; empty without `only_if_faster`.
        fused: names of the modules that norm or activate and quantize in one pass, with the layers that they run.
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    backends: dict[str, Backend]
    coverage: Coverage
    gains: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)

    @property
    def converted(self) -> list[str]:
        """The names of the layers that run as the recipe says."""
        return [row.name for row in self.rows if not row.reason]

    @property
    def skipped(self) -> dict[str, str]:
        """The names of the layers left as they were, with the reason."""
        return {row.name: row.reason for row in self.rows if row.reason}

    def summary(self) -> str:
        """The number of layers converted, what each of the three GEMMs runs on, and the matrices in high precision."""
        layers = plural(len(self.converted), "linear layer")
        lines = [f"{self.recipe.name}: {layers} converted, {len(self.skipped)} skipped"]
        lines += [f"  {gemm:<2} {b.name}: {b.reason}" for gemm, b in self.backends.items()]
        lines += [f"  fused: {count} x {what}" for what, count in Counter(self.fused.values()).items()]
        if self.gains:
            lines.append(f"  only if faster: {self.gains}")
        if self.recipe.quantized:
            lines += [f"  {line}" for line in str(self.coverage).splitlines()]
        return "\n".join(lines)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [self.summary()]
        for row in self.rows:
            n, k = row.shape
            outcome = f"skipped: {row.reason}" if row.reason else "converted"
            if row.gain is not None and not row.reason:
                outcome += f", {row.gain:.2f}x"
            lines.append(f"  {row.name:<{width}}  {n:>6} x {k:<6}  {outcome}")
        return "\n".join(lines)
