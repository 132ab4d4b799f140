"""Training of the study: its text, the trunk, its branches, runs that check the learning rate, and frozen weights.

A branch starts from the whole state of the trunk (weights, moments, the count of steps) and goes on with the trunk's
schedule. The branches of a data order see the same batches. A process trains all data orders of one mode, so that the
mode is compiled once.

Every final model is evaluated both ways: its weights in BF16, and in the FP8 of its mode's own forward pass. Of a mode
in BF16 the FP8 is that of `rowwise`.
"""

import hashlib
import json
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bench.gpu import harness
from bench.gpu.loss.model import IN_BF16, make_model
from octavo.checkpoint.files import replace_file
from octavo.data import read_text
from octavo.models.mixture import Mixture
from octavo.models.tokenizer import BpeTokenizer, lay_out
from octavo.nn.attention_layers import GradientScales
from octavo.nn.fused_loss import linear_cross_entropy
from octavo.scales import load_scale_state, scale_state, update_scales
from octavo.train.config import Config
from octavo.train.optimizer import learning_rate, make_optimizer, optimizer_state, set_learning_rate
from octavo.train.saving import disturb_weights

SHARE = 0.6  # of the steps, after which branches leave the trunk, where a folder was not begun with another
DISTURBANCE = 2e-3  # of each weight of a twin, relative, one standard deviation
BATCHES = 64  # whose gradients are compared
LAST = 3  # evaluations at the end of a run, whose mean is its loss
SERVED_AS = "rowwise"  # the FP8 in which weights that were trained in BF16 are evaluated


# --- The text: source code on the machine itself, without near-duplicate files, as tokens ----------------------
#
# The files are those of Python's standard library and of the installed packages. Packages copy files from one another,
# and generate many from one template. A copy in the held-out text rewards memory, and a copy in the training text is a
# repetition. So files are taken in the order of a hash of their content, and a file is left out if half of its distinct
# lines or more stand in files that were taken before it.
#
# A sequence is `context` tokens and the one after them. A run reads no sequence twice.


SUFFIXES = ("py", "pyi", "pyx", "c", "cpp", "cu", "h", "hpp", "cuh", "rst", "md")
SOURCES = ("stdlib", *(f"{sysconfig.get_path('purelib')}/**/*.{suffix}" for suffix in SUFFIXES))
SHORTEST_FILE = 400  # characters
LARGEST_FILE = 1_000_000  # characters; longer files are tables of numbers and generated code
SHORTEST_LINE = 20  # characters of a line that tells files apart
SAMPLE = 30_000_000  # characters that train the tokenizer
LONGEST_TOKEN = 4.0  # characters of a token on average, at the most: more text than this needs is not tokenized


def prepare_text(folder: Path, config: Config, sources: Sequence[str] = SOURCES) -> dict[str, Any]:
    """Write the tokens that `config` needs to `folder`/tokens.npz, and what they are to text.json; returns the latter.
    The tokenizer is in `folder`/model.

    Raises:
        ValueError: the sources have too little text.
    """
    began = time.monotonic()
    found = [text for text in read_text(sources).texts if SHORTEST_FILE <= len(text) <= LARGEST_FILE]
    found.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out = config.evaluate_batches * config.batch * config.context + 1
    needed = held_out + config.steps * rows_of_step(config) * config.context + 1
    kept = list(first(without_copies(found), int(LONGEST_TOKEN * needed)))
    tokenizer = BpeTokenizer.train(first(kept, SAMPLE), config.vocabulary)
    tokenizer.save(folder / "model")
    tokens, _ = lay_out(kept, tokenizer)
    if len(tokens) < needed:
        raise ValueError(
            f"{config.steps} steps without a repetition take {needed:,} tokens; the text has {len(tokens):,}"
        )
    facts = {
        "sources": f"Python's standard library and the installed packages: {', '.join(SUFFIXES)}",
        "files": len(found),
        "documents": len(kept),
        "characters": sum(map(len, kept)),
        "training_tokens": len(tokens) - held_out,
        "held_out_tokens": held_out - 1,
        "fingerprint": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "seconds": round(time.monotonic() - began, 1),
    }
    replace_file(folder / "text.json", json.dumps(facts))
    with whole(folder / "tokens.npz") as part:
        np.savez(part, held_out=tokens[:held_out], training=tokens[held_out:])
    return facts


def rows_of_step(config: Config) -> int:
    """The sequences that an optimizer step reads."""
    return config.batch * config.accumulate


def first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts from the start until they have so many characters together."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def without_copies(texts: Iterable[str]) -> Iterator[str]:
    """The texts of which more than half of the distinct lines are in no text given before."""
    seen: set[int] = set()
    for text in texts:
        lines = {hash(stripped) for line in text.splitlines() if len(stripped := line.strip()) >= SHORTEST_LINE}
        if 2 * len(lines & seen) < len(lines):
            seen |= lines
            yield text


def texts(folder: Path, config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequences to train on, and those held out, int32 [sequences, context + 1] on `device`."""
    with np.load(folder / "tokens.npz") as arrays:
        parts = [torch.from_numpy(arrays[part].astype(np.int32)).to(device) for part in ("training", "held_out")]
    training, held_out = (tokens.unfold(0, config.context + 1, config.context) for tokens in parts)
    return training, held_out


def reading_order(sequences: int, branch_step: int, batch: int, order: int | None) -> Tensor:
    """The sequences in the order in which a run reads them, int64 [sequences].

    All runs begin as the trunk does, which has the order None. From `branch_step` on, a data order reads those that the
    trunk has not read yet in a permutation of its own.
    """
    rows = torch.randperm(sequences, generator=torch.Generator().manual_seed(0))
    if order is None:
        return rows
    read, rest = rows[: branch_step * batch], rows[branch_step * batch :]
    return torch.cat((read, rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(order))]))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write for `path`, which another process waits for: it is whole, or not there."""
    part = path.with_name(f"part-{path.name}")
    yield part
    part.rename(path)


# --- Models that learn -----------------------------------------------------------------------------------------


class Study(NamedTuple):
    """What a folder of runs has in common: the settings, and how its branches leave the trunk."""

    size: str
    config: Config
    share: float = SHARE  # of the steps, after which branches leave the trunk
    rate: float = 1.0  # of the branches, as a multiple of the trunk's learning rate

    @property
    def first(self) -> int:
        """The step of the branches."""
        return round(self.share * self.config.steps)


class Learner:
    """A model in one mode with its optimizer. They are compiled once, and every run puts its state in their place."""

    def __init__(self, mode: str, config: Config, device: torch.device, *, normed: bool = True) -> None:
        torch.manual_seed(0)
        self.mode, self.config, self.device = mode, config, device
        self.model, self.converted = make_model(mode, config, device, normed=normed)
        self.optimizer = make_optimizer(self.model, config)
        self.loss: Callable[..., Tensor] = torch.compile(loss_of) if config.compile.blocks else loss_of

    @cached_property
    def other(self) -> nn.Module:
        """The model of the form that the mode does not train in."""
        return make_model(SERVED_AS if self.mode in IN_BF16 else "bf16", self.config, self.device)[0]

    def state(self) -> dict[str, Tensor]:
        """Weights and moments, in the memory of the model and the optimizer."""
        return dict(self.model.named_parameters()) | optimizer_state(self.model, self.optimizer)

    @torch.no_grad()
    def restart(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights and moments of `state`; the histories of delayed scaling and of attention begin empty."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        load_scale_state(self.model, {name: torch.zeros_like(t) for name, t in scale_state(self.model).items()})
        for module in self.model.modules():
            if isinstance(module, GradientScales):
                module.amax.zero_()

    def step(self, index: int, sequences: Tensor, rate: float = 1.0) -> Tensor:
        """One optimizer step on `sequences` [rows, context + 1], at `rate` times the learning rate; the mean loss.

        More rows than the batch are several micro-batches.
        """
        set_learning_rate(self.optimizer, rate * learning_rate(index, self.config))
        parts, losses = torch.split(sequences, self.config.batch), []
        for part in parts:
            loss = self.forward(self.model.train(), part)
            balance = self.model.take_balance() if isinstance(self.model, Mixture) else None
            ((loss if balance is None else loss + balance) / len(parts)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        update_scales(self.model)
        return torch.stack(losses).mean()

    def gradients(self, sequences: Tensor) -> dict[str, Tensor]:
        """The gradient of each weight matrix on `sequences` [batch, context + 1], float32."""
        self.forward(self.model.train(), sequences).backward()  # type: ignore[no-untyped-call]
        if isinstance(self.model, Mixture):
            self.model.take_balance()
        update_scales(self.model)
        matrices = {name: p.grad for name, p in self.model.named_parameters() if p.ndim > 1 and p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return matrices

    def forward(self, model: Any, sequences: Tensor) -> Tensor:
        tokens = sequences.long()
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
            if isinstance(model.lm_head, nn.Identity):
                return linear_cross_entropy(logits, model.embedding.weight, tokens[:, 1:], recipe="rowwise")
        return self.loss(logits, tokens[:, 1:])

    @torch.no_grad()
    def evaluate(self, held_out: Tensor, *, both: bool = False) -> dict[str, list[float]]:
        """The loss of each batch of held-out text by the weights in the mode's form, or in BF16 and in FP8."""
        own, other = ("bf16", "fp8") if self.mode in IN_BF16 else ("fp8", "bf16")
        forms = {own: self.model}
        if both:
            forms[other] = self.other
            for p, trained in zip(self.other.parameters(), self.model.parameters(), strict=True):
                p.copy_(trained)
        batches = torch.split(held_out, self.config.batch)
        losses = {form: torch.stack([self.forward(model.eval(), b) for b in batches]) for form, model in forms.items()}
        return {form: found.tolist() for form, found in losses.items()}

    def warm_up(self, *, both: bool = False) -> None:
        """Compile all that a run needs, on tokens without meaning, and give the memory back."""
        config = self.config
        shape = config.batch, config.context + 1
        tokens = torch.randint(config.vocabulary, shape, dtype=torch.int32, device=self.device)
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        for index in range(3):
            self.step(index, tokens)
        self.evaluate(tokens, both=both)
        self.restart(before)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits [B, T, V] in float32, 0-dim."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- Runs ------------------------------------------------------------------------------------------------------


def steps(learner: Learner, training: Tensor, rows: Tensor, first: int, last: int, rate: float = 1) -> Iterator[Tensor]:
    """The losses of the steps `first` to `last`, which read `training` in the order of `rows`."""
    batch = rows_of_step(learner.config)
    rows = rows.to(learner.device)
    for index in range(first, last):
        yield learner.step(index, training[rows[index * batch : (index + 1) * batch]], rate)


def prepare(folder: Path, study: Study, device: torch.device) -> None:
    """Write the tokens of all runs."""
    if not (folder / "tokens.npz").exists():
        print(prepare_text(folder, study.config), flush=True)


def train_trunk(folder: Path, study: Study, device: torch.device) -> None:
    """Train BF16 to the step of the branches, and write its state."""
    path = folder / "trunk.safetensors"
    if path.exists():
        return
    config, last = study.config, study.first
    learner = Learner("bf16", config, device)
    learner.warm_up()
    training, held_out = texts(folder, config, device)
    began = time.monotonic()
    losses = list(steps(learner, training, reading_order(len(training), last, rows_of_step(config), None), 0, last))
    facts = {"losses": rounded(losses), "evaluation": learner.evaluate(held_out), "seconds": time.monotonic() - began}
    write_run(folder / "trunk.json", learner, facts)
    with whole(path) as part:
        save_file(learner.state(), part)


def train_branches(folder: Path, study: Study, device: torch.device, modes: list[str], orders: list[int]) -> None:
    """Train each mode from the trunk to the end in each data order, without the runs that `folder` has."""
    config, first = study.config, study.first
    for mode in modes:
        missing = {order: path for order in orders if not (path := folder / f"branch-{mode}-{order}.json").exists()}
        if not missing:
            continue
        learner = Learner(mode, config, device)
        learner.warm_up(both=True)
        trunk = load_file(folder / "trunk.safetensors", device=str(device))
        training, held_out = texts(folder, config, device)
        for order, path in missing.items():
            learner.restart(trunk)
            if mode == "twin":
                disturb_weights(learner.model, DISTURBANCE, order)
            rows = reading_order(len(training), first, rows_of_step(config), order)
            evaluations, losses, began, done = [], list[Tensor](), time.monotonic(), first
            for back in reversed(range(LAST)):  # the last step, and two before it, 1/28 of the run apart
                step = config.steps - back * max(config.steps // 28, 1)
                losses += steps(learner, training, rows, done, step, study.rate)
                evaluations.append({"step": step, **learner.evaluate(held_out, both=True)})
                done = step
            if mode == "bf16":
                with whole(folder / f"final-{order}.safetensors") as part:
                    save_file(dict(learner.model.named_parameters()), part)
            facts = {"order": order, "first": first, "losses": rounded(losses), "evaluations": evaluations}
            write_run(path, learner, facts | {"seconds": time.monotonic() - began})


def check_rates(folder: Path, study: Study, device: torch.device) -> None:
    """Train BF16 from scratch: a quarter of the steps at half, once and twice the learning rate, and half of the steps.

    Each run ends with a rate of zero. The shorter runs give the shape of the curve too.
    """
    config = study.config
    runs = [(config.steps // 4, 0.5), (config.steps // 4, 1.0), (config.steps // 4, 2.0), (config.steps // 2, 1.0)]
    missing = [run for run in runs if not (folder / f"rate-{run[0]}-{run[1]}.json").exists()]
    if not missing:
        return
    learner = Learner("bf16", config, device)
    start = {name: tensor.clone() for name, tensor in learner.state().items()}
    learner.warm_up()
    training, held_out = texts(folder, config, device)
    rows = reading_order(len(training), 0, rows_of_step(config), 1)
    for count, rate in missing:
        learner.restart(start)
        learner.config = config.change(steps=count, decay_steps=count, warmup=max(count // 20, 1))
        began = time.monotonic()
        losses = list(steps(learner, training, rows, 0, count, rate))
        facts = {"steps": count, "rate": rate, "losses": rounded(losses), "evaluation": learner.evaluate(held_out)}
        write_run(folder / f"rate-{count}-{rate}.json", learner, facts | {"seconds": time.monotonic() - began})


@torch.no_grad()
def evaluate_frozen(folder: Path, study: Study, device: torch.device, modes: list[str], orders: list[int]) -> None:
    """The losses of the trunk and of the final BF16 models in the forward pass of each mode, without training."""
    _, held_out = texts(folder, study.config, device)
    weights = [folder / f"{name}.safetensors" for name in ("trunk", *(f"final-{order}" for order in orders))]
    for mode in modes:
        path = folder / f"frozen-{mode}.json"
        if path.exists():
            continue
        learner = Learner(mode, study.config, device)
        losses = {}
        for file in weights:
            found = load_file(file, device=str(device))
            for name, p in learner.model.named_parameters():
                p.copy_(found[name])
            (losses[file.stem],) = learner.evaluate(held_out).values()
        write_run(path, learner, {"losses": losses})


def compare_gradients(folder: Path, study: Study, device: torch.device, modes: list[str]) -> None:
    """The error of each gradient dw of a mode at the trunk's weights, against BF16's of the same batches.

    With the error d of a batch and the gradient g of BF16, over the batches:

        bias   |mean d|^2 / |mean g|^2, less what chance alone gives, |d - mean d|^2 / (batches - 1): it stays
        noise  mean |d - mean d|^2 / mean |g|^2: the part of one batch that averages out
    """
    base = Learner("bf16", study.config, device)
    trunk = load_file(folder / "trunk.safetensors", device=str(device))
    training, _ = texts(folder, study.config, device)
    read = rows_of_step(study.config)
    rows = reading_order(len(training), study.first, read, 7).to(device)
    batches = torch.split(rows[study.first * read :], study.config.batch)[:BATCHES]
    for mode in modes:
        path = folder / f"gradients-{mode}.json"
        if path.exists() or mode in IN_BF16:
            continue
        learner = Learner(mode, study.config, device)
        sums: dict[str, list[Tensor]] = {}  # of g, |g|^2, d and |d|^2
        for each in (base, learner):
            each.restart(trunk)
        for batch in batches:
            exact, found = (each.gradients(training[batch]) for each in (base, learner))
            for name, g in exact.items():
                d = found[name] - g
                added = [g, g.square().sum(), d, d.square().sum()]
                sums[name] = [a + b for a, b in zip(sums[name], added, strict=True)] if name in sums else added
        weights = {name: error_of(*of_weight, batches=len(batches)) for name, of_weight in sums.items()}
        write_run(path, learner, {"batches": len(batches), "weights": weights})


def error_of(g: Tensor, g_squared: Tensor, d: Tensor, d_squared: Tensor, *, batches: int) -> dict[str, float]:
    """The bias and the noise of one weight, from sums over the batches of g, |g|^2, d and |d|^2."""
    around = max(float(d_squared) - float(d.square().sum()) / batches, 0.0)  # sum |d - mean d|^2
    bias = float((d / batches).square().sum()) - around / batches / max(batches - 1, 1)
    return {"bias": bias / float((g / batches).square().sum()), "noise": around / float(g_squared)}


# --- Files -----------------------------------------------------------------------------------------------------


def rounded(losses: list[Tensor]) -> list[float]:
    return [round(loss, 5) for loss in torch.stack(losses).tolist()]


def write_run(path: Path, learner: Learner, facts: Mapping[str, Any]) -> None:
    """Write a run's file, with the machine."""
    of_model = {"parameters": sum(p.numel() for p in learner.model.parameters()), "converted": learner.converted}
    shared = {"machine": harness.facts(), "mode": learner.mode, **of_model}
    replace_file(path, json.dumps(shared | dict(facts)) + "\n")
    print(f"{path.stem} after {facts.get('seconds', 0):.0f} s", flush=True)
