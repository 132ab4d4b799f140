"""Timing linear layers in BF16 and FP8."""

from functools import partial
from itertools import count, product

import pytest
import torch
from torch import nn

from octavo.nn import only_if_faster as lookup
from octavo.nn import only_if_faster as measure
from octavo.recipe import get_recipe


@pytest.mark.parametrize(("gigabytes", "widest"), [(80, 32768), (48, 16384), (24, 8192), (2, 1024)])
def test_the_grid_is_what_the_memory_holds(gigabytes: int, widest: int) -> None:
    shapes = lookup.grid_shapes(gigabytes * 10**9)
    assert max(shapes) == (32768, widest, widest)
    axes = [sorted(set(axis)) for axis in zip(*shapes, strict=True)]
    assert sorted(shapes) == list(product(*axes))
    assert axes[0] == [512, 2048, 8192, 32768]


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"needs 1\.5 GB of free GPU memory, 1\.0 GB are"):
        lookup.grid_shapes(10**9)


class Clock:
    """Stands for the GPU's: calls take milliseconds of it, and events read it."""

    now = 0.0

    def spend(self, ms: float) -> None:
        self.now += ms

    def mark(self) -> "Event":
        return Event(self.now)


class Event:
    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_medians_of_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(), []
    monkeypatch.setattr(measure, "_mark", clock.mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def short() -> None:
        clock.spend(50.0 if len(order) == 6 else 1.0)  # one outlier
        order.append("short")

    def long() -> None:
        clock.spend(4.0)
        order.append("long")

    assert measure.interleaved_medians([short, long]) == [1.0, 4.0]
    assert order[:4] == ["short", "short", "long", "long"]  # how long they take
    assert order[4:] == ["short", "short", "short", "long"] * measure.TURNS  # three of one are a turn


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_the_layers_compile_once_for_every_size(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = []

    def backend(graph: object, inputs: object) -> object:
        compilations.append(graph)
        return graph.forward  # type: ignore[attr-defined]

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layer = measure.convert_layer(nn.Linear(1, 1, bias=False), measure.Linear, get_recipe(recipe), "measured")
    forward = measure.compiled(layer)
    for m, k, n in [(32, 48, 64), (48, 64, 32), (96, 80, 112), (32, 32, 32), (64, 32, 32)]:
        x, w = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16, requires_grad=True)
        expected = measure.convert_layer(nn.Linear(k, n, bias=False), measure.Linear, get_recipe(recipe), "measured")
        expected.weight = nn.Parameter(w.detach())
        assert torch.equal(forward(x, w), expected(x))
    assert len(compilations) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_gpu_is_timed_and_its_random_state_left() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = torch.cuda.get_rng_state()
    shapes = [(256, 512, 1024), (8192, 4096, 4096), (256, 64, 64), (512, 512, 512)]
    for name in ("tensorwise", "rowwise", "rowwise_dw_bf16", "delayed", "blockwise"):
        done = count()
        with torch.no_grad():
            rows = lookup.measure_shapes(get_recipe(name), shapes, device, partial(next, done))
        assert next(done) == len(shapes)
        assert [r.shape for r in rows] == shapes
        flops = 6 * 8192 * 4096 * 4096
        assert 0.1e15 < flops / (1e-3 * rows[1].bf16_ms) < 2.5e15  # FLOP/s of BF16 on GPUs that have FP8
        assert rows[0].bf16_ms < rows[1].bf16_ms
    assert torch.equal(torch.cuda.get_rng_state(), state)
