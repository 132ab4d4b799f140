"""The processes of a run: `torchrun` starts them, they agree, rank 0 prints, and signals stop them."""

import functools
import gc
import io
import math
import os
import pickle
import resource
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from types import FrameType
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.rendezvous import rendezvous

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import BUILT_IN_MODELS, LockedError, WriteError
from octavo.data import DataError
from octavo.train.config import Config, ConfigError, Parallel, flatten, refuse, settings_of
from octavo.util import choose_device, discard_output, printable

Value = TypeVar("Value")


def run_in_group(main: Callable[[], None]) -> None:
    """Call `main` while the processes that `torchrun` started form a group. A single process calls it alone. An error
    is recorded for torchrun, which ends the other processes and prints the traceback of every rank. So rank 0 alone
    raises errors; other ranks end with exit code 1."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal() or size == "0":
        raise ConfigError(
            f"WORLD_SIZE must be a number of processes, got {size!r}: start them with torchrun, or unset it"
        )
    if size == "1":
        main()
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set, but {', '.join(missing)} is not: start several processes with torchrun")
    try:
        record(functools.partial(_join, main))()
    except Exception:
        if os.environ["RANK"] != "0" and dist.is_torchelastic_launched():
            raise SystemExit(1) from None
        raise


@contextmanager
def group_of_one() -> Iterator[None]:
    """Within the block a single process forms a group by itself, for a mesh of one process."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(_backend(), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _join(main: Callable[[], None]) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    store, number, ranks = attempt_store()
    try:
        dist.init_process_group(_backend(), store=store, rank=number, world_size=ranks)
        main()
    except (ConfigError, DataError, ArtifactError, WriteError, LockedError, FileExistsError) as error:
        error.__context__ = None  # no traceback: the message says what to change
        raise error.with_traceback(None) from None
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):  # gloo's errors have no class
            raise RuntimeError(
                f"rank {number} has lost another rank, which failed (torchrun prints its error as the root cause), was "
                "killed, or stood still for longer than the setting parallel.timeout: raise that if a step may take "
                "longer, and start all ranks with the same command"
            ) from error
        raise
    dist.destroy_process_group()  # not after an error: another process may have ended, for which NCCL would wait


def own_device(name: str) -> torch.device:
    """The device of this process: of several, the local rank's GPU. One with a number becomes the current one."""
    device = choose_device(name)
    if device.type == "cuda" and device.index is not None and world_size() == 1:
        torch.cuda.set_device(device)  # on which FSDP2 computes
    if world_size() == 1 or device.type != "cuda":
        return device
    if device.index is not None:
        raise ConfigError(f"device must be cuda, without a number, if there are several processes; got {name}")
    return choose_device(f"cuda:{dist.get_node_local_rank(rank())}")


def check_same(config: Config) -> None:
    """Raise a ConfigError, on every rank, unless all ranks have the same settings."""
    settings = gather(flatten(config.to_dict(), settings_of(Config)))
    for name, first in settings[0].items():
        for number, other in enumerate(settings):
            if other[name] != first:
                raise ConfigError(
                    f"the processes must have the same settings: {name} is {first!r} on rank 0 and {other[name]!r} on "
                    f"rank {number}. Start all of them with the same file and options"
                )


def on_first(make: Callable[[], Value]) -> Value:
    """`make()` of rank 0, or its error, on every rank. The value must be picklable if there are several ranks."""
    made: list[Any] = [None]
    with same_outcome():
        if rank() == 0:
            made = [make()]
    if world_size() > 1:
        dist.broadcast_object_list(made, device=torch.device("cpu"))
    return made[0]


def mean_of_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over all ranks."""
    if world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= world_size()
    return value


# ---- The ranks of a run, and how they agree. A run without a process group has the one rank 0.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """The `value` of every rank, in their order, on every rank; it must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_message_group(dist.group.WORLD))
    return values


@contextmanager
def same_outcome() -> Iterator[None]:
    """If the block fails on any rank, it fails on all, with the error of the lowest: no rank waits for it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    errors = gather(_picklable(error) if world_size() > 1 else error)
    failed = [number for number, each in enumerate(errors) if each is not None]
    if failed:  # a rank raises its own error where it can: that has the traceback
        raise error if error is not None and failed[0] == rank() else errors[failed[0]]


class Agreement:
    """Takes the maximum over all ranks of a few integers, step after step, without waiting for the slowest rank."""

    def __init__(self) -> None:
        self._values, self._work = torch.zeros(0), None

    def reach(self, *values: int) -> Sequence[int]:
        """The largest `values` over all ranks in the call before this one, 0 in the first; of one process at once. The
        all-reduce runs on the CPU while the next step computes."""
        if world_size() == 1:
            return values
        if self._work is not None:
            self._work.wait()
        agreed = [int(value) for value in self._values] or [0] * len(values)
        self._values = torch.tensor(values, dtype=torch.int64)
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, _message_group(dist.group.WORLD), async_op=True)
        return agreed


def _picklable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@functools.lru_cache(maxsize=1)
def _message_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group for messages between CPUs: that of the GPUs would wait for the kernels before it. All ranks wait in it
    while rank 0 reads and tokenizes the data, which may take hours. A rank that ends is noticed at once, and one that
    stands still in a step by the collectives of the weights, after `parallel.timeout`."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


# ---- The processes of this attempt of a job that torchrun starts again find one another.


_PATIENCE = timedelta(minutes=10)


def attempt_store() -> tuple[Store, int, int]:
    """A store for this attempt alone, the rank and the number of ranks, for `init_process_group`. torchrun keeps one
    store for all attempts. The keys of an attempt that failed are still there, so processes would connect to processes
    that have ended (pytorch/pytorch#135712, #167288). Each machine counts restarts on its own."""
    store, rank, ranks = next(iter(rendezvous("env://", timeout=_PATIENCE)))
    return PrefixStore(agree_on_name(store, rank, ranks), store), rank, ranks


def agree_on_name(store: Store, rank: int, ranks: int) -> str:
    """A name that all ranks of this attempt have, and no process of an earlier one had. A rank asks with a name of its
    own, which only a living rank 0 can answer. Rank 0 may read the question of a process that has ended; its answer
    then meets no one. So it goes on until it has the thanks of all ranks for its name."""
    own = uuid.uuid4().hex
    if rank:
        store.set(f"question/{rank}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"thanks/{name}/{rank}", "")
        return name
    silent, deadline = set(range(1, ranks)), time.monotonic() + _PATIENCE.total_seconds()
    while silent:
        for other in sorted(silent):
            if store.check([f"question/{other}"]):
                store.set(f"answer/{store.get(f'question/{other}').decode()}", own)
            if store.check([f"thanks/{own}/{other}"]):
                silent.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(silent)} have not come within {_PATIENCE}")
        time.sleep(0.01)
    return own


# ---- The degrees of a run: how its processes form a mesh, and what FSDP2 gathers at once.
#
# The processes form an array [dp_replicate, dp_shard, tp], in the order of their ranks. Those that differ in `tp` only
# work on the same sequences, and on parts of each layer. All others have their own share of each batch.


SMALL = 1 << 27  # parameters: more than a block of a model of a billion has, less than one of Llama-3-8B


@dataclass(frozen=True)
class Degrees:
    """The sizes of the mesh, in the order of its dimensions."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """The processes, or groups of processes, that work on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def processes(self) -> int:
        return self.data * self.tp

    def share(self, rank: int) -> tuple[int, int]:
        """(index, count): which of `count` equal shares of a batch belongs to a rank."""
        return rank // self.tp, self.data


def find_degrees(parallel: Parallel, processes: int) -> Degrees:
    """The degrees of `parallel`, with the number of processes that are left in place of -1."""
    asked = {each.name: int(getattr(parallel, each.name)) for each in fields(Degrees)}
    open_names = [name for name, degree in asked.items() if degree == -1]
    if len(open_names) > 1:
        raise ConfigError(
            "only one degree of parallel can be -1, the processes that are left; got -1 for "
            f"{' and '.join(open_names)}: set all but one to a number, such as 1"
        )
    left = max(processes // math.prod(max(degree, 1) for degree in asked.values()), 1)
    asked |= dict.fromkeys(open_names, left)
    found = Degrees(**asked)
    if found.processes != processes:
        wanted = " x ".join(f"{name} {degree}" for name, degree in asked.items())
        raise ConfigError(
            f"the degrees of parallel must multiply to the number of processes, {processes}; got {wanted}, which is "
            f"{found.processes}: start {found.processes} processes with torchrun (octavo plan: --gpus "
            f"{found.processes}), or change parallel"
        )
    return found


def check_parallel(config: Config, degrees: Degrees, device: torch.device) -> None:
    """Raise a ConfigError unless the processes can divide the batch and the layers of a built-in model."""
    shares, several, tp = degrees.data, degrees.processes > 1, degrees.tp
    sizes = ["context", *(["heads", "width"] if config.model in BUILT_IN_MODELS else [])]
    sizes += ["kv_heads", "mlp_width"] if config.model == "llama" else []
    refuse(
        config,
        ("batch", config.batch % shares, f"a multiple of {shares}, for it counts the sequences of all processes",
         f"dp_replicate {degrees.dp_replicate} x dp_shard {degrees.dp_shard}",
         f"give --batch {-(-config.batch // shares) * shares}"),
        ("lora", config.lora and several, "one process, for frozen weights are not divided", degrees.processes,
         "start it without torchrun, or leave lora out"),
        ("optimizer.masters", config.optimizer.masters == "host" and several, "one process", degrees.processes,
         "give --optimizer.offload, or start it without torchrun"),
        ("precision", config.precision == "fp16" and several, "one process, whose loss scale it has",
         degrees.processes, "use bf16"),
        ("sample", config.sample and tp > 1, "parallel.tp 1, for tp divides each sequence", f"tp {tp}",
         "sample from the run with octavo generate"),
        ("model", config.model == "mixture" and tp > 1, "parallel.tp 1, for its experts are not cut", f"tp {tp}",
         "use dp_shard"),
        *(("parallel.tp", getattr(config, name) % tp, f"a {name} that is a multiple of it",
           f"{name} {getattr(config, name)}", "change one of the two") for name in sizes),
        ("parallel.async_tp", config.parallel.async_tp and tp > 1 and device.type != "cuda",
         "GPUs that reach each other's memory", device.type, "leave it out"),
    )  # fmt: skip


def make_mesh(degrees: Degrees, device: torch.device, timeout: int) -> DeviceMesh:
    """The mesh of all processes. A collective operation fails after `timeout` seconds. Every process must call this."""
    mesh = init_device_mesh(device.type, tuple(vars(degrees).values()), mesh_dim_names=tuple(vars(degrees)))
    if degrees.tp > 1:
        mesh["dp_shard", "tp"]._flatten("shard")  # so that DTensor reduces a norm over both in one operation
    for group in (None, *mesh.get_all_groups()):
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return mesh


def unit_size(parameters: int) -> int:
    """The blocks, of so many parameters each, in a unit of FSDP2: two if they are small together, else one. The hooks
    and collectives of a unit take about as long as the host's other work of a small block."""
    return 2 if 2 * parameters <= SMALL else 1


# ---- The memory of the device that a run trains on.


def pin(t: Tensor) -> Tensor:
    """Pin the memory of a tensor of the CPU until `unpin`: empty(pin_memory=True) takes up to twice its bytes."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(t.data_ptr(), t.nbytes, 0))  # type: ignore[no-untyped-call]
    return t


def unpin(t: Tensor) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(t.data_ptr()))  # type: ignore[no-untyped-call]


def peak_memory(device: torch.device) -> int:
    """The peak in bytes so far: of tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_memory(device: torch.device) -> int:
    """The bytes of a GPU, or this process's part of those of the CPU, which the processes of a machine share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes


# ---- The console of a training run. The run continues when its output can no longer be written.


_LONG = 1000  # tokens of a sample that takes long enough to show its progress


def training_console() -> "LiveConsole":
    """A console on standard output. If that can no longer be written, it says so once and prints nothing more. The run
    goes on if the reader of its pipe ended (`octavo train | head`), or the disk is full."""
    if sys.stdout is None or rank() > 0:  # the program was started without one, or another rank prints
        return LiveConsole(io.StringIO(), quiet=True)
    return LiveConsole(cast(IO[str], LastingStream(sys.stdout)))


def print_line(console: Console, text: str) -> None:
    """Print plain text: no markup, no colour, and nothing that a terminal would obey; wrapped on a terminal alone."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=not console.is_terminal)


class LiveConsole(Console):
    """A console that on a terminal has a live line, while its `bar` is entered, below its other lines: what runs, how
    far, the last figures and the time left."""

    def __init__(self, file: IO[str], *, quiet: bool = False) -> None:
        super().__init__(file=file, quiet=quiet)
        doing, said = TextColumn("{task.description}"), TextColumn("{task.fields[said]}")
        columns = (doing, BarColumn(), MofNCompleteColumn(), said, TimeRemainingColumn())
        self.bar = Progress(*columns, console=self, transient=True, disable=not self.is_terminal)
        self.task = self.bar.add_task("starting", total=None, said="")


def show(console: Console, doing: str, done: int, total: int, said: str | None = None) -> bool:
    """Write the live line again, if the console has one; `said` are the figures, None for those of before."""
    if not isinstance(console, LiveConsole) or console.bar.disable:
        return False
    said = console.bar.tasks[0].fields["said"] if said is None else said
    console.bar.update(console.task, description=doing, completed=done, total=total, said=said)
    return True


def show_sampled(console: Console, pieces: Iterable[str], count: int) -> str:
    """The text of `count` tokens, with its progress: on the live line, or in a line for each tenth of a long text."""
    text = ""
    for done, piece in enumerate(pieces, 1):
        text += piece
        if not show(console, "sampling", done, count) and count >= _LONG and done % (count // 10) == 0:
            print_line(console, f"sampled {done:,} of {count:,} tokens")
    return text


class LastingStream:
    """A text stream whose `write` and `flush` never raise an OSError: after the first one they do nothing."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._gone = stream, False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError as error:
            self._gone = True
            discard_output(self._stream)
            said = f"the log cannot be printed any more ({error}): the run continues, metrics.jsonl has its numbers"
            if sys.stderr is not None:
                try:
                    print(said, file=sys.stderr, flush=True)
                except OSError:
                    discard_output(sys.stderr)


# ---- Python's garbage collection in a run: every so many steps, and not in the middle of one.
#
# A collection of all the objects of a process that has compiled a model takes some 0.3 s, in another step of each rank,
# and all ranks wait for it. Steps leave no tensors in cycles of references, only small objects, which a collection of
# the young generations frees in some 10 ms.


EVERY = 50  # steps


@contextmanager
def collect_between_steps() -> Iterator[None]:
    """Within the block Python collects only in `collect_young`."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_young(step: int) -> None:
    """Free what the last steps left behind, after every 50th. Call it after each step."""
    if step % EVERY == 0:
        gc.collect(1)


# ---- Signals ask a run to stop after its current step; a second signal acts at once.


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: a terminal closes, or an ssh connection ends


@contextmanager
def delay_interrupts() -> Iterator[list[int]]:
    """Note the signal that comes within the block instead of acting on it; give the handlers back then, or after it. A
    signal that is ignored when the run starts, as SIGHUP under `nohup`, stays ignored."""
    noted: list[int] = []
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        give_back()

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        give_back()
