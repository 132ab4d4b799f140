"""The operations that a call dispatches, the tensors that it saves, and the operations that generated code calls."""

import re
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def operations(call) -> Counter[str]:
    """How often each operation is called, by names such as "octavo::quantize"."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            counts[op.name()] += 1
            return op(*args, **(kwargs or {}))

    counts: Counter[str] = Counter()
    with Count():
        call()
    return counts


def saved_tensors(call) -> list[torch.Tensor]:
    """The tensors that a call saves for the backward pass."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


def calls(codes: list[str]) -> set[str]:
    """The operations of ours that Inductor's code calls. (Its comments name those that were inlined.)"""
    lines = (line.partition("#")[0] for code in codes for line in code.splitlines())
    return {name for line in lines for name in re.findall(r"torch\.ops\.octavo\.(\w+)", line)}
