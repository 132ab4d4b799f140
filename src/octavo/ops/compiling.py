"""Compiling Triton kernels in several threads, before they are first launched.

    with compile_only():
        model(tokens)           no kernel of ours runs: each is compiled for its arguments, and results hold any numbers

A kernel is compiled at its first launch otherwise, one after the other, at 0.5 to 1 s each. Most of that time passes in
LLVM and in ptxas, without Python's lock. Triton saves compiled kernels on disk, for later processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

LOG = logging.getLogger(__name__)
MOST_THREADS = 16


class Compilation:
    """Kernels that threads compile, each once."""

    def __init__(self, threads: Executor) -> None:
        self.threads = threads
        self.known: set[tuple[Any, ...]] = set()

    def add(self, kernel: Any, signature: tuple[Any, ...], grid: tuple[int, ...], args: Any, constants: Any) -> None:
        """Compile `kernel` for these arguments. An error is not reported: it comes again at the first launch."""
        if signature not in self.known:
            self.known.add(signature)
            if (caches := getattr(kernel, "device_caches", None)) is not None:
                _ = caches[args[0].get_device()]  # made here: of threads that make it at once, one would keep its own
            self.threads.submit(_compile, kernel, grid, args, constants)


running: ContextVar[Compilation | None] = ContextVar("running", default=None)  # in this thread


@contextmanager
def compile_only() -> Iterator[None]:
    """In this thread, compile kernels instead of launching them. At the end, wait until all are compiled."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        token = running.set(Compilation(threads))
        try:
            yield
        finally:
            running.reset(token)


def _compile(kernel: Any, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> None:
    try:
        with torch.cuda.device(args[0].device):
            compiled = kernel.warmup(*args, grid=grid, **constants)
            _ = compiled.run  # loads the kernel on the GPU, and makes its launcher, which the host's compiler compiles
    except Exception:
        LOG.debug("%s was not compiled", kernel, exc_info=True)
