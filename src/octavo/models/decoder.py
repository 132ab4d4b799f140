"""The base of the decoder-only language models: logits[B, T, V] from tokens[B, T] through a stack of residual blocks.

    x = embed(tokens);  x = x + attention(norm(x));  x = x + mlp(norm(x));  logits = lm_head(norm(x))

The head may be tied to the embedding (Press and Wolf 2017, arXiv:1608.05859). Weights are drawn from a normal
distribution with a standard deviation of 0.02. For the two projections of a block that write to the residual stream it
is smaller by a factor of 1/sqrt(2 * layers), so that the stream's variance does not grow with depth (Radford et al.
2019, GPT-2, section 2.3).

In training, dropout (Srivastava et al. 2014) applies where GPT-2 has it: to the embeddings, to the probabilities of an
attention, and to the outputs of attention and MLP. It draws from torch's global random generator.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo.models.cache import KVCache
from octavo.nn import Experts

INIT_STD = 0.02


class DecoderShape(Protocol):
    """The settings that every decoder's configuration has: sizes in elements, `context` in tokens."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def dropout(self) -> float: ...


class Dropout(nn.Dropout):
    """An `nn.Dropout` that draws no random number if its probability is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.p else x

    @property
    def now(self) -> float:
        """The probability in the module's mode: 0 in evaluation."""
        return self.p if self.training else 0.0


class Decoder(nn.Module, ABC):
    """Base of the language models: tying, initialization and activation checkpointing.

    With `checkpoint_activations = True`, training saves only the input of each block and computes its activations again
    in the backward pass.
    """

    residual_projections: ClassVar[tuple[str, ...]]
    lm_head: nn.Linear

    def __init__(self, config: DecoderShape) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False
        self.register_load_state_dict_post_hook(_retie_after_load)  # type: ignore[no-untyped-call]

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """The token embedding, whose weight [V, width] a tied head shares."""

    @abstractmethod
    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] of int64 tokens [B, T].

        With a cache, the T tokens follow those that it holds, and only the logits [B, 1, V] of the last are computed.
        """

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's Parameter, if the configuration ties them."""
        if self.config.tied:
            self.lm_head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw all parameters anew, for example after `to_empty`, which leaves them uninitialized.

        Does nothing on the meta device.
        """
        if self.embedding.weight.is_meta:
            return
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                residual = name.rpartition(".")[2] in self.residual_projections
                std = INIT_STD / math.sqrt(2 * self.config.layers) if residual else INIT_STD
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, Experts):
                nn.init.normal_(module.gate_up_proj, std=INIT_STD)
                nn.init.normal_(module.down_proj, std=INIT_STD / math.sqrt(2 * self.config.layers))
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()

    def run_block(self, block: nn.Module, *args: Any) -> tuple[Tensor, Tensor]:
        """Return `block(*args)`; with `checkpoint_activations`, the backward pass computes the block again."""
        if self.checkpoint_activations and self.training and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False)  # type: ignore[no-any-return]
        return block(*args)  # type: ignore[no-any-return]

    def positions(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        """The positions of the tokens [B, T] in their texts: int64 [1, T], or [B, T] if the cache has padding.

        Raises a ValueError unless the tokens are int64 [B, T] that fit in the context.
        """
        if tokens.ndim != 2 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 [B, T], got {tokens.dtype} {tuple(tokens.shape)}")
        start = 0 if cache is None else cache.tokens
        if start + tokens.shape[1] > self.config.context:
            raise ValueError(
                f"the model's context is {self.config.context} tokens, got {tokens.shape[1]} after {start} cached; "
                "pass fewer tokens"
            )
        return torch.arange(tokens.shape[1], device=tokens.device)[None] if cache is None else cache.positions(tokens)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        # A move from the meta device gives every module its own Parameter, and so undoes the tie.
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.tie_weights()
        return self


def _retie_after_load(module: nn.Module, incompatible: Any) -> None:
    """Accept a tied checkpoint that stores the shared matrix once, and share it again after `assign=True`."""
    assert isinstance(module, Decoder)
    if module.config.tied and "lm_head.weight" in incompatible.missing_keys:
        incompatible.missing_keys.remove("lm_head.weight")
    module.tie_weights()
