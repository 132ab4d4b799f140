"""The tables of docs/scaling.md: measured steps on several GPUs, and the projection of octavo/plan/communication.py."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace

from bench.gpu.modes import BASE
from bench.gpu.sharded import OURS, TORCHAO, WIDE
from bench.report.aims import Aim
from bench.report.step_fit import fit, solve
from bench.report.tables import Result, Row, earlier, machine, number, times
from octavo.plan.communication import NODE, NVLINK, Links, Training

Rows = Iterable[Row]
WORLDS = (64, 256, 1024, 4096)
GROUP = 64  # GPUs that share the weights, at most
LAYERS = 32  # of Llama-3-8B
CARDS = (400, 100, 25)  # Gb/s of each GPU's network card
MODES = (BASE, WIDE, OURS, TORCHAO)


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


def fsdp(results: dict[str, Result]) -> Rows:
    for run in runs(results):
        modes = rows_of(run)
        for name, row in modes.items():
            yield {
                "GPUs": str(run["setting"]["world"]),
                "layers": str(run["setting"]["layers"]),
                "mode": name,
                "ms": f"{row['median']:.1f}",
                "tokens/s a GPU": f"{row['tokens_per_second']:,.0f}",
                "vs BF16": f"{row['ratio']:.3f}x",
                "vs torchao, FP8 gather": times(speed(modes, name), speed(modes, TORCHAO)),
                "peak GiB": f"{row['peak_bytes'] / 2**30:.1f}",
                "gathered GB a rank": f"{row['gathered_bytes'] / 1e9:.2f}",
                "exposed ms": number(row["kernels"].get("exposed"), "{:.1f}"),
                **earlier(row),
            }


def speed(modes: dict[str, Result], name: str) -> float | None:
    return modes[name]["ratio"] if name in modes else None


def fsdp_failures(results: dict[str, Result]) -> str:
    """The modes that did not run, with their errors; else nothing."""
    found = [
        f"- {run['setting']['world']} GPUs, {run['setting']['layers']} layers, {row['mode']}: {row['error']}"
        for run in (*runs(results), *runs(results, "gpu_tensor_parallel_"))
        for row in run["modes"]
        if "error" in row
    ]
    return "\n".join(["Modes that did not run:", "", *found]) if found else ""


def scaling_machines(results: dict[str, Result]) -> str:
    """A line for each result on this page: the number of GPUs, the machine, the versions and the date."""
    prefixes = ("gpu_fsdp_", "gpu_network_", "gpu_tensor_parallel_")
    found = [(name, result) for name, result in results.items() if name.startswith(prefixes)]
    return "\n".join(f"- `{name}.json`: {machine(result)}" for name, result in found)


def gathered_share(run: Result, name: str) -> float | None:
    """The bytes that a mode gathers of the blocks, over those of BF16. Embedding, head and norms are left out."""
    modes, setting = rows_of(run), run["setting"]
    if BASE not in modes or name not in modes:
        return None
    norms = 2 * setting["layers"] * 2 * setting["width"]  # twice, forward and backward
    root = 2 * setting["vocabulary"] * setting["width"] + setting["width"]
    other = 2 * (norms + root) / setting["world"]
    return float((modes[name]["gathered_bytes"] - other) / (modes[BASE]["gathered_bytes"] - other))


def network(results: dict[str, Result]) -> Rows:
    for result in runs(results, "gpu_network_"):
        for link in sorted(result["links"], key=lambda link: -link["bytes_per_second"]):
            rounds = link["rounds"]
            yield {
                "GB/s": f"{link['bytes_per_second'] / 1e9:.1f}",
                "link": f"{result['setting']['transport']}, {link['channels']} channels",
                **{f"{name}, ms": f"{statistics.median(times):.1f}" for name, times in rounds.items()},
                "FP8 gather vs BF16 gather": number(gain(rounds, OURS, WIDE), "{:.3f}x"),
                "vs BF16": number(gain(rounds, OURS, BASE), "{:.3f}x"),
            }


def gain(rounds: dict[str, list[float]], mode: str, other: str) -> float | None:
    """The speed of `mode` over that of `other` in the same rounds."""
    if mode not in rounds or other not in rounds:
        return None
    return statistics.median(b / a for a, b in zip(rounds[mode], rounds[other], strict=True))


def tensor_parallel(results: dict[str, Result]) -> Rows:
    for run in runs(results, "gpu_tensor_parallel_"):
        for name, row in rows_of(run).items():
            yield {
                "GPUs": str(run["setting"]["world"]),
                "mode": name,
                "ms": f"{row['median']:.2f}",
                "quartiles": f"{row['low']:.2f} to {row['high']:.2f}",
                "vs BF16": f"{row['ratio']:.3f}x",
                "exposed ms": number(row["kernels"].get("exposed"), "{:.2f}"),
            }


# --- Projected -------------------------------------------------------------------------------------------------


def trainings(results: dict[str, Result]) -> dict[str, tuple[int, Training]]:
    """The parts of each mode's step, fitted to the runs of `fitted_runs`, and their GPUs."""
    found = fitted_runs(results)
    if not found:
        return {}
    run, other = found[0], found[1] if len(found) > 1 else None
    modes, world = rows_of(run), run["setting"]["world"]
    return {name: (world, fitted(run, other, name)) for name in MODES if name in modes and BASE in modes}


def fitted_runs(results: dict[str, Result]) -> list[Result]:
    """The run of the most layers on the fewest GPUs, and one of fewer layers on as many GPUs, if there is one."""
    found = runs(results)
    layers = max((run["setting"]["layers"] for run in found), default=0)
    deepest = next((run for run in found if run["setting"]["layers"] == layers), None)
    if deepest is None:
        return []
    world = deepest["setting"]["world"]
    others = [run for run in found if run["setting"]["world"] == world and run is not deepest]
    return [deepest, *others[-1:]]


def fitted(run: Result, other: Result | None, mode: str) -> Training:
    """The times of a block and of the rest, from the times of a mode's step at two depths.

    Of one depth alone: the head takes its share of BF16's FLOPs in every mode. Where the mode has no step at the other
    depth, or one of code that sent gradients of another size, the rest is that of BF16.
    """
    row = rows_of(run)[mode]
    training = estimated(run, row)
    beside = rows_of(other).get(mode) if other is not None else None
    if other is not None and beside is not None and gradient_bytes(other, beside) == training.gradient:
        seconds = beside["median"] / 1e3
        rest = solve(lambda rest: at_depth(other, replace(training, rest=rest), run, row), seconds)
        training = replace(training, rest=rest)
    elif other is not None and mode != BASE:
        training = replace(training, rest=fitted(run, other, BASE).rest)
    return fit(row["median"] / 1e3, training, links_of(run), run["setting"]["world"])


def at_depth(other: Result, training: Training, run: Result, row: Result) -> float:
    """The seconds of a step of the run `other`, with the time of a block that fits `run` and the rest of `training`."""
    model = fit(row["median"] / 1e3, training, links_of(run), run["setting"]["world"])
    setting = other["setting"]
    return replace(model, layers=setting["layers"]).step(links_of(other), setting["world"])


def estimated(run: Result, row: Result) -> Training:
    """The parts of a mode's step but for the time of a block; the rest is the head's share of BF16's FLOPs."""
    setting, world = run["setting"], run["setting"]["world"]
    width, layers = setting["width"], setting["layers"]
    block = width * (2 * width + 2 * width * setting["kv_heads"] // setting["heads"] + 3 * setting["mlp_width"])
    attention = setting["tokens"] * width  # the two products over the causal half, as parameters
    head = setting["vocabulary"] * width
    base = rows_of(run)[BASE]
    rest = (base["median"] - base["optimizer_ms"]) / 1e3 * head / (layers * (block + attention) + head)
    root = 2 * head + width
    gradient = gradient_bytes(run, row)
    return Training(
        layers=layers,
        block=0.0,
        rest=rest,
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


def links_of(run: Result) -> Links:
    return Links(run.get("bytes_per_second", NVLINK))


def model_errors(results: dict[str, Result]) -> Rows:
    """The model's time of every measured step that it was not fitted to."""
    known = fitted_runs(results)
    for name, (_, training) in trainings(results).items():
        for run in runs(results):
            row, setting = rows_of(run).get(name), run["setting"]
            if row and run not in known:
                sent = training.sending(gradient_bytes(run, row))
                model = replace(sent, layers=setting["layers"]).step(links_of(run), setting["world"])
                yield error_row(f"{setting['world']} GPUs, {setting['layers']} layers", name, model, row["median"])
        for result in runs(results, "gpu_network_"):
            for link in result["links"]:
                if name in link["rounds"]:
                    model = at_bandwidth(result, name, training, link["bytes_per_second"])
                    where = f"{result['setting']['world']} GPUs at {link['bytes_per_second'] / 1e9:.1f} GB/s"
                    yield error_row(where, name, model, statistics.median(link["rounds"][name]))


def at_bandwidth(result: Result, mode: str, training: Training, bandwidth: float) -> float:
    """The model's seconds of a mode's step in a network benchmark, at a bandwidth in bytes a second."""
    setting = result["setting"]
    training = training.sending(2.0 if mode in setting.get("bf16_gradients", ()) else 4.0)
    links = Links(bandwidth, shared=setting["transport"] == "socket")  # few channels slow each collective alone
    return replace(training, layers=setting["layers"]).step(links, setting["world"])


def error_row(where: str, mode: str, model: float, milliseconds: float) -> Row:
    return {
        "measured": where,
        "mode": mode,
        "ms": f"{milliseconds:.1f}",
        "model, ms": f"{model * 1e3:.1f}",
        "error": f"{model * 1e3 / milliseconds - 1:+.1%}",
    }


def projection(results: dict[str, Result]) -> Rows:
    found = trainings(results)
    rate = max((run["bytes_per_second"] for run in runs(results) if "bytes_per_second" in run), default=NVLINK)
    if BASE not in found or OURS not in found:
        return
    for card in CARDS:
        for world in WORLDS:
            links = Links(rate, NODE * card / 8 * 1e9 * rate / NVLINK)
            seconds = {
                name: replace(training, layers=LAYERS).step(links, world, min(world, GROUP))
                for name, (_, training) in found.items()
            }
            tokens = runs(results)[0]["setting"]["tokens"]
            yield {
                "network a GPU": f"{card} Gb/s",
                "GPUs": f"{world:,}",
                **{f"{name}, tokens/s a GPU": f"{tokens / each:,.0f}" for name, each in seconds.items()},
                "vs BF16": times(seconds[BASE], seconds[OURS]),
                "FP8 gather vs BF16 gather": times(seconds.get(WIDE), seconds[OURS]),
            }


# --- Aims ------------------------------------------------------------------------------------------------------


def scaling_aims(results: dict[str, Result]) -> Iterator[Row]:
    for run in runs(results):
        modes, world, layers = rows_of(run), run["setting"]["world"], run["setting"]["layers"]
        if world == 1 or OURS not in modes:
            continue
        claim = f"{world} GPUs, {layers} layers: rowwise gathered in FP8"
        ours = modes[OURS]
        yield Aim(f"{claim}, vs compiled BF16", ours["ratio"], "≥", 1.35).row()
        torchao = speed(modes, TORCHAO)
        yield Aim(f"{claim}, vs {TORCHAO}", torchao and ours["ratio"] / torchao, "≥", 1.15).row()
        wide = speed(modes, WIDE)
        yield Aim(f"{claim}, vs gathered in BF16", wide and ours["ratio"] / wide, "≥", 0.99).row()
        peaks = [row["peak_bytes"] for name, row in modes.items() if name.startswith("torchao")]
        least = ours["peak_bytes"] / min(peaks) if peaks else None
        yield Aim(f"{claim}, peak memory vs the leanest torchao mode", least, "<", 1.0).row()
        yield Aim(f"{claim}, bytes vs BF16's", gathered_share(run, OURS), "≤", 0.502, "{:.4f}").row()
    for run in runs(results, "gpu_tensor_parallel_"):
        rows = rows_of(run)
        best = max((row["ratio"] for name, row in rows.items() if name.startswith("octavo")), default=None)
        rowwise = max((row["ratio"] for name, row in rows.items() if "torchao: rowwise" in name), default=None)
        yield Aim("tensor parallel on 2 GPUs, 70B-shaped blocks, vs BF16", best, "≥", 1.3).row()
        yield Aim("tensor parallel, vs torchao rowwise", best and rowwise and best / rowwise, "≥", 1.2).row()
