"""The cost of packing on prompts: the error of each layer and of the model, beside those of INT8.

Three models run in float32, so that only the rounding of packing differs: MODEL with its weights rounded to BF16, the
packed folder, and MODEL with the packed layers in INT8 instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import linear

from octavo.evaluation.int8 import int8_linear, quantize_int8
from octavo.evaluation.metrics import EmbeddingSums, LogitSums, Quality, energies, sqnr
from octavo.progress import Progress
from octavo.verification.reference import PackedLayers
from octavo.verification.streamed_model import BaselineModel, StreamedModel


@dataclass
class LayerSums:
    """The sums over prompts that the errors of one packed layer are computed from."""

    signal: float = 0.0
    noise: float = 0.0
    elements: int = 0
    clipped: int = 0
    amax: float = 0.0
    range: float | None = None

    @property
    def sqnr(self) -> float:
        """The SQNR in dB of the layer's output, against the BF16 layer's for the same inputs."""
        return sqnr(self.signal, self.noise)

    @property
    def clip_rate(self) -> float | None:
        """The share of the input's elements beyond the range of a stored scale."""
        return self.clipped / max(self.elements, 1) if self.range is not None else None

    @property
    def headroom(self) -> float | None:
        """The range of a stored scale over the largest input; below 1 it clips."""
        return self.range / self.amax if self.range is not None and self.amax else None


@dataclass
class WatchedLayers:
    """The linear layers of MODEL, y = x @ w^T; each packed layer is given the same input, and its error is summed."""

    get: Callable[[str], Tensor]
    packed: PackedLayers
    device: str
    watching: bool
    sums: dict[str, LayerSums] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        y = linear(x.float(), self.get(f"{name}.weight").to(self.device).float())  # [T,K] @ [N,K]^T
        if self.watching and name in self.packed.specs:
            sums = self.sums.setdefault(name, LayerSums())
            signal, noise = energies(y, self.packed(name, x))
            sums.signal, sums.noise = sums.signal + signal, sums.noise + noise
            sums.elements += x.numel()
            sums.amax = max(sums.amax, float(x.abs().max()))
            if (scale := self.packed.input_scale(name)) is not None:
                sums.range = float(scale) * self.packed.specs[name].largest
                sums.clipped += int((x.abs() > sums.range).sum())
        return y


@dataclass(frozen=True)
class Measured:
    """The quality of the packed model and of INT8, and the sums of each packed layer."""

    packed: Quality
    int8: Quality
    layers: dict[str, LayerSums]


def measure_quality(
    baseline: BaselineModel,
    layers: PackedLayers,
    packed: StreamedModel,
    batches: list[Tensor],
    device: str,
    watching: bool,
    progress: Progress,
) -> Measured:
    """Run the three models on prompts, a batch at a time.

    Args:
        baseline: MODEL.
        layers: the packed layers.
        packed: the packed model.
        batches: prompts, int64 [B, T] each.
        device: to compute on.
        watching: whether to measure each layer. Folded weights expect other inputs than MODEL's, so theirs are not.
        progress: see `octavo.progress`.
    """
    watched = WatchedLayers(baseline.get_bf16, layers, device, watching)
    int8 = _int8_layers(baseline, layers, device)
    reference = baseline.streamed(watched, device)
    sums = [LogitSums() if reference.causal else EmbeddingSums() for _ in ("packed", "int8")]
    for done, ids in enumerate(batches):
        progress(done, len(batches), "running prompts")
        reference.compute = watched
        expected = reference(ids)
        outputs = [packed(ids)]
        reference.compute = int8
        outputs.append(reference(ids))
        for actual, model_sums in zip(outputs, sums, strict=True):
            model_sums.add(ids, expected, actual)
    return Measured(sums[0].quality(), sums[1].quality(), watched.sums)


def _int8_layers(baseline: BaselineModel, packed: PackedLayers, device: str) -> Callable[[str, Tensor], Tensor]:
    """The linear layers of MODEL, with INT8 for those that are packed (`octavo.evaluation.int8`)."""

    def compute(name: str, x: Tensor) -> Tensor:
        weight = baseline.get_bf16(f"{name}.weight").to(device)
        if name not in packed.specs:
            return linear(x.float(), weight.float())
        return int8_linear(x, quantize_int8(weight))

    return compute
