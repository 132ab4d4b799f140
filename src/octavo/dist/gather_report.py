"""The report of `fp8_all_gather`: which weights FSDP2 gathers in eight bits, and why the others stay wide."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.words import plural, some_of


@dataclass(frozen=True)
class GatherRow:
    """One converted linear layer.

    Args:
        name: of the layer in the model.
        gathered: "fp8", or "wide": in the parameter's dtype, and quantized after the all-gather on every rank.
        reason: why it is gathered wide; "" otherwise.
    """

    name: str
    gathered: str
    reason: str = ""


@dataclass(frozen=True)
class GatherReport:
    """The report of `octavo.dist.fp8_all_gather`; printed, it has one line for each reason.

    Args:
        rows: one for each converted linear layer, in the order of the model's modules.
        unfused: the names of the FSDP units that keep a module from computing a norm or an activation in the pass of
            its linear layers, each with the name of that module.
    """

    rows: tuple[GatherRow, ...]
    unfused: Mapping[str, str] = field(default_factory=dict)

    @property
    def gathered(self) -> list[str]:
        """The names of the layers whose weights are gathered in eight bits."""
        return [row.name for row in self.rows if row.gathered == "fp8"]

    @property
    def wide(self) -> dict[str, str]:
        """The names of the layers whose weights are gathered wide, each with its reason."""
        return {row.name: row.reason for row in self.rows if row.gathered == "wide"}

    def __repr__(self) -> str:
        lines = [f"FP8 all-gather: {plural(len(self.gathered), 'weight')} in eight bits, {len(self.wide)} wide"]
        reasons = defaultdict(list)
        for name, reason in self.wide.items():
            reasons[reason].append(name)
        lines += [f"  {len(names)} wide: {reason} ({some_of(names)})" for reason, names in reasons.items()]
        fused = defaultdict(list)
        for unit, module in self.unfused.items():
            fused[module].append(unit)
        lines += [
            f"  not fused: {module}, since {some_of(units)} {'is a unit' if len(units) == 1 else 'are units'} of "
            "FSDP's: shard the block that holds it instead"
            for module, units in fused.items()
        ]
        return "\n".join(lines)
