"""octavo unpack and octavo convert-layout: from a packed folder back to BF16, or to another packing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from octavo_cli.choices import LAYOUTS, SCHEMES

Folder = Annotated[Path, typer.Argument(help="A packed folder.")]
Out = Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")]


def unpack(folder: Folder, out: Out) -> None:
    """Write a packed model in BF16: every weight is its bytes times its scale, rounded once.

    Example:

      octavo unpack packed/first models/first
    """
    from octavo import serve

    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("unpacking")
        serve.unpack(folder, out, progress=lambda done, of: bar.update(task, completed=done, total=of))
    console.print(f"unpacked {folder} into {out}", highlight=False, markup=False)


def convert_layout(
    folder: Folder,
    out: Out,
    layout: Annotated[
        str, typer.Option(help=f"{', '.join(LAYOUTS)}; the last two are for vLLM, transformers does not open them.")
    ] = LAYOUTS[0],
    scheme: Annotated[str | None, typer.Option(help=f"{', '.join(SCHEMES)}; without it, as it is.")] = None,
) -> None:
    """Write a packed model in another layout or by another scheme, and say what that lost.

    Example:

      octavo convert-layout packed/first packed/first-hf --layout fp8
    """
    from octavo import serve
    from octavo.artifact.packed import READERS

    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("converting")
        result = serve.convert_layout(
            folder, out, layout=layout, scheme=scheme,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )  # fmt: skip
    console.print(f"converted {folder} into {out}", highlight=False, markup=False)
    if layout in READERS:
        console.print(f"for {READERS[layout]}: transformers computes nonsense from it", highlight=False)
    if result.lossless:
        console.print("no weight changed")
        return
    worst = min(result.sqnr, key=lambda name: result.sqnr[name])
    finite = sorted(db for db in result.sqnr.values() if db < float("inf"))
    console.print(
        f"{len(finite)} of {len(result.sqnr)} weights were cast again: {finite[len(finite) // 2]:.1f} dB in the "
        f"median, {result.sqnr[worst]:.1f} dB at worst ({worst})",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
