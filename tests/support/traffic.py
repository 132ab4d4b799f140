"""The collectives that run in a block, and the bytes that this rank gives to each."""

from torch.utils._python_dispatch import TorchDispatchMode

GIVEN = {"_allgather_base_": 1, "alltoall_base_": 1, "allreduce_": 0}  # of c10d: the argument that is given


class Traffic(TorchDispatchMode):
    """Records the name of each collective, eager or functional, with its bytes."""

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
