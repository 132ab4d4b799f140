"""The tables of docs/recipes.md: every recipe with its evidence, and the choice that follows from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.gpu.recipes.variants import BASE, CONTROL, VARIANTS
from bench.report.tables import MISSING, Result, Row, machine, number

Rows = Iterable[Row]
DEFAULT = "rowwise"
RESOLUTION = 0.0025  # the smallest gap that the runs are meant to resolve
NOISE = 0.02  # of speeds and peaks: recipes that are closer to the default count as its equals
GEMMS = ("y", "dx", "dw")


def recipe_table(results: dict[str, Result]) -> Rows:
    """A row for each recipe that was trained."""
    found = results["recipes"]
    for name, row in found["recipes"].items():
        gap, timed = row["gap"], measured(found, "speed", name)
        yield {
            "recipe": f"`{name}`",
            "": VARIANTS[name].words,
            "seeds": str(len(row["losses"])) + (f", {row['diverged']} diverged" if row["diverged"] else ""),
            "gap to BF16": MISSING if gap is None else f"{gap['mean']:+.3%}",
            "95 % interval": interval(gap),
            **{f"SQNR of {gemm}": errors_of(found, name, gemm) for gemm in GEMMS},
            "speed": emulated(row) if timed is None else f"{timed['ratio']:.2f}x",
            "peak memory": MISSING if timed is None else relative_memory(found, timed),
        }


def interval(gap: Result | None) -> str:
    if gap is None:
        return MISSING
    return "{:+.3%} to {:+.3%}".format(*gap["interval"]) if gap["interval"] else f"{MISSING} (one seed)"


def errors_of(found: Result, name: str, gemm: str) -> str:
    row = measured(found, "errors", name)
    return MISSING if row is None else f"{row[gemm]['median']:.1f} ({row[gemm]['worst']:.1f})"


def emulated(row: Result) -> str:
    gemms = [gemm for gemm, implementation in row["gemms"].items() if implementation == "emulated"]
    return f"{MISSING} (emulated: {', '.join(gemms)})" if gemms else MISSING


def relative_memory(found: Result, timed: Result) -> str:
    base = measured(found, "speed", BASE)
    peak, least = timed["peak_bytes"], None if base is None else base["peak_bytes"]
    return number(peak / least if peak and least else None, "{:.2f}x")


def measured(found: Result, part: str, name: str) -> Result | None:
    """The row of a recipe in "errors" or "speed"; None if it was not measured."""
    row: Result | None = (found[part] or {"recipes": {}})["recipes"].get(name)
    return row


# --- The choice ------------------------------------------------------------------------------------------------


def recipe_choice(results: dict[str, Result]) -> Rows:
    """For each wish the recipe that the table gives, of those that are not `worse`."""
    found = results["recipes"]
    able = [name for name in recipes(found) if not worse(found["recipes"][name])]
    for wish, key in (("speed", speed_of(found)), ("little memory", memory_of(found))):
        best = best_of(able, key)
        yield {"for": wish, "recipe": f"`{best}`" if best else "not measured", "because": reason(found, best, wish)}
    for gemm in GEMMS:
        best = max(able, key=lambda name: exactness(found, name, gemm), default=None)
        known = best is not None and measured(found, "errors", best) is not None
        text = f"SQNR of {gemm} in the median layer and in the worst: {errors_of(found, best, gemm)} dB" if best else ""
        yield {
            "for": f"an exact {gemm}, in eight bits",
            "recipe": f"`{best}`" if known else "not measured",
            "because": text if known else MISSING,
        }


def best_of(names: Sequence[str], key: Callable[[str], float | None]) -> str | None:
    """The recipe with the largest key: the default, where no other is ahead of it by more than NOISE."""
    known = {name: value for name in names if (value := key(name)) is not None}
    best = max(known, key=lambda name: known[name], default=None)
    return DEFAULT if best and DEFAULT in known and known[best] <= known[DEFAULT] * (1 + NOISE) else best


def recipes(found: Result) -> Iterator[str]:
    """The recipes that were trained, without BF16 and the control."""
    return (name for name in found["recipes"] if name not in (BASE, CONTROL))


def worse(row: Result) -> bool:
    """True if a run diverged, or if the gap is above RESOLUTION and its interval above zero."""
    gap = row["gap"]
    resolved = gap is not None and gap["interval"] is not None and gap["interval"][0] > 0
    return bool(row["diverged"]) or (resolved and gap["mean"] > RESOLUTION)


def speed_of(found: Result) -> Callable[[str], float | None]:
    return lambda name: (measured(found, "speed", name) or {}).get("ratio")


def memory_of(found: Result) -> Callable[[str], float | None]:
    def less(name: str) -> float | None:
        peak = (measured(found, "speed", name) or {}).get("peak_bytes")
        return 1 / peak if peak else None

    return less


def exactness(found: Result, name: str, gemm: str) -> float:
    """The SQNR of the median layer; below all others for a GEMM in BF16."""
    row = measured(found, "errors", name)
    quantized = found["recipes"][name]["gemms"][gemm] != "bf16"
    return row[gemm]["median"] if row is not None and quantized else -1.0


def reason(found: Result, name: str | None, wish: str) -> str:
    timed = None if name is None else measured(found, "speed", name)
    if timed is None:
        return MISSING
    return f"{timed['ratio']:.2f}x of BF16's speed" if wish == "speed" else f"{relative_memory(found, timed)} of BF16's"


def recipe_default(results: dict[str, Result]) -> str:
    """A sentence on the default beside the faster recipes that are not `worse`."""
    found = results["recipes"]
    timed = measured(found, "speed", DEFAULT)
    if DEFAULT not in found["recipes"] or timed is None:
        return f"The default is `{DEFAULT}`. Its speed beside the others' has not been measured here."
    if worse(found["recipes"][DEFAULT]):
        return f"**The default, `{DEFAULT}`, is left out of the choice below: look at its gap.**"
    speed = speed_of(found)
    able = [name for name in recipes(found) if not worse(found["recipes"][name])]
    faster = [name for name in able if (speed(name) or 0.0) > timed["ratio"] * (1 + NOISE)]
    if not faster:
        return f"The default is `{DEFAULT}`: no other recipe in the choice is faster by more than {NOISE:.0%}."
    names = ", ".join(f"`{name}` ({speed(name):.2f}x)" for name in faster)
    return f"The default is `{DEFAULT}` ({timed['ratio']:.2f}x). Faster in the choice: {names}."


# --- The text --------------------------------------------------------------------------------------------------


def recipe_resolution(results: dict[str, Result]) -> str:
    """Which gaps the runs resolve: those whose intervals are narrow enough, and those that exclude zero."""
    found = results["recipes"]
    widths = {name: half(found["recipes"][name]["gap"]) for name in recipes(found)}
    known = {name: width for name, width in widths.items() if width is not None}
    if not known:
        return "One seed gives no interval: these runs resolve no gap."
    narrow = sum(width <= RESOLUTION for width in known.values())
    lines = [
        f"The intervals of {narrow} of {len(known)} recipes reach at most {RESOLUTION:.2%} to each side; the widest "
        f"reaches {max(known.values()):.2%} (`{max(known, key=known.__getitem__)}`)."
    ]
    above = [name for name in known if found["recipes"][name]["gap"]["interval"][0] > 0]
    below = [name for name in known if found["recipes"][name]["gap"]["interval"][1] < 0]
    for where, names in (("above", above), ("below", below)):
        listed = ", ".join(f"`{name}`" for name in names) if names else "none"
        lines.append(f"Intervals {where} zero: {listed}.")
    control = (found["recipes"].get(CONTROL) or {}).get("gap")
    if control is not None:
        lines.append(f"The gap of the control is {control['mean']:+.3%} (95 % interval {interval(control)}).")
    if found["bf16"]["spread"] is not None:
        lines.append(f"BF16's own losses have a standard deviation of {found['bf16']['spread']:.2%} over seeds.")
    return "\n".join(f"- {line}" for line in lines)


def half(gap: Result | None) -> float | None:
    """Half the width of the interval of a gap."""
    return None if gap is None or gap["interval"] is None else float(gap["interval"][1] - gap["interval"][0]) / 2


def recipe_setting(results: dict[str, Result]) -> str:
    """The models and the machines of the parts."""
    found = results["recipes"]
    size, corpus = found["settings"], found["corpus"]
    lines = [
        f"- *Gap*: a Llama with {size['layers']} layers, {size['width']} wide, and {size['vocabulary']:,} tokens in "
        f"its vocabulary; {found['tokens'] / 1e6:.1f} M tokens a run, which are "
        f"{found['tokens'] / corpus['train_tokens']:.2f} epochs. {machine(found)}"
    ]
    if earlier := found.get("earlier"):  # added by hand where runs of another commit were kept
        runs = sum(len(recipe["losses"]) for recipe in found["recipes"].values())
        lines.append(f"  {earlier['runs']} of its {runs} runs are those of commit {earlier['commit']}.")
    if errors := found["errors"]:
        lines.append(
            f"- *SQNR*: the {errors['layers']} linear layers of that model after {errors['steps']} steps in BF16, on a "
            f"batch of {errors['tokens']:,} tokens. {machine(errors)}"
        )
    if speed := found["speed"]:
        lines.append(
            f"- *Speed* and *peak memory*: {speed['layers']} blocks of Llama-3-8B's shape, {speed['width']:,} wide, "
            f"{speed['tokens']:,} tokens, plain modules, BF16 weights, forward and backward, each block compiled. "
            f"{machine(speed)}"
        )
    return "\n".join(lines)
