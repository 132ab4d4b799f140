"""FP32 weights, moments and AdamW in the CPU's memory; on the device, what the layers read of each weight.

    CPU      masters (FP32 weights), their gradients, AdamW's moments
    device   bytes and scales of the weights that FP8 layers read, one byte a weight; BF16 or FP32 copies of the others

    forward    a block waits for its masters to be updated; they come in FP32, and are quantized on the device
    backward   a gradient leaves on a stream of its own, which adds that of earlier micro-batches and takes the norm
    AdamW      threads of one core each, chunk by chunk, in the order in which the next forward pass reads the weights

Clipping takes the norm of all gradients: AdamW begins after the backward pass, and runs beside the next forward pass.
Without clipping it begins when a gradient has come, and runs beside the backward pass too. Then a gradient that is not
finite leaves its own weight as it was, and those before it have changed.

The parameters of the model are the masters: checkpoints, optimizer and watch see these. Within `on_device` the modules
have the tensors of the device in their place, which are written where a pass first reads them, and nowhere else.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from octavo.nn.linear import Linear, WeightCache
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import Cast, QTensor
from octavo.ops import quantize, quantize_scaled, quantize_stack
from octavo.scales import cached_stacks
from octavo.train.config import Config
from octavo.train.processes import pin, unpin

CHUNK = 1 << 20  # elements that a thread clips and updates while they are in the processor's cache
STAGED = 8  # gradients that are on their way at a time: the device holds them so long


class HostAdamW(torch.optim.AdamW):
    """AdamW on masters, by the threads of `HostMasters`."""

    hosted: "HostMasters"
    found_inf: Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.found_inf:
            self.hosted.update()
        if not self.hosted.beside:
            self.hosted.wait()


@dataclass(eq=False)
class HostWeight:
    """A master, the parameter `held` in its place on the device, the modules that have it, and its FP32 gradient."""

    master: nn.Parameter
    held: nn.Parameter
    places: list[tuple[nn.Module, str]]
    grad: Tensor
    left: int = 0  # micro-batches of this step whose gradients were sent
    norm: Tensor | None = None  # of the sum of these
    update: list[Future[None]] = field(default_factory=list)


@dataclass(eq=False)
class Unit:
    """Weights that are sent together: those that run as one GEMM, or one. `history` gives their scale, if it has one.
    `key` differs where a master or the scale was written since."""

    weights: list[HostWeight]
    send: Callable[[], None]
    history: Any = None
    key: tuple[Any, ...] = ()


class HostMasters:
    """Keeps the masters of a model on the CPU, and tensors of `device` that stand for them in a pass.

    Args:
        model: on the CPU, converted, and compiled if it is to be. Its buffers are moved to `device`.
        blocks: of the model, in the order of the forward pass.
        optimizer: of the model; it updates by this object from now on.
        config: layers of blocks that are not in FP8 compute in BF16 with precision bf16, and are held so.
    """

    def __init__(
        self, model: nn.Module, blocks: Iterable[Any], optimizer: HostAdamW, device: torch.device, config: Config
    ) -> None:
        self.model, self.optimizer, self.device, self.config = model, optimizer, device, config
        self.beside, optimizer.hosted = False, self
        self._streams: Any = torch.get_device_module(device)
        self._in, self._out = self._streams.Stream(), self._streams.Stream()
        # One core is left for the thread that launches. Threads of one core each wait for no other one.
        cores = max(torch.get_num_threads() - 1, 1)
        self._threads = ThreadPoolExecutor(cores, "adamw", torch.set_num_threads, (1,))
        self._leaving: deque[tuple[Any, Tensor, HostWeight | None]] = deque()
        self._units: dict[int, list[Unit]] = {}  # by the number of their block, -1 for those of none
        self._recipes: list[Any] = []
        self._factor: Tensor | None = None
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._block_of = {module: i for i, block in enumerate(blocks) for module in block.modules()}
        self._grads = {p: torch.zeros_like(p, requires_grad=False) for p in model.parameters() if p.requires_grad}
        self._pinned = [pin(t.detach()) for pair in self._grads.items() for t in pair if device.type == "cuda"]
        for module in model.modules():
            module._buffers.update({name: b if b is None else b.to(device) for name, b in module._buffers.items()})
        for p in model.parameters():
            p.computing_device = device  # type: ignore[attr-defined]
        for i, block in enumerate(blocks):
            self._wait_before(block, i)

    def close(self) -> None:
        """End the threads, and give the pinned memory back."""
        self._threads.shutdown(cancel_futures=True)
        torch.set_num_threads(torch.get_num_threads())  # of threads to come, which would have one core too
        self._streams.synchronize()
        for t in self._pinned:
            unpin(t)

    # ---- What the device holds.

    @torch.no_grad()
    def _build(self, layers: list[Any]) -> None:
        """Make the tensors of the device, as the recipes of the linear layers read them now."""
        places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        modules: Any = self.model.modules()
        for module in modules:
            for name, p in module._parameters.items():
                if p is not None:
                    places.setdefault(p, []).append((module, name))
            if hasattr(module, "weight_cache"):
                module.weight_cache = WeightCache()
        self._units = defaultdict(list)
        stacks: list[Any] = list(cached_stacks(self.model))
        stacks += [(layer.weight_cache, [layer], layer.recipe.w) for layer in layers if layer.history_of("w")]
        for cache, stacked, cast in stacks:
            if all(reads_bytes(layer) and len(places[layer.weight]) == 1 for layer in stacked):
                self._hold_bytes(cache, stacked, cast)
                for layer in stacked:
                    del places[layer.weight]
        for master, found in places.items():
            held = torch.empty_like(master, dtype=self._dtype(master, found), device=self.device)
            weight = self._weight(master, held, found)
            self._hold(Unit([weight], partial(self._copy, weight)))

    def _hold_bytes(self, cache: WeightCache, layers: Sequence[Any], cast: Cast) -> None:
        """Hold the bytes of layers that run as one GEMM, stacked along the rows, and give each layer its own."""
        masters, history = [layer.weight for layer in layers], layers[0].history_of("w")
        q, amax = self._quantize(masters, cast, history)
        cache.gathered, cache.amax, weights, start = q, amax, [], 0
        for layer, master in zip(layers, masters, strict=True):
            rows = slice(start, start := start + len(master))
            own = QTensor(q.data[rows], q.scale[rows], q.format, q.granularity) if len(layers) > 1 else q
            layer.weight_cache.gathered = own
            held = GatheredWeight(own.data, own.scale, master.dtype, q.granularity.name)
            weights.append(self._weight(master, held, [(layer, "weight")]))

        def send() -> None:
            new, new_amax = self._quantize(masters, cast, history)
            q.data.copy_(new.data)
            q.scale.copy_(new.scale)
            if amax is not None and new_amax is not None:
                amax.copy_(new_amax)

        self._hold(Unit(weights, send, history))

    def _quantize(self, masters: Sequence[Tensor], cast: Cast, history: Any) -> tuple[QTensor, Tensor | None]:
        """The bytes of masters that run as one GEMM, and, where a history gives the scale, their amax [1, 1]."""
        parts = [master.detach().to(self.device, non_blocking=True) for master in masters]
        if history is None:
            return (quantize_stack(parts, cast) if cast.by_row else quantize(parts[0], cast)), None
        scale = history.scale if history.ready else quantize(parts[0], cast).scale
        q, amax = quantize_scaled(parts[0], scale, cast)
        # as a layer does: the bytes of a tensor that is not finite are NaN, which such a scale does not show
        return QTensor(q.data, torch.where(amax.isfinite(), scale, torch.nan), q.format, q.granularity), amax

    def _dtype(self, master: Tensor, places: list[tuple[nn.Module, str]]) -> torch.dtype:
        """The dtype in which a weight is held whose layers read numbers: BF16 where they read no more of it."""
        layer: Any = places[0][0]
        linear = type(layer) is nn.Linear or (isinstance(layer, Linear) and not layer.recipe.quantized)
        narrow = linear and master.ndim == 2 and len(places) == 1 and layer in self._block_of
        return torch.bfloat16 if narrow and self.config.precision == "bf16" else master.dtype

    def _copy(self, weight: HostWeight) -> None:
        weight.held.detach().copy_(weight.master.detach().to(self.device, non_blocking=True))

    def _weight(self, master: Any, held: Tensor, places: list[tuple[nn.Module, str]]) -> HostWeight:
        parameter = nn.Parameter(held, requires_grad=master.requires_grad)
        weight = HostWeight(master, parameter, places, self._grads.get(master, held))
        if master.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: self._leave(weight))  # type: ignore[no-untyped-call]
        return weight

    def _hold(self, unit: Unit) -> None:
        self._units[self._block_of.get(unit.weights[0].places[0][0], -1)].append(unit)

    def _weights(self) -> Iterator[HostWeight]:
        """In the order in which a forward pass waits for them."""
        return (weight for block in sorted(self._units) for unit in self._units[block] for weight in unit.weights)

    # ---- A pass.

    @contextmanager
    def on_device(self, *, beside: bool) -> Iterator[None]:
        """Within the block the modules have the tensors of the device. After it the masters have the gradients.

        `beside`: a step follows, whose updates may run beside the passes before and after it.
        """
        layers = [module for module in self.model.modules() if isinstance(module, Linear)]
        if self._recipes != (recipes := [layer.recipe for layer in layers]):
            self.wait()
            self._build(layers)
            self._recipes = recipes
        self.beside = beside
        for weight in self._weights():
            weight.left, weight.norm = 0, None
        self._in.wait_stream(self._streams.current_stream())  # the pass before has read the copies
        self._await(-1)
        self._swap(held=True)
        try:
            yield
        finally:
            self._swap(held=False)
            while self._leaving:
                self._arrive()
        for weight in self._weights():
            if weight.left:
                weight.master.grad = weight.grad

    def _swap(self, *, held: bool) -> None:
        for weight in self._weights():
            for module, name in weight.places:
                module._parameters[name] = weight.held if held else weight.master

    def _wait_before(self, block: Any, number: int) -> None:
        """Let a block wait for its weights. The code of a compiled one stays as it is."""
        compiled = block._compiled_call_impl
        if compiled is None:
            block.register_forward_pre_hook(lambda *_: self._await(number))
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            self._await(number)
            return compiled(*args, **kwargs)

        block._compiled_call_impl = call

    @torch.no_grad()
    def _await(self, block: int) -> None:
        """Wait for the masters of a block, and send those that were written since; the stream that computes waits."""
        for unit in self._units.get(block, ()):
            for weight in unit.weights:
                _settle(weight)
            if (key := _key(unit)) != unit.key:
                with self._streams.stream(self._in):
                    unit.send()
                self._streams.current_stream().wait_stream(self._in)
                unit.key = key

    # ---- Gradients.

    @torch.no_grad()
    def _leave(self, weight: HostWeight) -> None:
        """Send a gradient that autograd has accumulated to the CPU."""
        grad: Any = weight.held.grad
        weight.held.grad = None
        self._out.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._out):
            total = grad.float()
            if weight.left:
                total = total + weight.grad.to(self.device, non_blocking=True)
            [norm] = torch._foreach_norm([total])
            weight.grad.copy_(total, non_blocking=True)
            weight.norm = norm.to("cpu", non_blocking=True)
            sent = self._streams.Event()
            sent.record()
        weight.left += 1
        begins = self.beside and self._at_once and weight.left == self.config.accumulate
        self._leaving.append((sent, grad, weight if begins else None))
        while self._leaving and (len(self._leaving) > STAGED or self._leaving[0][0].query()):
            self._arrive()

    def _arrive(self) -> None:
        """Wait for the first of the gradients that leave, and drop the device's."""
        sent, _, weight = self._leaving.popleft()
        sent.synchronize()
        if weight is not None and weight.norm is not None and weight.norm.isfinite():
            self._begin(weight, None)

    @property
    def _at_once(self) -> bool:
        return self.config.clip == 0 and self.config.watch.on_warning != "promote"  # a promotion repeats a step

    def clip(self, limit: float) -> Tensor:
        """Let the next update scale all gradients so that their norm is at most `limit`. The norm before, 0-dim."""
        norms = {weight.master: weight.norm for weight in self._weights() if weight.norm is not None}
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norms[p] for p in self._group_of if p in norms]))
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        self._factor = factor if factor < 1 else None
        return norm

    # ---- AdamW.

    def update(self) -> None:
        """Begin to update the masters that have gradients and are not updated in this step."""
        for weight in self._weights():
            if weight.left and not weight.update:
                self._begin(weight, self._factor)

    @torch.no_grad()
    def _begin(self, weight: HostWeight, factor: Tensor | None) -> None:
        group, state = self._group_of[weight.master], self.optimizer.state[weight.master]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options["beta1"], options["beta2"] = group["betas"]
        state["step"] += 1
        increment_version(weight.master)  # which the operation leaves as it is
        tensors = weight.master.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"]
        chunks = zip(*(t.view(-1).split(CHUNK) for t in tensors), strict=True)
        call = partial(_update, state["step"], factor, options)
        weight.update = [self._threads.submit(call, *chunk) for chunk in chunks]

    def wait(self) -> None:
        """Wait until the masters are updated, and no copy reads or writes them: before others do."""
        for weight in self._weights():
            _settle(weight)
        self._streams.synchronize()


def _update(
    step: Tensor, factor: Tensor | None, options: dict[str, Any], p: Tensor, g: Tensor, m: Tensor, v: Tensor
) -> None:
    if factor is not None:
        g.mul_(factor)
    torch._fused_adamw_([p], [g], [m], [v], [], [step], **options)


def _settle(weight: HostWeight) -> None:
    """Wait until a master is updated. Raises the error of a thread, and does so again in each later pass."""
    for done in weight.update:
        done.result()
    weight.update = []


def _key(unit: Unit) -> tuple[Any, ...]:
    scale = unit.history and (unit.history.ready, unit.history.scale._version)
    return scale, *(weight.master._version for weight in unit.weights)


def reads_bytes(layer: Any) -> bool:
    """True if the GEMMs of a linear layer read no number of its weight but its bytes and scales."""
    recipe = getattr(layer, "recipe", None)
    if not isinstance(layer, Linear) or recipe is None or recipe.y is None or recipe.w is None or recipe.reads_w_twice:
        return False
    backward = recipe.dx is not None or recipe.exact_backward
    return backward and recipe.w.rounding == "nearest" and recipe.w.scale != "e4m3" and "dx" not in recipe.rotate
