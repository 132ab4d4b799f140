"""FP32 weights, moments and AdamW in the CPU's memory; on the device, what the layers read of each weight.

    CPU      masters (FP32 weights), their gradients, AdamW's moments
    device   bytes and scales of the weights that FP8 layers read, one byte a weight; BF16 or FP32 copies of the others

    forward    a block waits for its own weights; they come in FP32, and are quantized on the device
    backward   a gradient leaves the device when autograd has it; a thread adds it to that of earlier micro-batches
    clipping   takes the norm of all gradients: AdamW begins after the backward pass
    AdamW      a second thread, weight by weight, in the order in which the next forward pass reads them

So AdamW runs beside the next forward pass. Without clipping each weight is updated when its gradient has come, beside
the backward pass. A gradient that is not finite then keeps its own weight as it was. Those before it have changed.

The parameters of the model are the masters: checkpoints, optimizer and watch see these. Within `on_device` the modules
have the tensors of the device in their place.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import PriorityQueue
from threading import Event, Semaphore
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from octavo.nn.linear import Linear, WeightCache
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import Cast, QTensor
from octavo.ops import quantize, quantize_scaled, quantize_stack
from octavo.scales import cached_stacks
from octavo.train.processes import pin, unpin

CHUNK = 1 << 21  # elements that are clipped and updated while they are in the cache of the processor
STAGED = 4  # gradients of later micro-batches that are on their way at a time


class HostAdamW(torch.optim.AdamW):
    """AdamW on masters, by the threads of `HostMasters`. A step that is sampled ends when all are updated."""

    hosted: "HostMasters"
    found_inf: Tensor
    watch: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if not self.found_inf:
            self.hosted.update()
        if self.sampled:
            self.hosted.wait()

    @property
    def sampled(self) -> bool:
        """True if the watch reads the weights before and after this step."""
        return self.watch is not None and self.watch.samples


@dataclass(eq=False)
class HostWeight:
    """A master, the parameter `held` in its place on the device, the modules that have it, and its FP32 gradient."""

    master: nn.Parameter
    held: nn.Parameter
    places: list[tuple[nn.Module, str]]
    grad: Tensor
    arrived: int = 0  # micro-batches of this step whose gradients were sent
    norm: Tensor | None = None  # of the gradient of all micro-batches
    unit: Any = None


@dataclass(eq=False)
class Unit:
    """Weights that are sent together: those that run as one GEMM, or one. `block` is the number of their block."""

    weights: list[HostWeight]
    block: int
    sent: Any  # the event of the last copy
    cast: Cast | None = None  # of those that are held as bytes, and their bytes, stacked along the rows
    q: QTensor | None = None
    history: Any = None  # of the scale, if it has one, and the amax that this history records
    amax: Tensor | None = None
    key: tuple[Any, ...] = ()  # differs where a master was written since
    ready: Event = field(default_factory=Event)  # the copy of this pass is in the stream
    updated: bool = False  # in this step


class HostMasters:
    """Keeps the masters of a model on the CPU, and tensors of `device` that stand for them in a pass.

    Args:
        model: converted, and compiled if it is to be. Its buffers are moved to `device`.
        blocks: of the model, in the order of the forward pass.
        narrow: whether layers of blocks that are not in FP8 compute in BF16, so that they read no more of a weight.
        accumulate: micro-batches of a step.
        at_once: without clipping, to update each weight when its gradient has come.
    """

    optimizer: HostAdamW

    def __init__(
        self, model: nn.Module, blocks: Iterable[Any], device: torch.device, *,
        narrow: bool, accumulate: int, at_once: bool,
    ) -> None:  # fmt: skip
        self.model, self.device, self.narrow, self.accumulate, self.at_once = model, device, narrow, accumulate, at_once
        self.units: list[Unit] = []
        self._streams: Any = torch.get_device_module(device)
        self._in, self._out = self._streams.Stream(device), self._streams.Stream(device)
        self._arriving, self._updating = ThreadPoolExecutor(1, "gradients"), ThreadPoolExecutor(1, "adamw")
        self._arrivals: list[Future[None]] = []
        self._updates: list[Future[None]] = []
        self._queue: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()
        self._count, self._slots, self._updates_now = count(), Semaphore(STAGED), False
        self._error: BaseException | None = None
        self._factor: Tensor | None = None
        self._recipes: list[Any] = []
        self._block_of = {module: i for i, block in enumerate(blocks) for module in block.modules()}
        self._grads = {p: torch.empty_like(p, requires_grad=False) for p in model.parameters() if p.requires_grad}
        self._pinned = [pin(t.detach()) for t in (*self._grads, *self._grads.values()) if device.type == "cuda"]
        for module in model.modules():
            module._buffers.update({name: b if b is None else b.to(device) for name, b in module._buffers.items()})
        for p in model.parameters():
            p.computing_device = device  # type: ignore[attr-defined]
        for i, block in enumerate(blocks):
            self._wait_before(block, i)

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
        self.units, rest = [], dict(places)
        stacks: list[Any] = list(cached_stacks(self.model))
        stacks += [(layer.weight_cache, [layer], layer.recipe.w) for layer in layers if layer.history_of("w")]
        for cache, stacked, cast in stacks:
            if all(reads_bytes(layer) and len(places[layer.weight]) == 1 for layer in stacked):
                self._hold_bytes(cache, stacked, cast)
                for layer in stacked:
                    del rest[layer.weight]
        for master, found in rest.items():
            self._hold([self._weight(master, self._copy(master, *found), found)])
        self.units.sort(key=lambda unit: unit.block)

    def _hold_bytes(self, cache: WeightCache, layers: Sequence[Any], cast: Cast) -> None:
        """Quantize the weights of layers that run as one GEMM, and give each layer its rows."""
        masters, history = [layer.weight for layer in layers], layers[0].history_of("w")
        q, amax = self._quantize(masters, cast, history)
        cache.gathered, weights, start = q, [], 0
        for layer, master in zip(layers, masters, strict=True):
            rows = slice(start, start := start + len(master))
            data, scale = (q.data[rows], q.scale[rows]) if len(layers) > 1 else (q.data, q.scale)
            layer.weight_cache.gathered = QTensor(data, scale, q.format, q.granularity)
            layer.weight_cache.amax = amax
            held = GatheredWeight(data, scale, master.dtype, q.granularity.name)
            weights.append(self._weight(master, held, [(layer, "weight")]))
        self._hold(weights, cast=cast, q=q, history=history, amax=amax)

    def _copy(self, master: Tensor, place: tuple[nn.Module, str], *others: Any) -> Tensor:
        """A copy on the device of a weight that is read as a number."""
        layer: Any = place[0]
        linear = type(layer) is nn.Linear or (isinstance(layer, Linear) and not layer.recipe.quantized)
        narrow = self.narrow and linear and master.ndim == 2 and not others and layer in self._block_of
        return master.detach().to(self.device, torch.bfloat16 if narrow else master.dtype, copy=True)

    def _weight(self, master: Any, held: Tensor, places: list[tuple[nn.Module, str]]) -> HostWeight:
        parameter = nn.Parameter(held, requires_grad=master.requires_grad)
        weight = HostWeight(master, parameter, places, self._grads.get(master, held))
        if master.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: self._leave(weight))  # type: ignore[no-untyped-call]
        return weight

    def _hold(self, weights: list[HostWeight], **options: Any) -> None:
        block = self._block_of.get(weights[0].places[0][0], -1)
        unit = Unit(weights, block, self._streams.Event(), **options)
        unit.key = _key(unit)
        for weight in weights:
            weight.unit = unit
        self.units.append(unit)

    def _quantize(self, masters: Sequence[Tensor], cast: Cast, history: Any) -> tuple[QTensor, Tensor | None]:
        """The bytes of masters that run as one GEMM, and, where a history gives the scale, their amax [1, 1]."""
        parts = [master.detach().to(self.device, non_blocking=True) for master in masters]
        if history is None:
            return (quantize_stack(parts, cast) if cast.by_row else quantize(parts[0], cast)), None
        scale = history.scale if history.ready else quantize(parts[0], cast).scale
        q, amax = quantize_scaled(parts[0], scale, cast)
        # as a layer does: the bytes of a tensor that is not finite are NaN, which such a scale does not show
        return QTensor(q.data, torch.where(amax.isfinite(), scale, torch.nan), q.format, q.granularity), amax

    # ---- A pass.

    @contextmanager
    def on_device(self, *, update: bool = False) -> Iterator[None]:
        """Within the block the modules have the tensors of the device. After it the masters have the gradients.

        `update`: the passes are those of a step, whose updates may begin before the block ends.
        """
        layers = [module for module in self.model.modules() if isinstance(module, Linear)]
        if self._recipes != (recipes := [layer.recipe for layer in layers]):
            self.wait()
            self._build(layers)
            self._recipes = recipes
        self._updates_now, free = update and self.at_once and not self.optimizer.sampled, self._now()
        for unit in self.units:
            unit.updated = False
            unit.ready.clear()
            self._enqueue(unit, partial(self._refresh, unit, free))
        for weight in self._weights():
            weight.arrived, weight.norm = 0, None
        self._await(-1)
        self._swap(held=True)
        try:
            yield
        finally:
            self._swap(held=False)
        self._settle(self._arrivals)
        for weight in self._weights():
            if weight.arrived:
                weight.master.grad = weight.grad

    def _weights(self) -> Iterator[HostWeight]:
        return (weight for unit in self.units for weight in unit.weights)

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

    def _await(self, block: int) -> None:
        """Let the stream that computes wait for the weights of a block; -1 for those of none."""
        for unit in self.units:
            if unit.block == block:
                unit.ready.wait()
                self._streams.current_stream().wait_event(unit.sent)
        self._settle([])

    def _now(self) -> Any:
        event = self._streams.Event()
        event.record(self._streams.current_stream())
        return event

    # ---- Gradients.

    @torch.no_grad()
    def _leave(self, weight: HostWeight) -> None:
        """Send a gradient that autograd has accumulated to the CPU; later micro-batches by way of other memory."""
        grad: Any = weight.held.grad
        weight.held.grad = None
        weight.arrived += 1
        free, into = self._now(), weight.grad
        if weight.arrived > 1:
            self._slots.acquire()
            into = torch.empty(grad.shape, pin_memory=grad.is_cuda)
        with self._streams.stream(self._out):
            self._out.wait_event(free)
            into.copy_(grad.float(), non_blocking=True)
            arrived = self._now()
        if grad.is_cuda:
            grad.record_stream(self._out)
        last = weight.arrived == self.accumulate
        self._arrivals.append(self._arriving.submit(self._arrive, weight, into, last, arrived, free))

    @torch.no_grad()
    def _arrive(self, weight: HostWeight, into: Tensor, last: bool, arrived: Any, free: Any) -> None:
        arrived.synchronize()
        if into is not weight.grad:
            weight.grad.add_(into)
            self._slots.release()
        if not last:
            return
        [weight.norm] = torch._foreach_norm([weight.grad])
        norms, unit = [each.norm for each in weight.unit.weights], weight.unit
        if self._updates_now and all(norm is not None for norm in norms):
            unit.updated = True
            if all(norm.isfinite() for norm in norms):
                self._begin_update(unit, None, free)

    def clip(self, limit: float) -> Tensor:
        """Let the next update scale all gradients so that their norm is at most `limit`. The norm before, 0-dim."""
        norms = {weight.master: weight.norm for weight in self._weights()}
        trained = (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
        found: list[Any] = [torch._foreach_norm([p.grad])[0] if norms[p] is None else norms[p] for p in trained]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(found))
        self._factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        return norm

    # ---- AdamW, and the copies that follow it.

    @contextmanager
    def updated_by(self, optimizer: Any) -> Iterator[None]:
        """Within the block the masters are updated by `optimizer`, a `HostAdamW`. After it the threads have ended."""
        self.optimizer, optimizer.hosted = optimizer, self
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        try:
            yield
        finally:
            self._arriving.shutdown()
            self._updating.shutdown()
            for t in self._pinned:
                unpin(t)

    def update(self) -> None:
        """Begin to update the masters that have gradients and are not updated in this step."""
        free = self._now()
        for unit in self.units:
            if not unit.updated:
                self._begin_update(unit, self._factor, free)

    def _begin_update(self, unit: Unit, factor: Tensor | None, free: Any) -> None:
        rate = self.optimizer.param_groups[0]["lr"]  # of this step: the next one sets another
        if weights := [weight for weight in unit.weights if weight.arrived]:
            self._enqueue(unit, partial(self._update, unit, weights, rate, factor, free))

    @torch.no_grad()
    def _update(self, unit: Unit, weights: list[HostWeight], rate: float, factor: Tensor | None, free: Any) -> None:
        for weight in weights:
            state, group = self.optimizer.state[weight.master], self._group_of[weight.master]
            settings = {name: group[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")}
            beta1, beta2 = group["betas"]
            state["step"] += 1
            tensors = weight.master.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"]
            for p, g, m, v in zip(*(t.view(-1).split(CHUNK) for t in tensors), strict=True):
                if factor is not None and factor < 1:
                    g.mul_(factor)
                torch._fused_adamw_(
                    [p], [g], [m], [v], [], [state["step"]], lr=rate, beta1=beta1, beta2=beta2, **settings
                )  # fmt: skip
            increment_version(weight.master)  # which that operation leaves as it is
        if unit.history is None:  # otherwise the scale is known after the step
            self._send(unit, free)

    def _refresh(self, unit: Unit, free: Any) -> None:
        self._send(unit, free)
        unit.ready.set()

    @torch.no_grad()
    def _send(self, unit: Unit, free: Any) -> None:
        """Send the masters of a unit to the device if they were written since, when its memory there is `free`."""
        if (key := _key(unit)) == unit.key:
            return
        with self._streams.stream(self._in):
            self._in.wait_event(free)
            if unit.cast is None or unit.q is None:
                master, held = unit.weights[0].master, unit.weights[0].held
                sent = master if held.dtype == master.dtype else master.to(self.device, non_blocking=True)
                held.copy_(sent, non_blocking=True)
            else:
                q, amax = self._quantize([weight.master for weight in unit.weights], unit.cast, unit.history)
                unit.q.data.copy_(q.data)
                unit.q.scale.copy_(q.scale)
                if unit.amax is not None and amax is not None:
                    unit.amax.copy_(amax)
            unit.sent.record(self._in)
        unit.key = key

    # ---- The threads.

    def _enqueue(self, unit: Unit, job: Callable[[], None]) -> None:
        """Run `job` before those of later blocks, and after earlier ones of its own."""
        self._queue.put((unit.block, next(self._count), job))
        self._updates.append(self._updating.submit(self._run_next))

    def _run_next(self) -> None:
        try:
            self._queue.get()[-1]()
        except BaseException as error:
            self._error = error
            for unit in self.units:  # no pass may wait for ever
                unit.ready.set()

    def _settle(self, futures: list[Future[None]]) -> None:
        while futures:
            futures.pop().result()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the masters are updated and sent: before others read or write them."""
        self._settle(self._updates)
        self._streams.synchronize()


def _key(unit: Unit) -> tuple[Any, ...]:
    scale = unit.history and (unit.history.ready, unit.history.scale._version)
    return scale, *((weight.master._version, weight.master.data_ptr()) for weight in unit.weights)


def reads_bytes(layer: Any) -> bool:
    """True if the GEMMs of a linear layer read no number of its weight but its bytes and scales."""
    recipe = getattr(layer, "recipe", None)
    if not isinstance(layer, Linear) or recipe is None or recipe.y is None or recipe.w is None or recipe.reads_w_twice:
        return False
    backward = recipe.dx is not None or recipe.exact_backward
    return backward and recipe.w.rounding == "nearest" and recipe.w.scale != "e4m3" and "dx" not in recipe.rotate
