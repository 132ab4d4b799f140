"""The tables of models trained in FP8 and in BF16 from the same weights on the same batches: `bench.gpu.gpt_parity`."""

from collections.abc import Iterable

from bench.report.tables import Result, Row, machine, markdown, pivot, ratio

Rows = Iterable[Row]


def parity_losses(results: dict[str, Result]) -> Rows:
    return losses(results["gpt_parity"])


def parity_gaps(results: dict[str, Result]) -> Rows:
    return gaps(results["gpt_parity"])


def mixture_parity(results: dict[str, Result]) -> str:
    """The section on a mixture of experts."""
    if "moe_parity" not in results:
        return "Not measured yet: `python -m bench.gpu.gpt_parity --model moe` measures it on one Hopper GPU."
    result = results["moe_parity"]
    settings = result["settings"]
    experts = settings["experts"]
    size = f"{settings['layers']} layers of width {settings['width']}"
    mixture = f"{experts['count']} experts of {settings['mlp_width']:,}, of which each token runs through"
    return f"""\
{size} with {mixture} {experts["top_k"]}; {result["tokens"]:,} tokens in {settings["steps"]} steps.
For each seed both modes start from the same weights and see the same batches. The table has final losses on text held
out, with the gap to BF16 in brackets:

{markdown(losses(result))}

{markdown(gaps(result))}

The BF16 runs lie {result["bf16_spread"]:.3%} apart (largest less smallest, over their mean). {machine(result)}"""


def losses(result: Result) -> Rows:
    """The final loss of each run, with its gap to BF16's of the same seed."""
    final = {(run["mode"], run["seed"]): run["final"] for run in result["runs"]}

    def cell(mode: str, seed: int) -> str:
        gap = ratio(final[mode, seed], final.get(("bf16", seed)))
        return f"{final[mode, seed]:.4f}" + ("" if gap is None or mode == "bf16" else f" ({gap - 1:+.2%})")

    return pivot("seed", ((str(seed), mode, cell(mode, seed)) for mode, seed in final))


def gaps(result: Result) -> Rows:
    """The mean gap of each mode over seeds, with its interval."""
    for mode, gap in result["gaps"].items():
        interval = " to ".join(f"{end:+.3%}" for end in gap["interval"] or ())
        yield {
            "mode": mode,
            "seeds": str(len(gap["seeds"])),
            "mean gap": f"{gap['mean']:+.3%}",
            "95 % interval": interval or "– (one seed)",
        }
