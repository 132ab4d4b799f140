"""A recipe says which cast each operand has in the three GEMMs of a linear layer. Tokens T, inputs K, outputs N:

    y [T,N] = x [T,K]   @ w[N,K]^T      reduces over K
    dx[T,K] = dy[T,N]   @ w[N,K]        reduces over N
    dw[N,K] = dy[T,N]^T @ x[T,K]        reduces over T

A GEMM is two casts, in the order in which the formula names its operands, or None: it then runs in BF16. Each tensor
is an operand of two GEMMs. With the same cast in both it is quantized *once*, and the granularity decides how its bytes
are used along the other axis:

    tensor, square blocks   the bytes are transposed, and the scales with them
    row                     the bytes are transposed; the scale, now along the reduction, is folded into the other
                            operand: s_w and the mantissa of s_x into dy before dy is quantized, the exponent of s_x
                            into the bytes of dy
    groups                  the bytes cannot be used: the tensor is quantized again along the other axis
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW, TENSOR, block, group
from octavo.numerics.scaling import History

# The casts of the presets that packed formats use too. The floor of a weight row's scale is relative to the largest:
# without it a row far below the others would vanish from dy * s_w, and an all-zero row could never learn
# (docs/decisions.md).
ROW_X = Cast(granularity=ROW)
ROW_W = Cast(granularity=ROW, relative_floor=2.0**-8)
BLOCK_X = Cast(granularity=group(128))
BLOCK_W = Cast(granularity=block(128, 128))
MX_GROUPS = Cast(granularity=group(32), scale="e8m0")

_OPERANDS = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}
GEMMS = tuple(_OPERANDS)


@dataclass(frozen=True)
class Gemm:
    """A GEMM of two eight-bit operands.

    Args:
        a, b: the casts of the two operands: x and w in y, dy and w in dx, dy and x in dw.
        fast_accumulation: let the tensor core keep its partial sums at about 14 bits instead of promoting them.
    """

    a: Cast
    b: Cast
    fast_accumulation: bool = False


@dataclass(frozen=True)
class Recipe:
    """The casts of the three GEMMs of a linear layer.

    Args:
        name: what reports call the recipe.
        y, dx, dw: the three GEMMs; None runs the GEMM in BF16.
        rotate: rotate x and w along K by a Hadamard matrix before they are quantized.
        emulate: on a GPU that has no GEMM for these casts, compute it slowly in float32 instead of raising an error.

    Raises:
        ValueError: no GEMM takes these casts together.
    """

    name: str
    y: Gemm | None = None
    dx: Gemm | None = None
    dw: Gemm | None = None
    rotate: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        if any(cast.granularity == ROW and cast.scale == "e8m0" for cast in self._casts):
            raise ValueError(
                f"recipe {self.name}: no GEMM takes row scales in e8m0: use float32 scales rounded up to powers of two "
                "(scale='pow2'), or groups of 32 with e8m0 scales, as mxfp8 does"
            )
        if self.dx is not None and self.dx.b.granularity == ROW:
            self._check_row_dx(self.dx)
        if self.dw is not None and self.dw.b.granularity == ROW:
            self._check_row_dw(self.dw)

    def _check_row_dx(self, dx: Gemm) -> None:
        if dx.b != self.w or dx.a.history is not None:
            raise ValueError(
                f"recipe {self.name}: a row-scaled w in dx must be the cast of w in y (its bytes, transposed), and dy, "
                "into which its scale is folded, cannot scale by a history"
            )

    def _check_row_dw(self, dw: Gemm) -> None:
        dy, x = dw.a, dw.b
        if x != self.x or dy != self.dy or dy.granularity != ROW or not dy.power_of_two:
            raise ValueError(
                f"recipe {self.name}: a row-scaled dw takes the casts of x in y and of dy in dx, both by row and dy "
                "with power-of-two scales, since these are folded into the exponents of dy's bytes"
            )

    @property
    def x(self) -> Cast | None:
        """The cast of x in y, or in dw where y runs in BF16; None where both do."""
        return self.y.a if self.y is not None else None if self.dw is None else self.dw.b

    @property
    def w(self) -> Cast | None:
        """The cast of w in y, or in dx where y runs in BF16; None where both do."""
        return self.y.b if self.y is not None else None if self.dx is None else self.dx.b

    @property
    def dy(self) -> Cast | None:
        """The cast of dy in dx, or in dw where dx runs in BF16; None where both do."""
        return self.dx.a if self.dx is not None else None if self.dw is None else self.dw.a

    @property
    def quantizes_w_once(self) -> bool:
        """Whether dx reads the bytes of the cast `w`, transposed."""
        return self.dx is not None and self.dx.b == self.w and self.dx.b.bytes_serve_both

    @property
    def quantizes_x_once(self) -> bool:
        """Whether dw reads the bytes of the cast `x`, transposed."""
        return self.dw is not None and self.dw.b == self.x and self.dw.b.bytes_serve_both

    def in_bf16(self, *gemms: str) -> Recipe:
        """This recipe with some of its GEMMs in BF16, as in `rowwise().in_bf16("y", "dw")`. The other casts stay.

        Raises:
            ValueError: a name other than "y", "dx" and "dw".
        """
        if wrong := [name for name in gemms if name not in GEMMS]:
            raise ValueError(f"the GEMMs of a linear layer are {', '.join(GEMMS)}; got {wrong[0]!r}")
        chosen = [name for name in GEMMS if name in gemms and getattr(self, name) is not None]
        changes: dict[str, Any] = dict.fromkeys(chosen)
        return replace(self, name=f"{self.name} with {', '.join(chosen)} in bf16", **changes) if chosen else self

    @property
    def _casts(self) -> list[Cast]:
        return [cast for gemm in (self.y, self.dx, self.dw) if gemm is not None for cast in (gemm.a, gemm.b)]

    @property
    def quantized(self) -> bool:
        """Whether any of the three GEMMs runs on eight-bit operands."""
        return bool(self._casts)

    @property
    def fusable(self) -> FusableRecipe | None:
        """The three GEMMs, where the fused modules (`octavo.nn.NormLinear`, `octavo.nn.SwiGLU`) can run them, or None.

        All three must have row scales rounded to nearest, and nothing may be rotated. The fused modules quantize x and
        dy in the pass that computes a row, where the other rows are not known: only w may have a relative floor.
        """
        if self.y is None or self.dx is None or self.dw is None or self.rotate:
            return None
        by_row = all(cast.granularity == ROW and cast.rounding == "nearest" for cast in self._casts)
        if not by_row or self.dw.a.relative_floor or self.dw.b.relative_floor:
            return None
        return FusableRecipe(self.y.a, self.y.b, self.dx.a, self.y, self.dx, self.dw, self.emulate)

    def to_json(self) -> str:
        """The recipe as JSON: each GEMM by the names of its operands, null for BF16."""
        gemms = {name: _gemm_to_dict(getattr(self, name), *operands) for name, operands in _OPERANDS.items()}
        return json.dumps({"name": self.name, "rotate": self.rotate, "emulate": self.emulate, **gemms})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` wrote, in this version or an earlier one."""
        fields = json.loads(text)
        gemms = {name: _gemm_from_dict(fields[name], *operands) for name, operands in _OPERANDS.items()}
        return cls(fields["name"], **gemms, rotate=fields["rotate"], emulate=fields.get("emulate", False))


@dataclass(frozen=True)
class FusableRecipe:
    """A recipe that the fused modules can run (`Recipe.fusable`): the casts of its tensors, and its GEMMs."""

    x: Cast
    w: Cast
    dy: Cast
    y: Gemm
    dx: Gemm
    dw: Gemm
    emulate: bool


def _gemm_to_dict(gemm: Gemm | None, a: str, b: str) -> dict[str, Any] | None:
    if gemm is None:
        return None
    return {a: gemm.a.to_dict(), b: gemm.b.to_dict(), "fast_accumulation": gemm.fast_accumulation}


def _gemm_from_dict(fields: dict[str, Any] | None, a: str, b: str) -> Gemm | None:
    if fields is None or a not in fields:  # earlier versions wrote a GEMM without operands for BF16
        return None
    return Gemm(Cast.from_dict(fields[a]), Cast.from_dict(fields[b]), fields["fast_accumulation"])


def _one_cast_each(name: str, x: Cast, w: Cast, dy: Cast) -> Recipe:
    """Three quantized GEMMs in which each tensor has one cast. Only y accumulates fast."""
    return Recipe(name, Gemm(x, w, fast_accumulation=True), Gemm(dy, w), Gemm(dy, x))


def bf16() -> Recipe:
    """The three GEMMs in BF16: the baseline."""
    return Recipe("bf16")


def tensorwise(gradients: str = "e5m2") -> Recipe:
    """One scale a tensor, from its own amax."""
    x = Cast(granularity=TENSOR)
    return _one_cast_each("tensorwise", x, x, replace(x, format=gradients))


def tensorwise_rotated(gradients: str = "e5m2") -> Recipe:
    """`tensorwise` with x and w rotated along K by a Hadamard matrix, for inputs with outliers in a few channels.

    The rotated weight is saved for the backward pass in high precision. Source: QuaRot (arXiv:2404.00456).
    """
    return replace(tensorwise(gradients), name="tensorwise_rotated", rotate=True)


def rowwise(gradients: str = "e4m3") -> Recipe:
    """The default: one scale a row; each tensor is quantized once, and its bytes are transposed for the other GEMM.

    y and dx accumulate fast: one operand is a weight, whose signs are mixed. dw never does: its sum over the tokens may
    be of one sign, and fast accumulation then lost up to a third of it (docs/decisions.md).
    """
    dy = Cast(gradients, ROW, "pow2")
    y, dx = Gemm(ROW_X, ROW_W, fast_accumulation=True), Gemm(dy, ROW_W, fast_accumulation=True)
    return Recipe("rowwise", y, dx, Gemm(dy, ROW_X))


def rowwise_dw_bf16(gradients: str = "e4m3") -> Recipe:
    """`rowwise` with dw in BF16, for runs in which dw is the sensitive GEMM; x is saved in BF16.

    Only dw needs power-of-two scales of dy. Here they are float32, which also makes dx more accurate.
    """
    dx = Gemm(Cast(gradients, ROW), ROW_W, fast_accumulation=True)
    return Recipe("rowwise_dw_bf16", Gemm(ROW_X, ROW_W, fast_accumulation=True), dx)


def delayed(gradients: str = "e5m2", history: History | None = None) -> Recipe:
    """One scale a tensor from the history of its amax, so that quantizing reads each tensor once; a margin of 2."""
    x = Cast(granularity=TENSOR, history=history or History(margin=1.0))
    return _one_cast_each("delayed", x, x, replace(x, format=gradients))


def blockwise(gradients: str = "e4m3") -> Recipe:
    """x and dy in 1 x 128 blocks along each reduction, w in 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    return _one_cast_each("blockwise", BLOCK_X, BLOCK_W, replace(BLOCK_X, format=gradients))


def mxfp8(gradients: str = "e4m3") -> Recipe:
    """OCP microscaling: 32 elements along each reduction share an E8M0 scale."""
    return _one_cast_each("mxfp8", MX_GROUPS, MX_GROUPS, replace(MX_GROUPS, format=gradients))


def groupwise(gradients: str = "e4m3", size: int = 64) -> Recipe:
    """`size` elements (32 to 128) along each reduction share a float32 scale."""
    x = Cast(granularity=group(size))
    return _one_cast_each("groupwise", x, x, replace(x, format=gradients))


def fnuz(recipe: Recipe) -> Recipe:
    """`recipe` in the eight-bit formats of AMD's MI300, which have no infinities and no negative zero."""

    def turned(cast: Cast) -> Cast:
        return replace(cast, format=f"{cast.format}fnuz")

    gemms: dict[str, Any] = {name: getattr(recipe, name) for name in GEMMS}
    changes = {name: gemm and replace(gemm, a=turned(gemm.a), b=turned(gemm.b)) for name, gemm in gemms.items()}
    return replace(recipe, name=f"{recipe.name}_fnuz", **changes)


PRESETS: dict[str, Callable[..., Recipe]] = {
    f.__name__: f
    for f in (
        bf16, tensorwise, tensorwise_rotated, rowwise, rowwise_dw_bf16, delayed, blockwise, mxfp8, groupwise,
    )
}  # fmt: skip


def get_recipe(recipe: str | Recipe) -> Recipe:
    """The preset of that name; a `Recipe` is returned as it is.

    Raises:
        ValueError: no preset has this name; the message lists them.
        TypeError: neither a name nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        call = f": call it, {recipe.__name__}()" if recipe in PRESETS.values() else ""
        raise TypeError(f"recipe must be a preset's name or a Recipe, got {recipe!r}{call}")
    if recipe not in PRESETS:
        raise ValueError(f"unknown recipe {recipe!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[recipe]()
