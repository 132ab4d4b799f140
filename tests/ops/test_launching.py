"""Calls of operations are recorded, and repeated with other addresses; kernels are compiled without a launch."""

import ast
import ctypes
import threading
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import TestCase

import pytest
import torch

from octavo.numerics import TENSOR, Cast, block, group
from octavo.ops import launching as module
from octavo.ops.launching import LONGEST_ROW, allocate, compile_only, fits, launch, repeat


def add(x, y, n: int) -> None:
    """y = x + [n, 0, 0, ...], of 8 floats. Each is a tensor, a descriptor of one, or an address."""
    tensors = (getattr(t, "base", t) for t in (x, y))
    addresses = (t if isinstance(t, int) else t.data_ptr() for t in tensors)
    source, target = ((ctypes.c_float * 8).from_address(address) for address in addresses)
    target[:] = source[0] + n, *source[1:]


class CompiledKernel:
    """A kernel, and what it is compiled to: with the name and the interface of Triton's class."""

    fn, arg_names = add, ("x_ptr", "y_ptr", "N", "BLOCK", "EVEN")
    function, packed_metadata = "function", "metadata"

    def __init__(self, **changed: object) -> None:
        self.calls, self.compiled = [], self
        vars(self).update(changed)

    def __getitem__(self, grid):
        def search(x, y, n, **constants):
            self.calls.append(("searched", grid, n, constants))
            add(x, y, n)
            return self.compiled

        return search

    def run(self, *args):
        *fixed, x, y, n, block, even = args
        self.calls.append(("compiled", *fixed, getattr(x, "block_shape", None), n, block, even))
        add(x, y, n)


@pytest.fixture(autouse=True)
def _empty(monkeypatch):
    monkeypatch.setattr(module, "_recorded", {})
    monkeypatch.setattr(module, "_current_stream", lambda device: f"stream of {device}")
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)


def described(base: torch.Tensor, *block: int):
    return SimpleNamespace(base=base, block_shape=list(block))


GIVEN = {"EVEN": True, "BLOCK": 4, "num_warps": 8}


def added(kernel: CompiledKernel, x: torch.Tensor, n: int = 5, way=lambda x: x, zero: bool = False, **changed):
    """x + [n, 0, 0, ...] by two launches, and its bits; `way` is how a kernel gets x."""

    def compute():
        y, z = allocate(x, x.shape), allocate(x, x.shape, zero=zero)
        launch(kernel, (3, 2), way(x), y, n - 1, **GIVEN | changed)
        launch(kernel, (3, 2), y, z, 1, **GIVEN | changed)
        return z, None, z.view(torch.int32)

    return repeat("added", (x, n, None, *changed.values()), compute)


@pytest.mark.parametrize("way", [lambda x: x, lambda x: described(x[:], 4)], ids=["tensor", "descriptor"])
@pytest.mark.parametrize("zero", [False, True])
def test_a_known_call_is_repeated_for_other_tensors(way, zero):
    kernel, kept = CompiledKernel(), []
    for _ in range(3):
        x = torch.randn(8)
        y, nothing, bits = added(kernel, x, way=way, zero=zero)
        kept.append((x, y))
        assert (nothing, bits.dtype, bits.data_ptr()) == (None, torch.int32, y.data_ptr())
    for x, y in kept:
        assert torch.equal(y, x + 5 * torch.eye(8)[0])
    assert kernel.calls[0] == ("searched", (3, 2), 4, GIVEN)
    fixed = ("compiled", 3, 2, 1, "stream of -1", "function", "metadata", None, None, None)
    tile = getattr(way(x), "block_shape", None)
    assert kernel.calls[2:] == [(*fixed, tile, 4, 4, True), (*fixed, None, 1, 4, True)] * 2
    assert not any(each.known for each in module._recorded.values())  # no tensor is held


@pytest.mark.parametrize(
    ("x", "changed"),
    [
        *((x, {}) for x in (torch.zeros(9)[1:], torch.zeros(16)[::2], torch.zeros(9), torch.zeros(8).int())),
        *((torch.zeros(8), changed) for changed in ({"n": 6}, {"BLOCK": 8})),
    ],
)
def test_a_call_of_another_kind_is_computed(x, changed):
    kernel = CompiledKernel()
    added(kernel, torch.zeros(8))
    added(kernel, x, **changed)
    assert [kind for kind, *_ in kernel.calls] == ["searched"] * 4


def test_tensors_that_share_memory_are_another_kind():
    kernel = CompiledKernel()
    for same in (True, False, True, False):
        x = torch.zeros(8)
        y = x if same else torch.zeros(8)
        repeat("both", (x, y), partial(launch, kernel, (1,), x, y, 1, **GIVEN))
        assert (float(y[0]), float(x[0])) == (1, same)


@pytest.mark.parametrize(
    "results",
    [
        lambda x, y, run: y,
        lambda x, y, run: None,
        lambda x, y, run: run(x.clone(), y),
        lambda x, y, run: (y, run(x, allocate(x, (8,))))[0],
        lambda x, y, run: run(x, y) + 1,
        lambda x, y, run: run(x, y)[:4],
        lambda x, y, run: run(x, y).add_(1),
    ],
    ids=["no launch", "nothing", "a tensor of PyTorch", "not written", "a result of PyTorch", "a part", "a write"],
)
def test_what_does_more_than_launch_is_computed_again(results):
    def run(x, y):
        launch(CompiledKernel(), (1,), x, y, 1, **GIVEN)
        return y

    for _ in range(3):
        x = torch.zeros(8)
        repeat("more", (x,), lambda x=x: results(x, allocate(x, (8,)), run))
    assert list(module._recorded.values()) == [None]


@pytest.mark.parametrize("changed", [{"compiled": None}, {"run": lambda: None}], ids=["not compiled", "interface"])
def test_what_is_no_compiled_kernel_of_triton_is_searched_again(changed):
    kernel = CompiledKernel(**changed)
    for _ in range(3):
        assert added(kernel, torch.zeros(8))[0][0] == 5
    assert [kind for kind, *_ in kernel.calls] == ["searched"] * 6


@pytest.mark.parametrize("known", [False, True])
def test_a_call_within_a_recorded_one_is_part_of_it(known):
    kernel = CompiledKernel()
    if known:
        added(kernel, torch.zeros(8))
    for _ in range(2):
        x = torch.randn(8)
        y = repeat("outer", (x,), lambda x=x: added(kernel, x)[0])
        assert torch.equal(y, x + 5 * torch.eye(8)[0])
    assert [kind for kind, *_ in kernel.calls] == ["searched"] * (2 + 2 * known) + ["compiled"] * 2
    assert len(module._recorded) == 1 + known


def test_the_memory_of_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    for n in range(9):
        added(CompiledKernel(), torch.zeros(8), n)
    assert len(module._recorded) <= 3


@pytest.mark.parametrize("able", [False, True])
def test_a_kernel_that_waits_for_its_inputs_starts_early(able, monkeypatch):
    monkeypatch.setattr(module, "starts_early", lambda: able)
    for fn, early in ((lambda: module.wait_for_inputs(), able), (add, False)):
        kernel = CompiledKernel(fn=fn)
        launch(kernel, (1,), torch.zeros(8), torch.zeros(8), 1, **GIVEN)
        assert ("launch_pdl" in kernel.calls[0][-1]) == early


def test_kernels_wait_for_their_inputs_before_they_read():
    sources = (path.read_text() for path in (Path(module.__file__).parent / "kernels").glob("*.py"))
    functions = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    waiting = [ast.unparse(node.body[0]) for node in functions if "wait_for_inputs()" in ast.unparse(node.body)]
    assert set(waiting) == {"wait_for_inputs()"}


def test_tensors_of_two_devices_are_refused():
    """The launcher would take the address of the other device as its own."""
    with pytest.raises(ValueError, match="on one device"):
        launch(CompiledKernel(), (1,), torch.zeros(8), torch.zeros(8, device="meta"), 5, **GIVEN)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(3,), (0,), (2, 3), (4, 0, 2), torch.Size((2, 3, 4, 5))])
def test_memory_of_results(shape, device):
    x = torch.zeros(2, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        made, expected = allocate(torch.nn.Parameter(x), shape, dtype), x.new_empty(shape, dtype=dtype)
        assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device)
        assert (made.stride(), made.requires_grad) == (expected.stride(), False)
    with torch.inference_mode():
        assert allocate(x, shape).dtype == x.dtype
        assert allocate(x, shape).is_inference()


# ---- compiling without launching


class Recorder:
    """Records what Triton compiles, and the threads that load it."""

    def __init__(self) -> None:
        self.device_caches: dict[int, list] = defaultdict(list)
        self.compiled: list[tuple] = []
        self.threads: list[int] = []

    def warmup(self, x, n: int, *, grid: tuple[int, ...], BLOCK: int) -> "Recorder":
        self.compiled.append((grid, n, BLOCK))
        if n < 0:
            raise ValueError("no such kernel")
        return self

    @property
    def run(self) -> None:
        self.threads.append(threading.get_ident())


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(module.torch.cuda, "device", lambda device: torch.no_grad())
    return Recorder()


def test_each_kind_is_compiled_once_in_another_thread(kernel: Recorder) -> None:
    x = torch.zeros(16)
    with compile_only():
        for n in (17, 18, 33):  # of one kind: no multiple of 16
            for first in (x, described(x, 4, 4)):
                launch(kernel, (n,), first, n, BLOCK=2)
        for n, block in ((32, 2), (1, 2), (17, 4)):
            launch(kernel, (3,), x, n, BLOCK=block)
    assert sorted(kernel.compiled) == [((3,), 1, 2), ((3,), 17, 4), ((3,), 32, 2), ((17,), 17, 2), ((17,), 17, 2)]
    assert len(kernel.threads) == 5
    assert threading.get_ident() not in kernel.threads
    assert list(kernel.device_caches) == [-1]


def test_an_error_leaves_the_kernel_to_its_first_launch(kernel: Recorder) -> None:
    with TestCase().assertLogs("octavo", "DEBUG") as logs, compile_only():
        launch(kernel, (1,), torch.zeros(16), -1, BLOCK=2)
    assert module.running.get() is None
    assert "no such kernel" in logs.output[0]


@pytest.mark.triton
def test_kinds_part_where_triton_compiles_anew():
    """Triton's own function decides; without Triton, this test has no oracle."""
    triton = pytest.importorskip("triton")
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    x = torch.zeros(64, dtype=torch.bfloat16)
    values = [None, *(n for k in (0, 4, 15, 16, 31, 32, 62) for n in (2**k, 2**k - 1, 2**k + 16, -(2**k)))]
    values += [x, x[1:], x[8:], x.float(), x.view(torch.int16), x.view(torch.float8_e4m3fn), x.view(torch.uint8)]
    base = triton.backends.compiler.BaseBackend
    for one in values:
        for other in values:
            if module._kind_of(one) == module._kind_of(other):
                assert specialize(base, one, False, True, True) == specialize(base, other, False, True, True)


# ---- the devices and tile sizes of the kernels


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [([], False), ([(9, 0)], False), ([(8, 9)], True), ([(9, 0), (8, 9)], True), ([(8, 6), (12, 0)], False)],
)
def test_an_ada_among_the_gpus_rounds_twice(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    assert module.some_gpu_rounds_twice.__wrapped__() == expected


@pytest.mark.parametrize("columns", range(0, LONGEST_ROW + 1, 331))
def test_a_row_tile_holds_the_row_and_triton_can_have_it(columns):
    """4096 elements or one row, and no fewer than 16 elements of a row."""
    elements, rows, warps = module.row_tile(columns)
    assert max(columns, 16) <= elements < 2 * max(columns, 16)
    assert rows == 1 or rows * elements <= 4096
    assert 8 <= warps <= 32
    for n in (elements, rows, warps):
        assert n & (n - 1) == 0


FLOOR = Cast(relative_floor=0.1)


@pytest.mark.parametrize(
    ("cast", "columns", "fit"),
    [
        (Cast(granularity=TENSOR), 10**6, True), (Cast(granularity=TENSOR, relative_floor=0.1), 8, False),
        (Cast(), LONGEST_ROW, True), (Cast(), LONGEST_ROW + 1, False), (Cast(scale="e8m0"), 8, True),
        (FLOOR, LONGEST_ROW, True), (FLOOR, LONGEST_ROW + 1, False), (replace(FLOOR, scale="pow2"), 8, True),
        (replace(FLOOR, scale="e8m0"), 8, False), (Cast(granularity=group(32), scale="e8m0"), 10**6, True),
        (replace(FLOOR, granularity=group(7)), 8, False), (replace(FLOOR, granularity=block(3, 129)), 8, False),
        (Cast(granularity=group(32768)), 8, True), (Cast(granularity=group(32769)), 8, False),
        (Cast(granularity=block(128, 128)), 10**6, True), (Cast(granularity=block(256, 128)), 8, True),
        (Cast(granularity=block(256, 129)), 8, False),
    ],
    ids=str,
)  # fmt: skip
def test_fits(cast, columns, fit):
    assert fits(cast, columns) == fit


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_run_on_gpus_from_compute_capability_8_9(device):
    able = device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
    assert module.has_kernels(torch.empty(0, device=device).device) == able
