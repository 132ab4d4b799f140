"""The first tables of docs/performance.md: generating text as users do, from the results of bench.gpu.generate, and of
bench.gpu.start."""

from collections.abc import Iterator
from typing import Any

from bench.gpu.modes import BASE, FP8_CACHE, HOOKED, SERVE, SERVE_FP8_CACHE
from bench.report.tables import Result, Row, machine, number, ratio
from octavo.speed.programs import EAGER, OCTAVO, STATIC

NAME = "gpu_generate"
GRAPHS = {OCTAVO: SERVE, FP8_CACHE: SERVE_FP8_CACHE, STATIC: BASE}  # the graph, captured by hand, of a way
START = "gpu_start"


def generation_decode(results: dict[str, Result]) -> Iterator[Row]:
    for batch in batches(results):
        for row in rows(results, f"decode {batch}"):
            yield {
                "batch": str(batch),
                "way": row["way"],
                "tokens/s": number(row["tokens_per_second"], "{:,.0f}") if not row["problem"] else row["problem"],
                "vs the best BF16": number(row["tokens_per_second_speedup"], "{:.2f}x"),
                "share of a CUDA graph captured by hand": number(graph_share(results, batch, row["way"]), "{:.0%}"),
                "peak GB": gigabytes(row["peak_bytes"]),
                "first call, s": number(row["warm_up_seconds"], "{:.1f}"),
            }


def generation_first_token(results: dict[str, Result]) -> Iterator[Row]:
    for row in rows(results, "prompt"):
        seconds = row["first_token_seconds"]
        yield {
            "prompt": f"{row['prompt']:,} tokens",
            "way": row["way"],
            "ms": number(None if seconds is None else 1e3 * seconds, "{:.1f}"),
            "vs BF16": number(row["first_token_speedup"], "{:.2f}x"),
        }


def generation_start(results: dict[str, Result]) -> Iterator[Row]:
    found = results.get(START, {"seconds": {}, "times_bf16": {}})
    for way, seconds in found["seconds"].items():
        yield {
            "way": way,
            "load, s": number(seconds["load"], "{:.1f}"),
            "first token, s": number(seconds["first_token"], "{:.1f}"),
            "both, times BF16's": number(found["times_bf16"][way], "{:.2f}"),
        }


def generation_check(results: dict[str, Result]) -> str:
    """A sentence on the tokens; nothing where it was not measured."""
    check = results.get(NAME, {}).get(f"check of {OCTAVO}")
    if check is None:
        return ""
    equal = " and ".join(map(str, check["equal"]))
    return (
        f"The first {equal} of {check['tokens']} greedy tokens are those of transformers' own loop on the same packed "
        f"model, for {len(check['equal'])} prompts. The weights are random, so the best logits nearly tie, and "
        "the rounding of two implementations of attention decides between them."
    )


def generation_machine(results: dict[str, Result]) -> str:
    found = results.get(NAME)
    if found is None:
        return ""
    return f"{found['layers']} layers. {machine(found)}"


# --- Figures, for the aims too ---------------------------------------------------------------------------------


def batches(results: dict[str, Result]) -> list[int]:
    """The batches that decoding was measured for."""
    return [int(part.split()[1]) for part in results.get(NAME, {}) if part.startswith("decode ")]


def rows(results: dict[str, Result], section: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = results.get(NAME, {}).get(section, [])
    return found


def figure(results: dict[str, Result], section: str, way: str, key: str, prompt: int | None = None) -> float | None:
    """A figure of a way; None where it was not measured."""
    for row in rows(results, section):
        if row["way"] == way and prompt in (None, row["prompt"]):
            value: float | None = row[key]
            return value
    return None


def graph_share(results: dict[str, Result], batch: int, way: str) -> float | None:
    """The tokens a second of a way over those of its decoding step as a CUDA graph that was captured by hand."""
    rates = results.get(NAME, {}).get(f"graphs {batch}", {}).get("tokens_per_second", {})
    return ratio(figure(results, f"decode {batch}", way, "tokens_per_second"), rates.get(GRAPHS.get(way)))


def eager_speed(results: dict[str, Result], batch: int) -> float | None:
    """The tokens a second of a packed model without CUDA graphs over those of BF16 without them."""
    section, key = f"decode {batch}", "tokens_per_second"
    return ratio(figure(results, section, HOOKED, key), figure(results, section, EAGER, key))


def start_time(results: dict[str, Result]) -> float | None:
    """The time to load and to the first token over BF16's, on a machine that has compiled the kernels before."""
    times: dict[str, float] = results.get(START, {}).get("times_bf16", {})
    return times.get(OCTAVO)


def gigabytes(count: int | None) -> str:
    return number(None if count is None else count / 1e9, "{:.1f}")
