"""octavo pack: writes an FP8-quantized checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo_cli.budget import print_budget
from octavo_cli.choices import LAYOUTS, SCHEMES
from octavo_cli.data import DATA_HELP, RUN_OPTIONS, print_reading, required_data
from octavo_cli.display import print_facts, progress, say
from octavo_cli.options import BUDGET_HELP, Device, Freeze, Layout, Out, Step, option, refuse_unused

if TYPE_CHECKING:
    from octavo.packing import BudgetReport, PackReport


def pack_command(
    command: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run of octavo train, or a Hugging Face model folder.")
    ],
    out: Out,
    scheme: Annotated[
        str | None,
        option(
            "NAME", f"Scheme of the packed layers: {', '.join(SCHEMES)}. Default: that of the run's recipe, or channel."
        ),
    ] = None,
    layer: Annotated[list[str] | None, option("GLOB=SCHEME", "Another scheme for these layers. Repeatable.")] = None,
    layout: Layout = LAYOUTS[0],
    skip: Annotated[list[str] | None, option("GLOB", "Layers that stay in BF16. Repeatable.")] = None,
    calibration: Annotated[
        Path | None,
        option("FOLDER", "The folder that octavo calibrate wrote for the model: for static and --kv-cache."),
    ] = None,
    rule: Annotated[
        str | None,
        option("NAME", "Rule of the scales from the calibration: amax (default), percentile (99.99) or mse."),
    ] = None,
    weights: Annotated[
        str, option("NAME", "Rule of the scales of weights: amax, or mse (least mean squared error).")
    ] = "amax",
    pow2: Annotated[bool, typer.Option("--pow2", help="Round the scales of weights up to powers of two.")] = False,
    share_scales: Annotated[
        bool | None,
        typer.Option(help="One scale for layers that vLLM fuses. Default: yes, unless the run trained its own scales."),
    ] = None,
    kv_cache: Annotated[
        str | None, option("NAME", "fp8: store the calibration's scales for a cache of keys and values.")
    ] = None,
    experts: Annotated[
        bool, typer.Option("--experts", help="Pack the experts of a mixture too, each with scales of its own.")
    ] = False,
    tensor_parallel: Annotated[
        str, option("NUMBERS", "Numbers of devices, such as 1,2,4,8, that the packed layers must divide over.")
    ] = "1",
    step: Step = None,
    budget: Annotated[
        list[str] | None, option("BUDGET", f"Keep layers in BF16 until the model on --data is within {BUDGET_HELP}.")
    ] = None,
    freeze: Freeze = None,
    data: Annotated[list[str] | None, option("TEXT", f"For --budget and --freeze. {DATA_HELP}.")] = None,
    samples: Annotated[int, option("NUMBER", "For --budget: number of prompts.")] = 32,
    context: Annotated[int, option("NUMBER", "For --budget and --freeze: most tokens of a prompt.")] = 512,
    device: Device = "cpu",
) -> None:
    """Write a model with its linear weights in FP8.

    The folder is a whole model: octavo generate, vLLM and transformers (with compressed-tensors) open it. Output heads,
    routers, layers that training skipped or moved to BF16, and everything but linear layers stay in BF16, and so do the
    experts of a mixture without --experts. --layer NAME=SCHEME packs a layer that training moved to BF16 all the same.

    Examples:

      octavo pack runs/first packed/first

      octavo pack models/qwen packed/qwen --scheme block --layout fp8 --tensor-parallel 1,2,4

      octavo pack models/qwen packed/qwen --calibration calibrated/qwen --kv-cache fp8

      octavo pack models/qwen packed/static --freeze 64 --data chats.jsonl

      octavo pack models/qwen packed/good --budget kl=0.01 --data chats.jsonl

      octavo generate packed/first --prompt "def main():"
    """
    from octavo.evaluation import Budget, PromptOptions
    from octavo.packing import PackOptions, pack, pack_frozen, pack_within

    options = PackOptions(
        scheme=scheme,
        layers=_layers(layer or []),
        layout=layout,
        skip=skip or [],
        calibration=calibration,
        rule=rule,
        weights=weights,
        pow2=pow2,
        share=share_scales,
        kv_cache=kv_cache,
        experts=experts,
        tensor_parallel=_degrees(tensor_parallel),
    )
    kept = None
    if budget and freeze is not None:
        raise ValueError("--budget and --freeze both run the model on --data: give one of them")
    if not budget and freeze is None:
        refuse_unused(command, RUN_OPTIONS, "--budget or --freeze")
    if freeze is not None:
        refuse_unused(command, ["--samples"], "--budget")
    with progress("packing") as advance:
        if freeze is not None:
            report = pack_frozen(
                source, out, required_data(data), options, device=device, step=step,
                prompts=PromptOptions(freeze, context), progress=advance, on_read=print_reading,
            )  # fmt: skip
        elif budget:
            report, kept = pack_within(
                source, out, [Budget.parse(text) for text in budget], data or [], options, device=device, step=step,
                prompts=PromptOptions(samples, context), progress=advance, on_read=print_reading,
            )  # fmt: skip
        else:
            report = pack(source, out, options, step=step, progress=advance)
    _print(report, kept, layout)


def _print(report: PackReport, kept: BudgetReport | None, layout: str) -> None:
    from octavo.artifact.packed.layouts import READERS

    say(f"packed {report.source} into {report.folder}")
    print_facts(_facts(report, kept))
    if kept is not None:
        print_budget(kept)
    if report.unpacked_expert_bytes:
        share = report.unpacked_expert_bytes / report.folder_bytes
        say(
            f"warning: {share:.0%} of the folder, {report.unpacked_expert_bytes / 1e6:.2f} MB, are experts in BF16: "
            "--experts packs them too",
            "yellow",
        )
    if layout in READERS:
        say(f"for {READERS[layout]}: transformers computes nonsense from it, or fails")


def _layers(given: list[str]) -> dict[str, str]:
    """Parse GLOB=SCHEME options."""
    if wrong := [text for text in given if "=" not in text]:
        raise ValueError(f"--layer takes GLOB=SCHEME, such as '*.down_proj=channel', got {wrong[0]!r}")
    return dict(text.rsplit("=", 1) for text in given)


def _degrees(given: str) -> list[int]:
    """Parse a list such as 1,2,4."""
    if not all(part.strip().isdecimal() for part in given.split(",")):
        raise ValueError(f"--tensor-parallel takes numbers of devices, such as 1,2,4,8, got {given!r}")
    return [int(part) for part in given.split(",")]


def _facts(report: PackReport, kept: BudgetReport | None) -> list[tuple[str, str]]:
    return [*_of_packed(report), *_of_others(report, kept), *_of_folder(report), *_of_scales(report)]


def _of_packed(report: PackReport) -> list[tuple[str, str]]:
    from octavo.words import plural

    facts = [("linear layers packed", f"{n}, {scheme}") for scheme, n in Counter(report.packed.values()).items()]
    before, after = (f"{size / 1e6:.2f} MB" for size in (report.bf16_bytes, report.packed_bytes))
    facts.append(("size of packed layers", f"{after} with scales, {report.ratio:.3f} of {before} in BF16"))
    if report.cached:
        facts.append(("KV cache", f"scales of keys and values in e4m3, for {plural(report.cached, 'attention layer')}"))
    return facts


def _of_others(report: PackReport, kept: BudgetReport | None) -> list[tuple[str, str]]:
    by_budget = [] if kept is None else kept.skip
    left = [f"{name}: {reason}" for name, reason in report.skipped.items() if name not in by_budget]
    if by_budget:
        left.append(f"{len(by_budget)} by the budget, in the table below")
    left += map(str, report.not_linear)
    out = [("left out", f"{name}: the model has no place for it") for name in report.left_out]
    return [*(("left in BF16", each) for each in left), *out]


def _of_folder(report: PackReport) -> list[tuple[str, str]]:
    facts = [("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")]
    if report.lacks_tokenizer:
        facts.append(("no tokenizer", "the source has none, and octavo generate needs one"))
    if any(scheme.startswith("group") for scheme in report.packed.values()):
        facts.append(("not for vLLM", "it cannot read groups of float32 scales; transformers and octavo can"))
    return facts


def _of_scales(report: PackReport) -> list[tuple[str, str]]:
    from octavo.words import plural

    facts = []
    if report.gains:
        gains = sorted(report.gains.values())
        middle = gains[len(gains) // 2]
        facts.append(("SQNR gained by mse", f"{gains[0]:.2f} to {gains[-1]:.2f} dB, median {middle:.2f} dB"))
    if report.ratios:
        names, largest = max(report.ratios.items(), key=lambda each: each[1])
        words = (
            f"{plural(len(report.ratios), 'group')} that vLLM casts again by one scale, unlike training; scales "
            f"differ by {largest:.2f}x at most ({names}). --share-scales shares them"
        )
        facts.append(("scales not shared", words))
    return facts
