"""Sorting by expert and back, against a loop over tokens in float64; the same bytes as quantizing the gathered rows."""

import numpy as np
import pytest
import torch
from grouped_examples import SIZES, offsets_of, rows_of
from interpreted_triton import run_kernel

from octavo import ops
from octavo.numerics import Cast
from octavo.ops.permutation import Factors, index_groups_reference, index_slots_reference

TOKENS, TOP_K, EXPERTS, K = 37, 3, 6, 40


def chosen() -> torch.Tensor:
    """[TOKENS, TOP_K], the experts of each token; nobody chose expert 2."""
    score = torch.rand(TOKENS, EXPERTS)
    score[:, 2] = -1
    return score.topk(TOP_K).indices


@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS - 2], ids=["all here", "some elsewhere"])
def test_slots_are_sorted_by_expert_and_stay_in_order(experts):
    index = chosen()
    slot, row, offsets = ops.sort_by_expert(index, experts)
    assert (slot.dtype, row.dtype, offsets.dtype) == (torch.int32,) * 3
    flat = index.view(-1).numpy()
    assert np.array_equal(slot.numpy(), np.argsort(flat, kind="stable"))
    counts = np.bincount(flat, minlength=EXPERTS)[:experts]
    assert np.array_equal(offsets.numpy(), counts.cumsum())
    assert counts[2] == 0
    for s, m in enumerate(row.view(-1).tolist()):
        assert m == -1 if flat[s] >= experts else slot[m] == s


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_group_of_each_row(sizes):
    expected = [e for e, size in enumerate(sizes) for _ in range(size)] + [len(sizes)] * 3
    assert ops.group_of_rows(offsets_of(sizes), sum(sizes) + 3).tolist() == expected


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("sizes", [*SIZES.values(), [0, 0, 0]], ids=[*SIZES, "nothing"])
def test_aligned_groups_hold_their_rows_and_zeros(sizes, spare):
    rows = sum(sizes) + spare
    slot = torch.randperm(rows).int()
    groups = ops.aligned_groups(offsets_of(sizes), rows, slot, TOP_K)
    expert, ends, place, token = groups
    starts = [0, *ends.tolist()[:-1]]
    assert {each.dtype for each in groups} == {torch.int32}
    assert len(place) % 16 == 0
    assert ends[-1] <= len(place) <= rows + 16 + 128 * len(sizes)
    for start, end, where in zip(starts, ends.tolist(), rows_of(sizes), strict=True):
        size = where.stop - where.start
        assert end - start == max(128, -(-size // 128) * 128)
        assert place[start:end].tolist() == [*range(where.start, where.stop), *[-1] * (end - start - size)]
    assert (place[ends[-1] :] == -1).all()
    assert expert.tolist() == [min(e, len(sizes) - 1) for e in ops.group_of_rows(offsets_of(sizes), rows).tolist()]
    assert token.tolist() == [-1 if m < 0 else int(slot[m]) // TOP_K for m in place.tolist()]


def test_the_transpose_places_rows():
    data = torch.randn(9, K).to(torch.float8_e4m3fn)
    place = torch.tensor([3, -1, 0, 8, 8, -1], dtype=torch.int32)
    shift = torch.arange(9, dtype=torch.int32)
    plain, placed = (ops.transpose(data, shift, place=rows).view(torch.uint8) for rows in (None, place))
    assert torch.equal(placed, torch.where(place < 0, 0, plain[:, place.clamp(min=0).long()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factors", ["", "columns and rows", "weights too"])
def test_the_bytes_are_those_of_the_gathered_rows(dtype, factors):
    slot, _, offsets = ops.sort_by_expert(chosen(), EXPERTS)
    x, group = torch.randn(TOKENS, K).to(dtype), ops.group_of_rows(offsets, len(slot))
    columns, rows = torch.rand(EXPERTS, K), 1 + torch.rand(len(slot), 1)  # a mantissa is its own
    given = {"column_scale": columns, "group": group, "mantissa_of": rows * 2.0**-3} if factors else {}
    if factors == "weights too":
        given["weight"] = weight = torch.randn(TOKENS, TOP_K)
        weight[:2] = torch.tensor([[0.0, -0.0, 1e-9], [-1e-9, 2.0**-24, -0.5]])
        rows = rows * torch.where(weight.abs() < 2.0**-24, 2.0**-24, weight).view(-1, 1)[slot]
    q = ops.gather_quantize(x, Cast(), Factors(**given, slot=slot), top_k=TOP_K)
    gathered = x[slot // TOP_K].float()
    expected = ops.quantize(gathered * columns[group] * rows if factors else gathered, Cast())
    assert torch.equal(q.scale, expected.scale)
    assert torch.equal(q.data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS - 2], ids=["all here", "some elsewhere"])
def test_combine(experts, weighted):
    _, row, _ = ops.sort_by_expert(chosen(), experts)
    y, weight = torch.randn(TOKENS * TOP_K, K), torch.rand(TOKENS, TOP_K)
    y[row.max() + 1 :] = torch.nan  # rows of other ranks hold any numbers
    exact = np.zeros((TOKENS, K))
    for t in range(TOKENS):
        for s in range(TOP_K):
            if row[t, s] >= 0:
                exact[t] += y[row[t, s]].double().numpy() * (float(weight[t, s]) if weighted else 1)
    np.testing.assert_allclose(ops.combine(y, row, weight if weighted else None).numpy(), exact, atol=2e-6)


def test_tokens_whose_experts_are_all_elsewhere():
    """No expert here has a row."""
    y, row = torch.zeros(0, K), torch.full((TOKENS, TOP_K), -1, dtype=torch.int32)
    assert torch.equal(ops.combine(y, row, None), torch.zeros(TOKENS, K))


def indexed_by_kernel(name: str, *given: object) -> tuple[torch.Tensor | None, ...]:
    """Run where kernels are interpreted, with few rows a program, and with other numbers where nothing is written."""
    from octavo.ops.kernels import permutation as kernel

    torch.use_deterministic_algorithms(True)
    kernel.BLOCK = 64
    return getattr(kernel, name)(*given)


def assert_equal_indices(actual: tuple[torch.Tensor | None, ...], expected: tuple[torch.Tensor | None, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None and other is None) or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.triton
@pytest.mark.parametrize("numbers", [1, 7, 300], ids=lambda n: f"{n} chosen")
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("experts", [1, 6, 150])
def test_the_kernel_indexes_slots(kernels, experts, rows, numbers):
    """Groups are empty, and experts are of other ranks."""
    flat = torch.randint(numbers, (rows,), dtype=torch.int32) + (experts // 3 if rows % 2 else 0)
    given = *torch.sort(flat, stable=True), experts
    actual = kernels.submit(indexed_by_kernel, "index_slots", *given).result()
    assert_equal_indices(actual, index_slots_reference(*given))


@pytest.mark.triton
@pytest.mark.parametrize("with_slots", [False, True])
@pytest.mark.parametrize("spare", [0, 1, 200])
@pytest.mark.parametrize(
    "sizes", [*SIZES.values(), [0], [500], [128, 0, 129, 127, 300], [1, 0, 2] * 25],
    ids=[*SIZES, "nothing", "one group", "multiples", "many"],
)  # fmt: skip
def test_the_kernel_indexes_groups(kernels, sizes, spare, with_slots):
    offsets, rows = offsets_of(sizes), sum(sizes) + spare
    places = len(ops.aligned_groups(offsets, rows).place)
    given = offsets, rows, places, torch.randperm(rows).int() if with_slots else None, TOP_K
    actual = kernels.submit(indexed_by_kernel, "index_groups", *given).result()
    assert_equal_indices(actual, index_groups_reference(*given))


@pytest.mark.triton
@pytest.mark.parametrize("k", [K, 2080])
def test_the_kernel_gathers(kernels, k):
    """Numbers of E4M3 times powers of two, since the interpreter rounds other numbers in its own way."""
    slot, row, offsets = ops.sort_by_expert(chosen(), EXPERTS - 2)  # others are elsewhere
    group, rows = ops.group_of_rows(offsets, len(slot)), len(slot)
    x = torch.randn(TOKENS, k).to(torch.float8_e4m3fn).float()
    x[:, 0] = 448.0
    column_scale = torch.exp2(torch.arange(EXPERTS)).view(-1, 1).expand(-1, k).contiguous()
    whole, weight = torch.rand(rows) < 0.5, torch.exp2(torch.randint(-9, 9, (TOKENS, TOP_K)).float())
    mantissas = torch.where(whole, 8, 12.0).unsqueeze(1)  # 1 and 1.5
    factors = Factors(column_scale, group, mantissas, weight, slot)
    given = x, Cast(scale="pow2"), TOP_K, factors
    data, scale = kernels.submit(run_kernel, "permutation", "gather_quantize", *given).result()
    token, rounded = slot // TOP_K, torch.where(whole, 1, 2).unsqueeze(1)
    assert torch.equal(data.float()[whole], x[token][whole])
    assert torch.equal(scale, column_scale[group, :1] * weight.view(-1, 1)[slot] * rounded)
