"""The cost of packing on prompts: the error of each layer and of the model, beside those of INT8.

Three models run in float32, so that only the rounding of packing differs: MODEL with its weights rounded to BF16, the
packed folder, and MODEL with the packed layers in INT8 instead.
"""

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import linear

from octavo.evaluation.metrics import EmbeddingSums, LogitSums, Quality, energies, sqnr
from octavo.progress import Progress
from octavo.verification.layer_spec import LayerSpec
from octavo.verification.numbers import round_input
from octavo.verification.reference import PackedLayers
from octavo.verification.streamed_experts import LinearFn
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

    baseline: BaselineModel
    packed: PackedLayers
    sums: dict[str, LayerSums] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        weight = self.baseline.get_served(f"{name}.weight").to(self.packed.device)
        y = linear(x.float(), weight.float())  # [T,K] @ [N,K]^T
        if name in self.packed.specs and not self.packed.files.folded:  # folded weights expect other inputs
            sums = self.sums.setdefault(name, LayerSums())
            signal, noise = energies(y, self.packed(name, x))
            sums.signal, sums.noise = sums.signal + signal, sums.noise + noise
            sums.elements += x.numel()
            sums.amax = max(sums.amax, float(x.abs().max()))
            if (scale := self.packed.input_scale(name)) is not None:
                sums.range = float(scale) * self.packed.specs[name].largest
                sums.clipped += int((x.abs() > sums.range).sum())
        return y


def measure_quality(
    baseline: BaselineModel, layers: PackedLayers, packed: StreamedModel, batches: list[Tensor], progress: Progress
) -> tuple[Quality, Quality, dict[str, LayerSums]]:
    """Run MODEL, the packed model and INT8 on prompts, a batch int64 [B, T] at a time.

    Returns:
        The quality of the packed model, that of INT8, and the sums of each packed layer.
    """
    watched, int8 = WatchedLayers(baseline, layers), _int8_layers(baseline, layers)
    reference = baseline.streamed(watched, layers.device)
    packed_sums, int8_sums = (LogitSums() if reference.logits else EmbeddingSums() for _ in range(2))
    for done, ids in enumerate(batches):
        progress(done, len(batches), "running prompts")
        reference.compute = watched
        expected = reference(ids)
        packed_sums.add(ids, expected, packed(ids))
        reference.compute = int8
        int8_sums.add(ids, expected, reference(ids))
    return packed_sums.quality(), int8_sums.quality(), watched.sums


def _int8_layers(baseline: BaselineModel, packed: PackedLayers) -> LinearFn:
    """The linear layers of MODEL, with INT8 for those that are packed: a scale for each row of the weight and for each
    token."""
    spec = LayerSpec.per_channel("token", integers=True)

    def compute(name: str, x: Tensor) -> Tensor:
        weight = baseline.get_served(f"{name}.weight").to(packed.device)
        if name not in packed.specs:
            return linear(x.float(), weight.float())
        return linear(round_input(x, spec), round_input(weight, spec))  # [T,K] @ [N,K]^T

    return compute
