"""Linear layers that compute their GEMMs by a recipe; convolutions and transformers' `Conv1D` that are products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.delayed import ScaleHistories, ScaleHistory, weight_amax
from octavo.nn.fused import NO_PAIR, Stack, is_frozen, reads, run_fused, stack_adapters
from octavo.nn.linear_function import FusedCall, LinearCall, linear
from octavo.nn.module_tools import (
    AdaptedLayer,
    PrecomputedProjections,
    autocast_dtype,
    check_call,
    check_input,
    mix_into,
    parts_of,
    parts_of_layer,
    unsupported,
)
from octavo.nn.observer import Observer, observer_of
from octavo.nn.parallel_weights import GatheredWeight, ParallelLinear, local_part
from octavo.numerics.qtensor import TENSOR, Cast, QTensor
from octavo.ops import quantize, quantize_stack
from octavo.ops.dispatch import choose_recipe
from octavo.recipe import Recipe, RecipeName
from octavo.util import choose_device

PREPARED = ("recipe", "_layer_name", "weight_cache", "histories")  # the attributes that `RecipeLayer.prepare` sets
ADDED = (*PREPARED, "input_is_saved", "observer", "parallel")  # and those that other modules set
ROUNDED = 1 + 2.0**-23  # amax / max of a format, rounded to float32, does not clip amax


@dataclass(eq=False)
class WeightCache:
    """A cache for the quantized weights of one layer, or of several that are stacked along their rows.

    Attributes:
        q: what `octavo.scales.cast_once` has cached.
        gathered: what FSDP2 has gathered, where `octavo.distributed.fp8_all_gather` makes it gather quantized weights.
            It is valid while the weights are `GatheredWeight`s; at other times its memory is freed.
        amax: [1, 1], the amax of this rank's part of the gathered weight, where a history records it.
    """

    q: QTensor | None = None
    gathered: QTensor | None = None
    amax: Tensor | None = None
    cast_weights: list[Tensor] = field(default_factory=list)
    key: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as an empty cache: no block of `cast_once` refreshes the copy of a model."""
        return WeightCache, ()

    def get(self, weights: Sequence[Tensor], cast: Cast) -> QTensor | None:
        """The quantized `weights`, if they are gathered or cached; cast again if a weight has changed."""
        if isinstance(weights[0], GatheredWeight):
            return self.gathered
        if self.q is not None and self.is_stale(weights):
            self.fill(weights, cast)
        return self.q

    @torch.no_grad()
    def fill(self, weights: Sequence[Tensor], cast: Cast) -> None:
        """Cast `weights` and cache the bytes, in the same memory as before if they fit."""
        if any(hasattr(w, "device_mesh") for w in weights):
            self.clear()
            return
        # only row scales stack
        self.store(quantize_stack(weights, cast) if cast.by_row else quantize(weights[0], cast), weights)

    @torch.no_grad()
    def store(self, q: QTensor, weights: Sequence[Tensor]) -> None:
        """Cache the quantized `weights`, in the same memory as before if they fit."""
        if self.q is None or (self.q.shape, self.q.data.device) != (q.shape, q.data.device):
            self.q = q
        else:
            self.q.data.copy_(q.data)
            self.q.scale.copy_(q.scale)
        self.note_cast(weights)

    def note_cast(self, weights: Sequence[Tensor]) -> None:
        """Note that the cache holds the bytes of `weights` as they are now."""
        # These references keep the memory allocated until the next cast, so that no other weight gets its address.
        self.cast_weights, self.key = [local_part(w).detach() for w in weights], _key(weights)

    def is_stale(self, weights: Sequence[Tensor]) -> bool:
        """True if a weight has changed since it was cached. Compiled code does not ask."""
        return not torch.compiler.is_compiling() and _key(weights) != self.key

    def clear(self) -> None:
        self.q, self.cast_weights, self.key = None, [], ()


def _key(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((id(w), w._version, w.data_ptr(), w.dtype) for w in map(local_part, weights))


class RecipeLayer(nn.Module):
    """Base of the converted layers: computes y = x @ w^T + bias by a recipe."""

    recipe: Recipe
    _layer_name: str
    histories: ScaleHistories | None
    weight_cache: WeightCache
    input_is_saved: bool = False  # by the operation before, as attention saves its output: see `LinearCall`
    observer: Observer | None = None
    parallel: Any = None  # a `ParallelLayer`, where each rank has a part of the layer

    def __init_subclass__(cls, **options: Any) -> None:
        if "_octavo_parts" not in vars(cls):  # a mixed class is no subclass that the user's own class needs to know of
            super().__init_subclass__(**options)

    def prepare(self, recipe: Recipe, name: str, device: torch.device) -> None:
        """Set the attributes of a converted layer; each cast with a history gets a `ScaleHistory`, a child module."""
        self.recipe, self._layer_name, self.weight_cache = recipe, name, WeightCache()
        histories = {
            operand: ScaleHistory(cast, cast.history, device)
            for operand, cast in (("x", recipe.x), ("w", recipe.w), ("dy", recipe.dy))
            if cast is not None and cast.history is not None
        }
        self.histories = ScaleHistories(histories).train(self.training) if histories else None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Called by `load_state_dict`. With assign=True it moves weights from the meta device, but no histories."""
        super()._load_from_state_dict(*args, **kwargs)
        device = next(self.parameters()).device
        if self.histories is not None and device.type != "meta" and any(b.is_meta for b in self.histories.buffers()):
            self.histories.to_empty(device=device)

    def history_of(self, operand: str) -> ScaleHistory | None:
        """The history of "x", "w" or "dy", if its scale comes from one."""
        return None if self.histories is None else dict(self.histories.items()).get(operand)  # type: ignore[return-value]

    def compute(self, x: Tensor, w: Tensor, bias: Tensor | None, cached: QTensor | None) -> Tensor:
        """y [..., N] of x [..., K] and w [N, K] with any strides; `cached` is w, quantized, if there is a cache."""
        check_call(self, x, w)
        dtype = compute_dtype(x)
        if isinstance(w, GatheredWeight) and (x.numel() == 0 or self.recipe.w is None):
            w = w.dequantize()
        if x.numel() == 0:
            return F.linear(x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype))
        histories = (self.history_of("x"), self.history_of("w"), self.history_of("dy"))
        call = LinearCall(self.recipe, dtype, *histories, observer_of(self), input_is_saved=self.input_is_saved)
        casts = self.recipe.x, self.recipe.w, self.recipe.dy
        if any(cast is not None and cast.granularity == TENSOR for cast in casts):
            call.parallel = self.parallel
        return linear(x, w, bias, call, cached)

    @property
    def freezable(self) -> bool:
        """True if y scales its input, as it comes, by a history."""
        return self.recipe.y is not None and self.recipe.y.a.history is not None

    @property
    def input_limit(self) -> Tensor | None:
        """The largest magnitude of x, 0-dim, that the scale of its history holds; None without such a scale."""
        x = self.history_of("x") if self.freezable else None
        return None if x is None or not x.ready else x.scale.view(()) * x.cast.fmt.max * ROUNDED

    def weights_to_cast(self) -> list[Tensor]:
        """The weights to which the recipe's cast of w applies; attention has several."""
        return [self.weight]  # type: ignore[list-item]

    def freeze_input(self, amax: Tensor) -> Tensor:
        """Make the scales of x and w constant: x's from `amax`, 0-dim, and w's from the weight. Returns x's, [1]."""
        for operand, largest in (("x", amax), ("w", weight_amax(self.weights_to_cast()))):
            if (history := self.history_of(operand)) is not None:
                history.seed([float(largest)])
                history.frozen = True
        return self.history_of("x").scale.view(1).clone()  # type: ignore[union-attr] # the layer is freezable

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by `torch.jit.script` before it reads the module."""
        raise unsupported("torch.jit.script (torch.compile and torch.export take them)")

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.recipe.name}")))


class Linear(RecipeLayer, nn.Linear):
    """`nn.Linear` that computes y, dx and dw by its recipe. Same parameters, same `state_dict`.

    `octavo.convert` makes it of an `nn.Linear`; a call builds one. Input [..., K] of any rank, zero rows included;
    output [..., N] in the autocast dtype, or in that of the input outside autocast; gradients in the dtypes of input
    and parameters.

    Args:
        in_features, out_features: K and N.
        bias: whether a bias is added.
        recipe: as in `octavo.convert`.
        device, dtype: of the parameters.

    Example:
        >>> octavo.Linear(64, 64)(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: RecipeName | Literal["auto"] | Path | Recipe = "rowwise",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device and choose_device(device), dtype)
        self.prepare(choose_recipe(recipe, self.weight.device), "", self.weight.device)

    def forward(self, input: Tensor | PrecomputedProjections) -> Tensor:  # named as in PyTorch
        if isinstance(input, PrecomputedProjections):
            return input.output_of(self)
        if self.parallel is not None:
            return self.parallel.linear(self, input)
        check_input(self, input)
        cached = None if input.numel() == 0 else self.quantized_weight(self.weight)
        return self.compute(input, self.weight, self.bias, cached)

    def quantized_weight(self, w: Tensor) -> QTensor | None:
        """The weight, or this rank's part `w` of it, where FSDP2 has gathered or `cast_once` cached it so."""
        if isinstance(w, GatheredWeight):
            history = None if self.recipe.w is None else self.history_of("w")
            if history is not None and self.weight_cache.amax is not None:
                history.observe(self.weight_cache.amax)
            return self.weight_cache.gathered
        cast = self.recipe.repeatable_w
        return None if cast is None else self.weight_cache.get([w], cast)

    def frozen(self, x: Tensor) -> tuple[Stack, FusedCall] | None:
        """The layer and its call for the input x, as `run_fused` takes them; None if it is trained or not fusable."""
        recipe = self.recipe.fusable
        if recipe is None or not is_frozen(self):
            return None
        check_call(self, x, self.weight)
        stack = Stack([self.weight], [self.bias], self.quantized_weight(self.weight))
        return stack, LinearCall(recipe, compute_dtype(x), observer=observer_of(self))

    def cached_weights(self) -> tuple[list[nn.Linear], Cast] | None:
        """This layer and the cast of its weight, if `octavo.scales.cast_once` can cache it."""
        cast = self.recipe.repeatable_w if self.parallel is None or self.recipe.fusable else None
        return None if cast is None else ([self], cast)


def adapted_output(layer: AdaptedLayer, x: Tensor) -> Tensor | None:
    """The output [..., N] of a frozen layer in adapters for x [..., K], in one pass; None where that is not possible.

    The layer is a `Linear`, or another class with its method `frozen`.
    """
    parts = parts_of_layer(layer)
    if parts is None or x.numel() == 0 or not reads([parts[1]], None, compute_dtype(x)):
        return None
    base, adapters = parts
    if (found := getattr(base, "frozen", lambda x: None)(x)) is None:
        return None
    stack, call = found
    pair = stack_adapters([adapters], stack.weights, call.dtype)
    return run_fused(x, None, None, stack, call, pairs=(pair, NO_PAIR))[0]


def convert_layer(module: Any, ours: type[RecipeLayer], recipe: Recipe, name: str) -> None:
    """Change `module`, called `name` in its model, in place into a layer of the class `ours` that computes by `recipe`.

    An `nn.Linear` becomes a `Linear`. The class of another becomes a subclass of `ours` and of its own.
    """
    added = PREPARED if isinstance(module, ParallelLinear) else ADDED
    if type(module) in (nn.Linear, ParallelLinear):
        module.__class__ = ours
    else:
        mix_into(module, ours)
    module._theirs = {key: vars(module).pop(key) for key in added if key in vars(module)}  # attributes of its user
    module.prepare(recipe, name, next(module.parameters()).device)


def restore_layer(module: Any) -> bool:
    """Give a converted layer its own class back, and return whether `module` was one. Others stay as they are."""
    ours, *theirs = parts_of(type(module))
    if not theirs and ours is Linear:  # as `convert_layer` makes it of an `nn.Linear`
        theirs = [nn.Linear if module.parallel is None else ParallelLinear]
    if not theirs or not issubclass(ours, RecipeLayer):
        return False
    for name in PREPARED:
        delattr(module, name)
    vars(module).pop("input_is_saved", None)
    vars(module).update(vars(module).pop("_theirs", {}))
    module.__class__ = theirs[0]
    return True


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of y and of unquantized GEMMs: autocast's, or that of the input."""
    return autocast_dtype(x.device.type) or x.dtype


# ---- `Conv1D`, the linear layer of transformers' GPT-2, computed by a recipe.
#
#     Conv1D: y = x @ W[K,N] + b          nn.Linear: y = x @ W[N,K]^T + b
#
# The recipe casts W^T, so that row scales belong to outputs as in `nn.Linear`, and the gradient is transposed back.


class Conv1D(RecipeLayer):
    """A converted `Conv1D`. `octavo.scales.cast_once` does not cache its weight: it is cast in every forward pass."""

    weight: nn.Parameter  # [K, N]
    bias: nn.Parameter  # [N]

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight.t(), self.bias, None)


# ---- Convolutions that are matrix products, computed by a recipe: those of size 1, and those of disjoint patches.
#
#     y[B,N,H/p,W/p] = conv(x[B,C,H,W], w[N,C,p,p], stride p)  =  patches[B H/p W/p, C p p] @ w[N, C p p]^T
#
# The rows of the product are the patches of x. Its result is y with the channels last in memory. As in PyTorch, pixels
# that fill no patch are left out; with a stride above a size of 1, so are those between.


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
IMAGE_CHANNELS = 16  # the most that an image has, or what an autoencoder makes of it


def is_gemm(module: nn.Module) -> bool:
    """True if `module` is a convolution of PyTorch, converted or not, that is a matrix product."""
    if not isinstance(module, CONVOLUTIONS) or parts_of(type(module))[-1] not in CONVOLUTIONS:
        return False
    sizes = module.kernel_size
    unpadded = module.padding in ("valid", (0,) * len(sizes)) or (module.padding == "same" and math.prod(sizes) == 1)
    fits = all(size in (1, step) for size, step in zip(sizes, module.stride, strict=True))
    return module.groups == 1 and unpadded and fits and all(d == 1 for d in module.dilation)


def reads_image(module: Any) -> bool:
    """True if a convolution that is a matrix product cuts an image into patches."""
    return math.prod(module.kernel_size) > 1 and int(module.in_channels) <= IMAGE_CHANNELS


class PatchConvolution(RecipeLayer):
    """A converted convolution. `cast_once` does not cache its weight: it is cast in every forward pass."""

    weight: nn.Parameter  # [N, C, *kernel_size]
    bias: nn.Parameter | None
    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """y [B, N, ...] of x [B, C, ...], or without the batch of both."""
        x, rank = input, len(self.kernel_size)
        fits = x.ndim in (rank + 1, rank + 2) and x.shape[-rank - 1] == self.in_channels
        if not fits or any(n < size for n, size in zip(x.shape[-rank:], self.kernel_size, strict=True)):
            raise ValueError(
                f"the convolution takes [B, {self.in_channels}, *sizes] with sizes of at least "
                f"{list(self.kernel_size)}, got {list(x.shape)}: resize or pad the input"
            )
        cut = x if x.ndim == rank + 2 else x.unsqueeze(0)
        for i, (size, step) in enumerate(zip(self.kernel_size, self.stride, strict=True), 2):
            cut = cut.unfold(i, size, step)  # becomes [B, C, *counts, *sizes]
        patches = cut.movedim(1, 1 + rank).flatten(1 + rank)  # [B, *counts, K]
        y = self.compute(patches, self.weight.flatten(1), self.bias, None).movedim(-1, 1)
        return y if x.ndim == rank + 2 else y.squeeze(0)


OURS: dict[Any, type[RecipeLayer]] = {nn.Linear: Linear, **dict.fromkeys(CONVOLUTIONS, PatchConvolution)}  # by theirs
