"""Starting and resuming a run, and its training loop.

One step, with `accumulate` micro-batches:

    for each:   loss = cross_entropy(logits(inputs), targets) / accumulate;  backward        gradients add up in FP32
    clip the gradient's norm;  AdamW on the FP32 master weights;  close the step of delayed scaling

The forward pass runs under autocast to BF16, or to FP16 with a scaled loss (Micikevicius et al., arXiv:1710.03740).
Converted linear layers run in FP8, and their weights are cast once a step. A step depends only on the weights, the
optimizer, the scale histories, the random state and its number. A checkpoint holds all of these, so a run that is
killed and resumed repeats its losses bit for bit. Every few steps `octavo.train.supervision` looks at what came of
them: it may promote layers, and take the run back to an earlier step.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from octavo.calibration.calibrator import load_calibration
from octavo.checkpoint.files import RECORD, ArtifactError, read_json
from octavo.checkpoint.folder import (
    BUILT_IN_MODELS,
    Actions,
    RunFolder,
    copy_description,
    described_files,
    locked_folder,
    writing,
)
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.data import DataError, ReadReport, absolute_source
from octavo.inference.engine import Engine
from octavo.inference.sampling import Sampling, TextStream
from octavo.models.tokenizer import Batches, Corpus, RandomBatches, Tokenizer, build_corpus
from octavo.nn.delayed import histories
from octavo.nn.module_tools import is_weight
from octavo.scales import seed_scales, update_scales
from octavo.train import model as models
from octavo.train import processes, saving, step_metrics
from octavo.train.config import Config, ConfigError, check_effects, refuse, settings_of, write_settings
from octavo.train.host_masters import HostAdamW, HostMasters
from octavo.train.loss import Loss, autocast, mean_loss, next_token_loss, own_random
from octavo.train.optimizer import RecentSteps, clip_gradients, learning_rate, make_optimizer, set_learning_rate
from octavo.train.settings import parse, read_settings
from octavo.train.supervision import CHECK_EVERY, Supervisor, apply_promotions
from octavo.util import plural
from octavo.watching.collection import Watch


@dataclass(frozen=True)
class Result:
    """The end of a call of `Trainer.run`: the step, the last evaluation loss, and the signal that stopped it."""

    step: int
    evaluation_loss: float | None
    interrupted: str | None


class TokenizedText(NamedTuple):
    """The text of a run in tokens, its tokenizer, and the report of the text that was read."""

    tokenizer: Tokenizer
    read: ReadReport
    corpus: Corpus


@dataclass(eq=False)
class Trainer:
    """A run in progress. `state` is what a checkpoint saves; `lock` keeps other programs out of the run's folder."""

    config: Config
    state: saving.TrainState
    loss: Loss
    data: TokenizedText
    training: Batches
    validation: Batches
    run_folder: RunFolder
    actions: Actions
    lock: AbstractContextManager[Any]
    console: Console
    recent: RecentSteps = field(default_factory=RecentSteps)
    watch: Watch | None = None

    @property
    def model(self) -> nn.Module:
        return self.state.model

    @cached_property
    def delayed(self) -> bool:
        """True if a layer of the model scales by a history."""
        return next(histories(self.model), None) is not None

    @cached_property
    def flops_per_token(self) -> float | None:
        return step_metrics.flops_per_token(self.model, self.config.context)

    def run(self) -> Result:
        """Train to `config.steps`, or until a signal; evaluate, log and save on the way and at the end."""
        config, state = self.config, self.state
        evaluation = interrupted = None
        agreement, logged, seconds = processes.Agreement(), state.step, 0.0  # of the steps since the last log line
        with (
            self.lock,
            processes.collect_between_steps(),
            processes.delay_interrupts() as noted,
            step_metrics.Metrics(self.run_folder.metrics, resumed_at=state.step, config=config) as metrics,
            step_metrics.watched(config, state, self.run_folder, metrics) as self.watch,
            saving.CheckpointWriter(self.run_folder, config.keep) as checkpoints,
            Supervisor(
                config, state, self.run_folder, self.actions, self.recent, metrics, self.console, self.watch,
                checkpoints, self.passes,
            ) as supervisor,
        ):  # fmt: skip
            precision = step_metrics.precision_of(self.model, state.device)
            start = {"dtypes": self._dtypes(), "started": step_metrics.start_of(state.device)}
            metrics.write(state.step, data=self.data.read.to_dict(), precision=precision, **start)
            while state.step < config.steps and interrupted is None:
                began = time.perf_counter()
                loss, norm = self.step()
                processes.collect_young(state.step)
                processes.show(self.console, "training", state.step, config.steps)
                # Read once a step: what comes later in this turn is for the next.
                number, failed = agreement.reach(sum(noted), checkpoints.failed)
                if failed:
                    checkpoints.wait()
                interrupted = Signals(number).name if number else None
                done = state.step == config.steps
                logs = state.step % config.log_every == 0 or done or interrupted is not None
                evaluates = state.step % config.evaluate_every == 0 or done
                saves = state.step % config.save_every == 0 or done or interrupted is not None
                checks = logs or evaluates or saves or state.step % CHECK_EVERY == 0
                if checks and state.device.type == "cuda":
                    torch.cuda.synchronize(state.device)  # the time is that of steps that the GPU still computes, too
                if checks and state.hosted is not None:
                    state.hosted.wait()
                seconds += time.perf_counter() - began
                if checks and supervisor.check():  # the run went back
                    logs, evaluates, saves = False, False, interrupted is not None
                if logs:
                    self._log(metrics, max(state.step - logged, 1), seconds, processes.mean_of_ranks(loss), norm)
                    logged, seconds = state.step, 0.0
                if evaluates:
                    evaluation = self._evaluate_and_sample(metrics)
                waited = checkpoints.save(state) if saves else 0.0
                if waited >= 1:
                    said = f"waited {waited:.0f} s for the disk to take the checkpoint before: raise save_every"
                    processes.print_line(self.console, f"step {state.step}: {said}")
        self.watch = None
        return Result(state.step, evaluation, interrupted)

    def step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step: the mean loss of this rank's sequences and the norm of the gradient, 0-dim tensors."""
        config, state = self.config, self.state
        if self.watch is not None and self.watch.done != state.step:  # a step is repeated
            self.watch.go_back(state.step)
        set_learning_rate(state.optimizer, learning_rate(state.step, config))
        loss = self.passes(state.step, update=True)
        state.scaler.unscale_(state.optimizer)
        if self.watch is not None:
            self.watch.read_gradients()  # before they are clipped
        trained = (p for group in state.optimizer.param_groups for p in group["params"])
        norm = clip_gradients(trained, config.clip or math.inf) if state.hosted is None else state.hosted.clip()
        scale = state.scaler.get_scale()
        self.recent.update(state.optimizer, state.scaler, norm)
        state.scaler.update()
        state.skipped_steps += int(state.scaler.get_scale() < scale)
        state.optimizer.zero_grad()
        if self.delayed:
            update_scales(self.model, skipped=self.recent.bad)  # the scales stay with the weights
        state.step, state.tokens = state.step + 1, state.tokens + config.step_tokens
        if self.watch is not None:
            self.watch.step()
        self.recent.note(state.step, loss, norm)
        return loss, norm

    def passes(self, step: int, *, update: bool = False) -> Tensor:
        """The forward and backward passes after `step` steps: the mean loss of this rank's sequences, 0-dim. `update`:
        the optimizer takes the gradients next."""
        config, state, sampled = self.config, self.state, self.watch is not None and self.watch.samples
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), device=state.device)
        first = self.actions.batch(step) * config.accumulate
        with state.on_device(beside=update and not sampled):
            for micro in range(config.accumulate):
                loss = self._loss(*self.training.at(first + micro))
                state.scaler.scale(loss / config.accumulate).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        return total / config.accumulate

    def evaluate(self) -> float:
        """The mean loss over the first `evaluate_batches` validation batches, each taken once at most."""
        self.model.eval()
        device, precision, count = self.state.device, self.config.precision, self.config.evaluate_batches
        with self.state.on_device():
            loss, _ = mean_loss(self.model, self.validation, device, self.loss, precision=precision, count=count)
        return float(processes.mean_of_ranks(torch.tensor(loss, dtype=torch.float64)))

    def sample(self, count: int) -> str:
        """`count` tokens that follow a newline, drawn with a fixed seed. The run's random state does not change."""
        self.model.eval()
        device, precision = self.state.device, self.config.precision
        with self.state.on_device(), models.eager(), own_random(device), autocast(precision, device):
            stream = TextStream(self.data.tokenizer, self.data.tokenizer.encode("\n"))
            steps = Engine(self.model, context=self.config.context).generate([stream.ids], count, Sampling(seed=0))
            pieces = (stream.add(token) for [token] in steps if token is not None)
            return processes.show_sampled(self.console, pieces, count) + stream.end()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, (inputs, targets), self.state.device, self.config.precision, self.loss)

    def _log(self, metrics: step_metrics.Metrics, steps: int, seconds: float, loss: Tensor, norm: Tensor) -> None:
        """Write the numbers of the last of `steps` steps, which took so many seconds."""
        config, state = self.config, self.state
        largest = step_metrics.largest_weights(self.model)
        record: dict[str, Any] = {
            "loss": float(loss),
            "learning_rate": learning_rate(state.step - 1, config),
            "gradient_norm": float(norm),
            "tokens": state.tokens,
            "seconds": round(seconds, 6),
            "tokens_per_second": config.step_tokens * steps / seconds,
            "peak_memory": max(processes.gather(processes.peak_memory(state.device))),
            "largest_weight": max(largest.values()),
        }
        if config.precision == "fp16":
            record |= {"loss_scale": state.scaler.get_scale(), "skipped_steps": state.skipped_steps}
        each = record["tokens_per_second"] / processes.world_size()
        if processes.world_size() > 1:
            record["tokens_per_second_per_gpu"] = each
        if (share := step_metrics.mfu(self.flops_per_token, each, state.device)) is not None:
            record["mfu"] = share
        left = seconds / steps * (config.steps - state.step)
        step_metrics.show_progress(self.console, state.step, config.steps, record, left)
        metrics.write(state.step, **record)
        if metrics.boards:
            metrics.draw(state.step, {f"weights/{name}/largest": value for name, value in largest.items()})
            scales = step_metrics.scales_of(self.model)
            metrics.draw(state.step, {f"scales/{name}": value for name, value in scales.items()})

    @torch.no_grad()
    def _dtypes(self) -> dict[str, str]:
        """The dtypes on one sequence, in evaluation mode, in which scale histories do not change."""
        self.model.eval()
        inputs, targets = self.validation.at(0)
        with self.state.on_device(), models.eager(), own_random(self.state.device):
            return step_metrics.observed_dtypes(self.model, lambda: self._loss(inputs[:1], targets[:1]))

    def _evaluate_and_sample(self, metrics: step_metrics.Metrics) -> float:
        loss = self.evaluate()
        record: dict[str, Any] = {"evaluation_loss": loss}
        processes.print_line(self.console, f"step {self.state.step}: evaluation loss {loss:.4f}")
        if self.config.sample:
            record["sample"] = self.sample(self.config.sample)
            processes.print_line(self.console, record["sample"])
        metrics.write(self.state.step, **record)
        return loss


def start_run(config: Config, console: Console) -> Trainer:
    """A new run in `config.out`, at step 0 or, of a branch, at that of the checkpoint. The run's folder is locked until
    `Trainer.run` ends. Every rank must call this; an error of one is raised on all. Before an error of the settings or
    the data nothing has been written."""
    processes.check_same(config)
    run = RunFolder(Path(config.out))
    with ExitStack() as stack:
        with processes.same_outcome():
            if processes.rank() == 0:
                stack.enter_context(locked_folder(run.path))
                _check_empty(run)
            config, degrees = settle(config), processes.find_degrees(config.parallel, processes.world_size())
            check_effects(config, degrees.processes, degrees.tp, degrees.data, settings_of(Config))
        trainer = prepare_run(config, run, stack, console, Path(config.branch) if config.branch else None)
        if config.branch:
            saving.load_checkpoint(Path(config.branch), trainer.state, other_recipe=True)
            if config.disturb:
                saving.disturb_weights(trainer.model, config.disturb, config.seed)
            processes.print_line(console, f"branches from {config.branch}")
        if (step := trainer.state.step) >= config.steps:
            raise ConfigError(
                f"steps must be above the {step} of {config.branch}; got {config.steps}: give more --steps"
            )
        processes.on_first(lambda: _describe(trainer))
        trainer.lock = stack.pop_all()
    return trainer


def resume_run(path: Path, overrides: Sequence[str], console: Console) -> Trainer:
    """The run in the folder `path`, at its newest checkpoint; `overrides` are settings that change, as --key value. The
    run's folder is locked until `Trainer.run` ends. Every rank must call this; an error of one is raised on all."""
    run = RunFolder(path)
    with ExitStack() as stack:
        with processes.same_outcome():
            run.check()
            if processes.rank() == 0:
                stack.enter_context(locked_folder(path))
            newest = run.newest()
            given = parse(overrides)
            before = _absolute_paths(read_settings(run))
            config = _absolute_paths(before.change(**given))
            of_the_start = ("tokenizer", "vocabulary", "calibration", "branch", "disturb")  # a resumed run ignores them
            began = {name: getattr(before, name) for name in of_the_start}
            refuse(config, *((name, getattr(config, name) != value, "a new run", f"one that began with {value!r}",
                              "leave it out") for name, value in began.items()))  # fmt: skip
            degrees = processes.find_degrees(config.parallel, processes.world_size())
            check_effects(config, degrees.processes, degrees.tp, degrees.data, given)  # what it had may have none now
            if config.out != str(path):
                raise ConfigError(f"a resumed run stays in its folder {path}; got --out {config.out}: leave it out")
            if (step := run.step_of(newest)) > config.steps:
                done = f"the {step} that the run {path} has done"
                raise ConfigError(f"steps must be at least {done}; got {config.steps}: give more --steps")
        processes.check_same(config)
        trainer = prepare_run(config, run, stack, console, newest)
        apply_promotions(trainer.model, trainer.actions.promotions)
        torch._dynamo.config.recompile_limit += len(trainer.actions.promotions)
        saving.load_checkpoint(newest, trainer.state)
        ended = f", the last of its {plural(step, 'step')}: --steps N goes on" if step == config.steps else ""
        if processes.rank() == 0:  # without more steps the run keeps the settings that it was trained with
            write_settings(before.change(data=config.data) if ended else config, run)
        processes.print_line(console, f"resumed from {newest}{ended}")
        trainer.lock = stack.pop_all()
    return trainer


def branch_settings(checkpoint: Path, overrides: Sequence[str]) -> Config:
    """The settings of the run of a checkpoint with `overrides`, for a branch, which is not disturbed again."""
    run = RunFolder(checkpoint if RunFolder(checkpoint).has_model else checkpoint.parent)
    run.check()
    if checkpoint.name not in (kept := [path.name for path in run.checkpoints()]):
        raise ArtifactError(f"{run.path} has no checkpoint {checkpoint.name}: it keeps {', '.join(kept) or 'none'}")
    return read_settings(run).change(disturb=0.0).change(**parse(overrides))


def settle(config: Config) -> Config:
    """The settings that a new run writes down: with absolute paths, and a context, if not given, that the model has."""
    if config.model in BUILT_IN_MODELS:
        return _absolute_paths(config)
    folder = Path(config.model).resolve()
    if RunFolder(folder).has_model:
        raise ConfigError(f"{folder} is a run of octavo train: continue it with --resume, or give another --model")
    models.check_folder(folder, config)
    described_files(folder)  # raises what copying them would
    context = {"context": min(config.context, models.positions_of(folder))} if "context" in config.derived else {}
    return _absolute_paths(config.change(model=str(folder), **context))


def _absolute_paths(config: Config) -> Config:
    """The settings with data sources and folders that mean the same from another working directory."""
    folders = {name: str(Path(path).resolve()) for name in ("calibration", "branch") if (path := getattr(config, name))}
    return config.change(data=tuple(map(absolute_source, config.data)), **folders)


def _check_empty(run: RunFolder) -> None:
    if run.path.exists() and not run.path.is_dir():
        raise FileExistsError(f"{run.path} is a file: --out must name the folder of the run, which it makes")
    if run.path.exists() and any(run.path.iterdir()):
        advice = f"resume it with --resume {run.path}, or" if run.checkpoints() else "it has no checkpoint, so"
        raise FileExistsError(f"{run.path} is not empty: {advice} choose another --out")


def _describe(trainer: Trainer) -> None:
    """Write to the run's folder its settings, and the model's config.json, in Hugging Face's terms, and tokenizer."""
    run, config = trainer.run_folder, trainer.config
    with writing(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        write_settings(config, run)  # first: a job that is started again knows the folder by them
        run.model.mkdir()
        if config.model in BUILT_IN_MODELS:
            made: Any = trainer.model.config
            described = made.to_hf()
            trainer.data.tokenizer.save(run.model)
        else:
            source = Path(config.model)
            described = {k: v for k, v in read_json(source / "config.json").items() if k not in models.PACKED}
            copy_description(source, run.model)
            if (source / RECORD).is_file():
                shutil.copy(source / RECORD, run.model)  # for octavo pack: what was folded into the weights
        (run.model / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def prepare_run(
    config: Config,
    run: RunFolder,
    lock: ExitStack,
    console: Console,
    checkpoint: Path | None = None,
    data: TokenizedText | None = None,
) -> Trainer:
    """The run of a settled `config` at step 0, of which nothing is written. Every rank must call this. `checkpoint`,
    which the caller will load, is checked before memory is taken. `data` None reads the data."""
    with processes.same_outcome():
        degrees = processes.find_degrees(config.parallel, processes.world_size())
        device = processes.own_device(config.device)
        processes.check_parallel(config, degrees, device)
        if config.tensorboard:
            step_metrics.event_writer()
        if config.wandb:
            step_metrics.wandb()
    if config.deterministic:  # cuBLAS reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    data = read_data(config, run, console) if data is None else data
    vocabulary, corpus = data.tokenizer.vocabulary_size, data.corpus
    draw, share = RandomBatches if config.sampling == "random" else Batches, degrees.share(processes.rank())
    training = draw(corpus.train, config.context, config.batch, config.seed, share)
    if config.batch > training.sequences:
        raise DataError(
            f"batch must be at most the {training.sequences} sequences of {config.context} tokens in the training "
            f"text, got {config.batch}: give more data, or a smaller batch with accumulate"
        )
    validation = Batches(corpus.validation, config.context, config.batch, None, share)
    storage = torch.device("cpu") if config.optimizer.on_host else device
    parts = degrees.dp_shard * degrees.tp
    models.check_memory(config, vocabulary, storage, parts)
    if checkpoint is not None:
        with processes.same_outcome():
            described = models.add_adapters(models.make_model(config, vocabulary, run.model, models.META), config)
            saving.open_checkpoint(checkpoint, described, corpus.fingerprint)
    torch.manual_seed(config.seed)
    if config.optimizer.offload:
        lock.enter_context(processes.group_of_one())
    made = models.make_trained_model(config, vocabulary, run.model, device, degrees)
    if config.model not in BUILT_IN_MODELS:
        models.check_vocabulary(made.model, max(training.highest, validation.highest))
        trained = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
        models.check_count(trained, config, storage, parts)
    if config.calibration and checkpoint is None:
        with processes.same_outcome():
            folder = Path(config.calibration)
            packed = (folder / "octavo.json").exists()
            known = PackedTensors(folder) if packed else load_calibration(folder, Path(config.model))
        seed_scales(made.model, known)
    processes.print_line(console, header_text(config, degrees, made, device, corpus))
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    optimizer = make_optimizer(made.model, config)
    state = saving.TrainState(made.model, optimizer, scaler, device, corpus.fingerprint)
    if isinstance(optimizer, HostAdamW):
        state.hosted = HostMasters(made.model, models.find_blocks(made.model), optimizer, device, config)
        lock.callback(state.hosted.close)
    return Trainer(config, state, made.loss, data, training, validation, run, run.read_actions(), lock, console)


def read_data(config: Config, run: RunFolder, console: Console) -> TokenizedText:
    """The data of a run. Rank 0 reads it for all; every rank of a process group must call this."""

    def read() -> TokenizedText:
        tokenizer, reading = models.open_data(config, run.model)
        for line in reading.report.lines():
            processes.print_line(console, line)
        corpus = build_corpus(reading.texts, tokenizer, config.context, config.validation_fraction)
        return TokenizedText(tokenizer, reading.report, corpus)

    return processes.on_first(read)


def header_text(
    config: Config, degrees: processes.Degrees, made: models.TrainedModel, device: torch.device, corpus: Corpus
) -> str:
    """The text before the first step: lines of model, data, steps and the like, then what `made` reports."""
    size = sum(t.numel() for t in (*made.model.parameters(), *made.model.buffers()) if is_weight(t))
    trained = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
    kind = "trained from random weights" if config.model in BUILT_IN_MODELS else "fine-tuned from its weights"
    if config.lora:
        kind = f"{trained:,} of them trained, in adapters of rank {config.lora}"
    each = config.step_tokens
    epochs = config.steps * each / len(corpus.train)
    decay = f" at step {config.decay_steps}" if config.decay_steps != config.steps else ""
    text = ", ".join(config.data)
    if config.data == ("stdlib",):
        text = "stdlib, the source code of Python's standard library (another text: --data PATH)"
    lines = {
        "model": f"{config.model}, {size:,} parameters, {kind}",
        "data": f"{text}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out",
        "steps": f"{plural(config.steps, 'step')} of {plural(each, 'token')}, {epochs:.2g} of the training tokens",
        "rate": f"{config.learning_rate:g} to {config.min_learning_rate:g}{decay} ({config.schedule}), after "
        f"{plural(config.warmup, 'step')} of warmup",
        "device": f"{device}, {config.precision} outside of FP8",
    }
    if degrees.processes > 1:
        divided = (f"{name} {degree}" for name, degree in vars(degrees).items() if degree > 1)
        lines["ranks"] = ", ".join([str(degrees.processes), *divided])
    lines["folder"] = config.out
    layers = "its layers compute as they are packed" if made.report is None else made.report.summary()
    gathered = [] if made.gathered is None else [str(made.gathered)]
    return "\n".join([*(f"{label:<8}{text}" for label, text in lines.items()), layers, *gathered])


# ---- Continuing a run whose job is started again with the same command, by torchrun after a failure or by a scheduler.


def start_or_resume(config: Config, console: Console, *, asked: bool = True) -> Trainer:
    """The run in `config.out` at its newest checkpoint, if there is one and the user has `asked` for it, or torchrun
    has started the job again after a failure. Otherwise a new run. Every rank must call this."""
    restarted = any(processes.gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))
    resumes = (asked or restarted) and processes.on_first(lambda: _has_checkpoint(config))  # before others write
    return resume_run(Path(config.out), (), console) if resumes else start_run(config, console)


def _has_checkpoint(config: Config) -> bool:
    """True if the folder of the run has a checkpoint. A run without one is removed, unless it has files of others."""
    run = RunFolder(Path(config.out))
    if not run.config.is_file():
        return False
    found, given = read_settings(run).to_dict(), settle(config).to_dict()
    for name, value in given.items():
        if name != "out" and found.get(name) != value:
            raise ConfigError(
                f"{run.path} holds a run with other settings: {name} is {found.get(name)!r} there, and {value!r} here. "
                f"Continue that run with --resume {run.path}, or choose another --out"
            )
    if run.checkpoints():
        return True
    ours = {"config.json", "metrics.jsonl", "actions.json", "report.html", "model", "watch", "tensorboard", "wandb"}
    if others := {path.name for path in run.path.glob("[!.]*")} - ours:
        message = f"{run.path} has no checkpoint, and {min(others)} is not of a run: move it, or choose another --out"
        raise FileExistsError(message)
    with locked_folder(run.path):
        shutil.rmtree(run.path)
    return False
