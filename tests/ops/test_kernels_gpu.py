"""Every kernel on a GPU against its reference: every bit of its results, over poisoned memory.

Most references run on the CPU, which other files here test against oracles. They run on the GPU where exp2, or the
order of float64 sums, may differ between devices (test_activation.py, test_norm.py), and for large matrices.
"""

import numpy as np
import pytest
import torch
from activation_oracle import FAR, on_the_border
from attention_oracle import DTYPES
from bits import assert_same, assert_same_numbers, bits, on_gpu
from fold_scales_oracle import folded, scales
from gpus import peak_of, poison
from norm_oracle import EPS
from norm_oracle import given as given_norm
from operation_examples import OPERATIONS, examples, permutations, quantizing, rotations, routing
from quantize_oracle import CASTS, OTHERS, matrix
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from octavo import ops
from octavo.numerics import FORMATS, Cast
from octavo.ops import launching
from octavo.ops.activation import WIDTHS, activation_gradient
from octavo.ops.launching import Factors
from octavo.ops.permutation import nonzero
from octavo.recipe import ROW_W

pytestmark = pytest.mark.gpu

CASTS = [cast for cast in CASTS if cast.format != "e2m1"]  # which no kernel writes
ROW, PRESETS = Cast().spec, [cast for cast in CASTS if cast not in OTHERS]
SEED = torch.tensor(0x0123456789ABCDEF)
OWN_DEVICE = ("activation", "norm")  # in the names of operations: the reference runs on the GPU
SUMS = {"activation_backward": 3}  # from this place on results are added in another order
CLOSE = ("norm_backward",)  # its sums have another order than those of the reference


def copied(values, device: str = ""):
    """The values, with a copy of each tensor that has its strides, on a device."""
    return tree_map_only(Tensor, lambda t: t.to(device or t.device, copy=True), values)


def reference(name: str, values):
    """The results of an operation by its reference, on the device of its arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(OPERATIONS[name]), "runs", lambda *_: False)
        return getattr(torch.ops.octavo, name)(*values)


def check(name: str, values: tuple, repeats: int = 3, *, here: bool = False) -> None:
    """The results, and the arguments, some of which are written to. `here`: the reference runs on the GPU."""
    given = copied(values, "cuda" if here or any(part in name for part in OWN_DEVICE) else "")
    expected, moved, first = reference(name, given), copied(values, "cuda"), None
    for _ in range(repeats):
        arguments = copied(moved)
        poison()
        actual = tree_leaves(getattr(torch.ops.octavo, name)(*arguments))
        first = first or actual
        for i, (one, other) in enumerate(zip(actual, tree_leaves(expected), strict=True)):
            assert (one.device.type, one.is_contiguous()) == ("cuda", True)
            assert_same_numbers(one, first[i] if i >= SUMS.get(name, len(first)) else other)
        for one, other in zip(tree_leaves(arguments), tree_leaves(given), strict=True):
            if isinstance(one, Tensor):
                assert_same_numbers(one, other)


def check_each(found, **options) -> None:
    names = set()
    for name, values in found:
        if name not in CLOSE and OPERATIONS[name].kernels:
            check(name, values, **options)
            names.add(name)
    assert names


# ---- rows and blocks of matrices

LARGE = (4096, 2048)
MATRICES = [(1, 1), (3, 5), (17, 130), (129, 257), (700, 131), (1, 4097), (5, 4097), (0, 7), (5, 0), (0, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_matrices_of_every_size(shape, dtype):
    check_each(examples(matrix(shape, dtype), CASTS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [LARGE, (3, 16384), (3, 20000), (2, 32768)], ids=str)
def test_large_matrices(shape, dtype):
    check_each(examples(matrix(shape, dtype), PRESETS), here=True)


@pytest.mark.parametrize("size", [1e-10, 1e-35, 2.0**-140, 1e30])
def test_tiny_and_huge_numbers(size):
    """Subnormal float32 numbers and products too: a GPU that flushes them would show."""
    for name, values in quantizing(torch.randn(33, 257) * size, CASTS):
        if name in ("quantize", "quantize_transposed"):
            check(name, values, repeats=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shape", [(129, 257), (9, 20000)], ids=str)
def test_a_number_that_is_not_finite(shape, value):
    """In the last column, which is in the second block of a long row."""
    x = matrix(shape, torch.bfloat16)
    x[4, -1] = value
    found = examples(x, CASTS if shape[0] > 9 else PRESETS)
    check_each((each for each in found if "requantize" not in each[0]), repeats=1)


def test_strided_matrices():
    check_each(examples(matrix((130, 17)).t(), CASTS), repeats=1)


def test_constant_rows_far_from_zero():
    check_each(examples(torch.tensor(FAR).unsqueeze(1).expand(-1, 130).contiguous(), []), repeats=1)


@pytest.mark.parametrize("kind", WIDTHS)
def test_activations_on_the_border_of_two_codes(kind):
    """Rounding in another order than the reference would give another code here."""
    u = on_the_border(kind)
    m, f = u.shape[0], u.shape[1] // WIDTHS[kind]
    scale = ops.activation_scales(u.cuda(), kind, Cast())
    factors = Factors(torch.ones(1, u.shape[1]), mantissa_of=torch.ones(m, 1))
    check("activation_quantize", (u, kind, None, True, ROW))
    check("activation_backward", (torch.ones(m, f), u, kind, ROW, *factors, ROW, scale, True))


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("shape", [(17, 130), (16, 40_000), LARGE], ids=str)
def test_sums_of_the_gradient_are_those_of_float64(shape, kind):
    m, f = shape
    dh, u = matrix((m, f), torch.bfloat16).cuda(), matrix((m, f * WIDTHS[kind]), torch.bfloat16).cuda()
    scale, ones = ops.activation_scales(u, kind, Cast()), torch.ones(1, u.shape[1], device="cuda")
    group, slot, row, weight = (t.cuda() for t in routing(m))
    given = dh, u, kind, ROW, ones.expand(2, -1), group, torch.ones_like(scale), weight, slot, row, ROW, scale, True
    poison()
    dbias, dweight = torch.ops.octavo.activation_backward(*given)[3:]
    du, h = (t.double() for t in activation_gradient(dh, u, kind))
    assert ((dbias - du.sum(0)).abs() <= 1e-6 * du.abs().sum(0)).all()
    products = (dh * h)[row.squeeze(1)] * (row >= 0) / nonzero(weight).double()
    assert ((dweight - products.sum(1, keepdim=True)).abs() <= 1e-6 * products.abs().sum(1, keepdim=True)).all()


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-12])
def test_the_eps_of_a_norm_decides_in_rows_as_small_as_its_root(eps):
    """Kernel and reference use the same eps to the last bit of rstd: the float64 1e-5 would show."""
    x = torch.randn(2048, 130) * torch.logspace(-8, 0, 2048).unsqueeze(1)
    check("norm_quantize", (x, None, torch.ones(130), None, eps, ROW, False, True), repeats=1)


@pytest.mark.parametrize("seed", range(20))
def test_large_matrices_again_and_again(seed):
    """A race between the warps of a program, or a lost store, shows in one run of many, each over new data."""
    torch.manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 1, (8192, 1), device="cuda"))  # over 12 octaves
    x = (torch.randn(8192, 4096, device="cuda") * sizes).bfloat16()
    weight, shift = torch.rand(4096, device="cuda"), torch.randint(0, 24, (8192,), dtype=torch.int32, device="cuda")
    row, column = 1 + torch.rand(8192, 1, device="cuda"), torch.rand(1, 4096, device="cuda")
    floors = Cast(relative_floor=2.0**-8), Cast(relative_floor=2.0**-4, scale="pow2")
    for cast in (Cast(), Cast("e5m2", scale="pow2"), *floors):
        check("quantize", (x, cast.spec, None, None, None, 1), 1, here=True)
    for fmt, given in (("e4m3", None), ("e4m3", shift), ("e5m2", None), ("e5m2", shift)):
        check("transpose", (ops.quantize(x, Cast(fmt)).data, given, None, None), 1, here=True)
    for center in (False, True):
        check("norm_quantize", (x, x.flip(0), weight, weight if center else None, EPS, ROW, center, True), 1)
    for kind, width in WIDTHS.items():
        u, dh = x[:2048], x[2048:4096, : 4096 // width]
        scale = ops.activation_scales(u, kind, Cast())
        check("activation_quantize", (u, kind, None, True, ROW), 1)
        factors = Factors(column, mantissa_of=row[:2048])
        check("activation_backward", (dh, u, kind, ROW, *factors, ROW, scale, True), 1)


# ---- norms: kernel and reference add in different orders in float64, whose sums then differ by 1e-15 of themselves


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cast"), [(torch.bfloat16, Cast()), (torch.float32, Cast("e5m2", scale="pow2"))], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 130), (129, 257), (5, 4097), (2048, 2048)], ids=str)
def test_the_norms_of_a_gpu_give_the_bytes_of_a_cpu(shape, dtype, cast, center):
    """All but a millionth. If the order of a float64 sum changes the last bit of a mean or rstd, an element of that row
    on the border of two codes may round to the other one."""
    values = given_norm(shape, dtype, True, True)
    actual = ops.norm_quantize(*on_gpu(values), EPS, cast, center=center)
    expected = ops.norm_quantize(*values, EPS, cast, center=center)
    assert torch.equal(bits(actual.total).cpu(), bits(expected.total))
    assert (bits(actual.output.data).cpu() != bits(expected.output.data)).sum() <= 1e-6 * shape[0] * shape[1]
    statistics = ((each.mean, each.rstd, each.output.scale) for each in (actual, expected))
    for one, other in zip(*statistics, strict=True):
        assert ((one.cpu() - other).abs() <= 2.0**-22 * other.abs()).all()
        assert (one.cpu() != other).sum() <= 1e-3 * shape[0]


def test_the_gradient_of_a_norm_of_no_rows():
    x, weight, column = (torch.ones(shape, device="cuda") for shape in ((0, 7), (7,), (0, 1)))
    dx, dweight, dbias = ops.norm_backward(x, x, weight, column, column, x, True)
    assert dx.shape == (0, 7)
    assert_same(dweight, torch.zeros_like(weight))
    assert_same(dbias, torch.zeros_like(weight))


# ---- rotations of rows, scales of the backward GEMMs, and the byte transpose


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 2), (5, 6), (130, 96), (0, 8), (3, 17), (9, 1024), (700, 4096), (33, 14336), (5, 8192), (3, 3 * 16384),
     (2, 32768), (2, 65536), (4, 8, 4, 48)],  # 32,768 in the registers of some GPUs, and more in two parts
    ids=str,
)  # fmt: skip
def test_rotate(shape, dtype):
    x = matrix((int(np.prod(shape[:-1])), shape[-1])).mul(2**-6).to(dtype).view(shape)
    check("rotate", (x, None))
    if x.ndim == 2:
        check("rotate", (x.t(), None), repeats=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_in_its_block(value):
    x = torch.ones(3, 192, device="cuda")
    x[1, 70] = value
    finite = ops.rotate(x).isfinite().view(3, 3, 64).all(-1).cpu()
    assert finite.tolist() == [[True] * 3, [True, False, True], [True] * 3]


@pytest.mark.parametrize(
    ("t", "n"), [(1, 1), (257, 5), (8192, 8193), (8193, 16), (32896, 5120), (131072, 3), (5, 20000)]
)
def test_fold_scales(t, n):
    s_x, s_g, s_w = scales(t, n)
    for given in (s_w, None):
        check("fold_scales", (s_x, s_g, given, None))
        for one, other in zip(ops.fold_scales(*on_gpu((s_x, s_g, given))), folded(s_x, s_g, given), strict=True):
            assert_same(one, other)
    s_g[t // 2] = torch.nan
    assert ops.fold_scales(s_x.cuda(), s_g.cuda(), None).dx.cpu().isnan().nonzero()[:, 0].tolist() == [t // 2]


@pytest.mark.parametrize("exponents", [(-126, -126), (-100, -49), (127, 127), (127, 0), (-75, -75)])
def test_powers_beyond_those_of_float32(exponents):
    s_x, s_g = (torch.full((9, 1), 2.0**e) for e in exponents)
    for s_w in (None, torch.tensor([[2.0**-126], [1.5], [2.0**127]])):
        check("fold_scales", (s_x, s_g, s_w, None), repeats=1)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("with_w", [True, False])
def test_compiled_code_folds_the_same_scales(with_w):
    torch._dynamo.reset()
    s_x, s_g, s_w = scales(8193, 16)
    given = s_x, s_g, s_w if with_w else None
    compiled = torch.compile(ops.fold_scales, fullgraph=True)
    for one, other in zip(compiled(*on_gpu(given)), ops.fold_scales(*given), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("shape", [(1, 1), (17, 130), (129, 257), (0, 7), (7, 0), LARGE], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_transpose(fmt, shape):
    """Without a shift all bytes are kept, those of NaN too; with one, NaN may become another NaN."""
    data = torch.randint(256, shape, dtype=torch.uint8).view(FORMATS[fmt].dtype)
    shift = torch.randint(0, 24, shape[:1], dtype=torch.int32)
    shift[::5], shift[3::7] = 0, 2**31 - 1
    strided = data.view(torch.uint8).t().contiguous().t().view(data.dtype)
    for given in (data, strided):
        check("transpose", (given, shift, None, None))
        poison()
        assert_same(ops.transpose(given.cuda()), ops.transpose(data))


# ---- stochastic rounding


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**62 - 1])
def test_stochastic_rounding_over_the_whole_range(fmt, seed):
    """Subnormal numbers of both, every binade, the neighbours of the grid's numbers, and numbers that saturate."""
    grid = torch.arange(256, dtype=torch.uint8).view(FORMATS[fmt].dtype).float()
    grid = grid[grid.isfinite()]
    near = [torch.nextafter(grid, torch.tensor(way)) for way in (-torch.inf, torch.inf)]
    sweeps = torch.linspace(-(2.0**-5), 2.0**-5, 300_000), torch.exp2(torch.linspace(-149, 20, 300_000))
    x = torch.cat([grid, *near, *sweeps]).view(1, -1)
    check("quantize_scaled", (x, torch.ones(1, 1), fmt, torch.tensor(seed)), repeats=1)


def test_the_noise_repeats_after_2_to_32_elements():
    """The hash takes the lower 32 bits of an index, and the kernel's own offsets have more."""
    rows, columns = 2**17, 2**15
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("takes 13 GB of GPU memory")
    x = torch.zeros(rows + 2, columns, device="cuda", dtype=torch.bfloat16)
    x[:2] = x[-2:] = torch.randn(2, columns, device="cuda").bfloat16()
    data, scale = torch.ops.octavo.quantize(x, ROW, None, None, SEED.cuda(), 1)
    assert torch.equal(bits(data[:2]), bits(data[-2:]))
    assert torch.equal(scale[:2], scale[-2:])
    assert_same(data[:2].contiguous(), torch.ops.octavo.quantize(x[:2].cpu(), ROW, None, None, SEED, 1)[0])


@pytest.mark.parametrize("function", [ops.quantize, ops.quantize_transposed])
def test_the_draw_follows_torch_manual_seed(function):
    cast, x, found = Cast(rounding="stochastic"), matrix((17, 130)).cuda(), []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        found.append(bits(function(x, cast).data))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


DRAWN = [Cast(cast.format, cast.granularity, cast.scale, rounding="stochastic") for cast in PRESETS]


@pytest.mark.parametrize("call", [ops.rotate, *(lambda x, cast=cast: ops.quantize(x, cast) for cast in DRAWN)])
def test_an_operation_takes_the_memory_of_its_result(call):
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    call(x)
    assert peak_of(lambda: call(x)) <= (2 if call is ops.rotate else 1.5) * x.numel() + 2**20


# ---- rows of tokens sorted by expert

SIZES = [(1, 1, 1, 16), (37, 3, 6, 200), (1024, 2, 8, 4096), (512, 8, 128, 2048), (130, 2, 4, 8200)]  # T, top_k, E, K


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_permutations(size, dtype):
    check_each(permutations(*size, dtype, [Cast(), Cast(scale="pow2"), Cast("e5m2", scale="pow2")]), here=True)


@pytest.mark.parametrize(("rows", "experts"), [(0, 5), (1, 1), (70_000, 1), (1025, 3000), (100_000, 3000)], ids=str)
@pytest.mark.parametrize("spread", [1, 2.5, 0.1])
def test_indices_of_slots_and_groups(rows, experts, spread):
    """Groups without rows, and experts of other ranks."""
    chosen = (torch.rand(rows) * spread * experts).int()
    slot, _, offsets = ops.sort_by_expert(chosen.unsqueeze(1), experts)
    check("index_slots", (*torch.sort(chosen, stable=True), experts))
    check("index_groups", (offsets, rows, len(ops.aligned_groups(offsets, rows).place), slot, 8))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_indexes_slots_and_groups(dynamic):
    def indices(experts):
        slot, row, offsets = ops.sort_by_expert(experts, 6)
        return slot, row, *ops.aligned_groups(offsets, slot.shape[0], slot, experts.shape[1])

    compiled = torch.compile(indices, fullgraph=True, dynamic=dynamic)
    for tokens in (40, 70):
        experts = torch.randint(9, (tokens, 2))
        for actual, expected in zip(compiled(experts.cuda()), indices(experts), strict=True):
            assert actual.device.type == "cuda"
            assert_same_numbers(actual, expected)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_compiled_code_searches_in_a_slice_of_offsets(computed):
    def groups(values):
        return ops.group_of_rows((-values if computed else values)[1:], 7)

    values = torch.tensor([1, 3, 5], dtype=torch.int32, device="cuda") * (-1 if computed else 1)
    assert torch.compile(groups, fullgraph=True)(values).tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("cast", [ROW_W, Cast(), Cast(scale="pow2", relative_floor=0.25)], ids=lambda c: c.spec)
@pytest.mark.parametrize("shape", [(3, 5, 16), (8, 1000, 512), (128, 256, 200)], ids=str)
def test_quantize_matrices(shape, cast):
    sizes = torch.exp2(torch.randint(-14, 1, (*shape[:2], 1)))
    w = (torch.randn(shape) * sizes).bfloat16()
    check("quantize", (w.flatten(0, 1), cast.spec, None, None, None, len(w)))


# ---- attention: rotary embedding and the bytes of a cache

HEADS = [  # batch, tokens, H, G, D
    (1, 1, 32, 8, 128), (64, 1, 32, 8, 128), (3, 1, 4, 2, 64), (2, 5, 4, 1, 80), (1, 37, 2, 2, 96), (2, 19, 3, 3, 256),
    (2, 3, 2, 1, 12), (1, 1000, 8, 2, 128),
]  # fmt: skip


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rotary_embedding(shape, kind):
    check_each(rotations(shape, kind), repeats=1)


@pytest.mark.parametrize(("dtype", "table"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
@pytest.mark.parametrize("shape", HEADS[:5], ids=str)
def test_rotary_embedding_in_other_dtypes(shape, dtype, table):
    check_each(rotations(shape, "fp8", dtype, table), repeats=1)


# ---- launches of known kernels: every property of an argument that decides the compiled kernel, in turns


def test_sizes_and_alignments_in_turns(monkeypatch):
    monkeypatch.setattr(launching, "_recorded", {})
    memory = torch.randn(70_000).bfloat16()
    on_gpu = memory.cuda()
    for _ in range(3):
        for m, k in ((1, 256), (3, 100), (16, 256), (17, 130), (1, 1), (48, 1)):
            for offset in (0, 1, 8):
                x, y = (t[offset : offset + m * k].view(m, k) for t in (memory, on_gpu))
                actual, expected = ops.quantize(y, Cast()), ops.quantize(x, Cast())
                assert_same(actual.data, expected.data)
                assert_same(actual.scale, expected.scale)

    assert {len(call.launches) for call in launching._recorded.values()} == {1}  # known, and repeated


def test_a_tensor_of_another_device_is_refused():
    x, weight = torch.randn(4, 256, device="cuda"), torch.ones(256)
    for _ in range(2):
        ops.norm_quantize(x, None, weight.cuda(), None, 1e-5, Cast(), center=False)
        with pytest.raises(ValueError, match="one device"):
            ops.norm_quantize(x, None, weight, None, 1e-5, Cast(), center=False)


def test_a_launch_goes_to_the_current_stream():
    x = torch.randn(4096, 4096, device="cuda")
    expected = ops.quantize(x, Cast()).scale
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # a second: the host comes back within it
        scale = ops.quantize(x, Cast()).scale
        assert not side.query()
    side.synchronize()
    assert torch.equal(scale, expected)
