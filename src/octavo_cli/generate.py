"""octavo generate and evaluate: text from a model, the speed of generating it, and the loss of a model on text."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from octavo.util import number, plural, printable
from octavo_cli import shared
from octavo_cli.display import print_facts, print_rows, progress, say
from octavo_cli.shared import DATA_HELP, KV_CACHES, argument, changed, numbers, option, print_reading, refuse_unused

if TYPE_CHECKING:
    import torch

    from octavo.data import ReadReport
    from octavo.inference.engine import Engine
    from octavo.inference.opening import OpenedModel
    from octavo.inference.sampling import Sampling
    from octavo.models.tokenizer import Batches, Tokenizer
    from octavo.speed import Grid

SOURCE_HELP = "A run of octavo train, a folder of octavo pack, or a Hugging Face model folder."
# The options that say what text to write; --time writes none.
_OF_TEXT = ("--prompt", "--file", "--chat", "--temperature", "--top-k", "--top-p", "--repetition-penalty", "--seed")


def generate_command(
    command: typer.Context,
    source: Annotated[Path, argument("SOURCE", SOURCE_HELP)],
    prompt: Annotated[list[str] | None, option("TEXT", "The text to continue; can be repeated.")] = None,
    file: Annotated[Path | None, option("FILE", 'Prompts: lines, or JSON lines with "prompt"; - is stdin.')] = None,
    chat: Annotated[bool, option("--chat", "Each prompt is a message, in the tokenizer's chat template.")] = False,
    batch: Annotated[str, option("NUMBER", "Prompts to generate from at once: 16; with --time some, 1,16.")] = "",
    count: Annotated[int | None, option("NUMBER", "Tokens to generate after each prompt: 200; with --time 64.")] = None,
    temperature: Annotated[float, option("NUMBER", "0 takes the most likely token; higher is more varied.")] = 0.8,
    top_k: Annotated[int, option("NUMBER", "Draw from so many most likely tokens; 0 draws from all.")] = 0,
    top_p: Annotated[float, option("NUMBER", "Draw from the most likely tokens of this total probability.")] = 1.0,
    repetition_penalty: Annotated[float, option("NUMBER", "Above 1, tokens of the text become less likely.")] = 1.0,
    seed: Annotated[int | None, option("NUMBER", "The seed of the draws: the same seed, the same text.")] = None,
    kv_cache: Annotated[str, option("NAME", f"Dtype of keys and values: {', '.join(KV_CACHES)}.")] = "auto",
    attention: Annotated[str, option("NAME", "bf16, or fp8 for long prompts: needs cudnn and Hopper.")] = "bf16",
    time: Annotated[bool, option("--time", "Time random prompts instead of writing text.")] = False,
    length: Annotated[str, option("NUMBERS", "With --time: lengths of the prompts in tokens.")] = "128,2048",
    rounds: Annotated[int, option("NUMBER", "With --time: times that each size is measured.")] = 5,
    step: shared.Step = None,
    device: shared.Device = "auto",
    as_json: shared.AsJson = False,
) -> None:
    """Generate text from prompts, or time it.

    A packed model computes with its eight-bit weights, the model of a run in the recipe that it was trained in, and
    any other model in BF16. Text is printed as it comes. Several prompts are a batch, and their texts are printed in
    the order of the prompts.

    Without --prompt and --file, prompts are read from standard input. A text that outgrows the model's context goes on
    from its last half. The KV cache auto is fp8 for a packed folder with scales for it.

    With --time, each batch of each length is a row: the time to the first token, and the tokens a second after it. They
    are medians of the rounds. The first call of a size, which compiles kernels, has a column of its own.

    Examples:

      octavo generate runs/first --prompt "def main():" --count 100 --seed 1
      octavo generate packed/first --prompt "def main():" --temperature 0
      octavo generate packed/first --file prompts.txt --json
      octavo generate packed/qwen --chat --prompt "What is FP8?"
      octavo generate packed/qwen --time --batch 1,16,64 --length 2048
    """
    with progress("starting"):  # PyTorch and transformers take seconds
        from octavo.checkpoint.folder import check_config
        from octavo.inference.engine import open_engine
        from octavo.inference.sampling import Sampling
        from octavo.scales import cast_once
        from octavo.speed import Grid
        from octavo.train.finished import ANY_MODEL, open_source
        from octavo.train.loss import autocast

    if time:
        if given := [name for name in changed(command) if name in _OF_TEXT]:
            raise ValueError(f"{given[0]} is for text, and --time writes none: leave one of the two out")
    else:
        refuse_unused(command, ["--length", "--rounds"], "--time")
    count = count if count is not None else 64 if time else 200
    grid = Grid(numbers("--batch", batch or ("1,16" if time else "16")), numbers("--length", length), count, rounds)
    if not time and len(grid.batches) > 1:
        raise ValueError(f"--batch takes one number without --time, got {', '.join(map(str, grid.batches))}")
    for name, value, known in (("--kv-cache", kv_cache, KV_CACHES), ("--attention", attention, shared.ATTENTIONS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    check_config(source, ANY_MODEL)  # before standard input is read
    texts = [] if time else [Text(each) for each in read_prompts(prompt, file)]
    with progress("reading the model"):
        opened = open_source(source, step, device)
    if chat:
        if (template := opened.tokenizer.chat) is None:
            raise ValueError(
                f"--chat needs a tokenizer with a chat template, and that in {opened.description} has none: omit it"
            )
        for text in texts:  # what a user says, and the beginning of the answer
            text.message = template([{"role": "user", "content": text.prompt}], answer=True)
    longest = max(grid.prompts) if time else tokenize(texts, opened)
    if time and longest + count > opened.context:
        raise ValueError(
            f"a prompt of {longest} tokens and {count} new ones are {longest + count} tokens, and the model of "
            f"{source} sees {opened.context}: take a shorter --length or a smaller --count"
        )
    with cast_once(opened.model), autocast(opened.precision, opened.device):
        engine = open_engine(
            opened.model, context=opened.context, tokens=longest + count, kv_cache=kv_cache,
            kv_scales=opened.kv_scales, attention=attention,
        )  # fmt: skip
        if time:
            time_engine(engine, opened, grid, source, as_json)
        else:
            write_texts(texts, engine, opened, grid, sampling, source, as_json)


def write_texts(
    texts: list[Text], engine: Engine, opened: OpenedModel, grid: Grid, sampling: Sampling, source: Path, as_json: bool
) -> None:
    """Generate up to `grid.tokens` tokens after each prompt, a batch at a time, and print them as they come."""
    from octavo.inference.opening import end_tokens

    [batch], count = grid.batches, grid.tokens
    if opened.device.type == "cuda":
        with progress("compiling kernels"):
            engine.warm_up(min(batch, len(texts)), max(len(text.ids) for text in texts), count)
    printing, stop, begin = print_texts(texts), end_tokens(opened.description), perf_counter()
    for start in range(0, len(texts), batch):
        for _ in continue_texts(texts[start : start + batch], engine, opened.tokenizer, count, sampling, stop):
            if not as_json:
                next(printing, None)
    seconds, tokens = perf_counter() - begin, sum(text.tokens for text in texts)
    first = min((s for text in texts if (s := text.first_token_seconds) is not None), default=seconds)
    if as_json:
        found = {"tokens": tokens, "tokens_per_second": tokens / seconds, "first_token_seconds": first}
        print(json.dumps({"source": str(source), **found, "texts": [text.to_dict() for text in texts]}, indent=2))
        return
    rate = f"{tokens / seconds:,.1f} tokens/s"
    say(f"{plural(tokens, 'token')}, {rate}, the first after {first:.3f} s", "dim", error=True)


def time_engine(engine: Engine, opened: OpenedModel, grid: Grid, source: Path, as_json: bool) -> None:
    """Time greedy tokens after random prompts at every size of the grid, and print the rows."""
    import torch

    from octavo.hf.meta_model import token_embedding
    from octavo.inference.sampling import Sampling
    from octavo.numerics import ROW
    from octavo.ops import find_backend
    from octavo.speed import facts, time_generation

    def generate(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        return torch.tensor(list(engine.generate(ids.tolist(), tokens, Sampling(temperature=0)))).t()

    embedding = token_embedding(opened.model)
    vocabulary = 1 if embedding is None else embedding.num_embeddings
    with progress("timing") as advance:
        rows = time_generation(generate, grid, vocabulary, opened.device, advance)
    machine = facts()
    if as_json:
        sizes = {"tokens": grid.tokens, "rounds": grid.rounds}
        print(json.dumps({"source": str(source), "machine": machine, **sizes, "rows": [row.to_dict() for row in rows]}))
        return
    timed = [
        {
            "batch": str(row.batch), "prompt": str(row.prompt),
            "first token ms": number(row.first_token_seconds, ".1f", 1e-3),
            "tokens/s": number(row.tokens_per_second, ",.1f"), "first call s": number(row.warm_up_seconds, ".2f"),
            "peak GB": number(row.peak_bytes, ".2f", 1e9), "problem": row.problem,
        }
        for row in rows
    ]  # fmt: skip
    title = f"{plural(grid.tokens, 'new token')}, medians of {plural(grid.rounds, 'round')}"
    print_rows(timed, prose=("problem",), title=title)
    where = machine["gpu"] if opened.device.type == "cuda" else machine["processor"]
    say(f"{opened.title}: {where}, octavo {machine['octavo']}, torch {machine['torch']}", "dim")
    backend = find_backend(opened.device, ROW, ROW, ("e4m3", "e4m3"))
    if backend.name == "emulated" and any(t.element_size() == 1 for t in opened.model.state_dict().values()):
        say(f"FP8 is emulated here: {backend.reason}", "dim")
    if any(row.whole_seconds and row.tokens_per_second is None for row in rows):
        say("Where there is no figure of tokens/s, all tokens took no longer than one: give a larger --count", "dim")


# ---- The prompts of a command: options, a file, or standard input.


def read_prompts(given: list[str] | None, file: Path | None) -> list[str]:
    """The prompts of the command line, or of a file: one a line, or JSON lines with a "prompt". "-" stands for standard
    input, and so does no file where standard input is no terminal."""
    if given and file:
        raise ValueError("--prompt and --file both give prompts: give one of them")
    prompts = given or _read(file)
    for prompt in prompts:
        if re.search("[\ud800-\udfff]", prompt):  # what Python makes of bytes that are no text
            raise ValueError(f"a prompt must be text in UTF-8, got {prompt[:40]!r}: convert it first")
    return prompts


def _read(file: Path | None) -> list[str]:
    if file is None and sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT, --file FILE, or prompts on standard input, one a line")
    if file is None or str(file) == "-":
        name, content = "standard input", sys.stdin.buffer.read()
    else:
        name = str(file)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"--file {file} cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must hold text in UTF-8, and byte {error.start} is not: convert it first") from error
    lines = [(at, line.rstrip("\r")) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} holds no prompt: give one a line, or --prompt TEXT")
    if not isinstance(_parse(lines[0][1]), dict):
        return [line for _, line in lines]
    prompts = []
    for at, line in lines:
        found = _parse(line)
        prompt = found.get("prompt") if isinstance(found, dict) else None
        if not isinstance(prompt, str):
            example = 'a JSON object such as {"prompt": "text"}'
            raise ValueError(f"{name}, line {at} must be {example}, as the first line is one")
        prompts.append(prompt)
    return prompts


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


# ---- The texts that octavo generate writes: their tokens, their times, and how they are printed.


@dataclass
class Text:
    """A prompt, and what follows it."""

    prompt: str  # as it was given
    message: str = ""  # as the chat template writes the prompt; "" for one that is continued as it is
    ids: list[int] = field(default_factory=list)  # of the prompt
    text: str = ""  # what follows it so far
    tokens: int = 0  # of `text`
    finished: str = ""  # "stop" after a token that ends a text, "length" after the last token that was asked for
    first_token_seconds: float | None = None  # from the begin of its batch

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("message", "ids")}


def tokenize(texts: Sequence[Text], opened: OpenedModel) -> int:
    """Set the tokens of each prompt, and return the largest number of them, which the model can see."""
    from octavo.train.model import check_vocabulary

    for place, text in enumerate(texts, 1):
        text.ids = opened.tokenizer.encode(text.message or text.prompt, special=not text.message)
        which = "the prompt" if len(texts) == 1 else f"prompt {place} of {len(texts)}"
        if not text.ids:
            raise ValueError(f"{which} must hold at least one token, got an empty one: give some text to continue")
        if len(text.ids) > opened.context:
            raise ValueError(f"{which} has {len(text.ids)} tokens, and the model sees {opened.context}: shorten it")
    check_vocabulary(opened.model, max(max(text.ids) for text in texts))
    return max(len(text.ids) for text in texts)


def continue_texts(
    texts: Sequence[Text], engine: Engine, tokenizer: Tokenizer, count: int, sampling: Sampling, stop: Collection[int]
) -> Iterator[None]:
    """Generate up to `count` tokens after each prompt, as one batch. Yields after each step."""
    from octavo.inference.sampling import TextStream

    streams, begin = [TextStream(tokenizer, text.ids) for text in texts], perf_counter()
    for tokens in engine.generate([text.ids for text in texts], count, sampling, stop):
        for text, stream, token in zip(texts, streams, tokens, strict=True):
            if token is None:
                text.text, text.finished = text.text + stream.end(), "stop"
                continue
            text.text, text.tokens = text.text + stream.add(token), text.tokens + 1
            if text.first_token_seconds is None:
                text.first_token_seconds = perf_counter() - begin
        yield
    for text, stream in zip(texts, streams, strict=True):
        text.text += stream.end()
        text.finished = "length" if text.tokens == count else "stop"
    yield


def print_texts(texts: Sequence[Text]) -> Iterator[None]:
    """Print texts in their order, at each step what has come since the last: the first that is not finished as it
    comes, the others after it."""
    console = Console()
    for at, text in enumerate(texts, 1):
        if len(texts) > 1:
            say(f"--- {at} of {len(texts)}", "dim")
        console.out(printable(text.prompt), end="\n" if text.message else "", style="bold", highlight=False)
        shown = 0
        while True:
            console.out(printable(text.text[shown:]), end="", highlight=False)
            console.file.flush()
            shown = len(text.text)
            if text.finished:
                break
            yield
        console.out("")


def evaluate_command(
    command: typer.Context,
    source: Annotated[Path, argument("SOURCE", SOURCE_HELP)],
    data: Annotated[list[str] | None, option("TEXT", f"{DATA_HELP}.")] = None,
    held_out: Annotated[Path | None, option("RUN", "Evaluate on the text that this run holds out.")] = None,
    batches: Annotated[int | None, option("NUMBER", "Batches. Default: what the run takes, all of --data.")] = None,
    batch: Annotated[int, option("NUMBER", "With --data: sequences in a batch.")] = 4,
    context: Annotated[int | None, option("NUMBER", "With --data: tokens in a sequence, up to the model's.")] = None,
    step: shared.Step = None,
    device: shared.Device = "auto",
    as_json: shared.AsJson = False,
) -> None:
    """Measure the loss and the perplexity of a model on text.

    A run is evaluated on the text that it holds out, as octavo train evaluates it. Any model is evaluated on --data,
    whose text is cut into sequences, or on the text that a run holds out.

    Examples:

      octavo evaluate runs/first
      octavo evaluate packed/first --held-out runs/first
      octavo evaluate models/qwen --data 'books/*.txt' --context 1024 --json
    """
    with progress("starting"):  # PyTorch and transformers take seconds
        from octavo.scales import cast_once
        from octavo.train import finished
        from octavo.train.config import Config
        from octavo.train.loss import mean_loss
        from octavo.train.model import check_vocabulary, make_loss

    if data and held_out:
        raise ValueError("--data and --held-out both name the text: give one of them")
    if not data:
        refuse_unused(command, ["--batch", "--context"], "--data")
    if batches is not None and batches < 1:
        raise ValueError(f"--batches must be at least 1, got {batches}")
    opened = finished.open_source(source, step, device)
    if data:
        text, count, read = _given(opened, data, batch, context)
    else:
        text, count, read = finished.held_out(held_out or source, opened)
    check_vocabulary(opened.model, text.highest)
    if not as_json:
        print_reading(read)
    with progress("evaluating") as advance, cast_once(opened.model):
        loss, tokens = mean_loss(
            opened.model, text, opened.device, make_loss(Config(), opened.model), precision=opened.precision,
            count=batches or count, progress=advance,
        )  # fmt: skip
    perplexity = math.exp(loss) if loss < 700 else None
    if as_json:
        found = {"source": str(source), "loss": loss if math.isfinite(loss) else None, "perplexity": perplexity}
        print(json.dumps(found | {"tokens": tokens, "data": read.to_dict()}, indent=2))
        return
    facts = [("model", opened.title), ("loss", f"{loss:.4f} nats a token, on {tokens:,} tokens")]
    print_facts([*facts, ("perplexity", "too large" if perplexity is None else f"{perplexity:.4g}")])


def _given(opened: OpenedModel, data: list[str], batch: int, context: int | None) -> tuple[Batches, None, ReadReport]:
    """All batches of the text that --data names."""
    from octavo.data import read_text
    from octavo.models.tokenizer import Batches, lay_out

    if context is not None and not 1 <= context <= opened.context:
        raise ValueError(f"--context must be from 1 to the model's {opened.context}, got {context}")
    reading = read_text(data, opened.tokenizer.chat)
    tokens, _ = lay_out(reading.texts, opened.tokenizer)
    length = min(context or opened.context, max(len(tokens) - 1, 1))
    return Batches(tokens, length, min(batch, max((len(tokens) - 1) // length, 1)), None), None, reading.report
