"""The tables of docs/pretraining.md: whole models trained in BF16 and in FP8."""

import statistics
from collections.abc import Iterable, Iterator

from bench.gpu.gpt_parity import gaps
from bench.report.tables import Result, Row, machine, number, times
from octavo.words import plural

Rows = Iterable[Row]
BASE = "bf16"


def models(results: dict[str, Result]) -> Iterator[Result]:
    """The result of each model, the smallest first."""
    found = [result for name, result in results.items() if name.startswith("pretrain_")]
    yield from sorted(found, key=lambda result: result["settings"]["layers"] * result["settings"]["width"] ** 2)


def label(result: Result) -> str:
    """The model; and the tokens at which its runs were compared, where that is not their end."""
    whole = result["compared_at_step"] == result["settings"]["steps"]
    return str(result["model"]) + ("" if whole else f", first {result['compared_tokens'] / 1e6:.1f} M tokens")


def pretraining_runs(results: dict[str, Result]) -> Rows:
    for result in models(results):
        for run in result["runs"]:
            yield {
                "model": label(result),
                "mode": run["mode"],
                "seed": str(run["seed"]),
                "tokens": f"{result['compared_tokens'] / 1e6:.1f} M",
                "loss on held-out text": f"{run['compared_loss']:.4f}",
                "tokens/s": f"{run['tokens_per_second']:,.0f}",
                "peak GiB": f"{run['peak_bytes'] / 2**30:.1f}",
                "seconds": number(run["seconds_to_target"], "{:.0f}"),
                "to a loss of": f"{result['target']:.3f}",
            }


def pretraining_speed(results: dict[str, Result]) -> Rows:
    """The mean over seeds of each mode's speed, memory and time to the target."""
    for result in models(results):
        means = {mode: mean_of(result, mode) for mode in dict.fromkeys(run["mode"] for run in result["runs"])}
        for mode, mean in means.items():
            yield {
                "model": label(result),
                "mode": mode,
                "tokens/s": f"{mean['tokens_per_second']:,.0f}",
                "speed vs BF16": times(mean["tokens_per_second"], means[BASE]["tokens_per_second"]),
                "peak memory vs BF16": times(mean["peak_bytes"], means[BASE]["peak_bytes"]),
                "time to the loss vs BF16": times(mean["seconds_to_target"], means[BASE]["seconds_to_target"]),
            }


def mean_of(result: Result, mode: str) -> dict[str, float]:
    runs = [run for run in result["runs"] if run["mode"] == mode]
    keys = "tokens_per_second", "peak_bytes", "seconds_to_target"
    return {key: statistics.mean(run[key] for run in runs) for key in keys}


def pretraining_gaps(results: dict[str, Result]) -> Rows:
    for result in models(results):
        for mode, gap in result["gaps"].items():
            interval = gap["interval"]
            resolved = interval is not None and not interval[0] <= 0 <= interval[1]
            yield {
                "model": label(result),
                "mode": mode,
                "seeds": str(len(gap["seeds"])),
                "mean gap to BF16": f"{gap['mean']:+.3%}",
                "95 % interval": "{:+.3%} to {:+.3%}".format(*interval) if interval else "– (one seed)",
                "BF16's seeds apart": number(result["bf16_spread"], "{:.3%}"),
                "resolved": "yes" if resolved else "no: these runs cannot tell the gap from zero",
            }


def pretraining_curves(results: dict[str, Result]) -> Rows:
    """The mean loss over seeds by tokens, while all runs of a model go on."""
    for result in models(results):
        runs = result["runs"]
        for number_of, point in enumerate(runs[0]["evaluations"]):
            if point["step"] > result["compared_at_step"]:
                break
            tokens = result["compared_tokens"] * point["step"] / result["compared_at_step"]
            losses: dict[str, list[float]] = {}
            for run in runs:
                losses.setdefault(run["mode"], []).append(run["evaluations"][number_of]["loss"])
            means = {mode: f"{statistics.mean(each):.4f}" for mode, each in losses.items()}
            yield {"model": label(result), "tokens": f"{tokens / 1e6:.1f} M", **means}


def pretraining_pooled(results: dict[str, Result]) -> Rows:
    """The gaps of each mode by tokens, over the seeds of all results of a model. A pair of runs is of one result."""
    models_and_tokens: dict[tuple[str, float], dict[tuple[str, int], float]] = {}
    for at, result in enumerate(models(results)):
        step_tokens = result["compared_tokens"] / result["compared_at_step"]
        for run in result["runs"]:
            for point in run["evaluations"]:
                losses = models_and_tokens.setdefault((result["model"], point["step"] * step_tokens), {})
                losses[run["mode"], 1000 * at + run["seed"]] = point["loss"]
    for (model, tokens), losses in sorted(models_and_tokens.items()):
        paired = dict.fromkeys(mode for mode, seed in losses if mode != BASE and (BASE, seed) in losses)
        texts = {mode: gap_text(gaps(losses, mode)) for mode in paired}
        yield {"model": model, "tokens": f"{tokens / 1e6:.1f} M", **texts}


def gap_text(gap: Result) -> str:
    within = " ({:+.1%} to {:+.1%})".format(*gap["interval"]) if gap["interval"] else ""
    return f"{gap['mean']:+.2%}{within}, {plural(len(gap['seeds']), 'seed')}"


def pretraining_text(results: dict[str, Result]) -> str:
    """A line for each model: its text, and the machine."""
    lines = []
    for result in models(results):
        settings, tokens = result["settings"], result["corpus"]["train_tokens"]
        parameters = result["runs"][0]["parameters"] / 1e6
        shape = f"{parameters:.0f} M parameters in {settings['layers']} layers, {settings['width']} wide"
        shape += f", sequences of {settings['context']} tokens"
        epochs = f"{result['compared_tokens'] / tokens:.2f} epochs of {tokens / 1e6:.0f} M tokens"
        lines.append(f"- {label(result)}: {shape}; {epochs}. {machine(result)}")
    return "\n".join(lines)
