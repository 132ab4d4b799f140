"""The models of `bench.gpu.gpt_parity` and their data, in octavo's own trainer."""

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from bench.gpu.peers import use_torchao
from octavo.artifact.lock import FolderLock
from octavo.artifact.run import RunFolder
from octavo.models.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from octavo.nn.delayed import load_scale_state, scale_state
from octavo.recipe import Recipe
from octavo.text import ReadReport, read_text
from octavo.train.blocks import prepare_blocks
from octavo.train.checkpoint import TrainState
from octavo.train.config import Config
from octavo.train.data import Batches, Corpus, build_corpus
from octavo.train.evaluation import next_token_loss
from octavo.train.loop import Trainer, TrainingData
from octavo.train.model import convert_model, make_model
from octavo.train.optimizer import make_optimizer
from octavo.train.tables import Compile, ExpertSettings

CONFIG = Config(
    model="gpt2", layers=12, width=768, heads=12, context=1024, tokenizer="bpe", vocabulary=50_257,
    batch=32, accumulate=2, steps=800, learning_rate=6e-4, min_learning_rate=6e-5, warmup=40,
    evaluate_batches=64, compile=Compile(blocks=True),
)  # fmt: skip
# Experts hold 75 of its 90 million parameters. A token runs through 19 million of them.
MIXTURE = Config(
    model="mixture", layers=6, width=512, heads=8, mlp_width=1024, context=512, tokenizer="bpe", vocabulary=16_384,
    experts=ExpertSettings(count=8, top_k=2), batch=48, accumulate=1, steps=400, learning_rate=1e-3,
    min_learning_rate=1e-4, warmup=40, evaluate_batches=64, compile=Compile(blocks=True),
)  # fmt: skip
MODELS = {"gpt": CONFIG, "moe": MIXTURE}
SOURCES = "stdlib", f"{sysconfig.get_path('purelib')}/**/*.py"
CHARACTERS = 220_000_000  # of the text; the tokenizer is trained on the first
SAMPLE = 30_000_000
LARGEST_FILE = 1_000_000  # characters; longer files are tables of numbers and generated code
# The relative error of a weight gradient: below the first in BF16 that is compiled otherwise, between them in FP8.
GRADIENT_ERRORS = 0.02, 0.5


TORCHAO = {"torchao": "rowwise", "torchao_tensorwise": "tensorwise"}  # the recipe of a mode


class Data(NamedTuple):
    corpus: Corpus
    tokenizer: Tokenizer
    report: ReadReport


# --- Data ------------------------------------------------------------------------------------------------------


def read_data(config: Config, sources: Sequence[str] = SOURCES, characters: int = CHARACTERS) -> Data:
    """Text on this machine as tokens: the Python source, if `sources` names no other."""
    reading = read_text(sources)
    texts = [text for text in set(reading.texts) if len(text) <= LARGEST_FILE]
    texts.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    texts = list(first(texts, characters))
    tokenizer = BpeTokenizer.train(first(texts, SAMPLE), config.vocabulary)
    corpus = build_corpus(texts, tokenizer, config.context, config.validation_fraction)
    print(f"{len(texts)} documents, {len(corpus.train):,} tokens to train on", flush=True)
    return Data(corpus, tokenizer, reading.report)


def first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts from the start until they have so many characters together."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def random_data(config: Config) -> Data:
    """Random tokens, for timing."""
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, 1 << 20, dtype=np.uint16)
    return Data(Corpus(tokens, tokens, "random"), ByteTokenizer(), ReadReport((), 0, 0, 0, {}, ()))


# --- Trainers --------------------------------------------------------------------------------------------------


def make_trainer(mode: str, config: Config, data: Data) -> tuple[Trainer, int]:
    """A trainer in one mode, and how many of its layers run in FP8. The head is in BF16 in every mode."""
    if mode in TORCHAO:
        return trainer_of("bf16", config, data, lambda model: use_torchao(model, TORCHAO[mode]))
    config = config.change(only_if_faster=mode.endswith("_if_faster"))
    return trainer_of(mode.removesuffix("_if_faster"), config, data)


def trainer_of(
    recipe: str | Recipe, config: Config, data: Data, replace: Callable[[nn.Module], int] | None = None
) -> tuple[Trainer, int]:
    """A trainer with `recipe`, and how many of its layers run in FP8.

    `replace` converts the model for another library, and returns how many layers it has converted.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config.change(recipe=recipe)
    model = make_model(config, padded(config), Path()).to(device)
    converted = len(convert_model(model, config).converted) if replace is None else replace(model)
    prepare_blocks(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    state = TrainState(model, make_optimizer(model, config), scaler, device, data.corpus.fingerprint)
    parts = data.corpus.train, data.corpus.validation
    training, held_out = (Batches(tokens, config.context, config.batch, None) for tokens in parts)
    batches = TrainingData(training, held_out, data.tokenizer, data.report)
    folder = Path("unused")  # `step` and `evaluate` write nothing
    places = RunFolder(folder), FolderLock(folder), Console(quiet=True)
    return Trainer(config, state, batches, *places), converted


def padded(config: Config) -> int:
    """The rows of the embedding: a multiple of 128, as fast GEMMs want it."""
    return -(-config.vocabulary // 128) * 128


def restart(trainer: Trainer, data: Data, seed: int) -> None:
    """The weights and batches of a seed; the weights in place, since the compiled code knows these tensors.

    The histories of delayed scaling become empty.
    """
    config, state = trainer.config, trainer.state
    torch.manual_seed(seed)
    state.model.load_state_dict(make_model(config, padded(config), Path()).state_dict())
    load_scale_state(state.model, {name: torch.zeros_like(t) for name, t in scale_state(state.model).items()})
    state.optimizer, state.step = make_optimizer(state.model, config), 0
    training = Batches(data.corpus.train, config.context, config.batch, seed)
    trainer.data = trainer.data._replace(training=training)


# --- The check -------------------------------------------------------------------------------------------------


def gradient_errors(trainers: dict[str, tuple[Trainer, int]], data: Data) -> dict[str, float]:
    """The relative error of each mode's worst weight gradient, against the first mode's on the same weights and batch.

    Raises:
        RuntimeError: an error outside GRADIENT_ERRORS, as of a wrong gradient or of a mode that does not run in FP8.
    """
    (_, (first_trainer, _)), *others = trainers.items()
    expected = gradients(first_trainer, data)
    errors = {}
    for mode, (trainer, converted) in others:
        actual = gradients(trainer, data)
        gaps = {name: float((actual[name] - exact).norm() / exact.norm()) for name, exact in expected.items()}
        worst = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf)
        errors[mode] = gaps[worst]
        least, most = GRADIENT_ERRORS if converted else (0.0, GRADIENT_ERRORS[0])
        if not least <= gaps[worst] <= most:
            raise RuntimeError(f"{mode}: the gradient of {worst} must be off by {least} to {most}, is by {gaps[worst]}")
    return errors


def gradients(trainer: Trainer, data: Data) -> dict[str, Tensor]:
    """The weight gradients of the linear layers but the head, of one batch at the weights of seed 0."""
    restart(trainer, data, 0)
    model, config = trainer.model.train(), trainer.config
    next_token_loss(trainer.model, trainer.data.training.at(0), trainer.state.device, config.precision).backward()  # type: ignore[no-untyped-call]
    linears = {
        name: m.weight.grad for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    }
    model.zero_grad()
    return {name: grad for name, grad in linears.items() if grad is not None}
