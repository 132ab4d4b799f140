"""The report of a conversion: the layers converted, the layers skipped and why, and the matrices in high precision."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.nn.coverage import Coverage
from octavo.nn.grouped_linear import LEAST_SIDE
from octavo.ops import Backend
from octavo.recipe import Recipe
from octavo.words import plural


@dataclass(frozen=True)
class Row:
    """One linear layer, convolution, weight of attention, or stack of the matrices of experts, in a conversion.

    Args:
        shape: [N, K], or [E, N, K].
        reason: why it was skipped; "" if it was converted.
        speedup: how many times faster FP8 was predicted to be; None without `only_if_faster`.
    """

    name: str
    shape: tuple[int, ...]
    reason: str
    speedup: float | None = None


@dataclass(frozen=True)
class Conversion:
    """The report of `convert`; printed, it is a table.

    Args:
        recipe: of the converted layers.
        rows: one for each linear layer of the model, then one for each input weight of `nn.MultiheadAttention`, under
            the name of the parameter, and one for each convolution that is a matrix product.
        backends: the backends of "y", "dx" and "dw".
        coverage: the shares of the FLOPs and the parameters that FP8 computes, and each matrix that stays in high
            precision.
        speedup_source: where the predicted speedups come from; "" without `only_if_faster`.
        experts: one row for each stack of the matrices of experts; its name is that of the parameter.
        expert_backends: the backends of the grouped GEMMs "y", "dx" and "dw" of experts.
        fused: the names of the modules that quantize in the pass of a norm or activation, each with a description.
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    backends: dict[str, Backend]
    coverage: Coverage
    speedup_source: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[Row, ...] = ()
    expert_backends: Mapping[str, Backend] = field(default_factory=dict)

    @property
    def converted(self) -> list[str]:
        """The names of the converted layers; of experts, the names of their stacked matrices."""
        return [row.name for row in (*self.rows, *self.experts) if not row.reason]

    @property
    def skipped(self) -> dict[str, str]:
        """The names of the skipped layers, as in `converted`, each with its reason."""
        return {row.name: row.reason for row in (*self.rows, *self.experts) if row.reason}

    def summary(self) -> str:
        """The number of layers converted, the backend of each GEMM, and the matrices in high precision."""
        layers = plural(sum(not row.reason for row in self.rows), "linear layer")
        if not self.recipe.quantized:
            return f"{self.recipe.name}: {layers} without eight-bit GEMMs: the recipe casts nothing"
        skipped = sum(bool(row.reason) for row in self.rows)
        lines = [f"{self.recipe.name}: {layers} converted, {skipped} skipped"]
        for reason, count in Counter(row.reason for row in self.experts).items():
            outcome = f"left in high precision: {reason}" if reason else f"converted{self._slow_experts()}"
            lines.append(f"  {plural(count, 'stack')} of experts {outcome}")
        lines += [f"  {gemm:<2} {b.name}: {b.reason}" for gemm, b in self.backends.items()]
        if any(not row.reason for row in self.experts):
            for backend in dict.fromkeys(self.expert_backends.values()):
                gemms = ", ".join(gemm for gemm, other in self.expert_backends.items() if other == backend)
                lines.append(f"  {gemms} of experts {backend.name}: {backend.reason}")
        lines += [f"  fused: {count} x {what}" for what, count in Counter(self.fused.values()).items()]
        if self.speedup_source:
            lines.append(f"  only if faster: {self.speedup_source}")
        return "\n".join([*lines, *(f"  {line}" for line in str(self.coverage).splitlines())])

    def _slow_experts(self) -> str:
        """What is known about the speed of the converted experts."""
        narrow = any(min(row.shape[1:]) < LEAST_SIDE for row in self.experts if not row.reason)
        if not narrow or self.backends["y"].name == "emulated":
            return ""
        return (
            f"; with sides below {LEAST_SIDE} they are slower than in BF16 on an H200 (only_if_faster=True leaves them "
            "in BF16)"
        )

    def __repr__(self) -> str:
        rows = [(row.name or "(model)", row) for row in (*self.rows, *self.experts)]  # a layer alone has no name
        width = max(len(name) for name, _ in rows)
        lines = [self.summary()]
        for name, row in rows:
            *first, k = row.shape
            n = " x ".join(map(str, first))
            outcome = f"skipped: {row.reason}" if row.reason else "converted"
            if row.speedup is not None and not row.reason:
                outcome += f", {row.speedup:.2f}x"
            lines.append(f"  {name:<{width}}  {n:>6} x {k:<6}  {outcome}")
        return "\n".join(lines)
