"""The results of a comparison of speed."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.speed.grid import Cell, Grid


@dataclass(frozen=True)
class Start:
    """How a program started.

    Attributes:
        program: its name.
        load_seconds: the time to open the model.
        first_token_seconds: the time of the first call in the process, which generates one token of one prompt.
        prompt: the length of that prompt in tokens.
        weight_bytes: the memory that the open model holds on a GPU, or None.
        problem: why the program was not measured, or "".
    """

    program: str
    load_seconds: float | None = None
    first_token_seconds: float | None = None
    prompt: int | None = None
    weight_bytes: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Check:
    """Greedy tokens of the fast way against those of the reference way of the same loaded model.

    Attributes:
        way, reference: the names of the two.
        tokens: new tokens of each prompt.
        equal: for each prompt, the number of leading tokens that are equal.
    """

    way: str
    reference: str
    tokens: int
    equal: list[int]

    @property
    def ok(self) -> bool:
        return min(self.equal) == self.tokens


@dataclass
class Row:
    """One way at one size.

    Attributes:
        way: such as "BF16, static".
        baseline: whether it computes in BF16, so that others are compared with it.
        batch, prompt: the size.
        warm_up_seconds: the first call of this size, with everything that it compiles and captures.
        prompt_seconds: of each round, the time to generate one token: the time to the first token.
        whole_seconds: of each round, the time to generate all tokens.
        new_tokens: of each prompt.
        peak_bytes: the most memory on a GPU, or None.
        problem: why it was not measured, such as "does not fit: ...", or "".
    """

    way: str
    baseline: bool
    batch: int
    prompt: int
    new_tokens: int = 1
    warm_up_seconds: float | None = None
    prompt_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    problem: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.batch, self.prompt)

    @property
    def first_token_seconds(self) -> float | None:
        """The median time to the first token."""
        return statistics.median(self.prompt_seconds) if self.prompt_seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """batch * (tokens - 1) / (time of all tokens - time of one), medians; None if the difference is not positive,
        as with a tiny model whose times are noise."""
        if not self.whole_seconds or self.new_tokens == 1:
            return None
        seconds = statistics.median(self.whole_seconds) - statistics.median(self.prompt_seconds)
        return self.batch * (self.new_tokens - 1) / seconds if seconds > 0 else None


@dataclass
class SpeedReport:
    """All results.

    Attributes:
        machine: the GPU, the versions and the commit, see `octavo.speed.machine.facts`.
        grid: the sizes.
        device: such as "cuda".
        interleaved: whether the ways took turns in each round. Otherwise the models did not fit in memory together, and
            were measured one after the other.
        check: None if there was no reference to compare with.
        starts: of each program.
        rows: of each size and way.
        remarks: what was not measured, and why.
        process_peak_bytes: on a CPU, the most memory of the process.
    """

    machine: dict[str, Any]
    grid: Grid
    device: str
    interleaved: bool = True
    check: Check | None = None
    starts: list[Start] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    process_peak_bytes: int | None = None

    def best_baseline(self, cell: Cell) -> tuple[float | None, float | None]:
        """The least time to the first token, and the most tokens a second, of the BF16 ways at this size."""
        rows = [row for row in self.rows if row.baseline and row.cell == cell]
        return (
            min(_known(row.first_token_seconds for row in rows), default=None),
            max(_known(row.tokens_per_second for row in rows), default=None),
        )

    def speedups(self, row: Row) -> tuple[float | None, float | None]:
        """How many times as fast as the best BF16 way: to the first token, and in tokens a second."""
        (first, rate), own = self.best_baseline(row.cell), row.first_token_seconds
        return (
            None if first is None or own is None else first / own,
            None if rate is None or row.tokens_per_second is None else row.tokens_per_second / rate,
        )

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        rows = []
        for row in self.rows:
            first, rate = self.speedups(row)
            figures = {"first_token_seconds": row.first_token_seconds, "tokens_per_second": row.tokens_per_second}
            rows.append(asdict(row) | figures | {"first_token_speedup": first, "tokens_per_second_speedup": rate})
        return {
            "machine": self.machine,
            "device": self.device,
            "grid": asdict(self.grid),
            "interleaved": self.interleaved,
            "check": None if self.check is None else asdict(self.check) | {"ok": self.check.ok},
            "starts": [asdict(start) for start in self.starts],
            "rows": rows,
            "remarks": self.remarks,
            "process_peak_bytes": self.process_peak_bytes,
        }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
