"""The training loop.

One step, with `accumulate` micro-batches:

    for each:   loss = cross_entropy(logits(inputs), targets) / accumulate;  backward        gradients add up in FP32
    clip the gradient's norm;  AdamW on the FP32 master weights;  close the step of delayed scaling

The forward pass runs under autocast to BF16, or to FP16 with a scaled loss (Micikevicius et al., arXiv:1710.03740).
Converted linear layers run in FP8, and their weights are cast once a step. A step depends only on the weights, the
optimizer, the scale histories, the random state and its number. A checkpoint holds all of these, so a run that is
killed and resumed repeats its losses bit for bit. Every few steps `octavo.train.supervision` looks at what came of
them: it may promote layers, and take the run back to an earlier step.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from octavo.checkpoint.run import RunFolder
from octavo.data import ReadReport
from octavo.inference.engine import Engine
from octavo.inference.sampling import Sampling, stream_texts
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.nn.delayed import histories
from octavo.rates.measured import peak_flops
from octavo.scales import update_scales
from octavo.train.config import Config
from octavo.train.loss import Batches, Loss, autocast, mean_loss, next_token_loss, own_random, whole_loss
from octavo.train.model import eager
from octavo.train.optimizer import RecentSteps, clip_gradients, learning_rate, set_learning_rate
from octavo.train.processes import (
    Agreement,
    gather,
    mean_of_ranks,
    peak_memory,
    print_line,
    show_sampled,
    show_step,
    world_size,
)
from octavo.train.saving import CheckpointWriter, TrainState
from octavo.train.step_metrics import (
    Metrics,
    observed_dtypes,
    precision_of,
    scales_of,
    show_progress,
    start_of,
    watched,
    weight_ranges,
)
from octavo.train.supervision import CHECK_EVERY, Supervisor
from octavo.watching import Watch


@dataclass(frozen=True)
class Result:
    """The end of a call of `Trainer.run`: the step, the last evaluation loss, and the signal that stopped it."""

    step: int
    evaluation_loss: float | None
    interrupted: str | None


class TrainingData(NamedTuple):
    """The batches of a run, the tokenizer of its text, and the report of the text that was read."""

    training: Batches
    validation: Batches
    tokenizer: Tokenizer
    read: ReadReport


class Trainer:
    """A run in progress. `state` is what a checkpoint saves; `lock` keeps other programs out of the run's folder."""

    def __init__(
        self,
        config: Config,
        state: TrainState,
        data: TrainingData,
        run: RunFolder,
        lock: AbstractContextManager[Any],
        console: Console,
        loss: Loss = whole_loss,
    ) -> None:
        self.config, self.state, self.data, self.console = config, state, data, console
        self.run_folder, self.lock = run, lock
        self.model, self.loss = state.model, loss
        self.actions, self.recent = run.read_actions(), RecentSteps()
        self.watch: Watch | None = None
        self.trained = [p for group in state.optimizer.param_groups for p in group["params"]]
        self.delayed = next(histories(state.model), None) is not None
        self.flops_per_token = flops_per_token(state.model, config.context)

    def run(self) -> Result:
        """Train to `config.steps`, or until a signal; evaluate, log and save on the way and at the end."""
        config, state = self.config, self.state
        evaluation = signal = None
        clock, agreement = _Clock(state.step), Agreement()
        with (
            self.lock,
            collect_between_steps(),
            delay_interrupts() as stop,
            Metrics(self.run_folder.metrics, resumed_at=state.step, config=config) as metrics,
            watched(config, state, self.run_folder, metrics) as self.watch,
            CheckpointWriter(self.run_folder, config.keep) as checkpoints,
            Supervisor(
                config, state, self.run_folder, self.actions, self.recent, metrics, self.console, self.watch,
                checkpoints, self.passes,
            ) as supervisor,
        ):  # fmt: skip
            with clock.paused():
                precision = precision_of(self.model, state.device)
                start = {"dtypes": self._dtypes(), "started": start_of(state.device)}
                metrics.write(state.step, data=self.data.read.to_dict(), precision=precision, **start)
            while state.step < config.steps and signal is None:
                loss, norm = self.step()
                collect_young(state.step)
                show_step(self.console, state.step, config.steps)
                # Read once a step: what comes later in this turn is for the next.
                number, failed = agreement.reach(stop.number, checkpoints.failed)
                if failed:
                    checkpoints.wait()
                signal = name_of(number)
                done = state.step == config.steps
                logs = state.step % config.log_every == 0 or done or signal is not None
                evaluates = state.step % config.evaluate_every == 0 or done
                saves = state.step % config.save_every == 0 or done or signal is not None
                if logs or evaluates or saves or state.step % CHECK_EVERY == 0:
                    if state.device.type == "cuda":
                        torch.cuda.synchronize(state.device)  # the clock counts the steps that the GPU still computes
                    with clock.paused():
                        went_back = supervisor.check()
                    if went_back:
                        logs, evaluates, saves = False, False, signal is not None
                if logs:
                    self._log(metrics, clock, mean_of_ranks(loss), norm)
                with clock.paused():
                    if evaluates:
                        evaluation = self._evaluate_and_sample(metrics)
                    if saves:
                        checkpoints.save(state)
        self.watch = None
        return Result(state.step, evaluation, signal)

    def step(self) -> tuple[Tensor, Tensor]:
        """One optimizer step: the mean loss of this rank's sequences and the norm of the gradient, 0-dim tensors."""
        config, state = self.config, self.state
        if self.watch is not None and self.watch.done != state.step:  # a step is repeated
            self.watch.go_back(state.step)
        set_learning_rate(state.optimizer, learning_rate(state.step, config))
        loss = self.passes(state.step)
        state.scaler.unscale_(state.optimizer)
        if self.watch is not None:
            self.watch.read_gradients()  # before they are clipped
        norm = clip_gradients(self.trained, config.clip or math.inf)
        scale = state.scaler.get_scale()
        norm = self.recent.update(state.optimizer, state.scaler, norm)
        state.scaler.update()
        state.skipped_steps += int(state.scaler.get_scale() < scale)
        state.optimizer.zero_grad()
        if not (self.delayed and self.recent.bad):  # the scales stay with the weights; delayed scaling waits anyway
            update_scales(self.model)
        state.step += 1
        if self.watch is not None:
            self.watch.step()
        self.recent.note(state.step, loss, norm)
        return loss, norm

    def passes(self, step: int) -> Tensor:
        """The forward and backward passes after `step` steps: the mean loss of this rank's sequences, 0-dim."""
        config, state = self.config, self.state
        self.model.train()
        total = torch.zeros((), device=state.device)
        first = self.actions.batch(step) * config.accumulate
        for micro in range(config.accumulate):
            loss = self._loss(*self.data.training.at(first + micro))
            state.scaler.scale(loss / config.accumulate).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total / config.accumulate

    def evaluate(self) -> float:
        """The mean loss over the first `evaluate_batches` validation batches, each taken once at most."""
        self.model.eval()
        count, precision = self.config.evaluate_batches, self.config.precision
        batches, device = self.data.validation, self.state.device
        loss, _ = mean_loss(self.model, batches, device, precision=precision, count=count, loss=self.loss)
        return float(mean_of_ranks(torch.tensor(loss, dtype=torch.float64)))

    def sample(self, count: int) -> str:
        """`count` tokens that follow a newline, drawn with a fixed seed. The run's random state does not change."""
        self.model.eval()
        with eager(), own_random(self.state.device), autocast(self.config.precision, self.state.device):
            prompts = [self.data.tokenizer.encode("\n")]
            steps = Engine(self.model, context=self.config.context).generate(prompts, count, Sampling(seed=0))
            pieces = (piece for [piece] in stream_texts(self.data.tokenizer, prompts, steps))
            return show_sampled(self.console, pieces, count)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(self.model, (inputs, targets), self.state.device, self.config.precision, self.loss)

    def _log(self, metrics: Metrics, clock: _Clock, loss: Tensor, norm: Tensor) -> None:
        config, state = self.config, self.state
        steps, seconds = clock.lap(state.step)
        with clock.paused():
            tokens = config.batch * config.accumulate * config.context
            ranges = weight_ranges(self.model)
            record: dict[str, Any] = {
                "loss": float(loss),
                "learning_rate": learning_rate(state.step - 1, config),
                "gradient_norm": float(norm),
                "tokens": tokens * state.step,
                "seconds": round(seconds, 6),
                "tokens_per_second": tokens * steps / seconds,
                "peak_memory": max(gather(peak_memory(state.device))),
                "largest_weight": max(max(-low, high) for low, high in ranges.values()),
            }
            if config.precision == "fp16":
                record |= {"loss_scale": state.scaler.get_scale(), "skipped_steps": state.skipped_steps}
            each = record["tokens_per_second"] / world_size()
            if world_size() > 1:
                record["tokens_per_second_per_gpu"] = each
            if (share := mfu(self.flops_per_token, each, state.device)) is not None:
                record["mfu"] = share
            left = seconds / steps * (config.steps - state.step)
            show_progress(self.console, state.step, config.steps, record, left)
            metrics.write(state.step, **record)
            if metrics.boards:
                metrics.draw(state.step, {f"weights/{n}/largest": max(-low, high) for n, (low, high) in ranges.items()})
                metrics.draw(state.step, {f"scales/{name}": value for name, value in scales_of(self.model).items()})

    @torch.no_grad()
    def _dtypes(self) -> dict[str, str]:
        """The dtypes on one sequence, in evaluation mode, in which scale histories do not change."""
        self.model.eval()
        inputs, targets = self.data.validation.at(0)
        with eager(), own_random(self.state.device):
            return observed_dtypes(self.model, lambda: self._loss(inputs[:1], targets[:1]))

    def _evaluate_and_sample(self, metrics: Metrics) -> float:
        loss = self.evaluate()
        record: dict[str, Any] = {"evaluation_loss": loss}
        print_line(self.console, f"step {self.state.step}: evaluation loss {loss:.4f}")
        if self.config.sample:
            record["sample"] = self.sample(self.config.sample)
            print_line(self.console, record["sample"])
        metrics.write(self.state.step, **record)
        return loss


class _Clock:
    """Measures the seconds of training steps, without those of evaluation and saving."""

    def __init__(self, step: int) -> None:
        self._step, self._start = step, time.perf_counter()

    def lap(self, step: int) -> tuple[int, float]:
        """The steps since the last lap, up to `step`, and the seconds that they took."""
        now = time.perf_counter()
        steps, seconds = max(step - self._step, 1), now - self._start
        self._step, self._start = step, now
        return steps, seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - began


# ---- Python's garbage collection in a run: every so many steps, and not in the middle of one.
#
# A collection of all the objects of a process that has compiled a model takes some 0.3 s, in another step of each rank,
# and all ranks wait for it. Steps leave no tensors in cycles of references, only small objects, which a collection of
# the young generations frees in some 10 ms.


EVERY = 50  # steps


@contextmanager
def collect_between_steps() -> Iterator[None]:
    """Within the block Python collects only in `collect_young`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_young(step: int) -> None:
    """Free what the last steps left behind, after every 50th. Call it after each step."""
    if step % EVERY == 0:
        gc.collect(1)


# ---- Signals ask a run to stop after its current step; a second signal acts at once.


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: a terminal closes, or an ssh connection ends


@dataclass
class Interrupt:
    """Holds the number of the signal that came; 0 if none came."""

    number: int = 0


def name_of(number: int) -> str | None:
    """The name of a signal by its number; None for 0."""
    return signal.Signals(number).name if number else None


@contextmanager
def delay_interrupts() -> Iterator[Interrupt]:
    """Note the signals within the block instead of acting on them; give their handlers back after it.

    A signal that is ignored when the run starts, as SIGHUP under `nohup`, stays ignored.
    """
    state = Interrupt()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        state.number = number
        give_back()

    for number in before:
        signal.signal(number, note)
    try:
        yield state
    finally:
        give_back()


# ---- Model FLOPs utilization (MFU): the share of a GPU's peak that the arithmetic of the model alone amounts to.
#
#     FLOPs of a token = 6 N + 6 L H (Q + V) T        MFU = FLOPs of a token * tokens a second a GPU / peak
#
# N is the number of parameters that multiply activations, L the number of layers, H that of heads, whose queries have Q
# and values V features, and T the sequence's length. Causal attention counts in full (PaLM: Chowdhery et al.,
# arXiv:2204.02311, appendix B). What activation checkpointing computes again does not count. The peak is the dense one
# of BF16 for every recipe, so that runs in BF16 and FP8 compare.


def flops_per_token(model: nn.Module, context: int) -> float | None:
    """The FLOPs of a token, forward and backward; None for stacked experts, of which a token uses an unknown number."""
    if any(p.ndim > 2 for p in model.parameters()):
        return None
    layers = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    multiplied = {id(p): p.numel() for m in layers for p in m.parameters(recurse=False) if p.ndim == 2}
    return 6.0 * (sum(multiplied.values()) + _attention_features(model) * context)


def _attention_features(model: Any) -> int:
    """L H (Q + V): the features of the queries and values of all layers."""
    if isinstance(model, Decoder):
        return 2 * model.config.layers * model.config.width
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # DeepSeek's latent attention has heads of other widths, and its head_dim is that of the rotary part alone.
    query, value = (getattr(config, name, None) or head for name in ("qk_head_dim", "v_head_dim"))
    return int(config.num_hidden_layers * config.num_attention_heads * (query + value))


def mfu(flops: float | None, tokens_per_second: float, device: torch.device) -> float | None:
    """The utilization of one GPU, 0 to 1; None if the FLOPs of a token or the peak are not known."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if flops is None or peak is None else flops * tokens_per_second / peak
