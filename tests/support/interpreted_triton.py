"""Running Triton kernels on the CPU, in Triton's interpreter.

Triton decides at its import whether it interprets, so the kernels run in another process.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from multiprocessing import get_context
from unittest.mock import patch


@contextmanager
def interpreter():
    """A process whose kernels are interpreted: submit `run_kernel`, or functions of a test module."""
    with ProcessPoolExecutor(1, get_context("spawn"), _read_bounds_of_loops) as pool:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            pool.submit(os.getpid).result()  # the process starts, and inherits it
        yield pool


def run_kernel(file: str, name: str, *args, **options):
    """The result of a function of ops/kernels; to be submitted to `interpreter`."""
    return getattr(import_module(f"octavo.ops.kernels.{file}"), name)(*args, **options)


def _read_bounds_of_loops() -> None:
    """Let `tl.range` take scalars of the kernel: Triton 3.6 has arrays [1] for them, which NumPy 2.4 refuses as int."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    @wraps(patch_tensor)
    def patched(tensor, *rest) -> None:
        patch_tensor(tensor, *rest)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched
