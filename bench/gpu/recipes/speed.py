"""Speed and peak memory of each recipe: blocks of Llama-3-8B's shape, BF16 weights, forward and backward, compiled.

The blocks are plain modules, so that all recipes run the same code around their GEMMs, and each is compiled by itself.
Recipes that do the same work (delayed scaling with other margins) are measured once. A recipe with an emulated GEMM is
not measured on a GPU. A step includes the cast of the weights, and the update of delayed scaling.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import octavo
from bench.gpu import llama
from bench.gpu.llama import Plain
from bench.gpu.passes import Passes, draw_matrices
from bench.gpu.recipes.variants import BASE, CONTROL, implementations, recipe_of
from bench.gpu.timing import decibels, interleaved, summary
from octavo.models.llama import LlamaConfig

CONFIG = replace(llama.CONFIG, layers=2)
LEAST_DB = 6.0  # of the output and of the gradient of the input, against BF16: less is a wrong kernel


class Runner(Passes):
    """The blocks with a recipe, and their step."""

    def __init__(self, name: str, config: LlamaConfig, tokens: int, device: torch.device) -> None:
        with torch.device(device):
            model = Plain(config).to(torch.bfloat16)
        draw_matrices(model)
        octavo.convert(model, recipe_of(name))
        for block in model.layers:
            block.compile()
        super().__init__(model, config, tokens, device)

    def step(self) -> list[torch.Tensor]:
        found = super().step()
        octavo.update_scales(self.model)
        return found


def measure(names: Sequence[str], config: LlamaConfig, tokens: int, rounds: int = 6) -> dict[str, Any]:
    """Milliseconds, and peak bytes, of a step with each recipe; of BF16 too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = list(dict.fromkeys([BASE, *names]))
    same = equal_work(names)
    runners, rows = {}, {}
    for name in dict.fromkeys(same.values()):
        if device.type == "cuda" and "emulated" in implementations(name, device).values():
            continue
        try:
            runners[name], rows[name] = build(name, config, tokens, device)
        except Exception as error:  # a recipe that does not run must not end the others; it has no row
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    check(runners, rows)
    steps: dict[str, Callable[[], Any]] = {name: runner.step for name, runner in runners.items()}
    times = interleaved(steps, rounds=rounds, repeat=4 if device.type == "cuda" else 1, warmup=1)
    base = summary(times[BASE])["median"]
    for name, each in times.items():
        rows[name] |= summary(each) | {"ratio": base / summary(each)["median"]}
        print(f"{name:24} {rows[name]['median']:7.2f} ms  {rows[name]['ratio']:.3f} of BF16's speed", flush=True)
    found = {name: rows[same[name]] | {"measured_as": same[name]} for name in names if same.get(name) in rows}
    return {"layers": config.layers, "width": config.width, "tokens": tokens, "recipes": found}


def equal_work(names: Sequence[str]) -> dict[str, str]:
    """The first recipe of those that do the same work, for each of `names` but the control."""
    first: dict[str, str] = {}
    return {name: first.setdefault(work_of(name), name) for name in names if name != CONTROL}


def work_of(name: str) -> str:
    """The recipe without its name and its margins, which change the scales and not the work."""
    return str(without(recipe_of(name).to_dict() | {"name": ""}, "margin"))


def without(values: Any, key: str) -> Any:
    return {k: without(v, key) for k, v in values.items() if k != key} if isinstance(values, dict) else values


def build(name: str, config: LlamaConfig, tokens: int, device: torch.device) -> tuple[Runner, dict[str, Any]]:
    """A compiled runner, and the peak bytes of its step: weights, activations, gradients and casts."""
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    runner = Runner(name, config, tokens, device)
    for _ in range(3):  # delayed scaling compiles twice
        runner.step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    runner.step()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    print(f"{name:24} peak {(peak or 0) / 1e9:.2f} GB", flush=True)
    return runner, {"peak_bytes": peak}


def check(runners: dict[str, Runner], rows: dict[str, dict[str, Any]]) -> None:
    """Add the SQNR of each recipe's output and gradient against BF16's to its row; a wrong one ends the benchmark."""
    exact = runners[BASE].step()
    for name, runner in runners.items():
        if name != BASE:
            found = [decibels(e, a) for e, a in zip(exact, runner.step(), strict=True)]
            if not all(db > LEAST_DB for db in found):
                raise RuntimeError(f"{name} must be within {LEAST_DB} dB of BF16; output and gradient have {found}")
            rows[name]["sqnr"] = found
