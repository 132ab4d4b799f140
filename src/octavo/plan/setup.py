"""A training run as it is planned: the model, the recipe, the GPUs, and the settings of `octavo train`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.ops import dispatch
from octavo.ops.launching import ARCHITECTURES
from octavo.plan.model_shape import Architecture, Attention, Block
from octavo.rates.measured import SHEET, Gpu, Shape, product_origin
from octavo.recipe import Recipe, get_recipe
from octavo.train.config import Config, OptimizerSettings
from octavo.train.processes import Degrees, find_degrees

# ---- The GEMMs that a recipe runs on the GPU of a plan, by the table that decides on a machine too.


def chosen_recipe(recipe: str | Recipe, gpu: Gpu) -> Recipe:
    """The recipe of a setting; "auto" is `rowwise` where the GPU has FP8 GEMMs, else `bf16`."""
    return get_recipe(("rowwise" if gpu.fp8 else "bf16") if recipe == "auto" else recipe)


def find_gemms(recipe: Recipe, gpu: Gpu, *, grouped: bool = False) -> dict[str, dispatch.Backend]:
    """The backends of y, dx and dw of `recipe`, in the eight-bit formats of `gpu`; of experts, if `grouped`."""
    architecture = ARCHITECTURES[gpu.architecture]
    return dispatch.gemm_backends(dispatch.in_formats_of(architecture, recipe), architecture, grouped=grouped)


def check_gemms(recipe: Recipe, gpu: Gpu) -> None:
    """Raise a ValueError if `gpu` lacks a GEMM of `recipe`."""
    if recipe.quantized and gpu.fp8 is None:
        raise ValueError(f"{gpu.name} has no FP8 GEMMs, which the recipe {recipe.name} needs: give --recipe bf16")
    for gemm, backend in find_gemms(recipe, gpu).items():
        if backend.name == "none":
            raise ValueError(
                f"{gpu.name} has no GEMM for {gemm} of the recipe {recipe.name} ({backend.reason}): give "
                "--recipe rowwise, or another of those that `octavo doctor --gpu` shows for it"
            )


# ---- Bytes of weights, gradients and optimizer states, by the settings of the table `[optimizer]`.
#
# Some programs have w_q, its transpose and a gradient in BF16, 1 + 1 + 2 bytes, beside the 16 of FP32 weights,
# gradients, m and v. Octavo has w_q alone beside them (`octavo.scales.cast_once`).


FP32, BF16, FP8 = 4.0, 2.0, 1.0


@dataclass(frozen=True)
class States:
    """Bytes of a parameter: its weight, gradient, AdamW's two moments, and copies of a linear layer's weight for FP8
    GEMMs. If `offloaded`, the CPU's memory has all but the copies; `resident` ones stay on the GPU."""

    weight: float
    gradient: float
    moments: float
    copies: float = 0.0
    offloaded: bool = False
    resident: bool = False

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.moments + self.copies

    @property
    def on_gpu(self) -> float:
        return self.copies if self.offloaded else self.total


def states_of(optimizer: OptimizerSettings, recipe: Recipe, *, accumulate: int) -> States:
    """The states that `octavo train` has with these settings."""
    gradient = optimizer.weight_bytes if accumulate == 1 else FP32
    copies = FP8 if recipe.repeatable_w is not None else 0.0  # of `octavo.scales.cast_once`
    if host := optimizer.masters == "host":
        copies = FP8 if recipe.reads_bytes else FP32 if recipe.quantized else BF16
    return States(optimizer.weight_bytes, gradient, optimizer.moment_bytes, copies, optimizer.on_host, resident=host)


def known_states() -> dict[str, States]:
    """Ways to train that differ in their states: of other programs, and of `octavo train` from the default to the
    smallest."""
    copies = States(FP32, FP32, 2 * FP32, copies=2 * FP8 + BF16)
    others = {
        "AdamW in FP32": States(FP32, FP32, 2 * FP32),
        "FP8 copies beside FP32 masters": copies,
        "the same, masters and optimizer offloaded": replace(copies, offloaded=True),
    }
    ways = {
        "octavo, default": (OptimizerSettings(), "bf16"),
        "octavo, optimizer.state = 8bit": (OptimizerSettings(state="8bit"), "bf16"),
        "octavo, also optimizer.weights = bf16": (OptimizerSettings(state="8bit", weights="bf16"), "bf16"),
        "octavo, optimizer.offload": (OptimizerSettings(offload=True), "bf16"),
        "octavo rowwise, optimizer.masters = host": (OptimizerSettings(masters="host"), "rowwise"),
    }
    own = {name: states_of(settings, get_recipe(recipe), accumulate=1) for name, (settings, recipe) in ways.items()}
    return others | own


MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class Setup:
    """A training run. `batch` of its settings counts the sequences of all GPUs in a micro-batch; the `degrees` say how
    the GPUs share weights and data."""

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
    def fused(self) -> bool:
        """True if the model's norms and activations quantize in the pass that computes them."""
        return self.model.fused and self.recipe.fusable is not None

    @property
    def fp8_experts(self) -> bool:
        """True if experts run in FP8."""
        found = find_gemms(self.recipe, self.gpu, grouped=True)
        return bool(found) and all(backend.name != "none" for backend in found.values())

    @property
    def fused_experts(self) -> bool:
        """True if experts run in FP8 with the passes between their GEMMs fused."""
        return self.fp8_experts and self.recipe.fusable is not None

    def recomputes_hidden(self, block: Block) -> bool:
        """True if selective checkpointing computes the inputs of the activation again: the MLP or experts are fused."""
        fused = self.fused_experts if block.has_experts else self.fused
        return fused and self.config.activation_checkpointing.mode == "selective"

    @property
    def attention_limit(self) -> str | None:
        """Why attention is not in FP8; "" if it is, and None if the settings do not ask for it."""
        context, attention = self.config.context, self.config.attention
        if attention.precision != "fp8":
            return None
        if context < attention.shortest:
            return f"texts of {context:,} tokens are shorter than attention.shortest, {attention.shortest:,}"
        if context % dispatch.GRADIENT_TILE:
            return f"{context:,} tokens are no multiple of {dispatch.GRADIENT_TILE}"
        return fp8_limit(self.model, self.gpu)

    @property
    def fp8_attention(self) -> bool:
        """True if attention runs in FP8."""
        return self.attention_limit == ""

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
        """Bytes of an element that FSDP2 gathers for the backward pass: of the blocks' matrices, and of all others."""
        wide, narrow = float(self.residual), 2.0 if self.recipe.reads_w_twice else 1.0
        return (narrow if self.recipe.quantized and self.config.parallel.fp8_all_gather else wide), wide

    @property
    def sent_gradient(self) -> float:
        """Bytes of a gradient that FSDP2 sends: of a BF16 one two (`octavo.distributed.send_bf16_gradients`)."""
        return float(self.residual) if self.degrees.dp_shard > 1 else 4.0

    @property
    def sharded(self) -> bool:
        """True if FSDP2 holds the weights: on several GPUs, or in the memory of the CPU."""
        return self.degrees.data > 1 or self.config.optimizer.offload

    @property
    def chunked(self) -> bool:
        return self.config.loss.is_chunked(self.model.vocabulary)


def make_setup(model: Architecture, config: Config, gpu: Gpu, gpus: int) -> Setup:
    """The setup of a run on `gpus` GPUs. A ValueError says which number of GPUs, degree, batch, context or recipe does
    not fit the model or the GPU."""
    if not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"--gpus must be from 1 to {MOST_GPUS:,}, more than any machine has; got {gpus:,}")
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
            f"batch counts the sequences of all GPUs and must be a multiple of the {degrees.data} that work on others; "
            f"the settings have {config.batch}: give --batch {-(-config.batch // degrees.data) * degrees.data}"
        )
    if config.optimizer.masters == "host" and degrees.processes > 1:
        raise ValueError(f"--optimizer.masters host needs one process; got {degrees.processes}: give --gpus 1")
    sizes = {"the context": config.context, "the width": model.width}
    for block in model.blocks:
        sizes |= {"the query heads": block.attention.heads, "the hidden features of the MLP": block.hidden}
        sizes["the key and value heads"] = block.attention.key_heads
    for name, size in sizes.items():
        if size % degrees.tp:
            divisors = [str(n) for n in range(1, min(size, 64) + 1) if all(each % n == 0 for each in sizes.values())]
            wrong = f"--parallel.tp must divide {name} of {model.name}, {size}; got {degrees.tp}"
            raise ValueError(f"{wrong}: it can be {', '.join(divisors)}")


# ---- The attention of a plan, in BF16 or in FP8: its time, where it runs in FP8, and by how much that is faster.
#
# The forward pass is two GEMMs and the backward pass five, each of 2 FLOPs for a query, a key and an element of a head:
# 14 T S H FLOPs for T tokens of texts of S, with H elements in all heads. Kernels compute whole tiles of TILE tokens.
# In causal attention a query sees (S + TILE) / 2 keys. cuDNN has kernels for heads of 64, 128, 192 and 256 elements
# (github.com/NVIDIA/cudnn-frontend/issues/378); other heads are padded with zeros to the next.
#
# Each pass also takes an exponential of each score, T S of them a head, whatever the width of the head. They run on
# other units than the products, and between them: Shah et al. (arXiv:2407.08608) count 3.9 * 10^12 exponentials a
# second of an H100 beside 989 * 10^12 FLOPs. So narrow heads have a lower rate in FLOPs.
#
# The products run at the rate of `octavo.rates.measured`, which was measured with heads of 128 elements. Around those
# of the backward pass, cuDNN has kernels that only move bytes: one multiplies dO with O and zeroes dq in FP32, one
# casts dq to BF16, and one sums dk and dv over the query heads that share a key head. The speed of FP8 over BF16 was
# measured by the length of a text (bench.gpu.attention, casts included; `make docs` writes attention_speeds.json) with
# 32 heads of queries and 8 of keys. Between two lengths it is interpolated; beyond them it is that of the nearest.


TILE = 128  # tokens
EXPONENTIAL = 256  # FLOPs: Hopper's multiprocessors compute 4,096 of them, or 16 exponentials, in a clock
MEASURED_HEAD = 128  # elements of the heads whose rate was measured
HEADS = (64, 128, 192, 256)  # elements of the heads that cuDNN has kernels for
FORWARD = 0.25  # of the time of the products in BF16, measured there from 4,096 tokens on; its FLOPs are 2/7


def attention_seconds(block: Block, gpu: Gpu, tokens: int, context: int) -> tuple[float, float]:
    """Seconds of both passes in BF16, and of the forward pass, of `tokens` tokens in texts of `context`."""
    a, whole = block.attention, -(-context // TILE) * TILE
    keys = (whole + TILE) / 2 if a.causal else whole
    sizes = a.queries // a.heads, a.output // a.heads
    widths = [next((known for known in HEADS if known >= size), size) for size in sizes]  # padded
    products = 7 * a.heads * sum(widths)  # FLOPs of a query and a key
    measured = 14 * MEASURED_HEAD
    as_measured = (products + 2 * EXPONENTIAL * a.heads) * measured / (measured + 2 * EXPONENTIAL)
    seconds = tokens * whole / context * keys * as_measured / gpu.attention_rate
    return seconds + tokens * gradient_bytes(a) / gpu.copy_rate, FORWARD * seconds


def gradient_bytes(attention: Attention) -> float:
    """Bytes that the backward pass moves beside its products, for each token."""
    a = attention
    shared = 2 * (a.queries + a.output + a.keys + a.values) if a.keys < a.queries else 0
    return 4 * a.output + (4 + 6) * a.queries + shared


def find_origins(
    model: Architecture, gpu: Gpu, recipe: Recipe, products: Sequence[tuple[Shape, int]], limit: str | None
) -> dict[str, str]:
    """For each rate, whether it was measured for the shapes of such a model or follows from the data sheet. `products`
    are (M, K, N) and the copies of each GEMM. `limit` is the `attention_limit`."""
    a, rates = model.blocks[0].attention, {"attention": gpu.attention, "memory": gpu.copy}
    found = {"matrix products": product_origin(gpu, recipe, products)}
    found |= {name: "measured" if rate else SHEET for name, rate in rates.items()} | {"links": "data sheet"}
    sizes = {a.queries // a.heads, a.output // a.heads}
    if gpu.attention and not (a.causal and sizes == {MEASURED_HEAD}):
        heads = f"{'causal' if a.causal else 'bidirectional'} heads of {' and '.join(map(str, sorted(sizes)))}"
        found["attention"] = f"from that of causal heads of {MEASURED_HEAD}, by FLOPs; {heads} were not measured"
    if limit is not None:
        fp8 = ", over the speed of FP8 that was measured on an H200"
        found["attention"] += f"; in BF16, since {limit}" if limit else fp8
    return found


def fp8_limit(model: Architecture, gpu: Gpu) -> str:
    """Why the attention of `model` does not run in FP8 on `gpu`; "" if it does."""
    a = model.blocks[0].attention
    if not a.causal:
        return f"FP8 attention is causal, and that of {model.name} is not"
    if a.queries != a.output:
        return f"FP8 attention takes queries and values of one size, and those of {model.name} differ"
    return dispatch.fp8_attention_limit(ARCHITECTURES[gpu.architecture], a.queries // a.heads)
