"""Decoding steps of one batch size: a cache of fixed size and, on a GPU, a CUDA graph of a step.

A step takes the tokens just chosen [B] and returns the logits [B, V] after them. The first step of a session runs
eagerly, which compiles its kernels; the second is captured, and all later ones are replays. A replay costs the host
some 0.1 ms, where an eager step costs 0.5 ms a layer.
"""

import warnings

import torch
from torch import Tensor

from octavo.generation.forward import Forward, uncached_autocast
from octavo.generation.prompts import Prompts, first_tokens, shared_prefix

PIECE = 8192  # tokens of all rows that a prompt's forward pass takes at a time: they set the peak of memory
SHARED = 256  # tokens that a shared prefix must save: fewer cost less than the forward pass of the prefix alone


class Session:
    """One batch size and capacity.

    Args:
        forward: the model with an empty cache.
        batch: number of sequences.
        captures: whether steps become a CUDA graph.
    """

    def __init__(self, forward: Forward, batch: int, device: torch.device, captures: bool) -> None:
        self.forward, self.batch, self.device, self.captures = forward, batch, device, captures
        self.cache = forward.cache
        with torch.inference_mode(False):  # a later generation may run outside of inference mode
            self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.first = torch.zeros(batch, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None  # of the graph
        self.eager_steps = 0

    @property
    def capacity(self) -> int:
        return self.cache.max_tokens

    def forget_graph(self, captures: bool) -> None:
        """Drop the graph; `captures` says whether later steps become one."""
        self.graph, self.logits, self.eager_steps = None, None, 0
        self.captures = captures

    # --- A prompt ----------------------------------------------------------------------------------------------

    def prefill(self, prompts: Prompts, shared: "Session | None" = None, piece: int | None = None) -> Tensor:
        """Logits [B, V] after the prompts, whose keys and values fill the empty cache.

        Args:
            prompts: of as many rows as the session has.
            shared: a session of one row that holds a prefix of all prompts, which is copied instead of computed.
            piece: tokens of a row that a forward pass takes; None takes `PIECE` tokens of all rows.
        """
        self.cache.reset(scales=True)
        self.first.copy_(first_tokens(prompts))
        self.cache.first = self.first if any(prompts.padding) else None
        start = 0
        if shared is not None:
            start = shared.cache.tokens
            self.cache.copy_prefix(shared.cache, self.batch)
        for part in torch.split(prompts.ids[:, start:], piece or max(1, PIECE // self.batch), dim=1):
            logits = self.forward(part)
        self.cache.freeze()
        if self.device.type == "cuda":
            self.cache.first = self.first  # a graph serves batches with padding and without
        return logits

    # --- A step ------------------------------------------------------------------------------------------------

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after the tokens [B], which the next step overwrites."""
        self.token.copy_(tokens[:, None])
        if self.captures and self.graph is None and self.eager_steps:
            self._capture()
        if self.graph is None:
            self.eager_steps += 1
            with uncached_autocast(self.device):
                return self.forward(self.token)
        length = self.cache.length
        assert length is not None
        assert self.logits is not None
        length.host += 1
        self.graph.replay()
        return self.logits

    def _capture(self) -> None:
        """Record a step as a CUDA graph. A model that waits for the device cannot be recorded: its steps stay eager."""
        length = self.cache.length
        assert length is not None
        before, graph = length.host, torch.cuda.CUDAGraph()
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), uncached_autocast(self.device):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    logits = self.forward(self.token)
                finally:
                    graph.capture_end()
            self.graph, self.logits = graph, logits
        except RuntimeError as error:
            self.captures = False
            warnings.warn(
                f"a decoding step of this model cannot be captured as a CUDA graph and runs eagerly, which is slower: "
                f"{str(error).splitlines()[0]}",
                stacklevel=2,
            )
        finally:
            length.host = before
            current.wait_stream(stream)


def prefix_worth_sharing(prompts: Prompts) -> int:
    """The number of tokens of a prefix that all prompts share, if to compute it once saves time; else 0."""
    batch = prompts.ids.shape[0]
    if batch == 1 or (batch - 1) * prompts.shortest < SHARED:
        return 0
    prefix = shared_prefix(prompts)
    return prefix if (batch - 1) * prefix >= SHARED else 0
