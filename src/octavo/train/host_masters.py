"""FP32 weights, moments and AdamW in the CPU's memory; on the device, what the layers read of each weight.

    forward    a block waits for its masters to be updated; they come in FP32, and are quantized on the device
    backward   a gradient leaves on a stream of its own, which adds that of earlier micro-batches and takes the norm
    AdamW      threads of one core each, chunk by chunk, in the order in which the next forward pass reads the weights

Clipping takes the norm of all gradients: AdamW begins after the backward pass, and runs beside the next forward pass.
Without clipping it begins when a gradient has come, beside the backward pass. A gradient that is not finite then leaves
its own weight as it was, and those before it have changed. The parameters of the model are the masters. Within
`on_device` the modules have tensors of the device, which are written where a pass first reads them, and nowhere else.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear import Linear, WeightCache
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import Cast, QTensor
from octavo.recipe import Recipe
from octavo.scales import cached_stacks
from octavo.train.config import Config
from octavo.train.processes import pin, unpin

CHUNK = 1 << 20  # elements that a thread clips and updates while they are in the processor's cache
STAGED = 8  # gradients that are on their way at a time: the device holds them so long
Place = tuple[nn.Module, str]  # a module and the name of its parameter
Unit = tuple[list["HostWeight"], Callable[[], None]]  # weights that run as one GEMM, or one, and what sends them


class HostAdamW(torch.optim.AdamW):
    """AdamW on masters, by the threads of `HostMasters`."""

    hosted: "HostMasters"
    found_inf: Tensor  # of the GradScaler

    def step(self, closure: Any = None) -> Any:
        if not self.found_inf:
            self.hosted.update()
        if not self.hosted.beside:
            self.hosted.wait()


@dataclass(eq=False)
class HostWeight:
    """A master, the parameter `held` in its place on the device, the modules that have it, and its FP32 gradient."""

    master: Any
    held: nn.Parameter
    places: list[Place]
    grad: Tensor
    left: int = 0  # micro-batches of this step whose gradients were sent
    norm: Any = None  # of the sum of these
    update: Sequence[Future[None]] = ()

    def settle(self) -> None:
        for done in self.update:
            done.result()


class HostMasters:
    """Keeps the masters of a model on the CPU, and tensors of `device` that stand for them in a pass. The model is
    converted, compiled if it is to be, and on the CPU; its buffers are moved. `blocks` are in the forward's order."""

    def __init__(
        self, model: nn.Module, blocks: Iterable[Any], optimizer: HostAdamW, device: torch.device, config: Config
    ) -> None:
        self.model, self.optimizer, self.device, self.config = model, optimizer, device, config
        self.beside, self._at_once, optimizer.hosted = False, False, self
        self._streams: Any = torch.get_device_module(device)
        self._in, self._out = self._streams.Stream(device), self._streams.Stream(device)
        cores = max(torch.get_num_threads() - 1, 1)  # one is left for the thread that launches
        self._threads = ThreadPoolExecutor(cores, "adamw", torch.set_num_threads, (1,))
        self._leaving: deque[tuple[Any, Tensor, HostWeight | None]] = deque()
        self._units: dict[int, list[Unit]] = {}  # by the number of their block, -1 for those of none
        self._due: dict[int, list[Unit]] = {}  # those that this pass has not read yet
        self._weights, self._recipes = list[HostWeight](), list[Recipe]()
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._block_of = {module: i for i, block in enumerate(blocks) for module in block.modules()}
        self._grads = {p: torch.zeros_like(p, requires_grad=False) for p in self._group_of}
        self._pinned = [pin(t.detach()) for pair in self._grads.items() for t in pair if device.type == "cuda"]
        for buffer in (b for module in model.modules() for b in module.buffers(recurse=False)):
            buffer.data = buffer.to(device)
        for p in model.parameters():
            p.computing_device = device  # type: ignore[attr-defined]
        for i, block in enumerate(blocks):
            self._wait_before(block, i)

    def close(self) -> None:
        """End the threads, and give the pinned memory back."""
        self._threads.shutdown(cancel_futures=True)
        torch.set_num_threads(torch.get_num_threads())  # of threads to come, which would have one core too
        self._streams.synchronize(self.device)
        for t in self._pinned:
            unpin(t)

    # ---- What the device holds.

    @torch.no_grad()
    def _build(self) -> None:
        """Make the tensors of the device, as the recipes of the linear layers read them now."""
        self._units = defaultdict(list)
        for weight in self._weights:
            del weight.held  # its hook refers to it: the memory would be taken until Python looks for such cycles
        places = defaultdict[Any, list[Place]](list)
        for name, p in self.model.named_parameters(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            places[p].append((self.model.get_submodule(path), last))
        stacks: Any = cached_stacks(self.model)
        for cache, layers, cast in stacks:
            if all(layer.recipe.reads_bytes and len(places[layer.weight]) == 1 for layer in layers):
                self._hold_bytes(cache, layers, cast)
                for layer in layers:
                    del places[layer.weight]
        for master, found in places.items():
            [(module, _), *others] = found
            linear = isinstance(module, nn.Linear) and module in self._block_of and not others and master.ndim == 2
            casts = isinstance(module, Linear) and module.recipe.quantized
            narrow = linear and not casts and self.config.precision == "bf16"
            held = torch.empty_like(master, dtype=torch.bfloat16 if narrow else None, device=self.device)
            self._hold([(master, held, found)], partial(_copy, held, master))
        units = (unit for block in sorted(self._units) for unit in self._units[block])
        self._weights = [weight for weights, _ in units for weight in weights]  # in the order of the forward pass

    def _hold_bytes(self, cache: WeightCache, layers: Sequence[Any], cast: Cast) -> None:
        """Hold the bytes of layers that run as one GEMM, stacked along the rows, and give each layer its own."""
        masters = [layer.weight for layer in layers]
        cache.clear()

        def send() -> None:
            cache.fill([master.detach().to(self.device, non_blocking=True) for master in masters], cast)
            cache.cast_weights.clear()

        send()
        q: Any = cache.q
        cache.gathered, found, start = q, [], 0
        for layer, master in zip(layers, masters, strict=True):
            rows = slice(start, start := start + len(master))
            own = q if len(layers) == 1 else QTensor(q.data[rows], q.scale[rows], q.format, q.granularity)
            layer.weight_cache.gathered = own
            held = GatheredWeight(own.data, own.scale, master.dtype, q.granularity.name)
            found.append((master, held, [(layer, "weight")]))
        self._hold(found, send)

    def _hold(self, found: Sequence[tuple[Any, Tensor, list[Place]]], send: Callable[[], None]) -> None:
        weights = []
        for master, tensor, places in found:
            held = nn.Parameter(tensor, requires_grad=master.requires_grad)
            weights.append(weight := HostWeight(master, held, places, self._grads.get(master, tensor)))
            if master.requires_grad:
                held.register_post_accumulate_grad_hook(partial(self._leave, weight))  # type: ignore[no-untyped-call]
        self._units[self._block_of.get(found[0][2][0][0], -1)].append((weights, send))

    # ---- A pass.

    @contextmanager
    def on_device(self, beside: bool = False) -> Iterator[None]:
        """Within the block the modules have the tensors of the device. After it the masters have the gradients.
        `beside`: a step follows, whose updates may run beside the passes before and after it."""
        if self._recipes != (recipes := [m.recipe for m in self.model.modules() if isinstance(m, Linear)]):
            self.wait()
            self._build()
            self._recipes = recipes
        self.beside = beside
        # A step that a promotion repeats must have changed no weight.
        self._at_once = beside and self.config.clip == 0 and self.config.watch.on_warning != "promote"
        for weight in self._weights:
            weight.left = 0
        self._in.wait_stream(self._streams.current_stream(self.device))  # the pass before has read what the device has
        self._due = dict(self._units)
        self._await(-1)
        self._swap(held=True)
        try:
            yield
        finally:
            self._swap(held=False)
            while self._leaving:
                self._arrive()

    def _swap(self, *, held: bool) -> None:
        for weight in self._weights:
            for module, name in weight.places:
                module._parameters[name] = weight.held if held else weight.master

    def _wait_before(self, block: Any, number: int) -> None:
        """Let a block wait for its weights. The code of a compiled one stays as it is."""
        compute = block._compiled_call_impl or block._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self._await(number)
            return compute(*args, **kwargs)

        block._compiled_call_impl = call

    @torch.no_grad()
    def _await(self, block: int) -> None:
        """Where a pass first reads a block: wait for its masters, and send them; the stream that computes waits."""
        for weights, send in self._due.get(block, ()):
            for weight in weights:
                weight.settle()
                weight.update = ()
            with self._streams.stream(self._in):
                send()
            self._streams.current_stream(self.device).wait_stream(self._in)
        self._due.pop(block, None)

    # ---- Gradients, and AdamW.

    @torch.no_grad()
    def _leave(self, weight: HostWeight, held: Any) -> None:
        """Send a gradient that autograd has accumulated to the CPU."""
        grad, held.grad = held.grad, None
        self._out.wait_stream(self._streams.current_stream(self.device))
        with self._streams.stream(self._out):
            total = grad.float()
            if weight.left:
                total = total + weight.grad.to(self.device, non_blocking=True)
            [norm] = torch._foreach_norm([total])
            weight.grad.copy_(total, non_blocking=True)
            weight.norm = norm.to("cpu", non_blocking=True)
            sent = self._streams.Event()
            sent.record()
        weight.left, weight.master.grad = weight.left + 1, weight.grad
        begins = self._at_once and weight.left == self.config.accumulate
        self._leaving.append((sent, grad, weight if begins else None))
        while self._leaving and (len(self._leaving) > STAGED or self._leaving[0][0].query()):
            self._arrive()

    def _arrive(self) -> None:
        """Wait for the first of the gradients that leave, and drop the device's."""
        sent, _, weight = self._leaving.popleft()
        sent.synchronize()
        if weight is not None and weight.norm.isfinite():
            self._begin(weight, None)

    def clip(self) -> Tensor:
        """Let the next update scale all gradients so that their norm is at most `clip`. The norm before, 0-dim."""
        norms = {weight.master: weight.norm for weight in self._weights if weight.left}
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norms[p] for p in self._group_of if p in norms]))
        self._factor = torch.clamp((self.config.clip or torch.inf) / (norm + 1e-6), max=1.0)
        return norm

    def update(self) -> None:
        """Begin to update the masters that have gradients and are not updated in this step."""
        for weight in self._weights:
            if weight.left and not weight.update:
                self._begin(weight, self._factor if self._factor < 1 else None)

    @torch.no_grad()
    def _begin(self, weight: HostWeight, factor: Tensor | None) -> None:
        group, state = self._group_of[weight.master], self.optimizer.state[weight.master]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options["beta1"], options["beta2"] = group["betas"]
        state["step"] += 1
        tensors = weight.master.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"]
        call = partial(_update, state["step"], factor, options)
        chunks = zip(*(t.view(-1).split(CHUNK) for t in tensors), strict=True)
        weight.update = [self._threads.submit(call, *chunk) for chunk in chunks]

    def wait(self) -> None:
        """Wait until the masters are updated, and no copy reads or writes them: before others do."""
        for weight in self._weights:
            weight.settle()
        self._streams.synchronize(self.device)


def _copy(held: Tensor, master: Tensor) -> None:
    held.copy_(master.detach().to(held.device, non_blocking=True))


def _update(step: Tensor, factor: Tensor | None, options: Any, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    if factor is not None:
        g.mul_(factor)
    torch._fused_adamw_([p], [g], [m], [v], [], [step], **options)
