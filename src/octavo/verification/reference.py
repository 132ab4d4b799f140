"""The reference that readers are compared with: linear layers computed in float32 from the bytes alone."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

from octavo.verification.files import CheckpointFiles
from octavo.verification.layer_spec import LayerSpec
from octavo.verification.numbers import RoundInput, round_input, widen


@dataclass(frozen=True)
class PackedLayers:
    """The linear layers of a packed folder: y = round(x) @ w^T in float32. Unpacked layers are not rounded.

    Args:
        files: the folder.
        specs: of the packed layers.
        device: to compute on.
        round_input: how inputs are rounded, see `octavo.verification.numbers`.
        unrounded: layers whose inputs are not rounded, whatever their specs say.
    """

    files: CheckpointFiles
    specs: Mapping[str, LayerSpec]
    device: str
    round_input: RoundInput = round_input
    unrounded: Collection[str] = ()

    def weight(self, name: str) -> Tensor:
        """The weight of a layer, float32 [N, K]."""
        data = self.files.get(f"{name}.weight").to(self.device)
        spec = self.specs.get(name)
        return (
            data.float() if spec is None else widen(data, self.files.get(f"{name}.{spec.scale}").to(self.device), spec)
        )

    def get(self, name: str) -> Tensor:
        """A tensor of the folder, on the CPU. Weights of packed layers, such as experts, are widened to float32."""
        layer = name.removesuffix(".weight")
        return self.weight(layer).cpu() if name.endswith(".weight") and layer in self.specs else self.files.get(name)

    def input_scale(self, name: str) -> Tensor | None:
        """The stored scale of a layer's input, float32 without dimensions; None if it has none."""
        spec = self.specs.get(name)
        if spec is None or spec.inputs != "static":
            return None
        return self.files.get(f"{name}.{spec.input_scale}").to(self.device).float().reshape(-1)[0]

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The output [..., N] of a layer for its input [..., K], without bias."""
        spec = self.specs.get(name)
        rounded = x.float()
        if spec is not None and name not in self.unrounded:
            rounded = self.round_input(x, spec, self.input_scale(name))
        return linear(rounded, self.weight(name))  # [T,K] @ [N,K]^T


def distance(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| of logits [..., V], after subtracting each token's mean over V: adding a number
    to all logits of a token changes no probability."""
    a, b = (t.double().cpu() - t.double().cpu().mean(-1, keepdim=True) for t in (actual, expected))
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm else float((a - b).norm())
