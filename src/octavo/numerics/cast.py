"""A cast: all settings of the quantization of one tensor to eight bits."""

from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from octavo.numerics.formats import EIGHT_BIT_FORMATS, Format, eight_bit_format
from octavo.numerics.granularity import ROW, TENSOR, Granularity, parse_granularity
from octavo.numerics.scaling import History

SCALE_KINDS = ("fp32", "pow2", "e8m0")
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True, eq=False)
class Cast:
    """The settings of a quantization. Frozen and hashable.

    Casts are compared by one string. torch.compile would take a number that differs between two recipes of one code for
    a variable.

    Args:
        format: "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz" or "int8". int8 is rounded to nearest.
        granularity: which elements share a scale.
        scale: "fp32", "pow2" (a float32 power of two, rounded up) or "e8m0" (the same, stored in one byte).
        rounding: "nearest" (even) or "stochastic".
        relative_floor: the smallest scale allowed, as a fraction of the tensor's largest scale, 0 to 1.
        history: delayed scaling, for a tensor-wide scale; None scales by the tensor's own amax.

    Attributes:
        spec: format, granularity, scale and relative_floor in one string, which `parse_cast` reads. The registered
            operations take it, since the schema of an operation has no type for a Cast.
        by_row: whether the granularity is row. torch.compile takes long to trace a comparison of granularities.

    Raises:
        TypeError: the granularity is no `Granularity`, such as a name.
        ValueError: an unknown name, a relative_floor outside 0 to 1, or a history without granularity tensor.

    Example:
        >>> octavo.Cast("e4m3", octavo.numerics.block(128, 128), scale="pow2").spec
        'e4m3 block:128x128 pow2 0.0'
    """

    format: str = "e4m3"
    granularity: Granularity = ROW
    scale: str = "fp32"
    rounding: str = "nearest"
    relative_floor: float = 0.0
    history: History | None = None
    spec: str = field(init=False, repr=False)
    by_row: bool = field(init=False, repr=False)
    _key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        eight_bit_format(self.format)
        if not isinstance(self.granularity, Granularity):
            raise TypeError(
                f"granularity must be a Granularity, got {self.granularity!r} ({type(self.granularity).__name__}): "
                "give ROW, TENSOR, group(128) or block(128, 128) of octavo.numerics"
            )
        if self.scale not in SCALE_KINDS:
            raise ValueError(f"unknown kind of scale {self.scale!r}: choose one of {', '.join(SCALE_KINDS)}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {self.rounding!r}: choose one of {', '.join(ROUNDINGS)}")
        if self.format == "int8" and self.rounding != "nearest":
            raise ValueError("int8 is rounded to nearest: choose an FP8 format for stochastic rounding")
        if not 0 <= self.relative_floor <= 1:
            raise ValueError(f"relative_floor is a fraction of the largest scale, 0 to 1, got {self.relative_floor}")
        if self.history is not None and self.granularity != TENSOR:
            raise ValueError(
                f"a history holds one amax a tensor: it needs granularity tensor, got {self.granularity.name}"
            )
        spec = f"{self.format} {self.granularity.name} {self.scale} {float(self.relative_floor)}"
        object.__setattr__(self, "spec", spec)  # the dataclass is frozen
        object.__setattr__(self, "by_row", self.granularity == ROW)
        history = () if self.history is None else tuple(vars(self.history).values())
        numbers = [value if isinstance(value, str) else float(value) for value in history]
        object.__setattr__(self, "_key", f"{spec} {self.rounding} {numbers}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cast) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def fmt(self) -> Format:
        return EIGHT_BIT_FORMATS[self.format]

    @property
    def power_of_two(self) -> bool:
        return self.scale != "fp32"

    @property
    def bytes_serve_both(self) -> bool:
        """Whether the bytes of one quantization, transposed, serve the other GEMM too (`octavo.recipe`)."""
        return self.by_row or self.granularity.transposes

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        values = asdict(self) | {"granularity": self.granularity.name}
        return {each.name: values[each.name] for each in fields(self) if each.init}


@cache
def parse_cast(spec: str) -> Cast:
    """The cast of a `Cast.spec`, which holds neither rounding nor history."""
    format, granularity, scale, relative_floor = spec.split()
    return Cast(format, parse_granularity(granularity), scale, relative_floor=float(relative_floor))
