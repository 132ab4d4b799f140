"""The tables of docs/accuracy.md: rows from the results of the CPU benchmarks."""

from collections.abc import Iterable

from bench.report.tables import Result, Row, number


def losses(results: dict[str, Result]) -> Iterable[Row]:
    result = results["loss_gap"]
    final = {(run["recipe"], run["seed"]): run["final"] for run in result["runs"]}
    for seed, (gap, packed) in enumerate(zip(result["gaps"], result["packed"], strict=True)):
        yield {
            "seed": str(seed),
            "BF16 loss": f"{final['bf16', seed]:.4f}",
            "FP8 (rowwise) loss": f"{final['rowwise', seed]:.4f}",
            "gap": f"{gap:+.2%}",
            "packed model": f"{packed['loss']:.4f} ({packed['to_trained']:+.2%})",
            "its weights vs BF16": f"{packed['bytes_to_bf16']:.3f}",
        }


def packing(results: dict[str, Result]) -> Iterable[Row]:
    for name, row in results["packing_quality"]["schemes"].items():
        yield {
            "scheme": name,
            **quality(row),
            "least SQNR of an output": number(row.get("output_sqnr", {}).get("least"), "{:.1f} dB"),
            "bytes vs BF16": number(row.get("bytes_to_bf16"), "{:.3f}"),
            "transformers' logits": number(row.get("readers", {}).get("transformers", {}).get("distance"), "{:.2e}"),
        }


def kv_caches(results: dict[str, Result]) -> Iterable[Row]:
    for name, row in results["kv_cache_quality"]["caches"].items():
        yield {"cache, its scales": name, **quality(row)}


def attention_in_fp8(results: dict[str, Result]) -> Iterable[Row]:
    rounded = "queries, keys, values, probabilities and result in E4M3"
    yield {"attention": rounded, **quality(results["attention_quality"]["fp8"])}


def quality(row: Result) -> dict[str, str]:
    """The change against BF16, over the same prompts."""
    change = row["perplexity_ratio"]
    return {
        "perplexity vs BF16": f"{change['value']:+.3%}",
        "95 % interval": f"{change['low']:+.3%} to {change['high']:+.3%}",
        "KL, nats a token": f"{row['kl']['value']:.2e}",
        "top-1": f"{row['top1']['value']:.2%}",
    }


def steps(results: dict[str, Result]) -> Iterable[Row]:
    for row in results["cpu_step"]["steps"]:
        yield {
            "recipe": row["recipe"],
            "high precision": row["precision"],
            "ms a step": f"{row['milliseconds']:.0f}",
            "vs BF16": f"{row['to_bf16']:.2f}",
            "vs FP32": f"{row['to_fp32']:.2f}",
        }
