"""A training run as it is planned: the model, the recipe, the GPUs, and the settings of `octavo train`."""

from dataclasses import dataclass

from octavo.plan.architecture import Architecture
from octavo.plan.gemms import check_gemms, chosen_recipe, has_grouped_gemms
from octavo.plan.hardware import Gpu
from octavo.plan.states import States, states_of
from octavo.recipe import Recipe
from octavo.train.config import Config
from octavo.train.loss import LARGE_VOCABULARY
from octavo.train.mesh import Degrees, find_degrees


@dataclass(frozen=True)
class Setup:
    """A training run, before it exists.

    Attributes:
        model: its layers.
        recipe: of its linear layers.
        gpu: each of the GPUs.
        config: the settings; `batch` counts the sequences of all GPUs in a micro-batch.
        degrees: how the GPUs share weights and data.
    """

    model: Architecture
    recipe: Recipe
    gpu: Gpu
    config: Config
    degrees: Degrees

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that one GPU works on; those that share a layer (tp) work on the same."""
        return self.config.batch // self.degrees.data * self.config.context

    @property
    def fp8_experts(self) -> bool:
        """Whether experts run in FP8."""
        return has_grouped_gemms(self.recipe, self.gpu)

    @property
    def states(self) -> States:
        return states_of(self.config.optimizer, self.recipe, accumulate=self.config.accumulate)

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream, which has the dtype of the embedding in the forward pass."""
        gathered = self.sharded and self.config.parallel.gather_dtype == "bf16"
        return 2 if gathered or self.config.optimizer.weights == "bf16" else 4

    @property
    def gathered_bytes(self) -> tuple[float, float]:
        """Bytes of an element that FSDP2 gathers: of the blocks' matrices, and of all other weights."""
        wide = float(self.residual)
        return (1.0 if self.recipe.quantized and self.config.parallel.fp8_all_gather else wide), wide

    @property
    def sent_gradient(self) -> float:
        """Bytes of a gradient that FSDP2 sends: of a BF16 one two (`octavo.dist.send_bf16_gradients`)."""
        return float(self.residual) if self.degrees.dp_shard > 1 else 4.0

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the weights: on several GPUs, or in the memory of the CPU."""
        return self.degrees.data > 1 or self.config.optimizer.offload

    @property
    def chunked(self) -> bool:
        choice = self.config.loss.logits
        return choice == "chunked" or (choice == "auto" and self.model.vocabulary >= LARGE_VOCABULARY)


def make_setup(model: Architecture, config: Config, gpu: Gpu, gpus: int) -> Setup:
    """The setup of a run on `gpus` GPUs.

    Raises:
        ValueError: no such number of GPUs; degrees that do not fit it, the model or the batch; a context that the model
            does not have; or a recipe that the GPU has no GEMMs for.
    """
    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1; got {gpus}")
    recipe = chosen_recipe(config.recipe, gpu).in_bf16(*config.bf16_gemms)
    check_gemms(recipe, gpu)
    if config.context > model.context:
        raise ValueError(f"--context must be at most the {model.context} tokens of {model.name}; got {config.context}")
    degrees = find_degrees(config.parallel, gpus)
    _check_degrees(model, config, degrees)
    return Setup(model, recipe, gpu, config, degrees)


def _check_degrees(model: Architecture, config: Config, degrees: Degrees) -> None:
    if config.batch % degrees.data:
        raise ValueError(
            f"batch counts the sequences of all GPUs and must be a multiple of the {degrees.data} that work on "
            f"different ones; the settings have {config.batch}: give "
            f"--batch {-(-config.batch // degrees.data) * degrees.data}"
        )
    sizes = {"the context": config.context, "the width": model.width}
    for block in model.blocks:
        sizes |= {"the query heads": block.attention.heads, "the hidden features of the MLP": block.hidden}
        sizes["the key and value heads"] = block.attention.heads * block.attention.keys // block.attention.queries
    for name, size in sizes.items():
        if size % degrees.tp:
            divisors = [n for n in range(1, min(size, 64) + 1) if all(each % n == 0 for each in sizes.values())]
            raise ValueError(
                f"--parallel.tp must divide {name} of {model.name}, {size}; got {degrees.tp}: it can be "
                f"{', '.join(map(str, divisors))}"
            )
