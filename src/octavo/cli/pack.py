"""octavo pack: a trained model as a folder of eight-bit weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo import serve
from octavo.artifact.packed import LAYOUTS, READERS
from octavo.artifact.scheme import SCHEMES

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
    rule: Annotated[str, typer.Option(help="Of static scales: amax, percentile (99.99) or mse.")] = "amax",
    kv_cache: KvCache = None,
    tensor_parallel: TensorParallel = "1",
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; without it, the newest.")] = None,
) -> None:
    """Write a model as a Hugging Face folder whose linear weights are eight bits.

    The folder holds all that running it takes; octavo generate, transformers (with compressed-tensors) and vLLM open
    it. Output heads, routers and what training skipped stay in BF16, and so does all that is no linear layer.

    Example:

      octavo pack runs/first packed/first

      octavo pack models/qwen packed/qwen --scheme block --layout fp8 --tensor-parallel 1,2,4

      octavo pack models/qwen packed/qwen --calibration calibrated/qwen --kv-cache fp8

      octavo generate packed/first --prompt "def main():"
    """
    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("packing")
        report = serve.pack(
            source,
            out,
            scheme=scheme,
            layers=_layers(layer or []),
            layout=layout,
            skip=skip or [],
            calibration=calibration,
            rule=rule,
            kv_cache=kv_cache,
            tensor_parallel=_degrees(tensor_parallel),
            step=step,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )
    console.print(f"packed {report.source} into {report.folder}", highlight=False, markup=False)
    console.print(_table(report))
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


def _table(report: serve.PackReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for scheme, count in Counter(report.packed.values()).items():
        table.add_row("linear layers packed", f"{count}, {scheme}")
    for name, reason in report.skipped.items():
        table.add_row("left in BF16", f"{name}: {reason}")
    table.add_row("their weights in BF16", f"{report.bf16_bytes / 1e6:.2f} MB")
    for name in report.left_out:
        table.add_row("left out", f"{name}: the model has no place for it")
    table.add_row("in e4m3, with scales", f"{report.packed_bytes / 1e6:.2f} MB ({report.ratio:.3f} of it)")
    table.add_row("the whole folder", f"{report.folder_bytes / 1e6:.2f} MB")
    return table
