"""Generation with one model: a cache of fixed size, decoding steps as CUDA graphs, and prompts in pieces.

    engine = Engine(model, context=4096)
    for tokens in engine.generate([[1, 2, 3], [4, 5]], 100, Sampling(temperature=0)):
        ...                                            one token of each prompt; None after its end

A session (`octavo.inference.session`) belongs to one batch size and has room for a number of tokens. It stays after a
call, so that the next call of the same batch size replays its graph. On a CPU the same code runs without graphs.
"""

import threading
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.inference import session as sessions
from octavo.inference.kv_cache import Pairs, UnservedError, check_settings, sliding_window
from octavo.inference.sampling import Sampling
from octavo.inference.session import Prompts, Session, free_bytes
from octavo.models.decoder import Decoder
from octavo.nn.module_tools import watched
from octavo.ops import fp8_attention_limit, index_of_largest
from octavo.ops.launching import compile_only, has_kernels

# ---- The loop that chooses tokens, one step after another, without a wait of the device for the host.
#
#     logits = prompt;  repeat:  tokens = choose(ids, logits);  logits = step(tokens);  read what the choice was
#
# A step is queued before the host reads the tokens that it starts from, so the device always has work: the host reads,
# streams and decides to stop while the step runs. When all sequences have ended, the step already queued is dropped.


Choose = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]


class Stop(NamedTuple):
    """When sequences end: `ended` takes the ids [B, n] and returns a boolean [B], True for each sequence that its last
    token has ended. The token `pad` fills the row of a sequence that has ended."""

    ended: Callable[[Tensor], Tensor]
    pad: Tensor | int


def send(tokens: Tensor, running: Tensor) -> Callable[[], tuple[Tensor, bool]]:
    """Begin to copy the tokens [B] of a step to the host. The result waits for the copy, and gives the tokens and
    whether a sequence is `running`."""
    box = torch.cat((tokens, running.any().view(1).long())).to("cpu", non_blocking=True)  # pinned, where from a GPU
    copied = torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None

    def read() -> tuple[Tensor, bool]:
        if copied is not None:
            copied.synchronize()
        return box[:-1], bool(box[-1])

    return read


def decode(
    prompts: Tensor, new: int, logits: Tensor, choose: Choose, step: Step, stop: Stop | None, watched: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Choose up to `new` tokens for each of the prompts, int64 [B, T], until all sequences have ended.

    `logits` [B, V] follow the prompts. `choose` takes ids [B, n] and logits, and returns the next tokens [B]; `step`
    takes these and returns the logits after them, and may overwrite the former logits. Without `stop`, all sequences
    have `new` tokens; if the caller does not read them either (`watched`), nothing waits for the device.

    Yields all ids so far, int64 [B, n], and the last tokens [B] on the host, or None if the caller does not read them.
    """
    batch, begin = prompts.shape
    ids = torch.empty(batch, begin + new, dtype=torch.int64, device=prompts.device)
    ids[:, :begin] = prompts
    running = torch.ones(batch, dtype=torch.bool, device=ids.device)
    reads = watched or stop is not None
    for n in range(begin + 1, ids.shape[1] + 1):
        tokens = choose(ids[:, : n - 1], logits)
        if stop is not None:
            tokens = torch.where(running, tokens, stop.pad)
        ids[:, n - 1] = tokens
        if stop is not None:
            running = running & ~stop.ended(ids[:, :n])
        read = send(tokens, running) if reads else None
        if n < ids.shape[1]:
            logits = step(tokens)
        if read is None:
            yield ids[:, :n], None
            continue
        found, goes_on = read()
        yield ids[:, :n], found
        if not goes_on:
            return


# ---- Generation with one model.


AUTO = "auto"
SESSIONS = 4  # at most; the one unused for the longest time goes first


class Engine:
    """Generates with one language model. One generation runs at a time; another thread waits for its end.

    Args:
        model: of `octavo.models` or of transformers, in evaluation mode.
        context: tokens that the model sees. A cache holds no more than its sliding window (`limit`).
        kv_cache: dtype of keys and values: "bf16", "fp16", "fp32", "fp8" or "int8". "auto" is "fp8" if there are
            scales for it, else the dtype that the model computes keys in.
        kv_scales: of an FP8 cache, a pair for each layer (of keys, of values), float32 with one element or one a head.
            None computes them from each prompt.
        attention: of prompts, "bf16" or "fp8", see `octavo.load`.
        own_cache: keys and values are in the cache that a model of transformers makes for itself.

    Raises:
        ValueError: the dtype, or the attention, is unknown.
    """

    def __init__(
        self,
        model: Any,
        *,
        context: int,
        kv_cache: str = AUTO,
        kv_scales: Pairs | None = None,
        attention: str = "bf16",
        own_cache: bool = False,
    ) -> None:
        dtype = ("fp8" if kv_scales else None) if kv_cache == AUTO else kv_cache
        check_settings(dtype, attention=attention)
        self.model, self.context, self.dtype, self.own_cache = model, context, dtype, own_cache
        self.scales = kv_scales if dtype == "fp8" else None
        self.asked, self.fp8_attention = kv_cache != AUTO, attention == "fp8"
        whole = own_cache or isinstance(model, Decoder)
        window = None if whole else sliding_window(model.config.get_text_config(decoder=True))
        self.limit = context if window is None else min(context, window)
        self.sessions: list[Session] = []  # the one used last is the last
        self.lock = threading.Lock()
        self.owner: int | None = None  # the thread that generates
        self.stream: torch.cuda.Stream | None = None  # of the last generation, whose last step may still run
        self.parts: list[Any] = []  # of the model, when the sessions were made
        self.hooked = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of the model: all but the sessions, whose graphs are of this model's memory."""
        return self.__dict__ | {"sessions": [], "lock": None, "owner": None, "stream": None, "parts": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"lock": threading.Lock()})

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def check_length(self, prompt: int, new: int) -> None:
        """Raise a ValueError unless `new` tokens after a prompt of `prompt` tokens fit in the cache."""
        if prompt > self.limit:
            raise ValueError(f"the model sees {self.limit} tokens, the prompt has {prompt} with padding: shorten it")
        if prompt + new - 1 > self.limit:
            raise ValueError(
                f"the model sees {self.limit} tokens: after a prompt of {prompt} it can generate "
                f"{self.limit + 1 - prompt} more, not {new}. Lower max_new_tokens or max_length, or shorten the prompt"
            )

    @torch.no_grad()
    def run(
        self, prompts: Prompts, new: int, choose: Choose, stop: Stop | None, *, watched: bool, piece: int | None = None
    ) -> Generator[tuple[Tensor, Tensor | None], None, None]:
        """Generate up to `new` tokens after the prompts, and yield what `decode` does.

        One forward pass of the prompts takes `piece` tokens of a row; None bounds the tokens of all rows. Raises what
        `generate` raises, and an UnservedError if the cache does not serve the model's attention.
        """
        batch, begin = prompts.ids.shape
        self.check_length(begin, new)
        with self.alone():
            self._refresh()
            session = self._session(batch, begin + new - 1)
            try:
                logits = session.prefill(prompts, piece)
            except UnservedError:  # of the code of the model, which no configuration shows
                if self.asked:
                    raise
                self.own_cache = True
                session = self._session(batch, begin + new - 1)
                logits = session.prefill(prompts)
            yield from decode(prompts.ids, new, logits, choose, session.step, stop, watched)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, stop: Collection[int] = ()
    ) -> Generator[list[int | None], None, None]:
        """Yield the next token of each prompt, up to `count` times; None for a prompt whose text has ended.

        A text that outgrows the context continues from its last `limit` // 2 tokens, at least one, as if they were all.

        Args:
            prompts: token ids, one list a prompt, of any lengths; or a tensor [B, T].
            count: number of tokens.
            sampling: how tokens are drawn.
            stop: tokens that end a text; they are not yielded.

        Raises:
            ValueError: no prompt, an empty one, or one longer than the context.
            MemoryError: the cache does not fit on the device.
            RuntimeError: this thread generates from the model already.
        """
        batch = sessions.pad_prompts(prompts, self.device)
        self.check_length(batch.ids.shape[1], 1)
        return self._generate(batch, count, sampling, stop)

    @torch.inference_mode()
    def _generate(
        self, batch: Prompts, count: int, sampling: Sampling, stop: Collection[int]
    ) -> Generator[list[int | None], None, None]:
        random, rows = sampling.generator(self.device), range(batch.ids.shape[0])
        ending = torch.tensor(sorted(stop), device=self.device)
        ended = [False for _ in rows]
        while count > 0 and not all(ended):
            new = min(count, self.limit + 1 - batch.ids.shape[1])
            choose = sampling.chooser(random, batch.padding)
            halt = Stop(lambda ids: torch.isin(ids[:, -1], ending), 0) if stop else None
            with closing(self.run(batch, new, choose, halt, watched=True)) as steps:
                for text, tokens in steps:
                    assert tokens is not None
                    ids = text
                    found = tokens.tolist()
                    ended = [ended[i] or found[i] in stop for i in rows]
                    if all(ended):
                        return
                    yield [None if ended[i] else found[i] for i in rows]
            count -= new
            dropped = ids.shape[1] - (self.limit // 2 or 1)
            batch = Prompts(ids[:, dropped:], tuple(max(0, padding - dropped) for padding in batch.padding))

    def warm_up(self, batch: int = 1, tokens: int = 256, new: int = 3) -> None:
        """Compile the kernels for prompts of `tokens` tokens, and capture the decoding step of a batch with room for
        `new` more, as a first call would. A call that needs more room than that may capture again."""
        length = max(1, min(tokens, self.limit - 3))
        prompts, room = sessions.pad_prompts([[0] * length] * batch, self.device), min(new, self.limit + 1 - length)
        if has_kernels(self.device) and not self.own_cache:
            self._compile(prompts, room)
        with closing(self.run(prompts, room, lambda _, logits: index_of_largest(logits), None, watched=False)) as steps:
            for _ in islice(steps, 3):
                pass
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def _compile(self, prompts: Prompts, new: int) -> None:
        """Compile the kernels of a first call in several threads. The session is dropped: its cache is empty."""
        with self.alone(), compile_only():
            batch, begin = prompts.ids.shape
            session = self._new_session(batch, begin + new - 1)
            session.captures = False
            logits = session.prefill(prompts)
            if new > 1:
                session.step(logits.argmax(-1))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread generates. The current stream waits for what the last generation has queued."""
        if self.owner == threading.get_ident():
            raise RuntimeError("this model is generating: finish that generation, or close its iterator, first")
        with self.lock:
            if self.device.type == "cuda":
                before, self.stream = self.stream, torch.cuda.current_stream(self.device)
                self.stream.wait_stream(before or self.stream)
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = None

    # --- Sessions ----------------------------------------------------------------------------------------------

    def _session(self, batch: int, tokens: int) -> Session:
        """A session with room for `tokens` tokens of each sequence: one of former calls, or a new one."""
        if self.own_cache:
            from octavo.inference.transformers_cache import OwnCacheSession

            return OwnCacheSession(self.model)  # type: ignore[return-value]
        fitting = [s for s in self.sessions if s.batch == batch and s.capacity >= tokens]
        if fitting:
            session = min(fitting, key=lambda s: s.capacity)
            self.sessions.remove(session)
        else:
            self.sessions = [s for s in self.sessions if s.batch != batch][1 - SESSIONS :]
            session = self._new_session(batch, tokens)
        self.sessions.append(session)
        return session

    def _new_session(self, batch: int, tokens: int) -> Session:
        capacity, device = sessions.capacity_for(tokens, self.limit), self.device
        shape = sessions.key_shape(self.model, self.dtype)
        needed = shape.nbytes(batch * capacity)
        while self.sessions and needed > free_bytes(device):
            self.sessions.pop(0)
        if needed > free_bytes(device):
            capacity = tokens
        sessions.check_memory(shape, batch, capacity, free_bytes(device))
        forward = sessions.make_forward(self.model, capacity, self.dtype, self.scales)
        if self.fp8_attention:
            if limit := fp8_attention_limit(device, shape.head_dim):
                warnings.warn(f"the attention of prompts runs in BF16: {limit}", stacklevel=2)
            forward.cache.fp8_attention = not limit
        return Session(forward, batch, device, captures=device.type == "cuda" and not self.hooked)

    def _refresh(self) -> None:
        """Drop the sessions, with their graphs, of a model that has changed. One with hooks runs eagerly."""
        parts = [self.device, sessions.key_dtype(self.model), *parts_of(self.model)]
        if parts != self.parts:
            self.parts = parts
            self.hooked = any(watched(module) for module in self.model.modules())
            self.sessions.clear()


def parts_of(model: nn.Module) -> list[Any]:
    """The modules of a model, the memory of their tensors, their hooks, and the state of PEFT's adapters: while these
    are the same, a CUDA graph of the model holds. `named_modules` and its relatives take three times as long."""
    parts: list[Any] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            parts += (id(module), type(module), watched(module))
            if "_active_adapter" in module.__dict__:
                state = "disable_adapters", "active_adapters", "merged_adapters", "scaling"
                parts += [repr(getattr(module, name, None)) for name in state]
            parts += (t.data_ptr() for t in module._parameters.values() if t is not None)
            parts += (t.data_ptr() for t in module._buffers.values() if t is not None)
            waiting += module._modules.values()
    return parts


def open_engine(model: Any, *, context: int, tokens: int, **settings: Any) -> Engine:
    """An `Engine` for texts of up to `tokens` tokens, prompt included, which may exceed the context. The `settings` are
    its other arguments.

    With `kv_cache="auto"`, transformers' own cache serves models and lengths that ours does not: a text longer than the
    sliding window of the model, for example. Otherwise these raise an UnservedError.
    """
    engine = Engine(model, context=context, **settings)
    try:
        sessions.make_forward(model, 1, engine.dtype, engine.scales)
        served = engine.asked or engine.limit >= min(context, tokens)
    except UnservedError as error:
        if engine.asked:
            raise UnservedError(f"{error}: leave kv_cache (--kv-cache) out, for transformers' own") from None
        served = False
    return engine if served else Engine(model, context=context, own_cache=True)
