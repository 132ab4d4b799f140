"""A cast: everything that decides how one tensor becomes eight bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from octavo.numerics.formats import Format, fp8_format
from octavo.numerics.granularity import ROW, TENSOR, Granularity, parse_granularity
from octavo.numerics.scaling import History

SCALE_KINDS = ("fp32", "pow2", "e8m0")
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Cast:
    """How a tensor is quantized.

    Args:
        format: "e4m3", "e5m2", "e4m3fnuz" or "e5m2fnuz".
        granularity: which elements share a scale.
        scale: "fp32", "pow2" (a float32 power of two, rounded up) or "e8m0" (the same, stored in one byte).
        rounding: "nearest" (even) or "stochastic".
        relative_floor: no scale is less than this part of the tensor's largest.
        history: delayed scaling, for a tensor-wide scale; None scales by the tensor's own amax.
    """

    format: str = "e4m3"
    granularity: Granularity = ROW
    scale: str = "fp32"
    rounding: str = "nearest"
    relative_floor: float = 0.0
    history: History | None = None

    def __post_init__(self) -> None:
        fp8_format(self.format)
        if self.scale not in SCALE_KINDS:
            raise ValueError(f"unknown kind of scale {self.scale!r}: choose one of {', '.join(SCALE_KINDS)}")
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"unknown rounding {self.rounding!r}: choose one of {', '.join(ROUNDINGS)}")
        if not 0 <= self.relative_floor <= 1:
            raise ValueError(f"relative_floor is a part of the largest scale, 0 to 1, got {self.relative_floor}")
        if self.history is not None and self.granularity != TENSOR:
            raise ValueError(
                f"a history holds one amax a tensor: it needs granularity tensor, got {self.granularity.name}"
            )

    @property
    def fmt(self) -> Format:
        """The format's facts."""
        return fp8_format(self.format)

    @property
    def power_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale != "fp32"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-compatible dictionary that `from_dict` reads back."""
        return asdict(self) | {"granularity": self.granularity.name}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Cast:
        """The cast that `to_dict` wrote."""
        history = fields.get("history")
        return cls(
            **fields
            | {
                "granularity": parse_granularity(fields.get("granularity", "row")),
                "history": None if history is None else History(**history),
            }
        )
