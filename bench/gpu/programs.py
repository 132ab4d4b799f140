"""The programs that generate text from a model folder, called as their users call them, and timed in turns.

Octavo and transformers are loaded into one process, and their ways to generate take turns at each size, in an order
that is drawn for each round. `octavo.speed` times each call.
"""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.loading import load
from octavo.speed import Cell, Generate, Grid, Row, release, timed
from octavo.util import import_extra, open_config, open_local

OCTAVO, EAGER, STATIC = "octavo", "BF16, eager", "BF16, static"
LOOP = "transformers' loop"
_CHECKED = 2  # prompts whose tokens are compared before anything is timed


@dataclass(frozen=True)
class Opened:
    """An open model.

    Attributes:
        ways: the ways to generate from it, by name.
        reference: a slower way, with whose tokens those of the first way are compared.
        forget: drops the caches that calls left, so that a size does not count the memory of the one before.
    """

    ways: Mapping[str, Generate]
    reference: Generate | None = None
    forget: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Program:
    """A program: its name, how it opens its model, and whether that is in BF16, with which others are compared."""

    name: str
    open: Callable[[], Opened]
    baseline: bool = False


def octavo_program(folder: Path, device: torch.device) -> Program:
    """`octavo.load` of a packed folder."""

    def open_model() -> Opened:
        model = load(folder, device)
        return Opened({OCTAVO: generation(model)}, own_loop(model), partial(drop_caches, model))

    return Program(OCTAVO, open_model)


def transformers_program(folder: Path, device: torch.device) -> Program:
    """transformers with a model in BF16: as `generate` runs by itself, and with a static cache, which it compiles."""

    def open_model() -> Opened:
        transformers = import_extra("transformers", "hf", "this benchmark runs a model of transformers")
        config = open_config(folder)
        model = open_local(transformers.AutoModelForCausalLM, folder, config=config, dtype=torch.bfloat16)
        model = model.eval().to(device)
        return Opened({EAGER: generation(model), STATIC: generation(model, cache_implementation="static")})

    return Program("transformers, BF16", open_model, baseline=True)


def generation(model: Any, **settings: Any) -> Generate:
    """`model.generate`, greedy, which no end token stops early."""

    def generate(ids: Tensor, tokens: int) -> Tensor:
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens,
            **settings,
        )  # fmt: skip
        return made[:, ids.shape[1] :]  # type: ignore[no-any-return]

    return generate


def own_loop(model: Any) -> Generate:
    """transformers' own loop with `model`: a cache that the caller gives turns Octavo's engine off."""
    transformers = import_extra("transformers", "hf", "a packed model is a model of transformers")

    def generate(ids: Tensor, tokens: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "generate runs on transformers' own loop")
            return generation(model, past_key_values=transformers.DynamicCache(config=model.config))(ids, tokens)

    return generate


def drop_caches(model: Any) -> None:
    """Drop the caches of a model of `octavo.load`, with their CUDA graphs."""
    model.octavo_engine.sessions.clear()


# --- The memory that a way takes, while others hold memory in the same process -----------------------------------


class Meter:
    """The most bytes that calls hold on a GPU, of which `weights` are the model's before the first call.

    `peak` is the most bytes since `reset`: the weights, what calls left allocated, and what a call takes while it runs;
    None on a CPU.
    """

    def __init__(self, device: torch.device, weights: int = 0) -> None:
        self.device, self.weights = device, weights
        self.reset()

    def reset(self) -> None:
        """Forget the peak, and what earlier calls left allocated."""
        self.held = self.weights
        self.peak: int | None = None

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._before = allocated(self.device)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            most = self.held + torch.cuda.max_memory_allocated(self.device) - self._before
            self.held += allocated(self.device) - self._before
            self.peak = max(most, self.peak or 0)


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


# --- Timing in turns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompts:
    """Random prompts of a grid for models of one vocabulary, on one device."""

    grid: Grid
    vocabulary: int
    device: torch.device

    def draw(self, cell: Cell) -> Tensor:
        """int64 [batch, prompt]; the same tokens in each call."""
        return self.grid.draw(cell, self.vocabulary, self.device)


class Start(NamedTuple):
    """The start of a program: seconds to open the model and of its first token, and the bytes of its weights."""

    program: str
    load_seconds: float
    first_token_seconds: float
    prompt: int
    weight_bytes: int | None


class Way(NamedTuple):
    """A way of an open program, ready to be measured."""

    name: str
    generate: Generate
    baseline: bool
    meter: Meter
    forget: Callable[[], None]


@dataclass
class WayRow(Row):
    """The row of one of several ways, with its speed as a multiple of the best BF16 way of its size."""

    baseline: bool = False
    first_token_speedup: float | None = None
    tokens_per_second_speedup: float | None = None


class Check(NamedTuple):
    """Greedy tokens of the fast way against those of the slow way of the same loaded model.

    `equal` has for each prompt the number of leading tokens that are equal.
    """

    way: str
    reference: str
    tokens: int
    equal: list[int]
    ok: bool


def open_program(program: Program, prompts: Prompts) -> tuple[Opened, Start]:
    """Open a program, and time that and its first token."""
    device, before = prompts.device, allocated(prompts.device)
    ids = prompts.draw(Cell(1, min(prompts.grid.prompts)))
    seconds, opened = timed(program.open, device)
    held = allocated(device) - before if device.type == "cuda" else None
    first, _ = timed(partial(next(iter(opened.ways.values())), ids, 1), device)
    return opened, Start(program.name, seconds, first, ids.shape[1], held)


def check_tokens(opened: Opened, prompts: Prompts) -> Check | None:
    """Compare the greedy tokens of the first way with those of the reference, for two prompts at once."""
    if opened.reference is None:
        return None
    name, generate = next(iter(opened.ways.items()))
    ids, tokens = prompts.draw(Cell(_CHECKED, min(prompts.grid.prompts))), prompts.grid.tokens
    same = (opened.reference(ids, tokens).cpu() == generate(ids, tokens).cpu()).long()
    equal = same.cummin(1).values.sum(1).tolist()  # cummin is 0 from the first that differs
    return Check(name, LOOP, tokens, equal, min(equal) == tokens)


def measure_cell(
    ways: Sequence[Way], cell: Cell, prompts: Prompts, advance: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure ways at one size, and return their rows. They take turns, in an order that is drawn for each round."""
    ids, grid = prompts.draw(cell), prompts.grid
    rows: dict[str, WayRow] = {}
    for way in ways:
        advance(f"{way.name}: batch {cell.batch}, prompt {cell.prompt}, first call")
        way.forget()
        way.meter.reset()
        rows[way.name] = WayRow(way.name, *cell, grid.tokens, baseline=way.baseline)
        with way.meter:
            rows[way.name].first_call(way.generate, ids)
        if rows[way.name].problem:
            way.forget()
            release(prompts.device)
    running, drawn = [way for way in ways if not rows[way.name].problem], random.Random(0)
    for turn in range(grid.rounds):
        drawn.shuffle(running)
        for way in running:
            advance(f"{way.name}: batch {cell.batch}, prompt {cell.prompt}, round {turn + 1} of {grid.rounds}")
            with way.meter:
                rows[way.name].time(way.generate, ids)
            rows[way.name].peak_bytes = way.meter.peak
    # Otherwise torch.compile makes code for any batch once it has seen two, which is slower than code for one.
    torch.compiler.reset()
    _compare(list(rows.values()))
    return [row.to_dict() for row in rows.values()]


def _compare(rows: Sequence[WayRow]) -> None:
    """Set the speeds over the best BF16 way: to the first token, and in tokens a second."""
    wide = [row for row in rows if row.baseline]
    first = min((s for row in wide if (s := row.first_token_seconds) is not None), default=None)
    rate = max((r for row in wide if (r := row.tokens_per_second) is not None), default=None)
    for row in rows:
        if first is not None and (own := row.first_token_seconds) is not None:
            row.first_token_speedup = first / own
        if rate is not None and (made := row.tokens_per_second) is not None:
            row.tokens_per_second_speedup = made / rate
