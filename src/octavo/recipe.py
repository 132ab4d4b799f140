"""A recipe reads as the three GEMMs of a linear layer. Tokens T, inputs K, outputs N:

    y [T,N] = x [T,K]   @ w[N,K]^T      reduces over K
    dx[T,K] = dy[T,N]   @ w[N,K]        reduces over N
    dw[N,K] = dy[T,N]^T @ x[T,K]        reduces over T

Each names the cast of its two operands, or none: that GEMM then runs in BF16. Every tensor stands in two GEMMs; the
same cast in both asks for *one* quantization, and the granularity says how its bytes serve the other direction:

    tensor, square blocks   the bytes transpose, and the scale with them
    row                     the bytes transpose, and the scale, now on the reduction, folds into the other operand:
                            s_w and the mantissa of s_x into dy before dy is quantized, exponents into dy's bytes
    groups                  nothing serves both: the tensor is quantized again along its other axis
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW, TENSOR, block, group
from octavo.numerics.scaling import History

# A weight row far below the others would vanish from dy * s_w, an all-zero one could never learn: docs/decisions.md.
WEIGHT_FLOOR = 2.0**-8


@dataclass(frozen=True)
class Gemm:
    """One GEMM: the casts of the two operands it has, and how it accumulates.

    Args:
        x, w, dy: the operand's cast; the two that the GEMM has, or neither (BF16).
        fast_accumulation: let the tensor core keep its partial sums at about 14 bits instead of promoting them.
    """

    x: Cast | None = None
    w: Cast | None = None
    dy: Cast | None = None
    fast_accumulation: bool = False

    @property
    def quantized(self) -> bool:
        """Whether this GEMM runs on eight-bit operands."""
        return any(cast is not None for cast in (self.x, self.w, self.dy))


@dataclass(frozen=True)
class Recipe:
    """Which cast, which GEMM, for y, dx and dw. Frozen; `to_json` and `from_json` round trip.

    Args:
        name: what reports call it.
        y, dx, dw: the three GEMMs.
        rotate: rotate x and w along K by a Hadamard matrix before anything is quantized.
    """

    name: str
    y: Gemm = field(default_factory=Gemm)
    dx: Gemm = field(default_factory=Gemm)
    dw: Gemm = field(default_factory=Gemm)
    rotate: bool = False

    def __post_init__(self) -> None:
        for gemm, operands in (("y", ("x", "w")), ("dx", ("dy", "w")), ("dw", ("dy", "x"))):
            given = {op for op in ("x", "w", "dy") if getattr(getattr(self, gemm), op) is not None}
            if given and given != set(operands):
                raise ValueError(
                    f"recipe {self.name}: {gemm} takes casts of {' and '.join(operands)}, got {sorted(given)}"
                )
        casts = [cast for gemm in (self.y, self.dx, self.dw) for cast in _casts(gemm)]
        if any(cast.granularity == ROW and cast.scale == "e8m0" for cast in casts):
            raise ValueError(
                f"recipe {self.name}: no GEMM takes row scales in e8m0: round float32 ones up, with scale='pow2', or "
                "give groups of 32 e8m0 scales, as mxfp8 does"
            )
        if self.dx.w is not None and self.dx.w.granularity == ROW:
            self._check_row_dx()
        if self.dw.x is not None and self.dw.x.granularity == ROW:
            self._check_row_dw()

    def _check_row_dx(self) -> None:
        assert self.dx.dy is not None
        if self.dx.w != self.y.w or self.dx.dy.history is not None:
            raise ValueError(
                f"recipe {self.name}: a row-scaled w in dx must be the cast of w in y (its bytes, transposed), and dy, "
                "into which its scale is folded, cannot scale by a history"
            )

    def _check_row_dw(self) -> None:
        x, dy = self.dw.x, self.dw.dy
        assert x is not None
        assert dy is not None
        if x != self.y.x or dy != self.dx.dy or dy.granularity != ROW or not dy.power_of_two:
            raise ValueError(
                f"recipe {self.name}: a row-scaled dw takes the casts of x in y and of dy in dx, both by row and dy "
                "with power-of-two scales, since these are folded into the exponents of dy's bytes"
            )

    @property
    def quantized(self) -> bool:
        """Whether any of the three GEMMs runs on eight-bit operands."""
        return self.y.quantized or self.dx.quantized or self.dw.quantized

    @property
    def delayed(self) -> bool:
        """Whether any cast keeps a history (then `octavo.update_scales` is due after each optimizer step)."""
        return any(cast.history is not None for gemm in (self.y, self.dx, self.dw) for cast in _casts(gemm))

    @property
    def folds(self) -> bool:
        """Whether all three GEMMs have float32 row scales, each tensor is quantized once, and rounding is to nearest.

        The fused modules (`octavo.nn.NormLinear`, `octavo.nn.SwiGLU`) are for such recipes. They quantize x and dy in
        the pass that makes a row, where a floor relative to other rows is not known; only w may have one.
        """
        casts = [cast for gemm in (self.y, self.dx, self.dw) for cast in _casts(gemm)]
        plain = all(cast.granularity == ROW and cast.rounding == "nearest" for cast in casts)
        floor = any(cast.relative_floor for cast in _casts(self.dw))  # of x or dy, whose casts are those in y and dx
        return len(casts) == 6 and plain and not floor and not self.rotate

    def to_json(self) -> str:
        """The recipe as JSON."""
        gemms = {name: _gemm_to_dict(getattr(self, name)) for name in ("y", "dx", "dw")}
        return json.dumps({"name": self.name, "rotate": self.rotate, **gemms})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` wrote."""
        fields = json.loads(text)
        gemms = {name: _gemm_from_dict(fields[name]) for name in ("y", "dx", "dw")}
        return cls(name=fields["name"], rotate=fields["rotate"], **gemms)


def _casts(gemm: Gemm) -> list[Cast]:
    return [cast for cast in (gemm.x, gemm.w, gemm.dy) if cast is not None]


def _gemm_to_dict(gemm: Gemm) -> dict[str, Any]:
    operands = {op: getattr(gemm, op) for op in ("x", "w", "dy")}
    casts = {op: cast.to_dict() for op, cast in operands.items() if cast is not None}
    return casts | {"fast_accumulation": gemm.fast_accumulation}


def _gemm_from_dict(fields: dict[str, Any]) -> Gemm:
    casts = {op: Cast.from_dict(fields[op]) for op in ("x", "w", "dy") if op in fields}
    return Gemm(fast_accumulation=fields["fast_accumulation"], **casts)


def _three(name: str, x: Cast, w: Cast, dy: Cast) -> Recipe:
    """A recipe of three quantized GEMMs, fast accumulation forward only."""
    return Recipe(name, y=Gemm(x=x, w=w, fast_accumulation=True), dx=Gemm(dy=dy, w=w), dw=Gemm(dy=dy, x=x))


def bf16() -> Recipe:
    """No quantization: the three GEMMs in BF16, the baseline."""
    return Recipe("bf16")


def tensorwise(gradients: str = "e5m2") -> Recipe:
    """One dynamic scale a tensor."""
    x = Cast(granularity=TENSOR)
    return _three("tensorwise", x, x, replace(x, format=gradients))


def rowwise(gradients: str = "e4m3") -> Recipe:
    """The one-quantization design, the default: a scale a row, each tensor quantized once, bytes transposed.

    Fast accumulation where one operand is a weight (y and dx), whose signs mix; never in dw, whose sum over the tokens
    may be of one sign: there it lost up to a third (docs/decisions.md).
    """
    x = Cast(granularity=ROW)
    w, dy = replace(x, relative_floor=WEIGHT_FLOOR), replace(x, format=gradients, scale="pow2")
    recipe = _three("rowwise", x, w, dy)
    return replace(recipe, dx=replace(recipe.dx, fast_accumulation=True))


def rowwise_dw_bf16(gradients: str = "e4m3") -> Recipe:
    """`rowwise` with dw in BF16, for runs whose gradients are the sensitive part; saves x in BF16.

    Only dw asks for power-of-two scales of dy. Here they are float32, so dx too is nearer to the exact product.
    """
    recipe = rowwise(gradients)
    assert recipe.dx.dy is not None
    dx = replace(recipe.dx, dy=replace(recipe.dx.dy, scale="fp32"))
    return replace(recipe, name="rowwise_dw_bf16", dx=dx, dw=Gemm())


def delayed(gradients: str = "e5m2", history: History | None = None) -> Recipe:
    """One scale a tensor from the history of its amax: a single pass over each tensor."""
    x = Cast(granularity=TENSOR, history=history or History())
    return _three("delayed", x, x, replace(x, format=gradients))


def blockwise(gradients: str = "e4m3") -> Recipe:
    """x and dy in 1 x 128 blocks along each reduction, w in 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    x = Cast(granularity=group(128))
    return _three("blockwise", x, Cast(granularity=block(128, 128)), replace(x, format=gradients))


def mxfp8(gradients: str = "e4m3") -> Recipe:
    """OCP microscaling: 32 elements along each reduction share an E8M0 scale."""
    x = Cast(granularity=group(32), scale="e8m0")
    return _three("mxfp8", x, x, replace(x, format=gradients))


def groupwise(gradients: str = "e4m3", size: int = 64) -> Recipe:
    """`size` elements (32 to 128) along each reduction share a float32 scale."""
    x = Cast(granularity=group(size))
    return _three("groupwise", x, x, replace(x, format=gradients))


def fnuz(recipe: Recipe) -> Recipe:
    """`recipe` in the eight-bit formats of AMD's MI300, which have no infinities and no negative zero."""

    def turned(gemm: Gemm) -> Gemm:
        given = {op: getattr(gemm, op) for op in ("x", "w", "dy") if getattr(gemm, op) is not None}
        return replace(gemm, **{op: replace(cast, format=f"{cast.format}fnuz") for op, cast in given.items()})

    name = f"{recipe.name}_fnuz"
    return replace(recipe, name=name, y=turned(recipe.y), dx=turned(recipe.dx), dw=turned(recipe.dw))


PRESETS: dict[str, Callable[..., Recipe]] = {
    f.__name__: f for f in (bf16, tensorwise, rowwise, rowwise_dw_bf16, delayed, blockwise, mxfp8, groupwise)
}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe itself, or the preset of that name; a ValueError names the choices, a TypeError what else came."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        call = f": call it, {recipe.__name__}()" if recipe in PRESETS.values() else ""
        raise TypeError(f"recipe must be a preset's name or a Recipe, got {recipe!r}{call}")
    if recipe not in PRESETS:
        raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[recipe]()
