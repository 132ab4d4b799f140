"""The operations that a call dispatches, and those that generated code calls."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def operations(call: Callable[[], object]) -> Counter[str]:
    """How often each operation is called, by names such as "octavo::quantize"."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[op.name()] += 1
            return op(*args, **(kwargs or {}))

    counts: Counter[str] = Counter()
    with Count():
        call()
    return counts


def calls(codes: list[str]) -> set[str]:
    """The operations of ours that Inductor's code calls. (Its comments name those that were inlined.)"""
    lines = (line.partition("#")[0] for code in codes for line in code.splitlines())
    return {name for line in lines for name in re.findall(r"torch\.ops\.octavo\.(\w+)", line)}
