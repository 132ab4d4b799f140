"""Finding out how a language model computes its logits, from the logits and not from the model's name.

Training on the next token is only possible if the logits of a token depend on that token and the ones before it. In an
encoder they depend on the later tokens too, so that the model sees the answer. The logits need not be in memory as a
whole if they are the outputs of a linear layer.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS = 8
_TOLERANCE = 1e-5  # of the largest logit: float32 rounding is about 1e-7, the effect of attention about 1e-3


@torch.no_grad()
def is_causal(model: nn.Module, vocabulary: int) -> bool:
    """Whether the logits of a token stay the same when the last token of the sequence changes.

    Runs `model` twice, in evaluation mode, on one sequence of 8 tokens. Call this before `octavo.convert`: the model
    must compute in float32, and quantization with one scale for a tensor makes every logit depend on every token.

    Args:
        model: returns logits [B, T, V], or an object with `logits`, for int64 tokens [B, T].
        vocabulary: tokens from 0 to this number, at least 2, are valid.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(_TOKENS, device=device)[None] % vocabulary  # [1, T]
    other = tokens.clone()
    other[0, -1] = (tokens[0, -1] + vocabulary // 2) % vocabulary
    training = model.training
    model.eval()
    try:
        before, after = (logits_of(model(ids))[0].float() for ids in (tokens, other))
    finally:
        model.train(training)
    allowed = _TOLERANCE * float(before.abs().max())
    return bool((before[:-1] - after[:-1]).abs().max() <= allowed)


def logits_of(output: object) -> Tensor:
    """The logits [B, T, V] that a forward pass returned: a tensor, or an output object of transformers."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ValueError(f"a language model must return logits, got {type(output).__name__}")
    return logits


@torch.no_grad()
def head_name(model: nn.Module) -> str | None:
    """The name of the linear layer whose outputs are the logits; None if the model changes them, as a cap does.

    Runs `model` once, in evaluation mode, on two tokens; it may be on the meta device.

    Args:
        model: returns logits [B, T, V], or an object with `logits`, for int64 tokens [B, T].
    """
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, args, output: outputs.__setitem__(name, output)

    # a subclass may compute in another way
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and name}
    with ExitStack() as stack:
        for name, module in linear.items():
            if module.bias is None:
                stack.enter_context(module.register_forward_hook(note(name)))
        stack.callback(model.train, model.training)
        model.eval()
        logits = logits_of(model(torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)))
    return next((name for name, output in outputs.items() if output is logits), None)
