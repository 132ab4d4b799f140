"""Running a test's function in several processes that form a gloo group on the CPU."""

import multiprocessing
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
from patience import HANG
from torch import distributed

# A server that has imported these once for all tests forks the processes: a rank starts in some 50 ms, not in seconds.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "octavo.train.trainer",
]


def use_server():
    """The context of `multiprocessing` whose processes the server forks; with GPUs, processes that begin anew. A forked
    process cannot use CUDA once an import has initialized it in the server."""
    if torch.cuda.device_count():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(world: int, function, *args) -> list:
    """The results of `function(rank, *args)` in `world` processes, by rank.

    Args:
        function: of a module, so that it can be pickled, as its arguments and results must be.

    Raises:
        AssertionError: a rank failed, with its traceback, or the time was up.
    """
    context = use_server()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(target=_rank, args=(rank, world, Path(folder), pipe[1], function, args), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _results([receiver for receiver, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


def use_gpus(rank: int) -> None:
    """In a function of `run_ranks`: leave the group on the CPU for one of NCCL, each rank with a GPU of its own."""
    store, world = distributed.distributed_c10d._get_default_store(), distributed.get_world_size()
    distributed.destroy_process_group()
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", store=distributed.PrefixStore("nccl", store), rank=rank, world_size=world,
        timeout=timedelta(seconds=HANG), device_id=torch.device("cuda", rank),
    )  # fmt: skip


def _results(receivers: list) -> list:
    """What each rank sent; raises at the first failure, since the other ranks may wait for that rank."""
    results = {}
    while len(results) < len(receivers):
        ready = wait([receiver for rank, receiver in enumerate(receivers) if rank not in results], HANG)
        assert ready, f"ranks {[rank for rank in range(len(receivers)) if rank not in results]} did not end in time"
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                result, failure = receiver.recv()
            except EOFError:
                failure = "its process ended without a result"
            assert failure is None, f"rank {rank}: {failure}"
            results[rank] = result
    return [results[rank] for rank in range(len(receivers))]


def _rank(rank: int, world: int, folder: Path, sender, function, args) -> None:
    warnings.simplefilter("error")
    for message in (".*should not be instantiated", ".torch.jit.script", "The .grad attribute of a Tensor that is not"):
        warnings.filterwarnings("ignore", message)  # torch.compile's own
    # A small one, which is read from a GPU that waits for another rank.
    warnings.filterwarnings("ignore", "FX graph cache copying of a large constant")
    torch.set_num_threads(1)
    try:
        store = distributed.FileStore(str(folder / "store"), world)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=HANG)
        )
        distributed.barrier()  # A rank whose function fails at once must not leave while another still connects.
        sender.send((function(rank, *args), None))
        distributed.destroy_process_group()
    except BaseException:
        sender.send((None, traceback.format_exc()))
