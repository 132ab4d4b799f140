"""octavo export-gguf: a model as a file for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from octavo_cli.choices import GGUF_WEIGHTS


def export_gguf(
    source: Annotated[Path, typer.Argument(help="A run of octavo train, or a Hugging Face model folder, in BF16.")],
    out: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")],
    weights: Annotated[str, typer.Option(help=f"Of linear layers: {' or '.join(GGUF_WEIGHTS)}.")] = GGUF_WEIGHTS[0],
    tokenizer: Annotated[bool, typer.Option(help="Write the tokenizer, a BPE, too.")] = True,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; without it, the newest.")] = None,
) -> None:
    """Write a model as a GGUF file, for llama.cpp: Llama, Mistral and Qwen2.

    Linear weights are Q8_0 (or F16), the embedding and the head F16, vectors F32. octavo unpack makes a packed folder
    one that can be exported.

    Example:

      octavo export-gguf models/qwen qwen-q8_0.gguf
    """
    from octavo import serve
    from octavo.words import plural

    console = Console()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("exporting")
        report = serve.export_gguf(
            source, out, weights=weights, tokenizer=tokenizer, step=step,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )  # fmt: skip
    types = ", ".join(f"{plural(count, 'tensor')} of {kind}" for kind, count in report.types.items())
    console.print(
        f"exported {source} into {report.path}: {report.architecture}, {types}, {report.bytes / 1e6:.2f} MB",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    for remark in report.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
