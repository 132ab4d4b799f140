"""What the layers of the models that are compared compute, each from the bytes alone, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.evaluation.int8 import int8_linear, quantize_int8
from octavo.evaluation.metrics import energies, sqnr
from octavo.verification.files import Bytes
from octavo.verification.layer_spec import Words
from octavo.verification.numbers import round_input, widen

RoundInput = Callable[[Tensor, Words, Tensor | None], Tensor]


class PackedLayers:
    """y = round(x) @ w^T of the layers of a packed folder; those that are not packed are plain.

    Args:
        read: the folder.
        layers: those that are packed.
        device: where they run.
        round_input: how the inputs are rounded, see `octavo.verification.layer_spec`.
    """

    def __init__(
        self, read: Bytes, layers: Mapping[str, Words], device: str, round_input: RoundInput = round_input
    ) -> None:
        self._read, self._layers, self._device, self._round_input = read, layers, device, round_input

    def weight(self, name: str) -> Tensor:
        """float32 [N, K]."""
        data = self._read.get(f"{name}.weight").to(self._device)
        words = self._layers.get(name)
        if words is None:
            return data.float()
        return widen(data, self._read.get(f"{name}.{words.scale}").to(self._device), words)

    def get(self, name: str) -> Tensor:
        """A tensor of the folder, on the CPU; the weights of packed experts, which no linear layer holds, widened."""
        layer = name.removesuffix(".weight")
        return self.weight(layer).cpu() if name.endswith(".weight") and layer in self._layers else self._read.get(name)

    def input_scale(self, name: str) -> Tensor | None:
        """That is stored, one number, or None."""
        words = self._layers.get(name)
        if words is None or words.inputs != "static":
            return None
        return self._read.get(f"{name}.{words.input_scale}").to(self._device).float().reshape(-1)[0]

    def __call__(self, name: str, x: Tensor) -> Tensor:
        words = self._layers.get(name)
        rounded = x.float() if words is None else self._round_input(x, words, self.input_scale(name))
        return linear(rounded, self.weight(name))  # [T,K] @ [N,K]^T


@dataclass
class LayerSums:
    """What was seen of one packed layer: energies, elements beyond the range, the amax of its input."""

    signal: float = 0.0
    noise: float = 0.0
    elements: int = 0
    clipped: int = 0
    amax: float = 0.0
    range: float | None = None

    @property
    def sqnr(self) -> float:
        """Of its output, against the BF16 layer on the same inputs, in dB."""
        return sqnr(self.signal, self.noise)

    @property
    def clip_rate(self) -> float | None:
        """The part of the input's elements beyond what its stored scale can hold."""
        return self.clipped / max(self.elements, 1) if self.range is not None else None

    @property
    def headroom(self) -> float | None:
        """The range over the amax that was seen, of a stored scale; below 1 it clips."""
        return self.range / self.amax if self.range is not None and self.amax else None


@dataclass
class WatchedLayers:
    """y = x @ w^T of MODEL's layers, which also feeds `packed` the same inputs and keeps what differs."""

    get: Callable[[str], Tensor]
    packed: PackedLayers
    words: Mapping[str, Words]
    device: str
    watching: bool = True
    sums: dict[str, LayerSums] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        y = linear(x.float(), self.get(f"{name}.weight").to(self.device).float())  # [T,K] @ [N,K]^T
        if self.watching and name in self.words:
            seen = self.sums.setdefault(name, LayerSums())
            signal, noise = energies(y, self.packed(name, x))
            seen.signal, seen.noise = seen.signal + signal, seen.noise + noise
            seen.elements += x.numel()
            seen.amax = max(seen.amax, float(x.abs().max()))
            if (scale := self.packed.input_scale(name)) is not None:
                seen.range = float(scale) * self.words[name].largest
                seen.clipped += int((x.abs() > seen.range).sum())
        return y


def int8_layers(get: Callable[[str], Tensor], packed: Mapping[str, Words], device: str) -> Callable[..., Tensor]:
    """What the layers compute where those of `packed` are INT8 instead (`octavo.evaluation.int8`)."""

    def compute(name: str, x: Tensor) -> Tensor:
        weight = get(f"{name}.weight").to(device)
        if name not in packed:
            return linear(x.float(), weight.float())
        return int8_linear(x, quantize_int8(weight))

    return compute


def distance(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted| / |wanted| of logits [..., V], each token's mean over V left out: it changes nothing."""
    a, b = (t.double().cpu() - t.double().cpu().mean(-1, keepdim=True) for t in (found, wanted))
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float((a - b).norm())


def probe(prompts: list[Tensor], vocabulary: int, context: int) -> Tensor:
    """Ids [B, T] on which consumers are compared: of the first prompts, or drawn where there are none."""
    if not prompts:
        drawn = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (2, min(32, context)), generator=drawn)
    return prompts[0][:4, :64]
