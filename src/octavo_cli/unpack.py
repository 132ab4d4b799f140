"""octavo unpack and octavo convert-layout: write a packed folder in BF16, or in another layout or scheme."""

from collections.abc import Sequence
from typing import Annotated

import typer

from octavo_cli.choices import LAYOUTS, SCHEMES
from octavo_cli.display import progress, say
from octavo_cli.options import Layout, Out, Packed


def unpack_command(folder: Packed, out: Out) -> None:
    """Write a packed model in BF16.

    Every weight is its bytes times its scale, rounded once.

    Example:

      octavo unpack packed/first models/first
    """
    from octavo.packing import unpack

    with progress("unpacking") as advance:
        result = unpack(folder, out, progress=advance)
    say(f"unpacked {folder} into {out}")
    _say_unused(result.unused)


def convert_layout(
    folder: Packed,
    out: Out,
    layout: Layout = LAYOUTS[0],
    scheme: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(SCHEMES)}. Default: the scheme of each layer stays.")
    ] = None,
) -> None:
    """Write a packed model in another layout or scheme.

    The command reports whether any weight changed, and by how much.

    Example:

      octavo convert-layout packed/block packed/block-fp8 --layout fp8
    """
    from octavo.artifact.packed.layouts import READERS
    from octavo.packing import convert_layout
    from octavo.words import plural

    with progress("converting") as advance:
        result = convert_layout(folder, out, layout=layout, scheme=scheme, progress=advance)
    say(f"converted {folder} into {out}")
    _say_unused(result.unused)
    if layout in READERS:
        say(f"for {READERS[layout]}: transformers computes nonsense from it")
    if result.lossless:
        say("no weight changed")
        return
    worst = min(result.sqnr, key=lambda name: result.sqnr[name])
    finite = sorted(db for db in result.sqnr.values() if db < float("inf"))
    say(
        f"{len(finite)} of {plural(len(result.sqnr), 'weight')} were cast again: median "
        f"{finite[len(finite) // 2]:.1f} dB, lowest {result.sqnr[worst]:.1f} dB ({worst})"
    )


def _say_unused(names: Sequence[str]) -> None:
    if names:
        say(f"left out: {len(names)} scales and zero points that no layer reads, {names[0]} among them")
