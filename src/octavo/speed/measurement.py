"""Timing programs: they load, then their ways of generating take turns, size by size.

Every figure is the wall clock's, around a public call, from prompts on the device to new tokens on the device. Two
calls are timed at each size: one new token (the time to the first token), and all of them. Their difference is
decoding. The first call of a size, which compiles kernels and captures graphs, is timed apart.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo.speed.grid import Cell, Prompts
from octavo.speed.memory import Meter, allocated, release
from octavo.speed.programs import Generate, Opened, Program
from octavo.speed.result import Check, Row, Start

Advance = Callable[[str], None]
"""advance(doing): the next piece of work begins."""

_CHECKED = 2  # prompts whose tokens are compared before anything is timed
_Result = TypeVar("_Result")


class Way(NamedTuple):
    """A way of an open program, ready to be measured."""

    name: str
    generate: Generate
    baseline: bool
    meter: Meter
    forget: Callable[[], None]


def open_program(program: Program, prompts: Prompts) -> tuple[Opened | None, Start]:
    """Open a program, and time that and its first token.

    Returns:
        The open program and its start. The first is None for a program that does not fit in memory, and for one that
        runs apart and fails.
    """
    device, before = prompts.device, allocated(prompts.device)
    ids = prompts.draw(Cell(1, min(prompts.grid.prompts)))
    try:
        seconds, opened = timed(program.open, device)
        held = allocated(device) - before if device.type == "cuda" and not program.apart else None
        first, _ = timed(partial(next(iter(opened.ways.values())), ids, 1), device)
        return opened, Start(program.name, seconds, first, ids.shape[1], held)
    except Exception as error:
        problem = _problem(error, program.apart)
    release(device)
    return None, Start(program.name, problem=problem)


def check_tokens(opened: Opened, prompts: Prompts) -> Check | None:
    """Compare the greedy tokens of the first way with those of the reference, for two prompts at once."""
    if opened.reference is None:
        return None
    name, generate = next(iter(opened.ways.items()))
    ids, tokens = prompts.draw(Cell(_CHECKED, min(prompts.grid.prompts))), prompts.grid.tokens
    same = (opened.reference(ids, tokens).cpu() == generate(ids, tokens).cpu()).long()
    leading = same.cummin(1).values  # 0 from the first that differs
    return Check(name, opened.reference_name, tokens, leading.sum(1).tolist())


def measure_cell(ways: Sequence[Way], cell: Cell, prompts: Prompts, advance: Advance) -> list[Row]:
    """Measure ways at one size. They take turns, in an order that is drawn for each round."""
    ids, grid, device = prompts.draw(cell), prompts.grid, prompts.device
    rows: dict[str, Row] = {}
    for way in ways:
        advance(f"{way.name}: batch {cell.batch}, prompt {cell.prompt}, first call")
        way.forget()
        way.meter.reset()
        rows[way.name] = _first_call(way, cell, ids, prompts)
    running, drawn = [way for way in ways if not rows[way.name].problem], random.Random(0)
    for turn in range(grid.rounds):
        drawn.shuffle(running)
        for way in running:
            advance(f"{way.name}: batch {cell.batch}, prompt {cell.prompt}, round {turn + 1} of {grid.rounds}")
            row = rows[way.name]
            row.prompt_seconds.append(_seconds(way, ids, 1, device))
            if grid.tokens > 1:
                row.whole_seconds.append(_seconds(way, ids, grid.tokens, device))
            row.peak_bytes = way.meter.peak
    # Otherwise torch.compile makes code for any batch once it has seen two, which is slower than code for one.
    torch.compiler.reset()
    return list(rows.values())


def _first_call(way: Way, cell: Cell, ids: Tensor, prompts: Prompts) -> Row:
    """The row of a way with the time of its first call at this size, or with the reason why it has none."""
    row = Row(way.name, way.baseline, *cell, prompts.grid.tokens)
    try:
        row.warm_up_seconds = _seconds(way, ids, prompts.grid.tokens, prompts.device)
        _seconds(way, ids, 1, prompts.device)
    except Exception as error:
        row.problem = _problem(error, way.meter.apart)
    if row.problem:
        way.forget()
        release(prompts.device)  # here, where the exception and its frames no longer hold tensors
    return row


def _seconds(way: Way, ids: Tensor, tokens: int, device: torch.device) -> float:
    with way.meter:
        seconds, made = timed(partial(way.generate, ids, tokens), device)
    if made.shape != (len(ids), tokens):
        raise RuntimeError(f"{way.name} was to generate {len(ids)} x {tokens} tokens, got {list(made.shape)}")
    return seconds


def timed(call: Callable[[], _Result], device: torch.device) -> tuple[float, _Result]:
    """Seconds until everything that a call started on the device is done, and its result."""
    _synchronize(device)
    begin = time.perf_counter()
    result = call()
    _synchronize(device)
    return time.perf_counter() - begin, result


def _problem(error: Exception, apart: bool) -> str:
    """The reason why something was not measured: memory, or any failure of a program that runs apart. Another error is
    raised again."""
    words = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"does not fit: {words}"
    if not apart:
        raise error
    return f"failed: {type(error).__name__}: {words}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
