"""Figures of docs/performance.md that follow from several rows of the results, and the gains that README shows."""

import csv
import re
import statistics
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu import modes
from bench.gpu.modes import BASE, FP8_CACHE, FUSED, OCTAVO, SERVE, SERVE_FP8_CACHE, STATIC, speedup
from bench.report import loss, scaling, training
from bench.report.filler import Result, Row, Rows, fill, names_of, number, spread
from octavo.nn.only_if_faster import SHIPPED
from octavo.rates.measured import Measurement, Table

COPY_SHARE = 0.85  # of a copy's bandwidth: what a kernel aims at
ONLY_IF_FASTER = 0.98  # of BF16's speed: what a layer aims at that is converted only if FP8 is faster
GRAPHS = {OCTAVO: SERVE, FP8_CACHE: SERVE_FP8_CACHE, STATIC: BASE}  # the graph, captured by hand, of a way
SCOPES = {"whole": "`torch.compile(model)`", "block": "`block.compile()` for each block"}
EXPERTS = {"mixtral": "Mixtral's", "small experts": "small experts"}
# A mode of the stack whose code was replaced after it was measured: the table of recipes has the speed of the new code.
REPLACED = "ours plain: delayed, compile"


# --- Generating text -------------------------------------------------------------------------------------------


def figure(results: dict[str, Result], section: str, way: str, key: str, prompt: int | None = None) -> float | None:
    """A figure of a way of `generate`; None where it was not measured."""
    rows: list[Result] = results["gpu_generate"].get(section, [])
    return next((row[key] for row in rows if row["way"] == way and prompt in (None, row["prompt"])), None)


def graph_share(results: dict[str, Result], batch: int, way: str) -> float | None:
    """The tokens a second of a way over those of its decoding step as a CUDA graph that was captured by hand."""
    rates = results["gpu_generate"].get(f"graphs {batch}", {}).get("tokens_per_second", {})
    own, graph = figure(results, f"decode {batch}", way, "tokens_per_second"), rates.get(GRAPHS.get(way))
    return own / graph if own and graph else None


# --- The layer stack -------------------------------------------------------------------------------------------


def by_mode(rows: list[Result], key: str) -> dict[str, float]:
    """One figure of each mode that has it."""
    return {row["mode"]: row[key] for row in rows if row[key] is not None}


def best_torchao(by_mode: dict[str, float]) -> float | None:
    """The least figure of torchao's modes."""
    return min((value for mode, value in by_mode.items() if mode.startswith("torchao")), default=None)


def below_floor(stack: Result) -> list[str]:
    """The parts of the fused mode that are faster than their floor."""
    floor, profile = stack["floors"]["cast"], stack["profiles"][FUSED]
    faster = [part for part in ("gemm", "attention", "rest") if profile[part] < floor[part]]
    return [f"{part} ({profile[part]:.2f} ms, floor {floor[part]:.2f})" for part in faster]


def longest_kernels(stack: Result) -> Rows:
    """The longest kernels of each profiled mode, in calls and milliseconds a step."""
    for mode, parts in stack["profiles"].items():
        yield from ({"mode": mode, "kernel": name, "calls": calls, "ms": ms} for name, calls, ms in parts["kernels"])


# --- A trained model -------------------------------------------------------------------------------------------


def faster_schemes(result: Result) -> list[str]:
    """The schemes that were faster than BF16 in every pass."""
    ratios = [{name: row["ratio"] for name, row in rows.items()} for rows in result.get("ms", {}).values()]
    return [f"`{name}`" for name in result["schemes"] if ratios and all(each.get(name, 0) > 1 for each in ratios)]


# --- Kernels and layers ----------------------------------------------------------------------------------------


def kernels_below(rows: list[Result]) -> str:
    slow = [row for row in rows if row["share"] < COPY_SHARE]
    names = ", ".join(f"{row['kernel']} at {' x '.join(map(str, row['shape']))} ({row['share']:.2f})" for row in slow)
    return f"{len(rows) - len(slow)} of {len(rows)} reach {COPY_SHARE} of a copy. Below it: {names or 'none'}."


def layer_speedups(cells: list[Result], mode: str, other: str) -> list[float]:
    """The speed of `mode` as a multiple of that of `other`, in each cell that has both."""
    return [speedup(cell, mode, other) for cell in cells if {mode, other} <= cell["rounds"].keys()]


def ranges(speeds: dict[str, list[float]]) -> Rows:
    """The least, the median and the largest speed of each mode or recipe, and the share of its speeds that gain."""
    for name, found in speeds.items():
        share = sum(speed > 1 for speed in found) / len(found)
        figures = {"least": min(found), "median": statistics.median(found), "most": max(found)}
        yield {"name": name, "share": share, **figures}


def below(values: list[float], bound: float) -> str:
    """How many of the values."""
    return f"{sum(value < bound for value in values)} of {len(values)}"


def layer_cells(cells: list[Result]) -> Rows:
    """Every cell: the time in BF16 and the speed of each mode."""
    for cell in sorted(cells, key=lambda cell: (cell["m"], cell["k"], cell["n"])):
        rounds, sizes = cell["rounds"], {name: cell[name.lower()] for name in "MKN"}
        speeds = {mode: speedup(cell, mode, "bf16") for mode in rounds if mode != "bf16"}
        yield {**sizes, "BF16 ms": statistics.median(rounds["bf16"]), **speeds}


def layer_sizes() -> list[Measurement]:
    """The table of speeds that the package ships."""
    grid = Table.from_json((files("octavo.rates") / SHIPPED["H100"]).read_text()).grid
    return sorted(grid, key=lambda row: (row.recipe, row.M, row.K, row.N))


def speeds_by_recipe() -> dict[str, list[float]]:
    """The speeds of each recipe over all sizes."""
    recipes = dict.fromkeys(row.recipe for row in layer_sizes())
    return {recipe: [row.speedup for row in layer_sizes() if row.recipe == recipe] for recipe in recipes}


def fastest_bf16(ms: dict[str, float]) -> str:
    return min((mode for mode in ms if mode.startswith("BF16")), key=ms.__getitem__)


def attention_times(cells: list[Result]) -> Rows:
    """Each mode by tokens and pass, with its speed over the fastest of BF16."""
    for cell in cells:
        for which, words in (("forward", "forward"), ("both", "forward and backward")):
            ms = cell[which]["ms"]
            for mode, value in ms.items():
                speed = speedup(cell[which], mode, fastest_bf16(ms))
                yield {"tokens": cell["tokens"], "words": words, "mode": mode, "ms": value, "speed": speed}


def write_grids(results: dict[str, Result], folder: Path, **more: Iterable[Row]) -> None:
    """Write the grids of docs/performance.md, and rows of other pages, as CSV files."""
    whole = ({"step": step, **found} for step, found in results["gpu_whole_step"].items() if "modes" in found)
    grids: dict[str, Iterable[Row]] = {
        "linear": ({key: getattr(row, key) for key in ("recipe", "M", "K", "N", "speedup")} for row in layer_sizes()),
        "layer": layer_cells(results["gpu_layer"]["cells"]),
        "kernels": longest_kernels(results["gpu_stack"]),
        "small_gemm": results["gpu_serve"]["kernels"],
        "schemes": results["gpu_schemes"]["rows"],
        "classifier": results["vision"]["classifier"],
        "diffusion": results["vision"]["diffusion"],
        "weight_only": results["gpu_weight_only"]["gemms"],
        "int8": results["gpu_int8"]["rows"],
        "copies": results["gpu_kernels"]["kernels"],
        "ceilings": results["gpu_ceilings"]["gemm"],
        "accumulation": results["gpu_ceilings"]["accumulation"],
        "attention_64": attention_times(results["gpu_attention"]["cells_of_64"]),
        "loss_gradients": loss.gradients(results),
        "grouped": ({**row, "shape": row["experts"]} for row in expert_shapes(results["gpu_grouped_rows"]["shapes"])),
        "grpo": results["cpu_grpo"]["arms"],
        "whole_steps": ({"step": row["step"], "mode": row.name, **row.value} for row in spread(whole, "modes")),
        "pretraining": training.curves(results),
        "pretraining_runs": training.every_run(results),
        "vision_layers": training.converted_layers(results["gpu_vision"]["shapes"]),
    }
    for name, found in (grids | more).items():
        rows = [flat(row) for row in found]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def flat(row: Row) -> dict[str, Any]:
    """A row of a file: the entries of a dictionary are columns, a list is one cell, and numbers have four digits."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}: {name}": each for name, each in flat(value).items()}
        elif isinstance(value, list):
            found[key] = ", ".join(f"{x:.4g}" if isinstance(x, float) else str(x) for x in value)
        else:
            found[key] = round(value, 4) if isinstance(value, float) else value
    return found


# --- Experts, serving, schemes ---------------------------------------------------------------------------------


def descriptor_gains(results: dict[str, Result], scales: str, key: str) -> str:
    """The least and the largest speed of a GEMM's best tiling by `key`, over that of the best one by pointers."""
    rows = [row for row in results["gpu_descriptors"]["gemms"] if row["scales"] == scales]
    shapes = {(row["m"], row["n"], row["k"]) for row in rows}
    by_shape = [[row for row in rows if (row["m"], row["n"], row["k"]) == shape] for shape in shapes]
    gains = [min(row["pointers_us"] for row in each) / min(row[key] for row in each) for each in by_shape]
    return f"{min(gains):.2f}x to {max(gains):.2f}x"


def expert_shapes(shapes: dict[str, Result]) -> list[Result]:
    """The measured shapes of experts, with their names."""
    return [{**shapes[key], "experts": name} for key, name in EXPERTS.items()]


def scheme_speeds(rows: Iterable[Row]) -> dict[int, dict[str, float]]:
    """BF16's time over the scheme's, of all layers together, by tokens and scheme."""
    times: dict[int, dict[str, float]] = {}
    for row in rows:
        of_tokens = times.setdefault(row["m"], {})
        of_tokens[row["scheme"]] = of_tokens.get(row["scheme"], 0.0) + row["us"]
    return {
        tokens: {scheme: us["bf16"] / each for scheme, each in us.items() if scheme != "bf16"}
        for tokens, us in times.items()
    }


def parity(results: dict[str, Result]) -> Rows:
    """The KL of forward passes from decoding, by models, machine and mode; the mode of the same bits refuses BF16."""
    for machine in ("CPU", "GPU"):
        for row in results[f"{machine.lower()}_rl_parity"]["rows"]:
            spread = f" ± {row['deviation']:.0e}" if "deviation" in row else ""
            kl = "refused" if row["same_bits"] is None else f"{row['same_bits']:.1e}" if row["same_bits"] else "0"
            named = {"models": row["models"], "machine": machine}
            yield {**named, "mode": "default", "kl": f"{row['default']:.1e}{spread}"}
            yield {**named, "mode": "same bits", "kl": kl}


# --- The gains that README shows: speeds over compiled BF16 and over torchao, with the accuracy beside them -----

LLAMA = "Llama-3-8B's shape"
NOT_DECIDED = "final loss: these runs do not decide it"
FRONT = ("a whole step", "Llama-3-8B, 32 layers", "experts", "Generate one text", "GPT of width")  # README's rows


class Gain(NamedTuple):
    """A line of gains.template.md: speeds as multiples of compiled BF16's and of torchao's (None: not measured)."""

    what: str
    to_bf16: float
    to_torchao: float | None
    accuracy: str
    link: str

    def row(self, docs: str = "docs/") -> Row:
        """The cells; `docs` is the folder of the pages, as seen from the page with the table."""
        accuracy = {"accuracy against BF16": self.accuracy} if self.accuracy else {}
        speeds = {"speed over compiled BF16": number(self.to_bf16), "over torchao": number(self.to_torchao)}
        return {"": self.what, **speeds, **accuracy, "measured": f"[how]({docs}{self.link})"}


def front(results: dict[str, Result]) -> list[Gain]:
    """The five rows of README, the one that loses among them, without the measures of accuracy, which differ by row."""
    found = {key: gain for key in FRONT for gain in gains(results) if key in gain.what}
    return [found[key]._replace(accuracy="") for key in FRONT]


def gains(results: dict[str, Result]) -> list[Gain]:
    names = names_of(results, modes, scaling, training) | globals()
    found: list[Gain] = []
    for line in Path(__file__).with_name("gains.template.md").read_text().splitlines():
        what, speeds, accuracy, link = line.split(" | ")
        to_bf16, to_torchao = eval(speeds, names)
        found.append(Gain(fill(what, names), to_bf16, to_torchao, fill(accuracy, names), link))
    return found


def faster(speeds: Mapping[str, float], ours: str, base: str = "bf16") -> tuple[float, float | None]:
    """The speed of a mode over BF16's, and over that of torchao's fastest mode."""
    torchao = [speed for mode, speed in speeds.items() if mode.startswith("torchao")]
    return speeds[ours] / speeds[base], speeds[ours] / max(torchao) if torchao else None


def gpt_speeds(result: Result) -> dict[str, float]:
    """Of the GPT that was measured before Octavo's GPT-2 had three layers for q, k and v."""
    return {row["mode"]: 1 / row["milliseconds"] for row in result["step_times"]["steps"]}


def graphs_speed(generated: Result, batch: int, way: str) -> float:
    """The speed of the decoding steps of a way over those of BF16, both compiled and captured as a CUDA graph."""
    rates = generated[f"graphs {batch}"]["tokens_per_second"]
    return float(rates[GRAPHS[way]] / rates[BASE])


def graphs(results: dict[str, Result], batch: int, way: str) -> str:
    loop = number(figure(results, f"decode {batch}", way, "tokens_per_second_speedup"))
    where = f"{LLAMA}, CUDA graphs of both, {gpu(results['gpu_generate'])}"
    return f"{where}; `generate` is {loop} over transformers' loop in BF16"


def gpu(result: Result) -> str:
    """The GPU's short name, H100 of "NVIDIA H100 80GB HBM3"."""
    name = str(result["machine"]["gpu"])
    short = re.search(r"\b[A-Z]\d00\b", name)
    return short[0] if short else name
