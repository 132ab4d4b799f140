"""The reference, which a CPU runs, against float64 on the same bytes; the stored bytes against ml_dtypes."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from attention_oracle import DTYPES, attention64, every_bf16, given, stored, wide

from octavo.ops import append_kv, cached_attention
from octavo.ops.attention import MAX_DIM, MAX_ROWS, ordered_attention, widened_attention
from octavo.ops.attention_tiles import TILES, choose_tile, shared_bytes, splits_of
from octavo.ops.launching import Cache

# Batch, heads, heads of keys, new tokens, size, room, tokens
SHAPES = [(2, 8, 2, 1, 32, 50, 37), (1, 4, 4, 3, 24, 40, 40), (3, 4, 1, 2, 16, 20, 2), (2, 2, 2, 1, 8, 5, 1)]
HERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_reference_against_float64(kind, shape, padded):
    *sizes, used = shape
    q, *cache = given(kind, *sizes, dtype=torch.float32 if kind == "bf16" else torch.bfloat16)
    q = q.float()
    first = [min(4, used - 1), 0, used - 1][: sizes[0]] if padded else None
    places = None if first is None else torch.tensor(first, dtype=torch.int32)
    scale = 0.7 * sizes[4] ** -0.5
    expected, size = attention64(q, *cache, used, first, scale)
    actual = cached_attention(q, *cache, torch.tensor(used), first=places, scale=scale)
    assert actual.dtype == torch.float32
    assert ((actual - expected).abs() <= 3e-5 * size).all()
    wider = widened_attention(q, Cache(*cache, torch.tensor(used)), places, scale)
    assert ((wider - expected).abs() <= 3e-5 * size).all()


def test_what_lies_beyond_the_length_does_not_count():
    q, *cache = given("fp8", 1, 2, 1, 1, 16, 20)
    expected = cached_attention(q, *cache, torch.tensor(7))
    for data in cache[:2]:
        data.view(torch.uint8)[:, :, 7:] = 0x7F  # NaN
    assert torch.equal(cached_attention(q, *cache, torch.tensor(7)), expected)


@HERE
@pytest.mark.parametrize(
    "run", [lambda q, cache, first, scale: cached_attention(q, *cache, first=first, scale=scale), widened_attention]
)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_nothing_seen_more_than_room_a_torn_mask_and_nan(kind, run, device):
    q, *cache = (t.to(device) for t in given(kind, 2, 4, 2, 2, 64, 200))

    def attend(used: int, first: list[int] | None = None) -> torch.Tensor:
        places = None if first is None else torch.tensor(first, dtype=torch.int32, device=device)
        return run(q, Cache(*cache, torch.tensor(used).to(device)), places, 0.125)

    y = attend(9, [8, 0])
    assert not y[0, :, 0].any()
    assert y[0, :, 1].any()
    assert y[1].any()
    assert attend(201).isnan().all()
    y = attend(9, [-1, 0])
    assert y[0].isnan().all()
    assert not y[1].isnan().any()
    if kind == "fp8":
        cache[0].view(torch.uint8)[0, 1, 17, 3] = 0x7F
        y = attend(150)
        assert y[0, 2:].isnan().all()
        assert not y[0, :2].isnan().any()


@pytest.mark.parametrize("attend", [cached_attention, ordered_attention])
@pytest.mark.parametrize(("batch", "new", "used"), [(0, 1, 3), (1, 0, 0), (1, 1, 0)])
def test_no_sequences_no_queries_and_no_tokens_give_zeros(attend, batch, new, used):
    q, *cache = given("bf16", batch, 4, 2, new, 16, 9)
    y = attend(q, *cache[: 2 if attend is ordered_attention else 4], torch.tensor(used))
    assert torch.equal(y, torch.zeros_like(q))


@pytest.mark.parametrize("used", [9, 10])
def test_strided_queries_give_a_contiguous_result(used):
    q, keys, values, *_ = given("bf16", 2, 4, 2, 3, 16, 9)
    y = ordered_attention(q.transpose(1, 2).contiguous().transpose(1, 2), keys, values, torch.tensor(used))
    assert y.is_contiguous()
    assert torch.equal(y.nan_to_num(9), ordered_attention(q, keys, values, torch.tensor(used)).nan_to_num(9))


def test_the_scale_of_products_is_that_of_the_size_by_default():
    values = *given("fp8", 1, 2, 1, 1, 16, 20), torch.tensor(9)
    assert torch.equal(cached_attention(*values), cached_attention(*values, scale=0.25))


# ---- storing


@HERE
@pytest.mark.parametrize("kind", DTYPES)
def test_every_number_is_stored_with_one_rounding(kind, device):
    x, dtype = every_bf16(), DTYPES[kind]
    scales = [None, None] if kind == "bf16" else [torch.tensor([0.03, 1.5]), torch.tensor([2.0**-120, 1e30])]
    keys, values = (torch.zeros(1, 2, 70, 512, device=device).to(dtype) for _ in range(2))
    clipped = torch.zeros(2, dtype=torch.int64, device=device)
    y = x.to(device).transpose(1, 2).contiguous().transpose(1, 2)
    here = [None if s is None else s.to(device) for s in scales]
    append_kv(y, y, keys, values, *here, torch.tensor(67).to(device), clipped)
    for data, scale in ((keys, scales[0]), (values, scales[1])):
        expected = torch.from_numpy(stored(x, scale, dtype))
        actual = torch.from_numpy(wide(data))
        assert torch.equal(actual[:, :, 3:67].nan_to_num(nan=7e4), expected.nan_to_num(nan=7e4))
        assert not actual[:, :, :3].any()
        assert not actual[:, :, 67:].any()
    limit = {"fp8": 464, "int8": 127.5}.get(kind)
    if limit is None:
        assert clipped.tolist() == [0, 0]
    else:
        lost = [int((~((x.float() * (1 / s).view(-1, 1, 1)).abs() <= limit)).sum()) for s in scales]
        assert clipped.tolist() == lost
        assert all(0 < n < 65536 for n in lost)


def test_the_amax_under_its_own_scale_is_not_clipped():
    x = torch.randn(1, 1, 1000, 8) * torch.logspace(-6, 3, 1000).view(-1, 1)
    for kind, largest in (("fp8", 448.0), ("int8", 127.0)):
        for row in x.unbind(2):
            k, clipped = row.unsqueeze(2), torch.zeros(2, dtype=torch.int64)
            scale = k.abs().amax().view(1) / largest
            data = torch.zeros(1, 1, 1, 8).to(DTYPES[kind])
            append_kv(k, k, data, data.clone(), scale, scale, torch.tensor(1), clipped)
            assert clipped.tolist() == [0, 0]
            assert float(data.float().abs().max()) == largest


def test_strided_keys_are_stored_as_they_are():
    k = torch.randn(2, 5, 3, 8).transpose(1, 2)
    keys, values = torch.zeros(2, 3, 6, 8), torch.zeros(2, 3, 6, 8)
    append_kv(k, -k, keys, values, None, None, torch.tensor(6), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(keys[:, :, 1:], k)
    assert torch.equal(values[:, :, 1:], -k)


# ---- how the kernel is cut up


def test_splits_fill_the_device_with_the_fewest_parts():
    h100 = 264
    assert splits_of(64, 32768, 128, h100) == 4  # 256 of 264
    assert splits_of(8, 32768, 128, h100) == 30  # 240 of 264
    assert splits_of(512, 32768, 128, h100) == 1  # 512 of 528
    assert splits_of(8, 256, 128, h100) == 2  # no more than there are tiles
    assert splits_of(1, 64, 128, h100) == 1
    assert splits_of(192, 32768, 128, h100) == 4  # 768 of 792; 1 would leave a quarter idle


# ---- the tiles fit into the shared memory of each GPU


ADA, HOPPER = 99 * 1024, 227 * 1024


@pytest.mark.parametrize("size", TILES)
def test_a_hopper_takes_the_fastest_and_the_largest_heads_fit_on_ada_and_rtx_blackwell(size):
    for block_d in (64, 128, MAX_DIM):
        assert choose_tile(size, MAX_ROWS, block_d, HOPPER) == TILES[size][0]
        for block_m in (16, MAX_ROWS):
            tile = choose_tile(size, block_m, block_d, ADA)
            assert shared_bytes(tile, size, block_m, block_d) <= ADA
    needs = [shared_bytes(tile, size, 16, 128) for tile in TILES[size]]
    assert needs == sorted(needs, reverse=True)


# ---- The integer instructions that widen bytes of E4M3 for GPUs before Ada, interpreted


def four_numbers(ptx: str, word: int) -> np.ndarray:
    """What `ptx` makes of a register of four bytes: float16 [4]."""
    at: dict[str, int] = {"$4": word}
    halves: list[int] = []

    def value(name: str) -> int:
        return at[name] if name in at else int(name, 0)

    def both(x: int) -> np.ndarray:
        return np.array([x], np.uint32).view(np.float16)

    for line in ptx.strip("{} ;").split("; "):
        operation, _, rest = line.strip().partition(" ")
        names = re.findall(r"\$?\w+", rest)
        given = [] if operation in (".reg", "mov.b32") else [value(name) for name in names[1:]]
        if operation == "mov.b32" and rest.startswith("{"):
            halves += [value(names[2]) & 0xFFFF, value(names[2]) >> 16]
        elif operation == "mov.b32":
            at[names[0]] = value(names[1])
        elif operation == "prmt.b32":
            source = given[0].to_bytes(4, "little") + given[1].to_bytes(4, "little")
            at[names[0]] = int.from_bytes(bytes(source[given[2] >> 4 * i & 7] for i in range(4)), "little")
        elif operation == "mul.rn.f16x2":
            at[names[0]] = int((both(given[0]) * both(given[1])).view(np.uint32)[0])
        elif operation != ".reg":
            a, b, *c = given
            made = {"and.b32": a & b, "shr.b32": a >> b, "add.u32": a + b, "lop3.b32": a & b | (c or [0])[0]}
            at[names[0]] = made[operation] & 0xFFFFFFFF
    return np.array(halves, np.uint16).view(np.float16)


def test_integer_instructions_widen_all_256_codes():
    pytest.importorskip("triton")
    from octavo.ops.kernels.attention import _BYTES_WORD

    codes = np.arange(256, dtype=np.uint8)
    found = np.concatenate([four_numbers(_BYTES_WORD.value, int(word)) for word in codes.view(np.uint32)])
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16))
