"""GEMMs that eager code launches at cuBLASLt itself, with a library that computes on the CPU from what it is told."""

import ctypes
import threading

import pytest
import torch
from gemm_examples import operands, wide, worst_row
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.ops import cublaslt
from octavo.ops.launching import ARCHITECTURES, Operands
from octavo.ops.library_gemms import scaled_mm_cublaslt

DTYPES = {number: dtype for dtype, number in cublaslt._TYPES.items()}
REFUSED = 15  # CUBLAS_STATUS_NOT_SUPPORTED


class Library:
    """cuBLASLt as far as a GEMM needs it. A function in `failing` returns REFUSED instead."""

    def __init__(self, workspace=0, failing=()):
        self.workspace, self.calls = workspace, []
        self.attributes, self.layouts = {}, {}  # by the address of the descriptor
        self.failures = []
        for name in failing:
            setattr(self, name, lambda *args, name=name: self.failures.append(name) or REFUSED)

    def _ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv(self):
        return 1 << 20

    def cublasLtMatmulDescInit_internal(self, product, size, compute, scale):
        assert (size.value, compute, scale) == (256, 68, 0)
        return 0

    def cublasLtMatmulDescSetAttribute(self, product, name, value, size):
        assert size.value == {25: 1, 8: 8, 17: 8, 18: 8}.get(name, 4)
        self.attributes.setdefault(ctypes.addressof(product), {})[name] = value._obj.value
        return 0

    def cublasLtMatrixLayoutInit_internal(self, layout, size, dtype, rows, columns, stride):
        assert (size.value, stride.value) == (64, rows.value)
        self.layouts[ctypes.addressof(layout._obj)] = DTYPES[dtype], rows.value, columns.value
        return 0

    def cublasLtMatmulPreferenceInit_internal(self, preference, size):
        assert size.value == 64
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, preference, name, value, size):
        assert (name, value._obj.value, size.value) == (1, 1 << 20, 8)
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, left, right, c, d, preference, most, found, count):
        assert most == 1
        assert c is d
        assert ctypes.sizeof(found) == 96
        found[8], count._obj.value = self.workspace, 1
        self.calls.append("heuristic")
        return 0

    def cublasLtMatmul(self, handle, product, one, a, left, b, right, zero, c, c_layout, d, d_layout, algorithm,
                       workspace, size, stream):  # fmt: skip
        assert (one._obj.value, zero._obj.value, stream.value, handle.value) == (1, 0, 7, 5)
        assert (workspace.value is not None, size.value) == (self.workspace > 0, self.workspace)
        assert c is d
        told, (_, n, m) = self.attributes[ctypes.addressof(product)], self.layouts[ctypes.addressof(d_layout)]
        of_rows = told[31] == told[32] == 3
        scale_b = self.read(told[17], torch.float32, n if of_rows else 1)
        scale_a = self.read(told[18], torch.float32, m if of_rows else 1)
        assert told[3] == 1
        y = self.matrix(b, right) @ self.matrix(a, left).T  # [M,K] @ [N,K]^T, where cuBLASLt has the transpose
        y = y * scale_a[:, None] * scale_b
        if told.get(7) == 4:
            y = y + self.read(told[8], DTYPES[told[26]], n)
        self.matrix(d, d_layout, raw=True).copy_(y)
        self.calls.append(bool(told[25]))
        return 0

    def matrix(self, box, layout, raw=False):
        """[columns, rows] by rows, which are the bytes of [rows, columns] by columns."""
        dtype, rows, columns = self.layouts[ctypes.addressof(layout)]
        return self.read(box.value, dtype, rows * columns, raw).view(columns, rows)

    def read(self, address, dtype, length, raw=False):
        memory = (ctypes.c_uint8 * (length * dtype.itemsize)).from_address(address)
        values = torch.frombuffer(memory, dtype=dtype)
        return values if raw else values.double()


@pytest.fixture
def library(monkeypatch):
    def use(**options):
        made = Library(**options)
        monkeypatch.setattr(cublaslt, "_libraries", lambda device: (made, made.cublasLtMatmul))
        return made

    monkeypatch.setattr(cublaslt, "_plans", threading.local())
    monkeypatch.setattr(cublaslt, "_current_stream", lambda device: 7)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentBlasHandle", lambda: 5, raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", None, raising=False)  # cannot be called
    return use


@pytest.mark.parametrize("workspace", [0, 64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "row", "row-e5m2"])
def test_cublaslt_is_told_the_gemm(library, kind, fast, with_bias, workspace):
    used = library(workspace=workspace)
    a, b = operands(kind, 17, 64, 48)
    bias = torch.randn(48).bfloat16() if with_bias else None
    for number in (2, 3):  # the second call finds the plan, and other numbers
        a.scale.mul_(number)
        y = scaled_mm_cublaslt(Operands.of(a, b), bias, torch.bfloat16, fast)
        exact = wide(a) @ wide(b).T + (0 if bias is None else bias.double().numpy())
        assert (y.shape, y.dtype) == ((17, 48), torch.bfloat16)
        assert worst_row(y, exact) < 2.0**-8
    assert used.calls == ["heuristic", fast, fast]


def test_a_plan_is_made_for_each_fact(library):
    """By which cuBLASLt chooses, and for each thread."""
    used = library()
    a, b = operands("row", 17, 64, 48)
    bias, shifted = torch.zeros(2, 52, dtype=torch.bfloat16)[:, 4:]
    half, short = torch.zeros(48, dtype=torch.float16), a.data[:16]
    calls = [
        (a.data, b.data, a.scale, b.scale, bias, torch.bfloat16, False),
        (a.data, b.data, a.scale, b.scale, bias, torch.bfloat16, True),
        (a.data, b.data, a.scale, b.scale, shifted, torch.bfloat16, False),
        (a.data, b.data, a.scale, b.scale, None, torch.bfloat16, False),
        (a.data, b.data, a.scale, b.scale, half, torch.float16, False),
        (short, b.data, a.scale[:16], b.scale, bias, torch.bfloat16, False),
    ]

    def call():
        for each in calls:
            assert cublaslt.scaled_mm(*each) is not None

    for _ in range(2):
        call()
    assert used.calls.count("heuristic") == 6
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert used.calls.count("heuristic") == 12


def operands_in_memory():
    a, b = operands("row", 17, 64, 48)
    return a.data, b.data, a.scale, b.scale


def is_refused(*given):
    return cublaslt.scaled_mm(*given, torch.bfloat16, False) is None


@pytest.mark.parametrize("name", [name for name in dir(Library) if name.startswith("cublas")])
def test_a_status_ends_a_plan(library, name):
    """A GEMM of another shape is tried again."""
    used = library(failing=[name])
    a, b = operands("row", 17, 64, 48)
    for rows in (17, 16):
        given = a.data[:rows], b.data, a.scale[:rows], b.scale, None
        before = len(used.failures)
        assert is_refused(*given)
        after = len(used.failures)
        assert after > before
        assert is_refused(*given)
        assert len(used.failures) == after


def test_torch_gets_what_it_refuses(library):
    used = library()
    a, b = operands("row", 17, 64, 48)
    bias = torch.zeros(48, dtype=torch.bfloat16)
    assert is_refused(a.data, b.data, a.scale[:16], b.scale, None)
    assert is_refused(a.data, b.data, a.scale.double(), b.scale, None)
    assert is_refused(a.data[:, :48].contiguous(), b.data, a.scale, b.scale, None)
    assert is_refused(a.data[:0], b.data, a.scale[:0], b.scale, None)
    assert is_refused(a.data, b.data, a.scale, b.scale, bias.float())
    assert is_refused(a.data, b.data, a.scale, b.scale, bias[:16])
    assert is_refused(a.data.view(torch.int8), b.data, a.scale, b.scale, None)
    assert used.calls == []


def test_traced_tensors_are_left_to_torch(library):
    library()
    given = operands_in_memory()
    with FakeTensorMode() as mode:
        assert is_refused(*(mode.from_tensor(x) for x in given), None)


def test_a_carveout_is_left_to_torch(library, monkeypatch):
    library()
    monkeypatch.setattr(cublaslt, "_carveout", lambda: 8)
    assert is_refused(*operands_in_memory(), None)


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_without_the_library_torch_computes(monkeypatch, error):
    def load(name, mode):
        raise error(name)

    monkeypatch.setattr(cublaslt, "find_architecture", lambda device: ARCHITECTURES["hopper"])
    monkeypatch.setattr(cublaslt, "architecture_key", lambda gpu: gpu.key)
    monkeypatch.setattr(cublaslt.ctypes, "PyDLL", load)
    assert cublaslt._libraries.__wrapped__(0) is None
    assert cublaslt._libraries.__wrapped__(-1) is None
