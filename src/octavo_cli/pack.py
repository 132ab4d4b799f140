"""octavo pack: a trained model as a folder of eight-bit weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo_cli.budget import print_budget
from octavo_cli.choices import LAYOUTS, SCHEMES
from octavo_cli.data import DATA_HELP, print_reading

if TYPE_CHECKING:
    from octavo import serve

Layout = Annotated[
    str, typer.Option(help=f"{', '.join(LAYOUTS)}; the last two are for vLLM, transformers does not open them.")
]
KvCache = Annotated[
    str | None, typer.Option(help="fp8: store scales for a cache of keys and values, from the calibration.")
]
TensorParallel = Annotated[
    str, typer.Option(help="Numbers of devices, such as 1,2,4,8, that the packed layers must divide over.")
]


def pack(
    source: Annotated[Path, typer.Argument(help="A run of octavo train, or a Hugging Face model folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            help=f"Of the packed layers: {', '.join(SCHEMES)}. Without it that of the run's recipe, or channel."
        ),
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="GLOB=SCHEME: another scheme for these layers; may be repeated.")
    ] = None,
    layout: Layout = LAYOUTS[0],
    skip: Annotated[list[str] | None, typer.Option(help="Glob of layers that stay in BF16; may be repeated.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="What octavo calibrate made of the model, for static and --kv-cache.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Of the calibration's scales: amax (if not given), percentile (99.99) or mse.")
    ] = None,
    weights: Annotated[str, typer.Option(help="Of weights' scales: amax, or mse, the least squared error.")] = "amax",
    pow2: Annotated[bool, typer.Option("--pow2", help="Round the scales of weights up to powers of two.")] = False,
    share_scales: Annotated[
        bool | None, typer.Option(help="One scale for fused layers; without it, unless the run trained its own.")
    ] = None,
    kv_cache: KvCache = None,
    tensor_parallel: TensorParallel = "1",
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; without it, the newest.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="kl=0.01 (nats a token), ppl=0.5%, of an encoder cosine=0.999: leave in BF16 what it takes on --data."
        ),
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help=f"For --budget. {DATA_HELP}.")] = None,
    samples: Annotated[int, typer.Option(help="For --budget: prompts.")] = 32,
    context: Annotated[int, typer.Option(help="For --budget: tokens of a prompt, at most.")] = 512,
    device: Annotated[str, typer.Option(help="For --budget: where the model runs, cpu or cuda.")] = "cpu",
) -> None:
    """Write a model as a Hugging Face folder whose linear weights are eight bits.

    The folder holds all that running it takes: octavo generate and transformers (with compressed-tensors) open it.
    Output heads, routers and what training skipped stay in BF16, and so does all that is no linear layer.

    Example:

      octavo pack runs/first packed/first

      octavo pack models/qwen packed/qwen --scheme block --layout fp8 --tensor-parallel 1,2,4

      octavo pack models/qwen packed/qwen --calibration calibrated/qwen --kv-cache fp8

      octavo pack models/qwen packed/good --budget kl=0.01 --data chats.jsonl

      octavo generate packed/first --prompt "def main():"
    """
    from octavo import serve
    from octavo.artifact.packed import READERS

    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("packing")
        settings: dict[str, Any] = {
            "scheme": scheme,
            "layers": _layers(layer or []),
            "layout": layout,
            "skip": skip or [],
            "calibration": calibration,
            "rule": rule,
            "weights": weights,
            "pow2": pow2,
            "share": share_scales,
            "kv_cache": kv_cache,
            "tensor_parallel": _degrees(tensor_parallel),
            "step": step,
        }
        if budget is None:
            kept = None
            report = serve.pack(
                source, out, **settings, progress=lambda done, of: bar.update(task, completed=done, total=of)
            )
        else:
            report, kept = serve.pack_within(
                source, out, serve.Budget.parse(budget), data or [],
                samples=samples, context=context, device=device, **settings, on_read=print_reading(console),
                progress=lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
            )  # fmt: skip
    console.print(f"packed {report.source} into {report.folder}", highlight=False, markup=False)
    console.print(_table(report, kept))
    if kept is not None:
        print_budget(console, kept)
    if layout in READERS:
        console.print(f"for {READERS[layout]}: transformers computes nonsense from it", highlight=False)


def _layers(given: list[str]) -> dict[str, str]:
    """GLOB=SCHEME, read."""
    if wrong := [text for text in given if "=" not in text]:
        raise ValueError(f"--layer takes GLOB=SCHEME, such as '*.down_proj=channel', got {wrong[0]!r}")
    return dict(text.rsplit("=", 1) for text in given)


def _degrees(given: str) -> list[int]:
    """1,2,4, read."""
    if not all(part.strip().isdecimal() for part in given.split(",")):
        raise ValueError(f"--tensor-parallel takes numbers of devices, such as 1,2,4,8, got {given!r}")
    return [int(part) for part in given.split(",")]


def _table(report: serve.PackReport, kept: serve.Kept | None) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for scheme, count in Counter(report.packed.values()).items():
        table.add_row("linear layers packed", f"{count}, {scheme}")
    before, after = (f"{size / 1e6:.2f} MB" for size in (report.bf16_bytes, report.packed_bytes))
    table.add_row("size of packed layers", f"{after} with scales, {report.ratio:.3f} of {before} in BF16")
    if report.cached:
        table.add_row("KV cache", f"scales of keys and values in e4m3, for {report.cached} attention layers")
    by_budget = [] if kept is None else kept.skip
    for name, reason in report.skipped.items():
        if name not in by_budget:
            table.add_row("left in BF16", f"{name}: {reason}")
    if by_budget:
        table.add_row("left in BF16", f"{len(by_budget)} by the budget, in the table below")
    for entry in report.not_linear:
        table.add_row("left in BF16", f"{entry} of the parameters")
    for name in report.left_out:
        table.add_row("left out", f"{name}: the model has no place for it")
    table.add_row("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")
    if not report.has_tokenizer:
        table.add_row("no tokenizer", "the source has none, and octavo generate needs one")
    if any(scheme.startswith("group") for scheme in report.packed.values()):
        table.add_row("not for vLLM", "it knows no groups of float32 scales; transformers and octavo do")
    if report.gains:
        gains = sorted(report.gains.values())
        table.add_row(
            "SQNR gained by mse", f"{gains[0]:.2f} to {gains[-1]:.2f} dB, {gains[len(gains) // 2]:.2f} in the median"
        )
    if report.ratios:
        most = max(report.ratios, key=lambda names: report.ratios[names])
        table.add_row(
            "scales not shared",
            f"{len(report.ratios)} groups that vLLM casts again by one scale, as training did not; they differ by "
            f"{report.ratios[most]:.2f}x at most ({most}): --share-scales",
        )
    return table
