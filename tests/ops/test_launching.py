"""A second launch with the same key calls the compiled kernel; any other property of an argument does not."""

import threading
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from octavo.numerics import TENSOR, Cast, block, group
from octavo.ops import launching as module
from octavo.ops.launching import LONGEST_ROW, _read, allocate, compile_only, fits, has_kernels, launch, running


class CompiledKernel:
    """Has the name and the interface of Triton's class."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[object], fails: bool) -> None:
        self.calls, self.fails = calls, fails

    def run(self, *args):
        if self.fails:
            raise TypeError("function takes exactly 12 arguments")
        self.calls.append(("compiled", *args))


class Kernel:
    arg_names = ("x_ptr", "y_ptr", "M", "BLOCK", "EVEN")

    def __init__(self, returns: bool = True, fails: bool = False) -> None:
        self.calls, self.returns, self.fails = [], returns, fails

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.calls.append(("searched", grid, args, constants))
            return CompiledKernel(self.calls, self.fails) if self.returns else None

        return run


@pytest.fixture(autouse=True)
def _empty(monkeypatch):
    monkeypatch.setattr(module, "_cached", {})
    monkeypatch.setattr(module, "_current_stream", lambda device: f"stream of {device}")


def test_the_second_launch_is_direct_with_the_constants_in_order():
    kernel, x = Kernel(), torch.zeros(8)
    launch(kernel, (3, 2), x, None, 5, EVEN=True, BLOCK=4, num_warps=8)
    launch(kernel, (3, 2), x, None, 7, EVEN=True, BLOCK=4, num_warps=8)
    assert kernel.calls[0] == ("searched", (3, 2), (x, None, 5), {"EVEN": True, "BLOCK": 4, "num_warps": 8})
    fixed = ("compiled", 3, 2, 1, "stream of -1", "function", "metadata", None, None, None)
    assert kernel.calls[1] == (*fixed, x.data_ptr(), None, 7, 4, True)


def described(base: torch.Tensor, *block: int):
    return SimpleNamespace(base=base, block_shape=list(block))


def test_a_known_launch_by_descriptors_hands_them_to_the_launcher_of_triton():
    kernel, given = Kernel(), {"BLOCK": 4, "EVEN": True, "num_warps": 8}
    one, other = described(torch.zeros(8), 2, 4), described(torch.zeros(8), 2, 4)
    launch(kernel, (3,), one, X, 5, **given)
    launch(kernel, (3,), other, X, 7, **given)
    kind, *_, first, address, size, block, even = kernel.calls[1]
    assert (kind, first, address, size, block, even) == ("compiled", other, X.data_ptr(), 7, 4, True)
    for each in (described(torch.zeros(8), 4, 2), described(torch.zeros(8).bfloat16(), 2, 4)):
        launch(kernel, (3,), each, X, 5, **given)
    assert [kind for kind, *_ in kernel.calls[2:]] == ["searched", "searched"]


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("args", "constants", "grid"),
    [
        *((args, {}, (3,)) for args in ((X.bfloat16(), None, 5), (torch.zeros(9)[1:], None, 5), (X, X, 5))),
        *(((X, None, size), {}, (3,)) for size in (1, 32, 2**31 + 1)),
        *(((X, None, 5), constants, (3,)) for constants in ({"BLOCK": 8}, {"num_warps": 4})),
        ((X, None, 5), {}, (4,)),
    ],
)
def test_another_key_is_searched(args, constants, grid):
    kernel = Kernel()
    given = {"BLOCK": 4, "EVEN": True, "num_warps": 8}
    launch(kernel, (3,), torch.zeros(8), None, 5, **given)
    launch(kernel, grid, *args, **given | constants)
    assert [kind for kind, *_ in kernel.calls] == ["searched", "searched"]


@pytest.mark.parametrize("kernel", [Kernel(returns=False), Kernel(fails=True)], ids=["not compiled", "interface"])
def test_what_is_no_compiled_kernel_of_triton_is_searched_again(kernel):
    for _ in range(3):
        launch(kernel, (1,), torch.zeros(8), None, 5, BLOCK=4, EVEN=True)
    assert [kind for kind, *_ in kernel.calls] == ["searched"] * 3


def test_the_memory_of_launches_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    for size in range(9):
        launch(Kernel(), (size,), torch.zeros(8), None, 5, BLOCK=4, EVEN=True)
    assert len(module._cached) <= 3


def test_tensors_of_two_devices_are_refused():
    """The launcher would take the address of the other device as its own."""
    x = torch.zeros(8)
    other = SimpleNamespace(dtype=x.dtype, data_ptr=x.data_ptr, get_device=lambda: 1, device="cuda:1")
    with pytest.raises(ValueError, match="on one device"):
        launch(Kernel(), (1,), x, other, 5, BLOCK=4, EVEN=True)


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
    """Records the calls that Triton's kernels get."""

    def __init__(self) -> None:
        self.device_caches: dict[int, list] = defaultdict(list)
        self.compiled: list[tuple] = []
        self.threads: set[int] = set()

    def warmup(self, *args, grid: tuple[int, ...], **constants) -> "Recorder":
        self.threads.add(threading.get_ident())
        self.compiled.append((*args[1:], grid, constants))
        if constants.get("FAILS"):
            raise ValueError("no such kernel")
        return self

    @property
    def run(self) -> None:
        self.compiled.append(("loaded",))

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **constants: self.compiled.append(("launched", *args[1:], grid, constants))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(module.torch.cuda, "device", lambda device: torch.no_grad())
    return Recorder()


def test_each_kernel_is_compiled_once_in_another_thread(kernel: Recorder) -> None:
    x = torch.zeros(16)
    with compile_only():
        for n in (17, 18, 33):  # of one kind: no multiple of 16
            for first in (x, described(x, 4, 4)):
                launch(kernel, (n,), first, n, BLOCK=2)
    assert sorted(kernel.compiled, key=str) == [*[("loaded",)] * 2, *[(17, (17,), {"BLOCK": 2})] * 2]
    assert threading.get_ident() not in kernel.threads
    assert list(kernel.device_caches) == [-1]


def test_other_sizes_and_constants_are_other_kernels(kernel: Recorder) -> None:
    x = torch.zeros(16)
    with compile_only():
        for n, block in ((17, 2), (32, 2), (1, 2), (17, 4)):
            launch(kernel, (1,), x, n, BLOCK=block)
    assert sorted(call[0] for call in kernel.compiled if call != ("loaded",)) == [1, 17, 17, 32]


def test_an_error_leaves_the_kernel_to_its_first_launch(kernel: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "octavo"), compile_only():
        launch(kernel, (1,), torch.zeros(16), 5, FAILS=True)
    assert running.get() is None
    assert "no such kernel" in caplog.text
    launch(kernel, (1,), torch.zeros(16), 5, FAILS=False)
    assert kernel.compiled[-1] == ("launched", 5, (1,), {"FAILS": False})


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
            if _read((one,), -1)[0] == _read((other,), -1)[0]:
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_are_no_kernels_without_a_gpu(device):
    assert not has_kernels(torch.device(device))


@pytest.mark.gpu
def test_kernels_run_from_compute_capability_8_9():
    device = torch.empty(0, device="cuda").device
    assert has_kernels(device) == (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9))
