"""octavo export-gguf: a model as a file for llama.cpp."""

from pathlib import Path
from typing import Annotated

import typer

from octavo_cli.choices import GGUF_WEIGHTS
from octavo_cli.display import progress, say
from octavo_cli.options import Step, option


def export_gguf_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run of octavo train, or a Hugging Face model folder, in BF16.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to make; it must not exist.")],
    weights: Annotated[str, option("TYPE", f"The type of linear weights: {' or '.join(GGUF_WEIGHTS)}.")] = GGUF_WEIGHTS[
        0
    ],
    tokenizer: Annotated[bool, typer.Option(help="Write the tokenizer, a BPE, too.")] = True,
    step: Step = None,
) -> None:
    """Write a Llama, Mistral or Qwen2 for llama.cpp (GGUF).

    Linear weights are Q8_0 (or F16), the embedding and the head F16, vectors F32. A packed folder can be exported
    after octavo unpack.

    Examples:

      octavo export-gguf models/llama llama-q8_0.gguf

      octavo export-gguf runs/first first.gguf --no-tokenizer
    """
    from octavo.gguf import export_gguf
    from octavo.words import plural

    with progress("exporting") as advance:
        report = export_gguf(source, out, weights=weights, tokenizer=tokenizer, step=step, progress=advance)
    types = ", ".join(f"{plural(count, 'tensor')} of {kind}" for kind, count in report.types.items())
    say(f"exported {source} into {report.path}: {report.architecture}, {types}, {report.bytes / 1e6:.2f} MB")
    for remark in report.remarks:
        say(remark)
