"""bench/gpu/programs.py: ways that take turns, their speed over BF16, and their memory beside each other."""

from typing import Any

import pytest
import torch
from tiny_models import Folders
from torch import Tensor

from bench.gpu.programs import (
    EAGER,
    OCTAVO,
    STATIC,
    Meter,
    Opened,
    Prompts,
    Way,
    WayRow,
    _compare,
    check_tokens,
    measure_cell,
    octavo_program,
    open_program,
    transformers_program,
)
from octavo.speed import Cell, Generate, Grid

CPU = torch.device("cpu")
PROMPTS = Prompts(Grid([2], [8], 4, 3), 256, CPU)


def counting(ids: Tensor, tokens: int) -> Tensor:
    return torch.arange(tokens).expand(len(ids), -1)


def way(name: str, generate: Generate = counting, *, baseline: bool = False) -> Way:
    return Way(name, generate, baseline, Meter(CPU), lambda: None)


def test_ways_take_turns_in_every_round() -> None:
    order: list[tuple[str, int]] = []

    def recording(name: str) -> Generate:
        def generate(ids: Tensor, tokens: int) -> Tensor:
            order.append((name, tokens))
            return counting(ids, tokens)

        return generate

    rows = measure_cell([way("a", recording("a")), way("b", recording("b"))], Cell(2, 8), PROMPTS, lambda _: None)
    assert [row["way"] for row in rows] == ["a", "b"]
    assert order[:4] == [("a", 4), ("a", 1), ("b", 4), ("b", 1)]  # the first calls
    for turn in range(4, 16, 4):
        assert sorted(order[turn : turn + 4]) == [("a", 1), ("a", 4), ("b", 1), ("b", 4)]


def test_a_speedup_is_over_the_best_bf16_way() -> None:
    def row(name: str, first: float, whole: float, baseline: bool) -> WayRow:
        return WayRow(name, 4, 128, 11, prompt_seconds=[first], whole_seconds=[whole], baseline=baseline)

    rows = [row("octavo", 1.0, 2.0, False), row("eager", 2.0, 7.0, True), row("static", 3.0, 5.0, True)]
    _compare(rows)
    assert [r.first_token_speedup for r in rows] == [2.0, 1.0, pytest.approx(2 / 3)]
    assert [r.tokens_per_second_speedup for r in rows] == [2.0, pytest.approx(2 / 5), 1.0]
    _compare(alone := [row("octavo", 1.0, 2.0, False)])
    assert alone[0].first_token_speedup is None


def test_tokens_are_compared_with_the_reference() -> None:
    def differs(ids: Tensor, tokens: int) -> Tensor:
        made = counting(ids, tokens).clone()
        made[1, 2] = 9  # the second prompt, third token; the last token is equal again
        return made

    check = check_tokens(Opened({"octavo": counting}, differs), PROMPTS)
    assert check is not None
    assert (check.way, check.tokens, check.equal, check.ok) == ("octavo", 4, [4, 2], False)


@pytest.mark.slow
def test_octavo_and_transformers_take_part(made: Folders) -> None:
    folder, wide = made("llama", scheme="channel"), made("llama")
    ways: list[Way] = []
    for program in (octavo_program(folder, CPU), transformers_program(wide, CPU)):
        opened, start = open_program(program, PROMPTS)
        assert start.weight_bytes is None
        check = check_tokens(opened, PROMPTS)
        assert check is None or check.ok
        ways += [way(name, generate, baseline=program.baseline) for name, generate in opened.ways.items()]
    rows = measure_cell(ways, Cell(2, 8), PROMPTS, lambda _: None)
    assert [(row["way"], row["baseline"]) for row in rows] == [(OCTAVO, False), (EAGER, True), (STATIC, True)]


class FakeGPU:
    """The counters of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
        self.now = self.most = held
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "most", self.now))

    def allocate(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


def test_the_memory_of_others_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch, held=500)  # of which 100 are this way's weights
    meter: Any = Meter(torch.device("cuda"), weights=100)
    with meter:
        gpu.allocate(70)
        gpu.allocate(-50)  # 20 stay
    assert meter.peak == 170
    gpu.allocate(200)  # another way's
    with meter:
        gpu.allocate(60)
        gpu.allocate(-60)
    assert meter.peak == 100 + 20 + 60
    meter.reset()
    with meter:
        gpu.allocate(5)
    assert meter.peak == 105
