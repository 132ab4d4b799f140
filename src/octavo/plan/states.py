"""Bytes of weights, gradients and optimizer states, by the settings of the table `[optimizer]`.

The table that people meet first counts the bytes of a parameter, without activations:

                                                  weight  gradient  m, v  FP8 copies  BF16 gradient     bytes      7B
    AdamW in FP32                                    4        4       8        -            -             16   112 GB
    FP8 copies beside FP32 masters                   4        4       8      1 + 1          2             20   140 GB
    the same, masters and optimizer offloaded       cpu      cpu     cpu     1 + 1          2              4    28 GB

So FP8 saves no memory of weights by itself: its copies (w_q for the forward pass, its transpose for the backward pass)
and the gradient in the dtype of the GEMMs come on top. They are all that the GPU holds when the CPU has the rest.
Octavo has neither the transposed copy nor the second gradient: 16 bytes, and one for w_q (`octavo.cast_once`).
"""

from dataclasses import dataclass

from octavo.recipe import Recipe
from octavo.train.moments import BLOCK
from octavo.train.tables import OptimizerSettings

FP32, BF16, FP8 = 4.0, 2.0, 1.0


@dataclass(frozen=True)
class States:
    """Bytes of a parameter: its weight, gradient, AdamW's two moments, and copies of the weight for GEMMs.

    Attributes:
        copies: of a weight that FP8 GEMMs read; other parameters have none.
        offloaded: whether weights, gradients and moments are in the CPU's memory.
    """

    weight: float
    gradient: float
    moments: float
    copies: float = 0.0
    offloaded: bool = False

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.moments + self.copies

    @property
    def on_gpu(self) -> float:
        return self.copies if self.offloaded else self.total


KNOWN_STATES = {
    "AdamW in FP32": States(FP32, FP32, 2 * FP32),
    "FP8 copies beside FP32 masters": States(FP32, FP32, 2 * FP32, copies=2 * FP8 + BF16),
    "the same, masters and optimizer offloaded": States(FP32, FP32, 2 * FP32, copies=2 * FP8 + BF16, offloaded=True),
}


def states_of(optimizer: OptimizerSettings, recipe: Recipe, *, accumulate: int) -> States:
    """The states that `octavo train` has with these settings."""
    weight = BF16 if optimizer.weights == "bf16" else FP32
    moments = 2 * FP32 if optimizer.state == "fp32" else 2 * (FP8 + FP32 / BLOCK)
    gradient = weight if accumulate == 1 else FP32
    copies = FP8 if recipe.repeatable_w is not None else 0.0  # of `octavo.cast_once`
    return States(weight, gradient, moments, copies, optimizer.offload)


def own_states() -> dict[str, States]:
    """Ways to train in `octavo train` that differ in their states, from the default to the smallest."""
    recipe = Recipe("bf16")
    ways = {
        "octavo, default": OptimizerSettings(),
        "octavo, optimizer.state = 8bit": OptimizerSettings(state="8bit"),
        "octavo, also optimizer.weights = bf16": OptimizerSettings(state="8bit", weights="bf16"),
        "octavo, optimizer.offload": OptimizerSettings(offload=True),
    }
    return {name: states_of(settings, recipe, accumulate=1) for name, settings in ways.items()}
