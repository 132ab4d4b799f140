"""octavo unpack and octavo convert-layout: write a packed folder in BF16, or in another layout or scheme."""

from collections.abc import Sequence
from typing import Annotated

import typer

from octavo_cli.choices import LAYOUTS, SCHEMES
from octavo_cli.data import DATA_HELP, RUN_OPTIONS, print_reading, required_data
from octavo_cli.display import progress, say
from octavo_cli.options import Device, Freeze, Layout, Out, Packed, option, refuse_unused


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
    command: typer.Context,
    folder: Packed,
    out: Out,
    layout: Layout = LAYOUTS[0],
    scheme: Annotated[
        str | None, option("NAME", f"{', '.join(SCHEMES)}. Default: the scheme of each layer stays.")
    ] = None,
    freeze: Freeze = None,
    data: Annotated[list[str] | None, option("TEXT", f"For --freeze. {DATA_HELP}.")] = None,
    context: Annotated[int, option("NUMBER", "For --freeze: most tokens of a prompt.")] = 512,
    device: Device = "cpu",
) -> None:
    """Write a packed model in another layout or scheme.

    The command reports whether any weight changed, and by how much.

    Examples:

      octavo convert-layout packed/block packed/block-fp8 --layout fp8

      octavo convert-layout packed/first packed/static --freeze 64 --data chats.jsonl
    """
    from octavo.artifact.packed.layouts import READERS
    from octavo.evaluation import PromptOptions
    from octavo.packing import convert_layout, freeze_folder
    from octavo.words import plural

    if freeze is not None and scheme not in (None, "static"):
        raise ValueError(f"--freeze stores scales of inputs, which only the scheme static has; got --scheme {scheme}")
    if freeze is None:
        refuse_unused(command, RUN_OPTIONS, "--freeze")
    with progress("converting") as advance:
        if freeze is None:
            result = convert_layout(folder, out, layout=layout, scheme=scheme, progress=advance)
        else:
            result = freeze_folder(
                folder, out, required_data(data), layout=layout, prompts=PromptOptions(freeze, context), device=device,
                progress=advance, on_read=print_reading,
            )  # fmt: skip
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
