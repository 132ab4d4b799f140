"""The tables of docs/recipes.md: every recipe with its evidence, and the choice that follows; and of docs/gpus.md."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import product

from bench.gpu.variants import BASE, CONTROL, VARIANTS, promoted
from bench.report.filler import MISSING, Result, Rows, number
from octavo.checkpoint.scheme import SCHEMES, find_gemm, scheme_on
from octavo.ops.dispatch import gemm_backends, in_formats_of
from octavo.ops.launching import ARCHITECTURES
from octavo.recipe import GEMMS, PRESETS, Recipe, blockwise, mxfp8, rowwise

DEFAULT = "rowwise"
RESOLUTION = 0.0025  # the smallest gap that the runs are meant to resolve
NOISE = 0.02  # of speeds and peaks: recipes that are closer to the default count as its equals


def recipe_table(found: Result) -> Rows:
    """A row for each recipe that was trained."""
    for name, row in found["recipes"].items():
        timed, trained = found["speed"]["recipes"].get(name), row["losses"] and computed(found, name)
        seeds = str(len(row["losses"])) if trained else MISSING
        yield {
            **row,
            "gap": row["gap"] if trained else None,
            "name": name,
            "words": VARIANTS[name].words,
            "seeds": seeds + (f", {row['diverged']} diverged" if row["diverged"] else ""),
            "speed": number(timed["ratio"]) if timed else emulated(row),
            "memory": number(relative_memory(found, name) if timed else None),
        }


def computed(found: Result, name: str) -> bool:
    """Whether the machine of the losses computes what sets a recipe apart: a CPU has no fast accumulation."""
    before = list(VARIANTS)[: list(VARIANTS).index(name)]
    return bool(found["machine"]["gpu"]) or exact(name) not in map(exact, before) or name == CONTROL


def exact(name: str) -> Recipe:
    """The recipe of a variant without its name and without fast accumulation."""
    return replace(promoted(VARIANTS[name].recipe, *GEMMS), name="")


def errors_of(found: Result, name: str, gemm: str) -> str:
    row = found["errors"]["recipes"].get(name)
    if row is None:
        return MISSING
    return f"{row[gemm]['median']:.1f} ({row[gemm]['worst']:.1f}, {number(row[gemm].get('worst_channel'), '{:z.1f}')})"


def emulated(row: Result) -> str:
    gemms = [gemm for gemm, implementation in row["gemms"].items() if implementation == "emulated"]
    return f"{MISSING} (emulated: {', '.join(gemms)})" if gemms else MISSING


def relative_memory(found: Result, name: str) -> float:
    peaks = found["speed"]["recipes"]
    return float(peaks[name]["peak_bytes"] / peaks[BASE]["peak_bytes"])


# --- The choice ------------------------------------------------------------------------------------------------


def choice(found: Result) -> Rows:
    """For each wish the recipe that the table gives, of those that are not `worse`."""
    able = allowed(found)
    fastest, leanest = best(able, lambda name: speed(found, name)), best(able, lambda n: 1 / relative_memory(found, n))
    yield {"wish": "speed", "recipe": fastest, "because": f"{number(speed(found, fastest))} of BF16's speed"}
    peak = number(relative_memory(found, leanest))
    yield {"wish": "little memory", "recipe": leanest, "because": f"{peak} of BF16's"}
    for gemm in GEMMS:
        quantized = [name for name in allowed(found) if found["recipes"][name]["gemms"][gemm] != "bf16"]
        closest = max(quantized, key=lambda name: float(found["errors"]["recipes"][name][gemm]["median"]))
        because = f"SQNR of {gemm}: {errors_of(found, closest, gemm)} dB"
        yield {"wish": f"an exact {gemm}, in eight bits", "recipe": closest, "because": because}


def allowed(found: Result) -> list[str]:
    """The recipes that are timed and not `worse`, without BF16 and the control."""
    timed = found["speed"]["recipes"].keys() - {BASE, CONTROL}
    return [name for name, row in found["recipes"].items() if name in timed and not worse(row)]


def worse(row: Result) -> bool:
    """True if a run diverged, or if the gap is above RESOLUTION and its interval above zero."""
    gap = row["gap"]
    resolved = gap is not None and gap["interval"] is not None and gap["interval"][0] > 0
    return bool(row["diverged"]) or (resolved and gap["mean"] > RESOLUTION)


def best(names: list[str], key: Callable[[str], float]) -> str:
    """The recipe with the largest key: the default, where no other is ahead of it by more than NOISE."""
    found = max(names, key=key)
    return DEFAULT if key(found) <= key(DEFAULT) * (1 + NOISE) else found


def speed(found: Result, name: str) -> float:
    return float(found["speed"]["recipes"][name]["ratio"])


# --- What the runs resolve -------------------------------------------------------------------------------------


def halves(found: Result) -> dict[str, float]:
    """Half the width of the interval of each recipe's gap."""
    gaps = {name: row["gap"]["interval"] for name, row in found["recipes"].items() if row["gap"] and name != CONTROL}
    return {name: (high - low) / 2 for name, (low, high) in gaps.items() if computed(found, name)}


def beside_zero(found: Result, sign: int) -> str:
    """The recipes whose interval lies above zero (`sign` 1) or below (-1)."""
    gaps = {name: found["recipes"][name]["gap"]["interval"] for name in halves(found)}
    return ", ".join(f"`{name}`" for name, ends in gaps.items() if min(sign * end for end in ends) > 0) or "none"


def not_again(found: Result) -> str:
    """The recipes whose losses are missing, since their arithmetic changed after they were trained."""
    return ", ".join(f"`{name}`" for name, row in found["recipes"].items() if not row["losses"] and not row["diverged"])


# --- docs/gpus.md: the GEMM of each recipe and scheme on each GPU; no measurements -----------------------------

SHOWN = [ARCHITECTURES[key] for key in ("ampere", "ada", "hopper", "blackwell", "rtx_blackwell", "mi300", "mi350")]


def recipes_by_gpu() -> Rows:
    presets = [preset() for preset in PRESETS.values()]
    rows = [(f"`{recipe.name}`", recipe, False) for recipe in presets if recipe.quantized]
    experts = (rowwise(), blockwise(), mxfp8())
    rows += [(f"stacks of experts, by `{recipe.name}`", recipe, True) for recipe in experts]
    for (name, recipe, grouped), gpu in product(rows, SHOWN):
        names = dict.fromkeys(b.name for b in gemm_backends(in_formats_of(gpu, recipe), gpu, grouped=grouped).values())
        yield {"recipe": name, "gpu": gpu.name, "gemm": "none" if "none" in names else ", ".join(names)}


def schemes_by_gpu() -> Rows:
    for scheme, gpu in product(SCHEMES.values(), SHOWN):
        cast, backend = find_gemm(scheme_on(scheme, gpu), gpu)
        gemm = backend.name if cast else f"weight-only, {backend.name}"
        yield {"scheme": scheme.name, "gpu": gpu.name, "gemm": gemm}


def sources_of_dispatch() -> str:
    record = json.loads((files("octavo.ops") / "dispatch.json").read_text())
    return "\n".join(f"- {source}" for source in record["sources"].values())
