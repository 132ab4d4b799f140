"""The records of a run: metrics.jsonl, boards on request, and one line per logged step on the terminal.

A line of metrics.jsonl is an object with `step`, the optimizer steps done, and the keys that docs/runs.md lists. The
loss is the mean over all ranks, and the memory is of the rank with the highest peak.
"""

import json
import math
import platform
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from octavo.checkpoint.files import replace_file, whole_lines
from octavo.checkpoint.folder import RunFolder, writing
from octavo.comparison import Call, seen_calls, with_parameters
from octavo.models.decoder import Decoder
from octavo.nn.conversion import computed_stacks
from octavo.nn.conversion_report import find_coverage
from octavo.nn.delayed import histories
from octavo.nn.linear import RecipeLayer
from octavo.nn.module_tools import is_weight
from octavo.nn.parallel_weights import largest_magnitudes
from octavo.ops.dispatch import gemm_backends
from octavo.rates.measured import peak_flops
from octavo.train.config import Config
from octavo.train.loss import AUTOCAST
from octavo.train.processes import print_line, rank, show, world_size
from octavo.train.run_records import read_record
from octavo.train.saving import TrainState
from octavo.util import finite, import_extra
from octavo.version import __version__
from octavo.watching.collection import Sample, Watch, watch
from octavo.watching.storage import BINADES, FULL_SHARE, OPERANDS, Records


class Metrics(AbstractContextManager["Metrics"]):
    """Writes records, each with its step, and draws their numbers on the boards that `config` names. Rank 0 alone does.
    A resumed run drops the records of later steps, so no step occurs twice."""

    def __init__(self, path: Path, *, resumed_at: int, config: Config | None = None) -> None:
        self._path, self._config = path, config
        self._open_files = ExitStack()
        self.go_back(resumed_at)

    def go_back(self, step: int) -> None:
        """Drop the records of the steps after `step`, from which the run continues, and a last line that was cut short.
        An ArtifactError if a whole line holds no record."""
        self._open_files.close()
        self.boards: list[TensorBoard | WeightsAndBiases] = []
        if rank() > 0:
            return
        lines = enumerate(whole_lines(self._path), 1)
        kept = [line for n, line in lines if read_record(line, f"{self._path}, line {n}")["step"] <= step]
        replace_file(self._path, "".join(kept))
        self._file = self._open_files.enter_context(self._path.open("a"))
        if self._config is not None and self._config.tensorboard:
            self.boards.append(TensorBoard(self._path.parent, step))
        if self._config is not None and self._config.wandb:
            self.boards.append(WeightsAndBiases(self._path.parent, self._config.to_dict()))
        for board in self.boards:
            self._open_files.callback(board.close)

    def write(self, step: int, **record: Any) -> None:
        """Append {"step": step, ...}; its numbers go to the boards too. inf and NaN, which JSON lacks, become null."""
        if rank() > 0:
            return
        record = finite(record)
        with writing(Path(self._file.name)):
            self._file.write(json.dumps({"step": step, **record}) + "\n")
            self._file.flush()
        self.draw(step, record)

    def draw(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Draw the numbers among the values on the boards."""
        drawn = {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        for board in self.boards:
            board.numbers(step, drawn)

    def __exit__(self, *error: object) -> None:
        self._open_files.close()


def show_progress(console: Console, step: int, steps: int, record: dict[str, Any], seconds_left: float) -> None:
    """Print one line of the record, and the time left; on a terminal the live line has them."""
    said = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
    if show(console, "training", step, steps, said):
        return
    each = f" ({record['tokens_per_second_per_gpu']:,.0f} a GPU)" if "tokens_per_second_per_gpu" in record else ""
    share = f"  MFU {record['mfu']:.1%}" if "mfu" in record else ""
    scale = f"  loss scale {record['loss_scale']:g}" if "loss_scale" in record else ""
    print_line(
        console,
        f"step {step:>{len(str(steps))}}/{steps}  loss {record['loss']:.4f}  lr {record['learning_rate']:.2e}  "
        f"grad norm {record['gradient_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s{each}{share}{scale}  "
        f"ETA {timedelta(seconds=round(seconds_left))}",
    )


# ---- TensorBoard and Weights & Biases: the numbers of a run by name, and histograms of its samples, counts [n] between
# edges [n + 1].


class TensorBoard:
    """Event files in the folder `tensorboard` of a run, without those of the steps after `step`."""

    def __init__(self, run: Path, step: int) -> None:
        self._writer = event_writer()(run / "tensorboard", purge_step=step + 1 if step else None)

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        middles = (np.array(edges[:-1]) + np.array(edges[1:])) / 2
        total, mean = sum(counts), float(np.dot(middles, counts))
        square = float(np.dot(middles**2, counts))
        self._writer.add_histogram_raw(name, edges[0], edges[-1], total, mean, square, edges[1:], counts, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases. The environment decides where it goes: WANDB_MODE, WANDB_PROJECT and others."""

    def __init__(self, run: Path, settings: Mapping[str, Any]) -> None:
        self._wandb = wandb()
        identity = run / "wandb" / "octavo-id"
        if not identity.is_file():
            identity.parent.mkdir(exist_ok=True)
            identity.write_text(uuid.uuid4().hex[:8])
        self._run = self._wandb.init(
            id=identity.read_text().strip(), resume="allow", name=run.name, dir=str(run), config=dict(settings)
        )
        # Its own steps cannot go back, as those of a run can.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
        drawn = self._wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))
        self._run.log({"step": step, name: drawn})

    def close(self) -> None:
        self._run.finish()


def event_writer() -> Any:
    """TensorBoard's SummaryWriter; an ImportError names the extra that has it."""
    return import_extra("torch.utils.tensorboard", "tensorboard", "--tensorboard needs tensorboard").SummaryWriter


def wandb() -> Any:
    """The package wandb; an ImportError names the extra that has it."""
    return import_extra("wandb", "wandb", "--wandb needs wandb")


# ---- Measurements of a mixed-precision run: the precision of each layer, all dtypes, and the range of the weights.


def start_of(device: torch.device) -> dict[str, str]:
    """The command, the machine and the versions that a run was started with, for its report."""
    name = Path(sys.argv[0]).name
    versions = {"octavo": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "command": shlex.join(["octavo" if name == "__main__.py" else name, *sys.argv[1:]]),
        "machine": chip if world_size() == 1 else f"{world_size()} x {chip}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def precision_of(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The precision that the parameters of `model` are computed in, read from its modules, as JSON values. `recipes`:
    for each recipe the `layers` that run it, and the backend of their GEMMs `y`, `dx` and `dw` ("bf16": unquantized, in
    the autocast dtype). `fp8_share`: the share of the parameters, 0 to 1, that FP8 GEMMs read. `high_precision`: the
    shares of the other parameters by name (repeated layers are one entry, their index written *), of `embeddings`, and
    of `other` (norms, biases and other vectors)."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, RecipeLayer)}
    recipes: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items():
        recipes.setdefault(layer.recipe.name, _backends(layer, device) | {"layers": []})["layers"].append(name)
    computed = [name for name, layer in layers.items() if layer.recipe.quantized]
    coverage = find_coverage(model, [*computed, *computed_stacks(model)])
    high = {left.name: left.share for left in coverage.left}
    high |= {"embeddings": coverage.embeddings, "other": coverage.other}
    return {
        "recipes": recipes,
        "fp8_share": round(coverage.computed, 6),
        "high_precision": {name: round(share, 6) for name, share in high.items()},
    }


def _backends(layer: RecipeLayer, device: torch.device) -> dict[str, str]:
    found = {gemm: backend.name for gemm, backend in gemm_backends(layer.recipe, device).items()}
    return {gemm: "emulated" if name == "none" and layer.recipe.emulate else name for gemm, name in found.items()}


def observed_dtypes(model: nn.Module, forward: Callable[[], Tensor]) -> dict[str, str]:
    """The dtype of every leaf module's output during `forward()`, and of its loss. Repeated layers are one entry, their
    index written *. If they differ, the entry names each dtype."""
    seen: dict[str, set[str]] = {}

    def see(call: Call, tensor: str, value: Tensor) -> None:
        if tensor == "y" and call.name:
            pattern = re.sub(r"\.\d+(?=\.|$)", ".*", call.name)
            seen.setdefault(pattern, set()).add(str(value.dtype).removeprefix("torch."))

    with seen_calls(with_parameters(model), see):
        loss = forward()
    found = {name: " ".join(sorted(dtypes)) for name, dtypes in seen.items()}
    return found | {"loss": str(loss.dtype).removeprefix("torch.")}


@torch.no_grad()
def largest_weights(model: nn.Module) -> dict[str, float]:
    """The largest magnitude of every whole parameter that is trained, in one transfer. Every rank must call this."""
    parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(parameters, largest_magnitudes([*parameters.values()]).tolist(), strict=True))


def scales_of(model: nn.Module) -> dict[str, float]:
    """The scale of every history of the recipe `delayed` that has one, by name, such as LAYER.histories.x."""
    known = {name: history.scale for name, history in histories(model) if history.ready}
    values = torch.cat([scale.view(1) for scale in known.values()]).tolist() if known else []
    return dict(zip(known, values, strict=True))


# ---- The watch of a run of the trainer: `octavo.watch` by the table `[watch]`, drawn on the run's boards.


def watched(
    config: Config, state: TrainState, run: RunFolder, metrics: Metrics
) -> AbstractContextManager[Watch | None]:
    """The watch of the model of a run while it trains; None where `watch.interval` is 0."""
    dtype, table = AUTOCAST.get(config.precision, torch.float32), config.watch
    if not table.interval:
        return nullcontext()
    found = watch(
        state.model, folder=run.path, interval=table.interval, rows=table.rows, dtype=dtype, resumed_at=state.step
    )
    if metrics.boards:
        found.listeners.append(lambda sample: draw_sample(metrics, found, sample))
    return found


def draw_sample(metrics: Metrics, watch: Watch, sample: Sample) -> None:
    """Draw some numbers of each layer, and the histogram of log2 |x| of each operand and gradient."""
    numbers: dict[str, float] = {}
    for record in sample.operands:
        name = f"watch/{watch.layers[record['layer']].name}/{OPERANDS[record['operand']]}"
        numbers |= {f"{name}/{field}": float(record[field]) for field in ("amax", "sqnr", "saturated", "flushed")}
        _draw_binades(metrics, sample.step, name, float(record["amax"]), record["binades"])
    for record in sample.layer_records:
        name = f"watch/{watch.layers[record['layer']].name}"
        numbers |= {f"{name}/{field}": float(record[field]) for field in ("gradient_norm", "update_ratio", "alignment")}
        amax, binades = float(record["gradient_amax"]), record["gradient_binades"]
        _draw_binades(metrics, sample.step, f"{name}/gradient", amax, binades)
    metrics.draw(sample.step, {name: value for name, value in numbers.items() if math.isfinite(value)})


def _draw_binades(metrics: Metrics, step: int, name: str, amax: float, binades: Records) -> None:
    if math.isfinite(amax) and amax > 0:
        top = math.frexp(amax)[1]  # the first binade ends at 2^top
        edges = [float(top - BINADES + k) for k in range(BINADES + 1)]
        shares = [count / FULL_SHARE for count in reversed(binades.tolist())]
        for board in metrics.boards:
            board.histogram(step, f"{name}/log2", edges, shares)


# ---- Model FLOPs utilization (MFU): the share of a GPU's peak that the arithmetic of the model alone amounts to.
#
#     FLOPs of a token = 6 N + 6 L H (Q + V) T        MFU = FLOPs of a token * tokens a second a GPU / peak
#
# N is the number of parameters that multiply activations, L the number of layers, H that of heads, whose queries have Q
# and values V features, and T the sequence's length. The factor of frozen parameters is 4. Causal attention counts in
# full (PaLM: Chowdhery et al., arXiv:2204.02311, appendix B). What activation checkpointing computes again does not
# count. The peak is the dense one of BF16 for every recipe, so that runs in BF16 and FP8 compare.


def flops_per_token(model: nn.Module, context: int) -> float | None:
    """The FLOPs of a token, forward and backward; None for stacked experts, of which a token uses an unknown number."""
    layers = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    weights = [t for m in layers for t in (*m.parameters(False), *m.buffers(False)) if is_weight(t)]
    if any(w.ndim > 2 for w in weights):
        return None
    multiplied = {id(w): (6.0 if w.requires_grad else 4.0) * w.numel() for w in weights if w.ndim == 2}
    return sum(multiplied.values()) + 6.0 * _attention_features(model) * context


def _attention_features(model: Any) -> int:
    """L H (Q + V): the features of the queries and values of all layers."""
    if isinstance(model, Decoder):
        return int(2 * model.config.layers * model.config.width)
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # DeepSeek's latent attention has heads of other widths, and its head_dim is that of the rotary part alone.
    query, value = (getattr(config, name, None) or head for name in ("qk_head_dim", "v_head_dim"))
    return int(config.num_hidden_layers * config.num_attention_heads * (query + value))


def mfu(flops: float | None, tokens_per_second: float, device: torch.device) -> float | None:
    """The utilization of one GPU, 0 to 1; None if the FLOPs of a token or the peak are not known."""
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if flops is None or peak is None else flops * tokens_per_second / peak
