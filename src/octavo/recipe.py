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

A Hadamard rotation belongs to a GEMM, not to a tensor: both operands are rotated along the reduction, where the two
rotations cancel (`octavo.numerics.scaling`), and quantized for this GEMM alone. `Recipe.rotate` names the GEMMs:

    y     x and w along K
    dx    dy and w along N
    dw    dy and x along T

The other GEMMs read bytes without a rotation. From rotated bytes of x, dw would have to be rotated back along K, which
spreads the error of the largest input over all others (docs/decisions.md).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch

from octavo.numerics.qtensor import ROW, TENSOR, Cast, block, group, parse_granularity
from octavo.numerics.scaling import History
from octavo.util import check_kinds, nearest, parse_object

_OPERANDS = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}
GEMMS = tuple(_OPERANDS)


@dataclass(frozen=True)
class Gemm:
    """A GEMM of two eight-bit operands.

    Args:
        a, b: the casts of the two operands: x and w in y, dy and w in dx, dy and x in dw.
        fast_accumulation: let the tensor core keep its partial sums at about 14 bits instead of promoting them.

    Raises:
        TypeError: an operand is no `Cast`, such as the name of a format, or `fast_accumulation` no bool.

    Example:
        >>> octavo.Recipe("mine", y=octavo.Gemm(octavo.Cast("e4m3"), octavo.Cast("e4m3")))  # dx and dw in BF16
    """

    a: Cast
    b: Cast
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        for operand, cast in (("a", self.a), ("b", self.b)):
            if not isinstance(cast, Cast):
                fix = f"Cast({cast!r}), whose scales are by row" if isinstance(cast, str) else 'Cast("e4m3")'
                raise TypeError(
                    f"a Gemm takes the casts of its two operands, got {cast!r} ({type(cast).__name__}) for {operand}: "
                    f"give a Cast, such as {fix}"
                )
        check_kinds(vars(self), {"fast_accumulation": bool}, "a Gemm's ", TypeError)


@dataclass(frozen=True)
class Recipe:
    """The casts of the three GEMMs of a linear layer.

    Args:
        name: what reports call the recipe.
        y, dx, dw: the three GEMMs; None runs the GEMM in BF16.
        rotate: the GEMMs whose two operands are rotated along the reduction by a Hadamard matrix before they are
            quantized, for this GEMM alone: any of "y", "dx" and "dw" (`octavo.recipe`).
        emulate: on a GPU that has no GEMM for these casts, compute it slowly in float32 instead of raising an error.
        exact_backward: dx and dw, both in BF16, read the numbers that the bytes of y stand for. They are the gradients
            of the y that was computed, and not of its high-precision twin.

    Attributes:
        fusable: the three GEMMs, where the fused modules (`octavo.nn.NormLinear`, `octavo.nn.SwiGLU`) can run them, or
            None.
        text: the fields as `from_json` reads them, with the same name for all recipes. Compiled code takes a string as
            a constant, and not a recipe.

    Raises:
        TypeError: y, dx or dw is neither a `Gemm` nor None, or `emulate` or `exact_backward` no bool.
        ValueError: no GEMM takes these casts together, `rotate` names something else, or `exact_backward` does not fit.
    """

    name: str
    y: Gemm | None = None
    dx: Gemm | None = None
    dw: Gemm | None = None
    rotate: tuple[str, ...] = ()
    emulate: bool = False
    exact_backward: bool = False
    fusable: FusableRecipe | None = field(init=False, repr=False, compare=False)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in GEMMS:
            if not isinstance(gemm := getattr(self, name), Gemm | None):
                raise TypeError(
                    f"recipe {self.name}: {name} must be a Gemm, or None for BF16, got {gemm!r} "
                    f"({type(gemm).__name__}): give Gemm(Cast(...), Cast(...))"
                )
        check_kinds(vars(self), {"emulate": bool, "exact_backward": bool}, f"recipe {self.name}: ", TypeError)
        if any(cast.format == "int8" for cast in self._casts):
            raise ValueError(f"recipe {self.name}: training takes FP8 formats, not int8, which is a packing scheme")
        if any(cast.by_row and cast.format == "e2m1" for cast in self._casts):
            raise ValueError(
                f"recipe {self.name}: e2m1 has no exponents into which a row scale could be folded: use groups of 32 "
                "or 16, as mxfp4 and nvfp4 do"
            )
        if any(cast.by_row and cast.scale_dtype == torch.float8_e8m0fnu for cast in self._casts):
            raise ValueError(
                f"recipe {self.name}: no GEMM takes row scales in e8m0: use float32 scales rounded up to powers of two "
                "(scale='pow2'), or groups of 32 with e8m0 scales, as mxfp8 does"
            )
        self._check_rotation()
        self._check_row_scales()
        self._check_histories()
        casts = () if self.y is None or "y" in self.rotate else (self.y.a, self.y.b)
        fits = casts and all(cast.bytes_serve_both and cast.rounding == "nearest" for cast in casts)
        if self.exact_backward and not (fits and self.dx is None and self.dw is None):
            raise ValueError(
                f"recipe {self.name}: exact_backward takes dx and dw in BF16, and casts of y without rotation, by row, "
                f"tensor or square block, rounded to nearest; got {self!r}: leave it out"
            )
        object.__setattr__(self, "text", json.dumps(self.to_dict() | {"name": "compiled"}))  # the dataclass is frozen
        object.__setattr__(self, "fusable", self._find_fusable())

    def _check_rotation(self) -> None:
        named = self.rotate if isinstance(self.rotate, Sequence) and not isinstance(self.rotate, str) else None
        if named is None or any(name not in GEMMS for name in named):
            raise ValueError(
                f"recipe {self.name}: rotate lists the GEMMs whose operands are rotated, of {', '.join(GEMMS)}, such "
                f"as ['y'] for x and w along K; got {self.rotate!r}"
            )
        object.__setattr__(self, "rotate", tuple(gemm for gemm in GEMMS if gemm in named))  # the dataclass is frozen
        if wide := [gemm for gemm in self.rotate if getattr(self, gemm) is None]:
            raise ValueError(
                f"recipe {self.name}: rotate names {wide[0]}, of which no operand is quantized: leave it out, or give "
                f"{wide[0]} casts"
            )

    def _check_histories(self) -> None:
        """Each tensor has one history, that of its first quantization; a rotated GEMM scales by its operands' amax."""
        for name, (a, b) in _OPERANDS.items():
            gemm: Gemm | None = getattr(self, name)
            for operand, cast in () if gemm is None else ((a, gemm.a), (b, gemm.b)):
                first = None if name in self.rotate else getattr(self, operand)
                if cast.history is not None and cast != first:
                    where = f"{'dx' if operand == 'dy' else 'y'}.{operand}"
                    raise ValueError(
                        f"recipe {self.name}: {name}.{operand} has a history, but quantizes its tensor "
                        f"{'for a rotated GEMM alone' if first is None else 'a second time'}, by the tensor's own "
                        "amax: leave the history out"
                        + ("" if first is None else f", or take the cast of {where} in both")
                    )

    def _check_row_scales(self) -> None:
        """A row scale of w in dx, or of x in dw, is folded into dy."""
        dx, dw = (None if name in self.rotate else getattr(self, name) for name in ("dx", "dw"))
        if dx is not None and dx.b.by_row and (dx.b != self.w or dx.a.history is not None):
            raise ValueError(
                f"recipe {self.name}: a row-scaled w in dx must be the cast of w in y (its bytes, transposed), and dy, "
                "into which its scale is folded, cannot scale by a history"
            )
        if dw is None or not dw.b.by_row:
            return
        if (dw.b, dw.a) != (self.x, self.dy) or not dw.a.by_row or not dw.a.power_of_two:
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
        """True if dx reads the bytes of the cast `w`, transposed or widened."""
        if self.dx is None or "dx" in self.rotate:
            return self.exact_backward
        return self.dx.b == self.w and self.dx.b.bytes_serve_both

    @property
    def reads_w_twice(self) -> bool:
        """True if y and dx read different bytes of w: in groups along their own reduction, or rotated for one."""
        return self.y is not None and self.dx is not None and ("y" in self.rotate or not self.quantizes_w_once)

    @property
    def quantizes_x_once(self) -> bool:
        """True if dw reads the bytes of the cast `x`, transposed or widened."""
        if self.dw is None or "dw" in self.rotate:
            return self.exact_backward
        return self.dw.b == self.x and self.dw.b.bytes_serve_both

    @property
    def repeatable_w(self) -> Cast | None:
        """The cast `w`, if y reads it and it gives the same bytes at each call: no history or random rounding."""
        w = None if "y" in self.rotate else self.w
        return w if w is not None and w.history is None and w.rounding == "nearest" else None

    @property
    def reads_bytes(self) -> bool:
        """True if the GEMMs read no numbers of w, but bytes and scales that are the same at each call."""
        backward = self.dx is not None or self.exact_backward
        once = self.y is not None and backward and not self.reads_w_twice and "dx" not in self.rotate
        return once and self.repeatable_w is not None and self.repeatable_w.scale != "e4m3"

    @property
    def scales_by_history(self) -> bool:
        """True if the scales of x and w come from histories of these tensors."""
        return all(cast is not None and cast.history is not None for cast in (self.x, self.w))

    def in_bf16(self, *gemms: str) -> Recipe:
        """This recipe with some of its GEMMs in BF16, as in `rowwise().in_bf16("y", "dw")`. The other casts stay."""
        if wrong := [name for name in gemms if name not in GEMMS]:
            raise ValueError(f"the GEMMs of a linear layer are {', '.join(GEMMS)}; got {wrong[0]!r}")
        chosen = [name for name in GEMMS if name in gemms and getattr(self, name) is not None]
        if not chosen:
            return self
        rotate = tuple(gemm for gemm in self.rotate if gemm not in chosen)
        changes: dict[str, Any] = {"rotate": rotate, "exact_backward": self.exact_backward and "y" not in chosen}
        changes |= dict.fromkeys(chosen)
        return replace(self, name=f"{self.name} with {', '.join(chosen)} in bf16", **changes)

    @property
    def _casts(self) -> list[Cast]:
        return [cast for gemm in (self.y, self.dx, self.dw) if gemm is not None for cast in (gemm.a, gemm.b)]

    @property
    def quantized(self) -> bool:
        """True if any of the three GEMMs runs on eight-bit operands."""
        return len(self._casts) > 0  # torch 2.11 cannot trace bool() of a list

    @property
    def has_four_bits(self) -> bool:
        """True if an operand of the three GEMMs is in E2M1."""
        return any(cast.format == "e2m1" for cast in self._casts)

    def _find_fusable(self) -> FusableRecipe | None:
        """See `fusable`.

        All three must have row scales rounded to nearest, and nothing may be rotated. The fused modules quantize x and
        dy in the pass that computes a row, where the other rows are not known: only w may have a relative floor.
        """
        if self.y is None or self.dx is None or self.dw is None or self.rotate:
            return None
        by_row = all(cast.by_row and cast.rounding == "nearest" for cast in self._casts)
        if not by_row or self.dw.a.relative_floor or self.dw.b.relative_floor:
            return None
        return FusableRecipe(self.y.a, self.y.b, self.dx.a, self.y, self.dx, self.dw, self.emulate, self.text)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        gemms = {name: getattr(self, name) for name in GEMMS}
        casts = ", ".join(f"{name}: {f'{gemm.a} x {gemm.b}' if gemm else 'bf16'}" for name, gemm in gemms.items())
        exact = ", exact_backward=True" if self.exact_backward else ""
        return f"Recipe({self.name!r}, {casts}, rotate={self.rotate}, emulate={self.emulate}{exact})"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON values: each GEMM by the names of its operands, None for BF16."""
        gemms: dict[str, Any] = dict.fromkeys(GEMMS)
        for name, (a, b) in _OPERANDS.items():
            if gemm := getattr(self, name):
                gemms[name] = {a: gemm.a.to_dict(), b: gemm.b.to_dict(), "fast_accumulation": gemm.fast_accumulation}
        settings = {"name": self.name, "rotate": list(self.rotate), "emulate": self.emulate}
        # Earlier versions read the recipes of all others.
        return settings | ({"exact_backward": True} if self.exact_backward else {}) | gemms

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str = "custom") -> Recipe:
        """The recipe of the fields that `to_dict` gave, in this version or an earlier one, or that a person wrote.

        A field that is left out has the default of its class: a GEMM runs in BF16. The name is then `name`.

        Raises:
            ValueError: an unknown field, a value of the wrong type or outside its range, or casts that no GEMM takes
                together; the message names the field, such as y.x.granularity.
        """
        kinds = {"name": str, "rotate": object, "emulate": bool, "exact_backward": bool} | dict.fromkeys(GEMMS, object)
        found = {"name": name} | _read_fields(values, kinds, "")
        if not found["name"]:
            raise ValueError("name must not be empty")
        return cls(**found | {gemm: _read_gemm(found.get(gemm), gemm) for gemm in GEMMS})

    def to_json(self) -> str:
        """The recipe as JSON, the fields of `to_dict`."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The recipe that `to_json` wrote, in this version or an earlier one."""
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class FusableRecipe:
    """A recipe that the fused modules can run (`Recipe.fusable`): the casts of its tensors, its GEMMs, and its text."""

    x: Cast
    w: Cast
    dy: Cast
    y: Gemm
    dx: Gemm
    dw: Gemm
    emulate: bool
    text: str


# ---- The presets.

# The casts of the presets that packed formats use too. The floor of a weight row's scale is relative to the largest:
# without it a row far below the others would vanish from dy * s_w, and an all-zero row could never learn
# (docs/decisions.md).
ROW_X = Cast(granularity=ROW)
ROW_W = Cast(granularity=ROW, relative_floor=2.0**-8)
BLOCK_X = Cast(granularity=group(128))
BLOCK_W = Cast(granularity=block(128, 128))
MX_GROUPS = Cast(granularity=group(32), scale="e8m0")


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
    """`tensorwise` with x and w rotated along K by a Hadamard matrix for y; dx and dw are those of `tensorwise`.

    Source: QuaRot (arXiv:2404.00456).
    """
    return replace(tensorwise(gradients), name="tensorwise_rotated", rotate=("y",))


def rowwise(gradients: str = "e4m3") -> Recipe:
    """The default: one scale a row; each tensor is quantized once, and its bytes are transposed for the other GEMM.

    y and dx accumulate fast: one operand is a weight, whose signs are mixed. dw never does. Its sum over the tokens may
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


def rowwise_forward() -> Recipe:
    """`rowwise` in y, and the exact gradient of that y: dx and dw in BF16, from the numbers of the same bytes.

    For fine-tuning and reinforcement learning, where an engine multiplies these bytes. x is saved in one byte. Source:
    the backward override of Transformer Engine (pull request 2644).
    """
    return Recipe("rowwise_forward", Gemm(ROW_X, ROW_W, fast_accumulation=True), exact_backward=True)


def delayed(gradients: str = "e5m2", history: History | None = None) -> Recipe:
    """One scale a tensor from the history of its amax, with room for twice that: quantizing reads each tensor once."""
    x = Cast(granularity=TENSOR, history=history or History())
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


def mxfp4() -> Recipe:
    """Four bits: E2M1 in groups of 32 with the E8M0 scales of MX, and dy rounded stochastically. Emulated.

    dy and w are rotated for dx, and dy and x for dw. Scales of dy are rounded up, so that nothing saturates and the
    rounding has no bias. Source: Tseng et al., "Training LLMs with MXFP4" (arXiv:2502.20586).
    """
    x, dy = Cast("e2m1", group(32), "e8m0_floor"), Cast("e2m1", group(32), "e8m0", "stochastic")
    return Recipe("mxfp4", Gemm(x, x), Gemm(dy, x), Gemm(dy, x), rotate=("dx", "dw"))


def nvfp4() -> Recipe:
    """Four bits: E2M1 with E4M3 scales and one of the tensor; x and dy in groups of 16, w in squares. Emulated.

    dy is rounded stochastically. dy and x are rotated for dw. Source: NVIDIA, "Pretraining Large Language Models with
    NVFP4" (arXiv:2509.25149), which also leaves some layers in BF16 and rotates 16 tokens at a time.
    """
    x, w = Cast("e2m1", group(16), "e4m3"), Cast("e2m1", block(16, 16), "e4m3")
    dy = replace(x, rounding="stochastic")
    return Recipe("nvfp4", Gemm(x, w), Gemm(dy, w), Gemm(dy, x), rotate=("dw",))


def fnuz(recipe: Recipe) -> Recipe:
    """`recipe` in the eight-bit formats of AMD's MI300, which have no infinities and no negative zero."""
    if recipe.has_four_bits:
        return recipe

    def turned(cast: Cast) -> Cast:
        return replace(cast, format=f"{cast.format}fnuz")

    gemms: dict[str, Any] = {name: getattr(recipe, name) for name in GEMMS}
    changes = {name: gemm and replace(gemm, a=turned(gemm.a), b=turned(gemm.b)) for name, gemm in gemms.items()}
    return replace(recipe, name=f"{recipe.name}_fnuz", **changes)


RecipeName = Literal[
    "bf16", "tensorwise", "tensorwise_rotated", "rowwise", "rowwise_dw_bf16", "rowwise_forward", "delayed",
    "blockwise", "mxfp8", "groupwise", "mxfp4", "nvfp4",
]  # fmt: skip
RECIPE_FILES = (".json", ".toml")  # the endings of their names
PRESETS: dict[str, Callable[..., Recipe]] = {name: globals()[name] for name in get_args(RecipeName)}


def get_recipe(recipe: str | Path | Recipe) -> Recipe:
    """The preset of that name, or the recipe in a file; a `Recipe` is returned as it is.

    A .json file has the fields of a recipe. A .toml file is one of settings, and has them in its table `[recipe]`.

    Raises:
        ValueError: no preset has this name, and the message lists them; or the file has no recipe or cannot be read,
            and the message names the file and the field.
        TypeError: neither a name nor a path nor a `Recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):
        call = f": call it, {recipe.__name__}()" if recipe in PRESETS.values() else ""
        raise TypeError(f"recipe must be a preset's name, a file or a Recipe, got {recipe!r}{call}")
    if str(recipe).endswith(RECIPE_FILES):
        return _read(Path(recipe))
    if recipe not in PRESETS:
        of_format = f" ({recipe} is a format; 'rowwise' is the default recipe)"
        meant = of_format if recipe in ("fp8", "float8", "e4m3") else nearest(str(recipe), PRESETS)
        raise ValueError(
            f"unknown recipe {str(recipe)!r}{meant}: choose one of {', '.join(PRESETS)}, or "
            "give the .json or .toml file of a recipe"
        )
    return _once(PRESETS[str(recipe)])


_once: Callable[[Callable[[], Recipe]], Recipe] = functools.cache(lambda preset: preset())  # frozen: one serves all


def similar_preset(recipe: Recipe) -> str:
    """The name of the first preset that casts x and w in y as `recipe` does; "custom" if none does.

    Rounding, the floor of scales and the settings of a history may differ.
    """
    return next((name for name, preset in PRESETS.items() if _forward(preset()) == _forward(recipe)), "custom")


def _forward(recipe: Recipe) -> object:
    if recipe.y is None:
        return None
    casts = (recipe.y.a, recipe.y.b)
    return "y" in recipe.rotate, [(c.format, c.granularity, c.scale, c.history is None) for c in casts]


def _read(path: Path) -> Recipe:
    """The recipe in the file `path`; without a field `name` it is called by the file's."""
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"recipe file {path} cannot be read: {error.strerror}") from error
    found = parse_object(text, f"recipe file {path}", toml=is_toml)
    values = found.get("recipe", {}) if is_toml else found
    if is_toml and (not values or not isinstance(values, dict)):
        raise ValueError(
            f"recipe file {path}: a TOML file must have the fields of a recipe in its table [recipe], got "
            f"{f'recipe = {values!r}' if values else 'none'}"
        )
    try:
        recipe = Recipe.from_dict(values, path.stem)
    except ValueError as error:
        raise ValueError(f"recipe file {path}: {error}") from error
    if recipe.name in PRESETS and recipe != PRESETS[recipe.name]():
        raise ValueError(
            f"recipe file {path}: {recipe.name} is the name of a preset, which has other fields: give the recipe a "
            'name of its own, such as "name": "mine"'
        )
    return recipe


# ---- The fields of a recipe as JSON values, which a person may have written. An error names the field.


def _read_gemm(values: Any, name: str) -> Gemm | None:
    if values is None:
        return None
    operands = _OPERANDS[name]
    found = _read_fields(values, dict.fromkeys(operands, object) | {"fast_accumulation": bool}, name)
    if missing := [operand for operand in operands if operand not in found]:
        raise ValueError(
            f"{name}.{missing[0]} is missing: {name} needs the casts of {' and '.join(operands)}, or is null for BF16"
        )
    a, b = (_read_cast(found.pop(operand), f"{name}.{operand}") for operand in operands)
    return Gemm(a, b, **found)


def _read_cast(values: object, where: str) -> Cast:
    found = _read_fields(values, _kinds(Cast) | {"granularity": str, "history": object}, where)
    if found.get("history") is not None:
        history = _read_fields(found["history"], _kinds(History), f"{where}.history")
        found["history"] = _made(History, history, f"{where}.history")
    if "granularity" in found:
        found["granularity"] = _made(parse_granularity, {"name": found["granularity"]}, f"{where}.granularity")
    return _made(Cast, found, where)


def _read_fields(values: object, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`values`, an object with fields of these names and kinds; the caller checks those of the kind `object`. `where`
    is the path of the fields, such as y.x; "" for the whole."""
    if not isinstance(values, Mapping):
        given = f"{values!r} ({type(values).__name__})"
        raise ValueError(f"{where or 'a recipe'} must be an object with the fields {', '.join(kinds)}; got {given}")
    path = f"{where}." if where else ""
    if unknown := [name for name in values if name not in kinds]:
        advice = _advice(unknown[0], kinds)
        raise ValueError(f"unknown field {path}{unknown[0]}{advice}: the fields are {', '.join(kinds)}")
    check_kinds(values, {name: kinds[name] for name in values if kinds[name] is not object}, path)
    return dict(values)


def _advice(name: str, kinds: Iterable[str]) -> str:
    """Where a field with this name belongs, or the field here with a name much like it."""
    owners: dict[str, Iterable[str]] = {
        "the recipe": ("rotate", "emulate", "exact_backward", "y", "dx", "dw"),
        "a GEMM: y, dx or dw": ("x", "w", "dy", "fast_accumulation"),
        "an operand": _kinds(Cast),
        "a history": _kinds(History),
    }
    owner = next((each for each, names in owners.items() if name in names and not set(names) & set(kinds)), None)
    return nearest(name, kinds) if owner is None else f" ({name} is a field of {owner})"


def _kinds(cls: type) -> dict[str, Any]:
    types = get_type_hints(cls)
    return {each.name: types[each.name] for each in fields(cls) if each.init}


def _made(make: Any, arguments: Mapping[str, Any], where: str) -> Any:
    try:
        return make(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
