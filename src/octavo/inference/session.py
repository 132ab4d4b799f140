"""Decoding with one model: the forward pass, prompts of a batch, captured steps, and the room of the cache."""

import math
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.inference.kv_cache import DTYPES, ModelKVCache, Pairs
from octavo.models.decoder import Decoder
from octavo.nn.module_tools import autocast_dtype
from octavo.util import plural

# ---- The forward pass over new tokens and a cache of fixed size, for models of `octavo.models` and of transformers.


class Forward(Protocol):
    """A model with a cache. A call takes tokens [B, T], stores their keys and values, and returns the logits [B, n, V]
    of the tokens with the indices `kept`, int64 [n]; None keeps the last.

    `row_by_row` says that the logits of a token do not depend on the later ones, or on how many there are.
    """

    cache: ModelKVCache
    row_by_row: bool

    def __call__(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor: ...


class KeyShape(NamedTuple):
    """Sizes of the keys of one token: layers, heads of keys, elements of a head; and the dtype that stores them."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, tokens: int) -> int:
        """Bytes of the keys and values of `tokens` tokens."""
        return 2 * tokens * self.layers * self.heads * self.head_dim * self.dtype.itemsize


class DecoderForward:
    """A model of `octavo.models` with a cache."""

    row_by_row = True

    def __init__(self, model: Decoder, max_tokens: int, dtype: str | None, scales: Pairs | None) -> None:
        self.model = model
        self.cache = ModelKVCache(model.config.layers, max_tokens, dtype, scales=scales, freezes=False)

    def __call__(self, tokens: Tensor, kept: Tensor | None = None) -> Tensor:
        return self.model(tokens, self.cache, kept)


def make_forward(model: Any, max_tokens: int, dtype: str | None, scales: Pairs | None) -> Forward:
    """The forward pass of a language model over an empty cache. The scales of a warm-up grow until they are frozen.
    An UnservedError if the cache does not serve the model's attention."""
    if isinstance(model, Decoder):
        return DecoderForward(model, max_tokens, dtype, scales)
    from octavo.inference.transformers_cache import TransformersForward

    return TransformersForward(model, max_tokens, dtype, scales)


def key_shape(model: Any, dtype: str | None) -> KeyShape:
    """The sizes of a model's keys, stored in the dtype of that name; None takes the dtype that they have."""
    if isinstance(model, Decoder):
        own: Any = model.config
        layers, heads, width, dim = own.layers, own.heads, own.width, None
        kv_heads = getattr(own, "kv_heads", None)
    else:
        config = model.config.get_text_config(decoder=True)
        # Mamba has no attention, and is not served.
        layers, heads, width = config.num_hidden_layers, getattr(config, "num_attention_heads", 1), config.hidden_size
        kv_heads, dim = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
    stored = key_dtype(model) if dtype is None else DTYPES[dtype]
    return KeyShape(layers, kv_heads or heads, dim or width // heads, stored)


def key_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that the keys of a model have: that of autocast, or of its parameters."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    return autocast_dtype(weight.device.type) or weight.dtype


def uncached_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast as it is, without its cache of cast weights: a CUDA graph must not read memory that autocast frees."""
    dtype = autocast_dtype(device.type)
    if device.type == "cpu" or dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


# ---- Prompts of a batch: token ids that end at the same place, with padding on the left of the shorter ones.


class Prompts(NamedTuple):
    """The prompts of a batch: ids, int64 [B, T] on the model's device, and the padding on the left of each row."""

    ids: Tensor
    padding: tuple[int, ...]

    @property
    def first(self) -> Tensor:
        """The first token of each row that is not padding, int32 [B]."""
        return torch.tensor(self.padding, dtype=torch.int32, device=self.ids.device)


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device, token: int = 0) -> Prompts:
    """The prompts as a batch, padded on the left with a token. A penalty of repetition sees it."""
    if len(prompts) == 0:  # a tensor of ids is a sequence too
        raise ValueError("at least one prompt is required, got none")
    if empty := [i for i, prompt in enumerate(prompts) if len(prompt) == 0]:
        raise ValueError(f"a prompt must hold at least one token, prompt {empty[0] + 1} of {len(prompts)} is empty")
    longest = max(map(len, prompts))
    rows = [[token] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(rows, dtype=torch.int64, device=device)
    return Prompts(ids, tuple(longest - len(prompt) for prompt in prompts))


def read_prompts(ids: Tensor, mask: Tensor | None, device: torch.device) -> Prompts:
    """The prompts of token ids [B, T] and their attention mask [B, T], as transformers passes them."""
    if ids.shape[0] == 0:
        raise ValueError(f"at least one prompt is required, got input_ids of shape {list(ids.shape)}")
    if ids.shape[1] == 0:
        raise ValueError("a prompt must hold at least one token, got input_ids of length 0")
    if mask is None:
        return Prompts(ids.to(device), (0,) * ids.shape[0])
    seen = mask.cpu().bool()
    padding = seen.int().argmax(1)
    wrong = seen.sum(1) != seen.shape[1] - padding
    if seen.shape != ids.shape or bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise ValueError(
            f"a batch of prompts needs padding on the left only, and row {row} of attention_mask {list(mask.shape)} "
            f"for input_ids {list(ids.shape)} is not zeros, then ones: tokenize with tokenizer.padding_side = 'left'"
        )
    return Prompts(ids.to(device), tuple(padding.tolist()))


# ---- Prompts and decoding steps of one batch size: a cache of fixed size and, on a GPU, CUDA graphs.
#
# A step takes the tokens just chosen [B] and returns the logits [B, V] after them. A short prompt is padded on its
# right to one of a few lengths: no token sees a later one, so the padding changes no logits, and what it stores is
# forgotten. The first pass of each length runs eagerly, which compiles its kernels; the second is captured, and all
# later ones are replays. A replay costs the host some 0.1 ms, where an eager pass costs 0.5 to 1 ms a layer.


PIECE = 8192  # tokens of all rows that a prompt's forward pass takes at a time: they set the peak of memory
SHORT = 2048  # tokens of all rows, padding included, of a prompt that is captured
FEWEST = 64  # tokens that a prompt is padded to
CAPTURING = threading.RLock()  # of the thread that captures: PyTorch's generator of random numbers serves one capture


class Pass:
    """A forward pass over `tokens`, int64 [B, T], whose numbers change from one run to the next. `kept`, int64 [1],
    is the index of a prompt's last token before the padding; a step keeps its only token."""

    def __init__(self, batch: int, length: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # a later generation may run outside of inference mode
            self.tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
            self.kept = torch.zeros(1, dtype=torch.int64, device=device) if length > 1 else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None  # of the graph
        self.ran = False


class Session:
    """One batch size and capacity. `forward` is the model with an empty cache. If the session `captures`, passes over
    steps and short prompts become CUDA graphs, which share their memory. If it `pads`, short prompts are padded."""

    def __init__(self, forward: Forward, batch: int, device: torch.device, captures: bool) -> None:
        self.forward, self.batch, self.device, self.captures = forward, batch, device, captures
        self.cache, self.pads = forward.cache, device.type == "cuda" and forward.row_by_row
        self.cache.batch, self.capacity = batch, self.cache.max_tokens
        self.passes: dict[int, Pass] = {}  # by the number of tokens
        self.pool: Any = None  # of the memory of the graphs
        self.stream = torch.cuda.Stream(device) if captures else None  # type: ignore[no-untyped-call]  # of captures
        with torch.inference_mode(False):
            self.first = torch.zeros(batch, dtype=torch.int32, device=device)

    # --- A prompt ----------------------------------------------------------------------------------------------

    def prefill(self, prompts: Prompts, piece: int | None = None) -> Tensor:
        """Logits [B, V] after the prompts, whose keys and values fill the empty cache. A forward pass takes `piece`
        tokens of a row, or at most `PIECE` tokens; the head takes the last token alone."""
        self.cache.reset(scales=True)
        self.first.copy_(prompts.first)
        self.cache.first = first = self.first if any(prompts.padding) else None
        if piece is None and (length := self._padded(prompts)):
            logits = self._prefill_padded(prompts.ids, length)
        elif piece is None and not self.cache.has_warm_up:
            logits = self._prefill_groups(prompts.ids, first)
        else:
            logits = self._prefill(prompts.ids, piece or max(1, PIECE // self.batch))
        self.cache.freeze()
        if self.device.type == "cuda":
            self.cache.first = self.first  # a graph serves batches with padding and without
        return logits

    def _prefill(self, ids: Tensor, piece: int) -> Tensor:
        """Logits [B, V] after the tokens [B, T]; a forward pass takes `piece` tokens of a row."""
        *before, last = torch.split(ids, piece, dim=1)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        for part in before:
            self.forward(part, none)
        return self.forward(last)[:, -1]

    def _prefill_groups(self, ids: Tensor, first: Tensor | None) -> Tensor:
        """The same for groups of sequences, one after the other. Tokens of a whole prompt attend without a mask."""
        size, logits = max(1, PIECE // ids.shape[1]), []
        for start in range(0, self.batch, size):
            group = slice(start, start + size)
            self.cache.begin(group if size < self.batch else None)
            self.cache.first = None if first is None else first[group]
            logits.append(self._prefill(ids[group], PIECE))
        self.cache.begin(None)
        self.cache.first = first
        return torch.cat(logits)

    def _padded(self, prompts: Prompts) -> int:
        """The length that the prompts are padded to; 0 for prompts that are not. Padding on the left needs a mask."""
        length = min(power_or_half_more(prompts.ids.shape[1], FEWEST), self.capacity)
        short = 1 < length <= SHORT // self.batch
        return length if self.pads and short and not any(prompts.padding) else 0

    def _prefill_padded(self, ids: Tensor, length: int) -> Tensor:
        found, tokens = self._pass(length), ids.shape[1]
        found.tokens[:, :tokens] = ids  # the padding has tokens of former prompts, or 0
        assert found.kept is not None
        found.kept.fill_(tokens - 1)
        self.cache.last = found.kept  # the scales of a warm-up leave the padding out
        logits = self._run(found)
        self.cache.last = None
        self.cache.crop(length - tokens)
        return logits

    # --- A step ------------------------------------------------------------------------------------------------

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the tokens [B], which the next step overwrites."""
        found = self._pass(1)
        found.tokens.copy_(tokens[:, None])
        return self._run(found)

    # --- A pass ------------------------------------------------------------------------------------------------

    def _pass(self, length: int) -> Pass:
        if length not in self.passes:
            self.passes[length] = Pass(self.batch, length, self.device)
        return self.passes[length]

    def _run(self, found: Pass) -> Tensor:
        """Logits [B, V] after the tokens of a pass, which the next run overwrites."""
        if self.captures and found.graph is None and found.ran:
            with CAPTURING:
                self._capture(found)
        if found.graph is None:
            found.ran = True
            with uncached_autocast(self.device):
                return self.forward(found.tokens, found.kept)[:, -1]
        assert found.logits is not None
        self.cache.set_host_count(self.cache.tokens + found.tokens.shape[1])
        found.graph.replay()
        return found.logits

    def _capture(self, found: Pass) -> None:
        """Record a pass as a CUDA graph. A model that waits for the device cannot be recorded: it runs eagerly."""
        before, graph = self.cache.tokens, torch.cuda.CUDAGraph()
        self.pool = torch.cuda.graph_pool_handle() if self.pool is None else self.pool
        stream, current = self.stream, torch.cuda.current_stream(self.device)
        assert stream is not None
        stream.wait_stream(current)
        random = torch.cuda.default_generators[current.device_index]
        state = random.clone_state()
        # PyTorch frees the workspace of cuBLAS that it keeps for a stream, although graphs still write to it
        # (pytorch/pytorch#193402). Where none is kept, the workspace of a graph lies in the graph's own memory.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.stream(stream), uncached_autocast(self.device):
                graph.capture_begin(self.pool, capture_error_mode="thread_local")
                try:
                    logits = self.forward(found.tokens, found.kept)[:, -1]
                finally:
                    graph.capture_end()
            found.graph, found.logits = graph, logits
        except RuntimeError as error:
            # PyTorch 2.11 takes the capture for underway (pytorch/pytorch#180395). Later ones refuse the call.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(current.device_index, self.pool)
            self.pool = None  # without a graph: PyTorch takes it for no other
            random.graphsafe_set_state(state)  # PyTorch leaves a state that draws numbers in a capture alone
            if found.kept is None:
                self.captures = False
            else:
                self.pads = False
            warnings.warn(
                f"this model cannot be captured as a CUDA graph and runs eagerly, which is slower: "
                f"{str(error).splitlines()[0]}",
                stacklevel=2,
            )
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            self.cache.set_host_count(before)
            current.wait_stream(stream)


# ---- The room of a cache, and whether the memory of the device suffices for it.


GIB = 1 << 30
SMALLEST = 256  # tokens of the smallest cache


def capacity_for(tokens: int, context: int) -> int:
    """Room of a cache for `tokens` tokens: a power of two, or one and a half, so that few sizes serve all lengths."""
    return min(power_or_half_more(tokens, SMALLEST), context)


def power_or_half_more(tokens: int, size: int) -> int:
    """The smallest power of two, or one and a half of one, that is at least `tokens` and `size`, a power of two."""
    while size < tokens:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def free_bytes(device: torch.device) -> float:
    """Bytes that can be allocated on a GPU, those that PyTorch holds unused included; infinite on another device."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_memory(shape: KeyShape, batch: int, tokens: int, free: float) -> None:
    """Raise a MemoryError, which says what fits, unless `free` bytes hold `batch` sequences of `tokens` tokens."""
    needed, one = shape.nbytes(batch * tokens), shape.nbytes(1)
    if needed <= free:
        return
    fitting = []
    if most := int(free // (one * tokens)):
        fitting.append(f"{'one sequence' if most == 1 else f'{most} sequences'} of {tokens} tokens")
    if longest := int(free // (one * batch)):
        fitting.append(f"{longest} tokens for {plural(batch, 'sequence')}")
    advice = f"What fits: {' or '.join(fitting)}." if fitting else "No sequence fits."
    if shape.dtype.itemsize > 1:
        advice += " kv_cache='fp8' of octavo.load, or --kv-cache fp8 of octavo generate, halves the keys and values."
    raise MemoryError(
        f"the keys and values of {plural(batch, 'sequence')} of {tokens} tokens need {needed / GIB:.1f} GiB in "
        f"{shape.dtype}, and {free / GIB:.1f} GiB are free on the GPU. {advice}"
    )
