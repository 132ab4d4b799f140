"""Generation with one model: a cache of fixed size, decoding steps as CUDA graphs, and prompts in pieces.

    engine = Engine(model, context=4096)
    for tokens in engine.generate([[1, 2, 3], [4, 5]], 100, Sampling(temperature=0)):
        ...                                            one token of each prompt; None after its end

A session (`octavo.generation.session`) belongs to one batch size and has room for a number of tokens. It stays after a
call, so that the next call of the same batch size replays its graph. On a CPU the same code runs without graphs.
"""

import threading
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from octavo.generation.forward import Forward, key_dtype, key_shape, make_forward, most_tokens
from octavo.generation.loop import Choose, Stop, decode
from octavo.generation.memory import capacity_for, check_memory, fits, free_bytes
from octavo.generation.prompt_attention import check_attention, use_fp8_attention
from octavo.generation.prompts import Prompts, pad_prompts
from octavo.generation.sampling import Sampling
from octavo.generation.session import Session, prefix_worth_sharing
from octavo.kv_cache.layer import check_settings
from octavo.kv_cache.model import Pairs
from octavo.nn.norm_linear import watched
from octavo.ops.compiling import compile_only
from octavo.ops.triton_support import has_kernels

AUTO = "auto"
SESSIONS = 4  # at most; the one unused for the longest time goes first


class Engine:
    """Generates with one language model. One generation runs at a time; another thread waits for its end.

    Args:
        model: of `octavo.models` or of transformers, in evaluation mode.
        context: tokens that the model sees.
        kv_cache: dtype of keys and values: "bf16", "fp16", "fp32", "fp8" or "int8". "auto" is "fp8" if there are
            scales for it, else the dtype that the model computes keys in.
        kv_scales: of an FP8 cache, a pair for each layer (of keys, of values), float32 with one element or one a head.
            None computes them from each prompt.
        attention: of prompts, "bf16" or "fp8", see `octavo.load`.

    Raises:
        ValueError: the dtype, or the attention, is unknown.

    Attributes:
        asked: whether a dtype of the cache was asked for.
        limit: tokens that the cache may hold: the context, or the sliding window of the model.
    """

    def __init__(
        self,
        model: Any,
        *,
        context: int,
        kv_cache: str = AUTO,
        kv_scales: Pairs | None = None,
        attention: str = "bf16",
    ) -> None:
        check_attention(attention)
        dtype = ("fp8" if kv_scales else None) if kv_cache == AUTO else kv_cache
        if dtype is not None:
            check_settings(dtype, None, None)
        self.model, self.context, self.dtype = model, context, dtype
        self.scales = kv_scales if dtype == "fp8" else None
        self.asked, self.fp8_attention = kv_cache != AUTO, attention == "fp8"
        most = most_tokens(model)
        self.limit = context if most is None else min(most, context)
        self.sessions: list[Session] = []  # the one used last is the last
        self.place: tuple[torch.device, torch.dtype] | None = None  # of the keys in the sessions
        self.lock = threading.Lock()
        self.owner: int | None = None  # the thread that generates
        self.parts: list[Any] = []  # of the model, when graphs were last captured
        self.hooked = False

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of the model: all but the sessions, whose graphs are of this model's memory."""
        return self.__dict__ | {"sessions": [], "lock": None, "owner": None, "parts": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"lock": threading.Lock()})

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def check_length(self, prompt: int, new: int) -> None:
        """Raise a ValueError unless `new` tokens after a prompt of `prompt` tokens fit in the cache."""
        if prompt > self.limit:
            raise ValueError(
                f"the model sees {self.limit} tokens, and the prompt has {prompt} (padding included): shorten it"
            )
        if prompt + new - 1 > self.limit:
            raise ValueError(
                f"the model sees {self.limit} tokens: after a prompt of {prompt} it can generate "
                f"{self.limit + 1 - prompt} more, not {new}. Lower max_new_tokens or max_length, or shorten the prompt"
            )

    @torch.no_grad()
    def run(
        self, prompts: Prompts, new: int, choose: Choose, stop: Stop | None, *, watched: bool, piece: int | None = None
    ) -> Generator[tuple[Tensor, Tensor | None], None, None]:
        """Generate up to `new` tokens after the prompts.

        Args:
            prompts: of one batch.
            new: number of tokens, at least 1.
            choose, stop, watched: see `octavo.generation.loop.decode`.
            piece: tokens of a row that one forward pass of the prompt takes; None bounds the tokens of all rows.

        Yields:
            All ids so far, int64 [B, n], and the last tokens on the host, if `watched`.

        Raises:
            UnservedError: the attention of the model is of a kind that the cache does not serve.
            ValueError: the text would exceed the context.
            MemoryError: the cache does not fit on the device.
            RuntimeError: this thread generates from the model already.
        """
        batch, begin = prompts.ids.shape
        self.check_length(begin, new)
        with self._alone():
            session = self._session(batch, begin + new - 1)
            logits = session.prefill(prompts, self._shared(prompts), piece)
            if new > 1:  # while the device works on the prompt
                self._refresh()
            yield from decode(prompts.ids, new, logits, choose, session.step, stop, watched)

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, stop: Collection[int] = ()
    ) -> Generator[list[int | None], None, None]:
        """Yield the next token of each prompt, up to `count` times; None for a prompt whose text has ended.

        A text that outgrows the context continues from its last `limit` // 2 tokens, as if they were the whole text.

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
        batch = pad_prompts(prompts, self.device)
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
            batch = _last_tokens(Prompts(ids, batch.padding), self.limit // 2)

    def warm_up(self, batch: int = 1, tokens: int = 256, new: int = 3) -> None:
        """Compile the kernels for prompts of `tokens` tokens, and capture the decoding step of a batch with room for
        `new` more, as a first call would. A call that needs more room than that may capture again."""
        length = max(1, min(tokens, self.limit - 3))
        prompts, room = pad_prompts([[0] * length] * batch, self.device), min(new, self.limit + 1 - length)
        if has_kernels(self.device):
            self._compile(prompts, room)
        with closing(self.run(prompts, room, _most_likely, None, watched=False)) as steps:
            for _ in islice(steps, 3):
                pass
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.no_grad()
    def _compile(self, prompts: Prompts, new: int) -> None:
        """Compile the kernels of a first call in several threads. The session is dropped: its cache is empty."""
        with self._alone(), compile_only():
            batch, begin = prompts.ids.shape
            session = self._new_session(batch, begin + new - 1)
            session.captures = False
            logits = session.prefill(prompts)
            if new > 1:
                session.step(logits.argmax(-1))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until no other thread generates.

        Raises:
            RuntimeError: this thread generates already.
        """
        if self.owner == threading.get_ident():
            raise RuntimeError("this model is generating: finish that generation, or close its iterator, first")
        with self.lock:
            self.owner = threading.get_ident()
            try:
                yield
            finally:
                self.owner = None

    # --- Sessions ----------------------------------------------------------------------------------------------

    def _session(self, batch: int, tokens: int) -> Session:
        """A session with room for `tokens` tokens of each sequence: one of former calls, or a new one."""
        place = self.device, key_dtype(self.model)
        if place != self.place:  # the model was moved or cast
            self.sessions.clear()
            self.place = place
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
        capacity, shape, device = capacity_for(tokens, self.limit), key_shape(self.model), self.device
        while self.sessions and not fits(shape, batch * capacity, self.dtype, device):
            self.sessions.pop(0)
        if not fits(shape, batch * capacity, self.dtype, device):
            capacity = tokens
        check_memory(shape, batch, capacity, self.dtype, free_bytes(device))
        forward = self._forward(capacity)
        return Session(forward, batch, device, captures=device.type == "cuda" and not self.hooked)

    def _forward(self, capacity: int) -> Forward:
        forward = make_forward(self.model, capacity, self.dtype, self.scales)
        if self.fp8_attention:
            use_fp8_attention(forward, self.model, self.device)
        return forward

    def _shared(self, prompts: Prompts) -> Session | None:
        """A session of one row with the prefix that all prompts share, if that saves time."""
        prefix = prefix_worth_sharing(prompts)
        if not prefix:
            return None
        shared = Session(self._forward(prefix), 1, self.device, captures=False)
        begin = prompts.padding[0]
        shared.prefill(Prompts(prompts.ids[:1, begin : begin + prefix], (0,)))
        return shared

    def _refresh(self) -> None:
        """Forget the graphs of a model whose modules, tensors or hooks have changed. One with hooks runs eagerly."""
        if self.device.type != "cuda":
            return
        parts = parts_of(self.model)
        if parts != self.parts:
            self.parts = parts
            self.hooked = any(watched(module) for module in self.model.modules())
            for session in self.sessions:
                session.forget_graph(captures=not self.hooked)


def parts_of(model: nn.Module) -> list[Any]:
    """The modules of a model, the memory of their tensors, and their hooks: while these are the same, a CUDA graph of
    the model holds. `named_modules` and its relatives take three times as long."""
    parts: list[Any] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            parts += (id(module), type(module), watched(module))
            parts += (t.data_ptr() for t in module._parameters.values() if t is not None)
            parts += (t.data_ptr() for t in module._buffers.values() if t is not None)
            waiting += module._modules.values()
    return parts


def _most_likely(ids: Tensor, logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _last_tokens(prompts: Prompts, count: int) -> Prompts:
    dropped = prompts.ids.shape[1] - count
    return Prompts(prompts.ids[:, dropped:], tuple(max(0, padding - dropped) for padding in prompts.padding))
