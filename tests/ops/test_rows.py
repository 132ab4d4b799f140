"""Rows of many matrices: quantized together with the bytes and scales of each by itself, or added up; and words."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from bits import assert_same_numbers, on_gpu
from gpus import poison
from torch import Tensor

from octavo.numerics import ROW, TENSOR, Cast, scale_from_amax
from octavo.ops import quantize, quantize_scaled
from octavo.ops.launching import RowBatch
from octavo.ops.rows import add_rows, cast_rows, row_amaxes, word_sums

CASTS = [Cast(relative_floor=2.0**-8), Cast(), Cast("e5m2", ROW, "pow2", relative_floor=0.25)]
SIZES = (3, 0, 130, 1, 257)
PADDING = 2  # rows between the matrices, which nothing may write


def matrices(columns: int, dtype: torch.dtype) -> list[Tensor]:
    """With zero, tiny and non-finite rows."""
    generator = torch.Generator().manual_seed(columns)
    made = [torch.randn(rows, columns, generator=generator) * 10.0 ** (i - 2) for i, rows in enumerate(SIZES)]
    made[2][5], made[2][7] = 0, made[2][7] * 1e-6
    made[4][3, 0], made[4][9, -1], made[4][11, 0] = torch.nan, torch.inf, -torch.inf
    return [m.to(dtype) for m in made]


def starts() -> list[int]:
    return [sum(SIZES[:i]) + i * PADDING for i in range(len(SIZES))]


def quantized(parts: list[Tensor], cast: Cast, *, at_once: bool) -> tuple[Tensor, Tensor, Tensor]:
    """amax, data and scales of a batch whose floors are those of each matrix, in memory that starts as 7."""
    device, total = parts[0].device, sum(SIZES) + PADDING * len(SIZES)
    amax = torch.full((total,), 7.0, device=device)
    data = torch.full((total, parts[0].shape[1]), 7, dtype=torch.uint8, device=device).view(cast.fmt.dtype)
    batch = RowBatch(parts, starts())
    row_amaxes(batch, amax, data if at_once else None, cast)
    power_of_two, scale = cast.power_of_two, torch.ones_like(amax)
    for start, rows in zip(starts(), SIZES, strict=True):
        of = slice(start, start + rows)
        floor = cast.relative_floor
        scale[of] = scale_from_amax(amax[of], cast.fmt, power_of_two=power_of_two, relative_floor=floor)
    written = scale_from_amax(amax, cast.fmt, power_of_two=power_of_two) if at_once else None
    cast_rows(batch, scale, written, data, cast)
    return amax, data, scale


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
def test_each_matrix_as_by_itself(cast: Cast, at_once: bool) -> None:
    """The memory between the matrices stays as it is."""
    parts = matrices(40, torch.bfloat16)
    _, data, scale = quantized(parts, cast, at_once=at_once)
    for x, start in zip(parts, starts(), strict=True):
        expected, end = quantize(x, cast), start + x.shape[0]
        assert_same_numbers(data[start:end], expected.data)
        assert_same_numbers(scale[start:end, None], expected.scale)
        assert (data[end : end + PADDING].view(torch.uint8) == 7).all()


def test_numbers_beyond_a_given_scale_saturate() -> None:
    x, scale = torch.randn(5, 24) * 100, torch.full((1, 1), 0.01)
    data = torch.zeros(5, 24).to(torch.float8_e4m3fn)
    cast_rows(RowBatch([x], [0]), scale.view(1).repeat(5), None, data, Cast())
    assert_same_numbers(data, quantize_scaled(x, scale, Cast(granularity=TENSOR))[0].data)


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 130, 2048, 4097])
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
def test_a_gpu_gives_every_byte_and_amax_of_a_cpu(cast: Cast, columns: int, dtype: torch.dtype, at_once: bool) -> None:
    parts = matrices(columns, dtype)
    expected = quantized(parts, cast, at_once=at_once)
    moved = on_gpu(parts)
    for _ in range(3):
        poison()
        for actual, wanted in zip(quantized(moved, cast, at_once=at_once), expected, strict=True):
            assert_same_numbers(actual, wanted)


@pytest.mark.gpu
def test_matrices_at_odd_addresses() -> None:
    x, scale = torch.randn(1 + 5 * 64, device="cuda")[1:].view(5, 64), torch.full((5,), 0.01, device="cuda")
    data = torch.zeros(5, 64, device="cuda").to(torch.float8_e4m3fn)
    cast_rows(RowBatch([x], [0]), scale, None, data, Cast())
    expected = torch.zeros(5, 64).to(torch.float8_e4m3fn)
    cast_rows(RowBatch([x.cpu()], [0]), scale.cpu(), None, expected, Cast())
    assert_same_numbers(data, expected)


# ---- adding rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("columns", [0, 1, 1023, 4096, 1_000_003])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_sums_are_those_of_float64(count: int, columns: int, mean: bool, device: str) -> None:
    rows, total = torch.randn(count, columns, device=device).bfloat16(), torch.full((columns,), torch.nan).to(device)
    if device == "cuda":
        poison()
    add_rows(rows, total, mean=mean)
    expected = rows.double().mean(0) if mean else rows.double().sum(0)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_two_rows_have_the_bits_of_pytorch() -> None:
    rows, total = torch.randn(2, 100_000, device="cuda").bfloat16(), torch.empty(100_000, device="cuda")
    add_rows(rows, total, mean=True)
    assert torch.equal(total, rows.float().sum(0) * 0.5)


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets() -> None:
    rows = torch.zeros(3, 800_000_000, dtype=torch.bfloat16, device="cuda")
    rows[:, -5:] = torch.tensor([1.0, 2.0, 4.0], device="cuda").bfloat16()[:, None]
    total = torch.empty(800_000_000, device="cuda")
    add_rows(rows, total, mean=False)
    assert total[-5:].tolist() == [7.0] * 5
    assert total[:-5].count_nonzero() == 0


# ---- adding words


def bytes_of(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def tensors() -> list[Tensor]:
    """Of less than a word, of words and a part, of blocks of a kernel; at an odd address, and with strides."""
    made = bytes_of(1, 7, 8, 9, 23, 24, 0, 8 * 4096, 8 * 4096 + 15, 8 * 3 * 4096 + 13)
    odd, strided = bytes_of(100, 990)
    return [*made, odd[3:], strided.view(33, 30).t(), torch.tensor(2.5), torch.ones(5, 3).bfloat16()]


def sums_by_numpy(tensors: list[Tensor]) -> list[int]:
    found = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        words = np.frombuffer(data + b"\0" * (-len(data) % 8), np.uint64)
        factors = np.arange(len(words), dtype=np.uint64) * np.uint64(0x1E3779B97F4A7C15)
        factors = (factors ^ (factors.view(np.int64) >> 31).view(np.uint64)) | np.uint64(1)
        found.append(int((words * factors).sum().view(np.int64)))
    return found


def interpreted_sums(tensors: list[Tensor], programs: int) -> list[int]:
    from octavo.ops.kernels import rows as kernel

    with patch.object(kernel, "PROGRAMS", programs):
        found: list[int] = kernel.word_sums(tensors).tolist()
    return found


@pytest.mark.parametrize("words", [3, 5000, 1 << 19])
def test_the_sums_of_words_by_numpy(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.ops.rows.WORDS", words)
    assert word_sums(tensors()).tolist() == sums_by_numpy(tensors())


@pytest.mark.triton
@pytest.mark.parametrize("programs", [1, 2, 8])
def test_the_kernel_gives_the_sums_of_words(kernels, programs: int) -> None:
    assert kernels.submit(interpreted_sums, tensors(), programs).result() == sums_by_numpy(tensors())


@pytest.mark.gpu
def test_a_gpu_gives_the_sums_of_words() -> None:
    made = [*tensors(), *bytes_of(8 * 256 * 4096 * 2 + 21)]
    moved = [t.cuda() for t in made]
    moved[10] = bytes_of(100)[0].cuda()[3:]
    for _ in range(3):
        poison()
        assert word_sums(moved).tolist() == sums_by_numpy(made)
