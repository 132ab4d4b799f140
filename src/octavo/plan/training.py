"""The plan of a training run: memory, time, speed, and which layers gain from the recipe."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from octavo.nn.speedup.lookup import LEAST_SPEEDUP
from octavo.ops import Backend
from octavo.plan.attention import is_fp8, speed_if_fp8, training_limit
from octavo.plan.gemms import find_gemms
from octavo.plan.memory import Memory, plan_memory
from octavo.plan.rates import has_measured, layer_speedup
from octavo.plan.setup import Setup, make_setup
from octavo.plan.step_time import StepTime, block_products, plan_step

LARGEST = 1 << 20  # sequences of a micro-batch on one GPU
WORTHWHILE = 1.02  # times the tokens a second, for which another setting is worth naming


@dataclass(frozen=True)
class Gain:
    """A GEMM of a block: its shape, and the speed of its forward and backward pass as a multiple of that in BF16."""

    layer: str
    shape: tuple[int, int, int]
    speedup: float

    @property
    def gains(self) -> bool:
        return self.speedup >= LEAST_SPEEDUP


@dataclass(frozen=True)
class TrainingPlan:
    """Memory and time of a training run.

    Attributes:
        setup: the run.
        network: bytes a second of a GPU's network card.
    """

    setup: Setup
    network: float = 50e9

    @cached_property
    def memory(self) -> Memory:
        return plan_memory(self.setup)

    @cached_property
    def time(self) -> StepTime:
        return plan_step(self.setup, self.network)

    @property
    def gemms(self) -> dict[str, Backend]:
        """The backends of y, dx and dw."""
        return find_gemms(self.setup.recipe, self.setup.gpu)

    @property
    def gpus(self) -> int:
        return self.setup.degrees.processes

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.setup.gpu.memory

    @property
    def tokens_per_step(self) -> int:
        config = self.setup.config
        return config.batch * config.accumulate * config.context

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU trains on in a second."""
        return self.tokens_per_step / self.time.total / self.gpus

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization against the BF16 peak of the data sheet (`octavo.train.utilization`)."""
        model = self.setup.model
        queries = sum(block.count * block.attention.queries for block in model.blocks)
        flops = 6.0 * model.active_parameters + 12.0 * queries * self.setup.config.context
        return flops * self.tokens_per_second / self.setup.gpu.bf16

    def days(self, tokens: float) -> float:
        """Days to train on so many tokens."""
        return tokens / (self.tokens_per_second * self.gpus) / 86400

    def cost(self, tokens: float, price: float) -> float:
        """The cost of training on `tokens` tokens, at `price` for an hour of one GPU."""
        return self.days(tokens) * 24 * self.gpus * price

    @property
    def gains(self) -> list[Gain]:
        """The quantized GEMMs of each kind of block."""
        setup = self.setup
        products = [each for block in setup.model.blocks for each in block_products(setup, block) if each.quantized]
        kinds = dict.fromkeys((each.layer, each.shape, each.count) for each in products)
        return [Gain(layer, shape, layer_speedup(setup.gpu, setup.recipe, shape, n)) for layer, shape, n in kinds]

    @property
    def fp8_attention_speed(self) -> float | None:
        """The speed of attention in FP8 as a multiple of that in BF16; None where it is not meant for FP8."""
        return speed_if_fp8(self.setup)

    @property
    def largest_batch(self) -> int:
        """The most sequences of a micro-batch, of all GPUs, that fit; 0 if none do."""
        step = self.setup.degrees.data
        low, high = 0, 1
        while high <= LARGEST and self._fits_with(high * step):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits_with(middle * step) else (low, middle)
        return low * step

    def _fits_with(self, batch: int) -> bool:
        setup = replace(self.setup, config=self.setup.config.change(batch=batch))
        return plan_memory(setup).peak <= setup.gpu.memory

    @property
    def faster_settings(self) -> dict[str, float]:
        """Where the GPU waits for the host: options of `octavo train`, and how many times the tokens/s each gives.

        A larger micro-batch gives the GPU more work for the same launches. More micro-batches in a step share the
        update of the weights. The others launch less. Empty where the GPU does not wait.
        """
        config, found = self.setup.config, {}
        changes: dict[str, dict[str, Any]] = {
            f"--batch {2 * config.batch}": {"batch": 2 * config.batch},
            f"--accumulate {4 * config.accumulate}": {"accumulate": 4 * config.accumulate},
            "--activation-checkpointing.mode none": {"activation_checkpointing.mode": "none"},
            "--compile.blocks": {"compile.blocks": True},
            "--no-parallel.fp8-all-gather": {"parallel.fp8_all_gather": False},
            "--recipe bf16": {"recipe": "bf16"},
        }
        for option, change in changes.items() if self.time.waiting else ():
            setup = make_setup(self.setup.model, config.change(**change), self.setup.gpu, self.gpus)
            other = replace(self, setup=setup)
            speed = other.tokens_per_second / self.tokens_per_second
            if other.fits and speed >= WORTHWHILE:
                found[option] = speed
        return found

    @property
    def origins(self) -> dict[str, str]:
        """For each kind of figure, whether it rests on measurements or on the data sheet."""
        setup = self.setup
        found = dict(setup.gpu.origins)
        if setup.recipe.quantized and setup.gpu.grid and not has_measured(setup.gpu, setup.recipe):
            found["matrix products"] = f"those of blockwise, since {setup.recipe.name} was not measured"
        found["host"] = "measured with compiled blocks of a Llama on hosts of H200s, which differ by 15 %"
        if is_fp8(setup):
            found["attention"] += ", over the speed of FP8 that was measured on an H200"
        elif setup.config.attention.precision == "fp8":
            found["attention"] += f"; in BF16, since {training_limit(setup)}"
        return found

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible values: bytes and seconds."""
        setup, memory, time = self.setup, self.memory, self.time
        return {
            "model": setup.model.name,
            "parameters": setup.model.parameters,
            "recipe": setup.recipe.name,
            "gemms": {name: backend.name for name, backend in self.gemms.items()},
            "gpu": setup.gpu.name,
            "gpus": self.gpus,
            "tokens_per_step": self.tokens_per_step,
            "memory": {**memory.parts, "peak": memory.peak, "offloaded": memory.offloaded, "moment": memory.moment},
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "seconds": {**time.parts, "total": time.total},
            "host_seconds": time.host,
            "tokens_per_second_a_gpu": self.tokens_per_second,
            "utilization": self.utilization,
            "gains": [{"layer": g.layer, "shape": list(g.shape), "speedup": g.speedup} for g in self.gains],
            "fp8_attention_speed": self.fp8_attention_speed,
            "faster_settings": self.faster_settings,
            "origins": self.origins,
        }
