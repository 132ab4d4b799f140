"""The size of a packed folder, beside the same model in BF16."""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.verification.files import CheckpointFiles
from octavo.verification.layer_spec import LayerSpec


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes.

    Attributes:
        packed, packed_bf16: of the packed layers, scales included, and of the same layers in BF16.
        whole, whole_bf16: of all tensors, and of all tensors with the packed layers in BF16.
    """

    packed: int
    packed_bf16: int
    whole: int
    whole_bf16: int


def measure_sizes(files: CheckpointFiles, layers: Mapping[str, LayerSpec]) -> Sizes:
    """Add up the sizes of a folder's tensors, of which `layers` are packed."""
    scales = [f"{name}.{spec.scale}" for name, spec in layers.items()]
    scales += [f"{name}.{spec.input_scale}" for name, spec in layers.items() if spec.inputs == "static"]
    weights = [f"{name}.weight" for name in layers]
    packed = sum(files.nbytes(name) for name in (*weights, *scales))
    packed_bf16 = 2 * sum(files.nbytes(name) for name in weights)  # a packed weight has one byte an element
    whole = sum(files.nbytes(name) for name in files.shapes)
    return Sizes(packed, packed_bf16, whole, whole - packed + packed_bf16)
