"""The GEMMs of a recipe: their casts, the checks of casts that go together, and JSON."""

from __future__ import annotations

import difflib
import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from octavo.numerics.qtensor import Cast, parse_granularity
from octavo.numerics.scaling import History

_OPERANDS = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}
GEMMS = tuple(_OPERANDS)


@dataclass(frozen=True)
class Gemm:
    """A GEMM of two eight-bit operands.

    Args:
        a, b: the casts of the two operands: x and w in y, dy and w in dx, dy and x in dw.
        fast_accumulation: let the tensor core keep its partial sums at about 14 bits instead of promoting them.

    Raises:
        TypeError: an operand is no `Cast`, such as the name of a format.

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


@dataclass(frozen=True)
class Recipe:
    """The casts of the three GEMMs of a linear layer.

    Args:
        name: what reports call the recipe.
        y, dx, dw: the three GEMMs; None runs the GEMM in BF16.
        rotate: the GEMMs whose two operands are rotated along the reduction by a Hadamard matrix before they are
            quantized, for this GEMM alone: any of "y", "dx" and "dw" (`octavo.recipe`).
        emulate: on a GPU that has no GEMM for these casts, compute it slowly in float32 instead of raising an error.

    Attributes:
        fusable: the three GEMMs, where the fused modules (`octavo.nn.NormLinear`, `octavo.nn.SwiGLU`) can run them, or
            None.
        text: the fields as `from_json` reads them, with the same name for all recipes. Compiled code takes a string as
            a constant, and not a recipe.

    Raises:
        TypeError: y, dx or dw is neither a `Gemm` nor None.
        ValueError: no GEMM takes these casts together, or `rotate` names something else.
    """

    name: str
    y: Gemm | None = None
    dx: Gemm | None = None
    dw: Gemm | None = None
    rotate: tuple[str, ...] = ()
    emulate: bool = False
    fusable: FusableRecipe | None = field(init=False, repr=False, compare=False)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in GEMMS:
            if not isinstance(gemm := getattr(self, name), Gemm | None):
                raise TypeError(
                    f"recipe {self.name}: {name} must be a Gemm, or None for BF16, got {gemm!r} "
                    f"({type(gemm).__name__}): give Gemm(Cast(...), Cast(...))"
                )
        if any(cast.format == "int8" for cast in self._casts):
            raise ValueError(f"recipe {self.name}: training takes FP8 formats, not int8, which is a packing scheme")
        if any(cast.by_row and cast.scale == "e8m0" for cast in self._casts):
            raise ValueError(
                f"recipe {self.name}: no GEMM takes row scales in e8m0: use float32 scales rounded up to powers of two "
                "(scale='pow2'), or groups of 32 with e8m0 scales, as mxfp8 does"
            )
        self._check_rotation()
        if self.dx is not None and self.dx.b.by_row and "dx" not in self.rotate:
            self._check_row_dx(self.dx)
        if self.dw is not None and self.dw.b.by_row and "dw" not in self.rotate:
            self._check_row_dw(self.dw)
        self._check_histories()
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

    def _check_row_dx(self, dx: Gemm) -> None:
        if dx.b != self.w or dx.a.history is not None:
            raise ValueError(
                f"recipe {self.name}: a row-scaled w in dx must be the cast of w in y (its bytes, transposed), and dy, "
                "into which its scale is folded, cannot scale by a history"
            )

    def _check_row_dw(self, dw: Gemm) -> None:
        dy, x = dw.a, dw.b
        if x != self.x or dy != self.dy or not dy.by_row or not dy.power_of_two:
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
        """True if dx reads the bytes of the cast `w`, transposed."""
        rotated = "dx" in self.rotate
        return self.dx is not None and not rotated and self.dx.b == self.w and self.dx.b.bytes_serve_both

    @property
    def quantizes_x_once(self) -> bool:
        """True if dw reads the bytes of the cast `x`, transposed."""
        rotated = "dw" in self.rotate
        return self.dw is not None and not rotated and self.dw.b == self.x and self.dw.b.bytes_serve_both

    @property
    def repeatable_w(self) -> Cast | None:
        """The cast `w`, if y reads it and it gives the same bytes at each call: no history or random rounding."""
        w = None if "y" in self.rotate else self.w
        return w if w is not None and w.history is None and w.rounding == "nearest" else None

    @property
    def scales_by_history(self) -> bool:
        """True if the scales of x and w come from histories of these tensors."""
        return all(cast is not None and cast.history is not None for cast in (self.x, self.w))

    def in_bf16(self, *gemms: str) -> Recipe:
        """This recipe with some of its GEMMs in BF16, as in `rowwise().in_bf16("y", "dw")`. The other casts stay.

        Raises:
            ValueError: a name other than "y", "dx" and "dw".
        """
        if wrong := [name for name in gemms if name not in GEMMS]:
            raise ValueError(f"the GEMMs of a linear layer are {', '.join(GEMMS)}; got {wrong[0]!r}")
        chosen = [name for name in GEMMS if name in gemms and getattr(self, name) is not None]
        if not chosen:
            return self
        changes: dict[str, Any] = dict.fromkeys(chosen)
        rotate = tuple(gemm for gemm in self.rotate if gemm not in chosen)
        return replace(self, name=f"{self.name} with {', '.join(chosen)} in bf16", rotate=rotate, **changes)

    @property
    def _casts(self) -> list[Cast]:
        return [cast for gemm in (self.y, self.dx, self.dw) if gemm is not None for cast in (gemm.a, gemm.b)]

    @property
    def quantized(self) -> bool:
        """True if any of the three GEMMs runs on eight-bit operands."""
        return len(self._casts) > 0  # torch 2.11 cannot trace bool() of a list

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
        return f"Recipe({self.name!r}, {casts}, rotate={self.rotate}, emulate={self.emulate})"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON values: each GEMM by the names of its operands, None for BF16."""
        gemms = {name: _gemm_to_dict(getattr(self, name), *operands) for name, operands in _OPERANDS.items()}
        return {"name": self.name, "rotate": list(self.rotate), "emulate": self.emulate, **gemms}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], name: str = "custom") -> Recipe:
        """The recipe of the fields that `to_dict` gave, in this version or an earlier one, or that a person wrote.

        A field that is left out has the default of its class: a GEMM runs in BF16.

        Args:
            values: the fields.
            name: of a recipe that has no field `name`.

        Raises:
            ValueError: an unknown field, a value of the wrong type or outside its range, or casts that no GEMM takes
                together; the message names the field, such as y.x.granularity.
        """
        kinds = {"name": str, "rotate": object, "emulate": bool} | dict.fromkeys(GEMMS, object)
        fields = {"name": name} | read_fields(values, kinds, "")
        if not fields["name"]:
            raise ValueError("name must not be empty")
        if isinstance(fields.get("rotate"), bool):  # of earlier versions
            fields["rotate"] = ("y",) if fields["rotate"] else ()
        found = {gemm: _gemm_from_dict(fields.get(gemm), gemm) for gemm in GEMMS}
        return cls(**fields | found)

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


def _gemm_to_dict(gemm: Gemm | None, a: str, b: str) -> dict[str, Any] | None:
    if gemm is None:
        return None
    return {a: gemm.a.to_dict(), b: gemm.b.to_dict(), "fast_accumulation": gemm.fast_accumulation}


def _gemm_from_dict(values: Any, name: str) -> Gemm | None:
    if values is None or values == {"fast_accumulation": False}:  # earlier versions wrote the latter for BF16
        return None
    fields = read_casts(values, _OPERANDS[name], {"fast_accumulation": bool}, name)
    a, b = (fields.pop(operand) for operand in _OPERANDS[name])
    return Gemm(a, b, **fields)


# ---- Reading casts from JSON values that a person may have written. An error names the field and says what is allowed.


_TYPE_NAMES = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the end of "unknown ...": whether one of `known`, with a name much like `name`, was meant."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def read_fields(values: object, kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """`values`, after a check that they are an object with fields of these names and types.

    Args:
        kinds: the type of each field by name; `object` for one that the caller checks.
        where: the path of the fields, such as y.x; "" for the whole.

    Raises:
        ValueError: they are not.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{where or 'a recipe'} must be an object with the fields {', '.join(kinds)}; got {_shown(values)}"
        )
    found = dict(values)
    for name, value in found.items():
        path = f"{where}.{name}" if where else name
        if name not in kinds:
            raise ValueError(f"unknown field {path}{_advice(name, kinds)}: the fields are {', '.join(kinds)}")
        if kinds[name] is float and type(value) is int:
            found[name] = value = float(value)
        # type() and not isinstance(): a bool is an int in Python, but never here.
        wrong = kinds[name] is not object and type(value) is not kinds[name]
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{path} must be {_TYPE_NAMES[kinds[name]]}; got {_shown(value)}")
    return found


def _advice(name: str, kinds: Iterable[str]) -> str:
    """Where a field with this name belongs, or the field here with a name much like it."""
    others = {owner: names for owner, names in _owners().items() if not set(names) & set(kinds)}
    owner = next((owner for owner, names in others.items() if name in names), None)
    return nearest(name, kinds) if owner is None else f" ({name} is a field of {owner})"


def _owners() -> dict[str, Iterable[str]]:
    return {
        "the recipe": ("rotate", "emulate", "y", "dx", "dw"),
        "a GEMM: y, dx or dw": ("x", "w", "dy", "fast_accumulation"),
        "an operand": _kinds(Cast),
        "a history": _kinds(History),
    }


def read_casts(values: object, operands: tuple[str, ...], others: Mapping[str, type], where: str) -> dict[str, Any]:
    """The fields of a GEMM: the cast of each of its `operands`, which are required, and `others`."""
    found = read_fields(values, dict.fromkeys(operands, object) | dict(others), where)
    if missing := [operand for operand in operands if operand not in found]:
        raise ValueError(
            f"{where}.{missing[0]} is missing: {where} needs the casts of {' and '.join(operands)}, or is null for BF16"
        )
    return found | {operand: _cast(found[operand], f"{where}.{operand}") for operand in operands}


def _cast(values: object, where: str) -> Cast:
    kinds = _kinds(Cast) | {"granularity": str, "history": object}
    found = read_fields(values, kinds, where)
    if found.get("history") is not None:
        history = read_fields(found["history"], _kinds(History), f"{where}.history")
        found["history"] = _made(History, history, f"{where}.history")
    if "granularity" in found:
        found["granularity"] = _made(parse_granularity, {"name": found["granularity"]}, f"{where}.granularity")
    cast: Cast = _made(Cast, found, where)
    return cast


def _kinds(cls: type) -> dict[str, Any]:
    """The type of each field that the constructor of a dataclass takes."""
    types = typing.get_type_hints(cls)
    return {each.name: types[each.name] for each in fields(cls) if each.init}


def _made(make: Any, arguments: Mapping[str, Any], where: str) -> Any:
    """`make(**arguments)`. A ValueError names the field `where`."""
    try:
        return make(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
