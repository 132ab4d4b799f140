"""The tables of docs/scaling.md: measured steps on several GPUs, and the projection of octavo/plan/step_time.py."""

import statistics
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from bench.gpu.modes import BASE, OURS, TORCHAO, WIDE, speedup
from bench.report.filler import Result, Row, Rows
from octavo.plan.step_time import NODE, Links, Training
from octavo.rates.measured import find_gpu

WORLDS = (64, 256, 1024, 4096)
GROUP = 64  # GPUs that share the weights, at most
LAYERS = 32  # of Llama-3-8B
CARDS = (400, 100, 25)  # Gb/s of each GPU's network card
MODES = (BASE, WIDE, OURS, TORCHAO)
EAGER_BASE = "bf16, eager"
NVLINK = find_gpu("h200").link


def runs(results: dict[str, Result], prefix: str = "gpu_fsdp_") -> list[Result]:
    """The results of one benchmark, by the number of layers and of GPUs."""
    found = [result for name, result in results.items() if name.startswith(prefix)]
    return sorted(found, key=lambda run: (run["setting"]["layers"], run["setting"]["world"]))


def rows_of(run: Result) -> dict[str, Result]:
    """The measured modes of a run. The first row of a mode that was measured twice."""
    found: dict[str, Result] = {}
    for row in run["modes"]:
        if "median" in row:
            found.setdefault(row["mode"], row)
    return found


# --- Measured --------------------------------------------------------------------------------------------------


def failures(results: dict[str, Result]) -> list[Row]:
    """The modes that did not run."""
    found = (*runs(results), *runs(results, "gpu_tensor_parallel_"))
    return [{**run["setting"], **row} for run in found for row in run["modes"] if "error" in row]


def gathered_share(run: Result, name: str) -> float:
    """The bytes that a mode gathers of the blocks, over those of BF16. Embedding, head and norms are left out."""
    modes, setting = rows_of(run), run["setting"]
    norms = 2 * setting["layers"] * 2 * setting["width"]  # twice, forward and backward
    root = 2 * setting["vocabulary"] * setting["width"] + setting["width"]
    other = 2 * (norms + root) / setting["world"]
    return float((modes[name]["gathered_bytes"] - other) / (modes[BASE]["gathered_bytes"] - other))


def network(results: dict[str, Result]) -> Rows:
    for result in runs(results, "gpu_network_"):
        for link in sorted(result["links"], key=lambda link: -link["bytes_per_second"]):
            gains = {"to_wide": speedup(link, OURS, WIDE), "to_base": speedup(link, OURS, BASE)}
            for mode, times in link["rounds"].items():
                yield {**result["setting"], **link, **gains, "mode": mode, "ms": statistics.median(times)}


# --- Projected -------------------------------------------------------------------------------------------------


def fit(seconds: float, training: Training, links: Links, world: int) -> Training:
    """`training` with the block's time that makes a step on `world` GPUs take `seconds`."""
    return replace(training, block=solve(lambda block: replace(training, block=block).step(links, world), seconds))


def solve(function: Callable[[float], float], target: float) -> float:
    """The largest argument from 0 to `target`, in 2^40 steps, at which the rising `function` is at most `target`."""
    step = target / (1 << 40)
    return step * bisect_right(range(1, 1 << 40), target, key=lambda place: function(place * step))


def trainings(results: dict[str, Result]) -> dict[str, Training]:
    """The parts of each mode's step, fitted to the runs of `fitted_runs`."""
    run, other = fitted_runs(results)
    return {name: fitted(run, other, name) for name in MODES}


def fitted_runs(results: dict[str, Result]) -> list[Result]:
    """The runs of the most and of the second most layers on the fewest GPUs."""
    fewest = min(run["setting"]["world"] for run in runs(results))
    return [run for run in runs(results) if run["setting"]["world"] == fewest][::-1][:2]


def fitted(run: Result, other: Result, mode: str) -> Training:
    """The times of a block and of the rest, from the times of a mode's step at two depths."""
    row, beside, world = rows_of(run)[mode], rows_of(other)[mode], run["setting"]["world"]
    training = estimated(run, row)

    def with_rest(rest: float) -> Training:
        return fit(row["median"] / 1e3, replace(training, rest=rest), links_of(run), world)

    def at_other_depth(rest: float) -> float:
        return replace(with_rest(rest), layers=other["setting"]["layers"]).step(links_of(other), world)

    return with_rest(solve(at_other_depth, beside["median"] / 1e3))


def estimated(run: Result, row: Result) -> Training:
    """The parts of a mode's step but for the times of a block and of the rest."""
    setting, world, gradient = run["setting"], run["setting"]["world"], gradient_bytes(run, row)
    layers, root = setting["layers"], 2 * setting["vocabulary"] * setting["width"] + setting["width"]
    return Training(
        layers=layers,
        block=0.0,
        rest=0.0,
        optimizer=row["optimizer_ms"] / 1e3 * world,
        gathered=(row["gathered_bytes"] * world - 2 * root) / (2 * layers),
        reduced=(row["reduced_bytes"] * world - gradient * root) / layers,
        root_gathered=2 * root,
        root_reduced=gradient * root,
        gradient=gradient,
    )


def gradient_bytes(run: Result, row: Result) -> float:
    """Bytes of a gradient that a mode sends: PyTorch sends FP32, and Octavo BF16 since `send_bf16_gradients`."""
    return float(4 * row["reduced_bytes"] / rows_of(run)[BASE]["reduced_bytes"])


def sending(training: Training, gradient: float) -> Training:
    """The same step with so many bytes a gradient in its reductions."""
    reduced, root = (size * gradient / training.gradient for size in (training.reduced, training.root_reduced))
    return replace(training, reduced=reduced, root_reduced=root, gradient=gradient)


def links_of(run: Result) -> Links:
    return Links(run.get("bytes_per_second", NVLINK))


def model_errors(results: dict[str, Result]) -> Rows:
    """The model's time of every measured step that it was not fitted to."""
    known = fitted_runs(results)
    for name, training in trainings(results).items():
        for run in runs(results):
            row, setting = rows_of(run).get(name), run["setting"]
            if row and run not in known:
                sent = sending(training, gradient_bytes(run, row))
                model = replace(sent, layers=setting["layers"]).step(links_of(run), setting["world"])
                where = f"{setting['world']} GPUs, {setting['layers']} layers"
                yield {"where": where, "mode": name, "model": model, "ms": row["median"]}
        for result in runs(results, "gpu_network_"):
            for link in result["links"]:
                if name in link["rounds"]:
                    model = at_bandwidth(result, name, training, link["bytes_per_second"])
                    where = f"{result['setting']['world']} GPUs at {link['bytes_per_second'] / 1e9:.1f} GB/s"
                    ms = statistics.median(link["rounds"][name])
                    yield {"where": where, "mode": name, "model": model, "ms": ms}


def at_bandwidth(result: Result, mode: str, training: Training, bandwidth: float) -> float:
    """The model's seconds of a mode's step in a network benchmark, at a bandwidth in bytes a second."""
    setting = result["setting"]
    training = sending(training, 2.0 if mode in setting.get("bf16_gradients", ()) else 4.0)
    links = Links(bandwidth, shared=setting["transport"] == "socket")  # few channels slow each collective alone
    return replace(training, layers=setting["layers"]).step(links, setting["world"])


def projection(results: dict[str, Result]) -> Rows:
    found, measured = trainings(results), runs(results)
    rate = max((run["bytes_per_second"] for run in measured if "bytes_per_second" in run), default=NVLINK)
    for card in CARDS:
        for world in WORLDS:
            links = Links(rate, NODE * card / 8 * 1e9 * rate / NVLINK)
            steps = {name: replace(training, layers=LAYERS) for name, training in found.items()}
            seconds = {name: step.step(links, world, min(world, GROUP)) for name, step in steps.items()}
            gains = {"to_base": seconds[BASE] / seconds[OURS], "to_wide": seconds[WIDE] / seconds[OURS]}
            for mode, each in seconds.items():
                rates = measured[0]["setting"]["tokens"] / each
                yield {"card": card, "world": world, "mode": mode, "rate": rates, **gains}
