"""What `octavo pack` says that it made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.nn.coverage import Leftover


@dataclass(frozen=True)
class PackReport:
    """What `pack` made. Sizes in bytes.

    `packed` names the scheme of each packed layer, `gains` the dB of SQNR that each gained by the rule mse. `ratios`:
    layers that consumers fuse ("q, k, v") and that keep scales of their own, with the largest over the smallest.
    `cached`: attention layers whose keys and values have scales. `has_tokenizer`: whether the folder holds one.
    `not_linear`: the matrices that stay in BF16 because no linear layer holds them, such as stacks of experts.
    """

    folder: Path
    source: Path
    packed: Mapping[str, str]
    skipped: Mapping[str, str]
    left_out: Sequence[str]
    bf16_bytes: int
    packed_bytes: int
    folder_bytes: int
    gains: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    cached: int = 0
    has_tokenizer: bool = True
    not_linear: Sequence[Leftover] = ()

    @property
    def ratio(self) -> float:
        """The packed linear weights, scales included, against the same in BF16."""
        return self.packed_bytes / self.bf16_bytes
