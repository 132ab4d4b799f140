"""Running Triton kernels on the CPU, in Triton's interpreter.

Triton decides at its import whether it interprets, so the kernels run in another process.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from multiprocessing import get_context
from typing import Any


@contextmanager
def interpreter() -> Iterator[Executor]:
    """A process whose kernels are interpreted: submit `run_kernel`, or functions of a test module."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # the process inherits it when it starts, at the first submission
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), _read_bounds_of_loops) as pool:
            pool.submit(os.getpid).result()
            os.environ.pop("TRITON_INTERPRET")
            yield pool
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def run_kernel(file: str, name: str, *args: Any, **options: Any) -> Any:
    """The result of a function of ops/kernels; to be submitted to `interpreter`."""
    return getattr(import_module(f"octavo.ops.kernels.{file}"), name)(*args, **options)


def _read_bounds_of_loops() -> None:
    """Let `tl.range` take scalars of the kernel: Triton 3.6 has arrays [1] for them, which NumPy 2.4 refuses as int."""
    from triton.runtime import interpreter

    patch: Callable[..., None] = interpreter._patch_lang_tensor

    @wraps(patch)
    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched
