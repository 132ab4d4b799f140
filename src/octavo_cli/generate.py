"""octavo generate: text from a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from octavo_cli.choices import ATTENTIONS, KV_CACHES
from octavo_cli.display import progress, say
from octavo_cli.opened import SOURCE_HELP, open_source
from octavo_cli.options import AsJson, Device, Step, option
from octavo_cli.prompts import read_prompts
from octavo_cli.texts import Printer, Text, continue_texts, tokenize


def generate_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)],
    prompt: Annotated[list[str] | None, option("TEXT", "The text to continue; can be repeated.")] = None,
    file: Annotated[
        Path | None, option("FILE", 'Prompts, one a line, or JSON lines with the key "prompt"; - is standard input.')
    ] = None,
    batch: Annotated[int, option("NUMBER", "Prompts to generate from at once.")] = 16,
    count: Annotated[int, option("NUMBER", "Tokens to generate after each prompt.")] = 200,
    temperature: Annotated[float, option("NUMBER", "0 takes the most likely token; higher is more varied.")] = 0.8,
    top_k: Annotated[int, option("NUMBER", "Draw from so many most likely tokens; 0 draws from all.")] = 0,
    top_p: Annotated[float, option("NUMBER", "Draw from the most likely tokens of this total probability.")] = 1.0,
    repetition_penalty: Annotated[
        float, option("NUMBER", "Above 1, tokens that the text holds become less likely.")
    ] = 1.0,
    seed: Annotated[int | None, option("NUMBER", "The seed of the draws: the same seed, the same text.")] = None,
    kv_cache: Annotated[
        str,
        option(
            "NAME", f"Dtype of keys and values: {', '.join(KV_CACHES)}. auto is fp8 for a folder with scales for it."
        ),
    ] = "auto",
    attention: Annotated[
        str,
        option(
            "NAME", f"Attention of long prompts: {', '.join(ATTENTIONS)}. fp8 needs the extra cudnn and a Hopper GPU."
        ),
    ] = "bf16",
    step: Step = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Generate text from prompts.

    A packed model computes with its eight-bit weights, the model of a run in the recipe that it was trained in, and
    any other model in BF16. Text is printed as it comes. Several prompts are a batch, and their texts are printed in
    the order of the prompts.

    Without --prompt and --file, prompts are read from standard input. A text that outgrows the model's context goes on
    from its last half.

    Examples:

      octavo generate runs/first --prompt "def main():" --count 100 --seed 1

      octavo generate packed/first --prompt "def main():" --temperature 0

      octavo generate packed/first --file prompts.txt --json
    """
    from octavo.generation import Sampling
    from octavo.generation.own_cache import open_engine
    from octavo.nn import cast_once
    from octavo.runtime import end_tokens
    from octavo.train.evaluation import autocast
    from octavo.words import plural

    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    _check(count, batch, kv_cache, attention)
    texts = [Text(each) for each in read_prompts(prompt, file)]
    with progress("reading the model"):
        opened = open_source(source, step, device)
    longest = tokenize(texts, opened.tokenizer, opened.context)
    with cast_once(opened.model), autocast(opened.precision, opened.device):
        engine = open_engine(
            opened.model,
            context=opened.context,
            tokens=longest + count,
            kv_cache=kv_cache,
            kv_scales=opened.kv_scales,
            attention=attention,
        )
        if opened.device.type == "cuda":
            with progress("compiling kernels"):
                engine.warm_up(min(batch, len(texts)), longest, count)
        printer, stop, begin = Printer(texts), end_tokens(opened.description), perf_counter()
        for start in range(0, len(texts), batch):
            some = texts[start : start + batch]
            for _ in continue_texts(some, engine, opened.tokenizer, count, sampling, stop):
                if not as_json:
                    printer.update()
    found = _totals(texts, perf_counter() - begin)
    if as_json:
        print(json.dumps({"source": str(source), **found, "texts": [text.to_dict() for text in texts]}, indent=2))
        return
    say(
        f"{plural(found['tokens'], 'token')}, {found['tokens_per_second']:,.1f} tokens/s, "
        f"the first after {found['first_token_seconds']:.3f} s",
        "dim",
        error=True,
    )


def _check(count: int, batch: int, kv_cache: str, attention: str) -> None:
    """Raise a ValueError for an option that cannot be, before the model is read."""
    if count < 1 or batch < 1:
        raise ValueError(f"--count and --batch must be at least 1, got {count} and {batch}")
    if kv_cache not in KV_CACHES:
        raise ValueError(f"--kv-cache must be one of {', '.join(KV_CACHES)}, got {kv_cache!r}")
    if attention not in ATTENTIONS:
        raise ValueError(f"--attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")


def _totals(texts: Sequence[Text], seconds: float) -> dict[str, Any]:
    tokens = sum(text.tokens for text in texts)
    first = min((s for text in texts if (s := text.first_token_seconds) is not None), default=seconds)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "first_token_seconds": first}
