"""The records of a run: metrics.jsonl, boards on request, and one line per logged step on the terminal.

A line of metrics.jsonl is an object with `step`, the optimizer steps done, and:

    at the start and each resume   data: the text read and skipped (`octavo.text.ReadReport.to_dict`), precision
                                   (`octavo.train.instrument.precision_of`), and dtypes (`observed_dtypes`)
    every log_every steps          loss, learning_rate, gradient_norm, tokens (trained on so far), seconds (of training,
                                   since the log record before), tokens_per_second, peak_memory (bytes),
                                   largest_weight (the largest magnitude); of fp16 also loss_scale, skipped_steps; of
                                   several processes tokens_per_second_per_gpu; of a GPU whose peak is known mfu
                                   (`octavo.train.utilization`). The loss is the mean over all ranks, and the memory
                                   that of the rank with the highest peak.
    every evaluate_every steps     evaluation_loss, sample (a text)
    with findings                  warnings (the number of findings by rule), promoted (the new precision by layer),
                                   rolled_back_from (the step from which the run went back to this one)
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from octavo.artifact.atomic_folder import write_error
from octavo.train.boards import Board, TensorBoard, WeightsAndBiases
from octavo.train.config import Config
from octavo.train.ranks import rank


class Metrics:
    """Writes records, each with its step. A resumed run drops the records of later steps, so no step occurs twice.

    Args:
        path: of metrics.jsonl.
        resumed_at: the step at which the run begins.
        open_boards: opens the boards of the run, which continue after a step.
    """

    def __init__(
        self, path: Path, *, resumed_at: int, open_boards: Callable[[int], Sequence[Board]] = lambda step: ()
    ) -> None:
        self._path, self._open_boards = path, open_boards
        path.touch()
        self._open(resumed_at)

    def _open(self, step: int) -> None:
        self.boards = self._open_boards(step)
        os.truncate(self._path, _length_until(self._path, step))
        self._file = self._path.open("a")

    def go_back(self, step: int) -> None:
        """Drop the records of the steps after `step`, from which the run continues."""
        self._close()
        self._open(step)

    def write(self, step: int, **record: Any) -> None:
        """Append {"step": step, ...}; its numbers go to the boards too. inf and NaN, which JSON lacks, become null."""
        record = {name: None if _no_number(value) else value for name, value in record.items()}
        try:
            self._file.write(json.dumps({"step": step, **record}) + "\n")
            self._file.flush()
        except OSError as error:
            raise write_error(Path(self._file.name), error) from error
        self.draw(step, record)

    def draw(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Draw the numbers among the values on the boards."""
        drawn = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        for board in self.boards:
            board.numbers(step, drawn)

    def draw_histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        """Draw counts [n] between edges [n + 1] on the boards."""
        for board in self.boards:
            board.histogram(step, name, edges, counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        self._file.close()
        for board in self.boards:
            board.close()


class _NoMetrics(Metrics):
    """The records of a rank that writes none."""

    def __init__(self) -> None:
        self.boards = ()

    def write(self, step: int, **record: Any) -> None: ...

    def go_back(self, step: int) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def open_metrics(config: Config, path: Path, resumed_at: int) -> Metrics:
    """The records of a run, which rank 0 writes, and the boards that its settings name."""

    def open_boards(step: int) -> list[Board]:
        boards: list[Board] = [TensorBoard(path.parent, step)] if config.tensorboard else []
        return boards + ([WeightsAndBiases(path.parent, config.to_dict())] if config.wandb else [])

    return Metrics(path, resumed_at=resumed_at, open_boards=open_boards) if rank() == 0 else _NoMetrics()


def show_progress(console: Console, step: int, steps: int, record: dict[str, Any], seconds_left: float) -> None:
    """One line: step, loss, learning rate, gradient norm, tokens a second (also of a GPU, with its MFU), time left."""
    each = f" ({record['tokens_per_second_per_gpu']:,.0f} a GPU)" if "tokens_per_second_per_gpu" in record else ""
    share = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
    scale = f"  loss scale {record['loss_scale']:g}" if "loss_scale" in record else ""
    console.print(
        f"step {step:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
        f"grad norm {record['gradient_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s{each}{share}{scale}  "
        f"ETA {timedelta(seconds=round(seconds_left))}",
        highlight=False,
        soft_wrap=True,
    )


def _length_until(path: Path, step: int) -> int:
    """The bytes of the records up to `step`; a last line that a kill cut short does not count."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except ValueError:
            break
        length += len(line)
    return length


def _no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
