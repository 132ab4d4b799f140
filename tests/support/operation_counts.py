"""What a call does, seen by its operations: their counts, the tensors that it saves, the memory that it holds, and the
bytes that it sends; and the operations that generated code calls."""

import re
from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GIVEN = {"_allgather_base_": 1, "alltoall_base_": 1, "allreduce_": 0}  # of c10d: the argument that is given


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
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


def calls(codes: list[str]) -> set[str]:
    """The operations of ours that Inductor's code calls. (Its comments name those that were inlined.)"""
    lines = (line.partition("#")[0] for code in codes for line in code.splitlines())
    return {name for line in lines for name in re.findall(r"torch\.ops\.octavo\.(\w+)", line)}


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of storages that operations made inside the block and that are still alive, whoever holds them:
    autograd, activation checkpointing, caches, or a function. `known` storages, such as weights, do not count.

    Example:
        >>> with LiveMemory() as memory:
        ...     y = torch.ones(100).exp()
        >>> memory.now()
        400
    """

    def __init__(self, known=()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        return sum(size for _, size in self.alive.values())


class Traffic(TorchDispatchMode):
    """Records the name of each collective, eager or functional, with the bytes that this rank gives to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        functional = namespace == "_c10d_functional" and name != "wait_tensor"
        if functional or (namespace == "c10d" and name in GIVEN):
            given = args[GIVEN.get(name, 0)]
            self.sent.append((name, sum(t.nbytes for t in (given if isinstance(given, list) else [given]))))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[int]:
        """The bytes of each collective whose name has `name` in it."""
        return [count for known, count in self.sent if name in known]
