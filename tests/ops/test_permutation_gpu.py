"""The kernels of the permutation, and of the operations that take groups, against their references: every byte."""

import pytest
import torch
from bits import bits
from gpu_memory import check_bytes, poison

from octavo.numerics import Cast
from octavo.ops import aligned_groups, group_of_rows, sort_by_expert
from octavo.ops import permutation as reference
from octavo.ops.activation import activation_backward_reference, activation_scales_reference
from octavo.ops.quantization import quantize_reference
from octavo.ops.transposition import transpose_reference
from octavo.recipe import ROW_W

pytestmark = pytest.mark.gpu

SIZES = [(1, 1, 1, 16), (37, 3, 6, 200), (1024, 2, 8, 4096), (512, 8, 128, 2048), (130, 2, 4, 8200)]  # T, top_k, E, K
CASTS = [Cast(), Cast(scale="pow2"), Cast("e5m2", scale="pow2")]


def rows(t: int, top_k: int, e: int):
    torch.manual_seed(0)
    index = torch.rand(t, e + 1, device="cuda").topk(top_k).indices  # the number e is no expert
    found = sort_by_expert(index, e)
    return found, group_of_rows(found.offsets, t * top_k).clamp(max=e - 1)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gather_quantize(size, dtype, cast):
    t, top_k, e, k = size
    found, group = rows(t, top_k, e)
    x = torch.randn(t, k, device="cuda").to(dtype)
    factors = torch.rand(e, k, device="cuda"), group, torch.rand(t * top_k, 1, device="cuda")
    plain = torch.randn(t * top_k, k, device="cuda").to(dtype)
    for given in (
        (x, found.slot, top_k, *factors),
        (x, found.slot, top_k, None, None, None),
        (plain, None, 1, *factors),
    ):
        matrix, slot, count, *rest = given
        expected = reference.gather_quantize_reference(matrix, cast, slot, count, *rest)
        check_bytes(expected, torch.ops.octavo.gather_quantize, matrix, cast.spec, slot, count, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_combine(size, dtype):
    t, top_k, e, k = size
    found, _ = rows(t, top_k, e)
    y, dout = torch.randn(t * top_k, k, device="cuda").to(dtype), torch.randn(t, k, device="cuda").to(dtype)
    y[found.offsets[-1] :] = torch.nan
    for weight in (None, torch.rand(t, top_k, device="cuda")):
        expected = reference.combine_reference(y, found.row, weight)
        check_bytes(expected, torch.ops.octavo.combine, y, found.row, weight, repeats=1)
    expected = reference.combine_weight_gradient_reference(dout, y, found.row)
    poison()
    actual = torch.ops.octavo.combine_weight_gradient(dout, y, found.row)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * k)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_transpose_places_rows(size, shifted):
    t, top_k, e, k = size
    found, _ = rows(t, top_k, e)
    _, place = aligned_groups(found.offsets, t * top_k)
    data = torch.randn(t * top_k, k, device="cuda").to(torch.float8_e4m3fn)
    shift = torch.randint(0, 20, (t * top_k,), dtype=torch.int32, device="cuda") if shifted else None
    check_bytes(transpose_reference(data, shift, place), torch.ops.octavo.transpose, data, shift, place, None)


@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_compiled_code_searches_in_a_slice_of_offsets(computed):
    def groups(values):
        return group_of_rows((-values if computed else values)[1:], 7)

    values = torch.tensor([1, 3, 5], dtype=torch.int32, device="cuda") * (-1 if computed else 1)
    assert torch.compile(groups, fullgraph=True)(values).tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("cast", [ROW_W, Cast(), Cast(scale="pow2", relative_floor=0.25)], ids=lambda c: c.spec)
@pytest.mark.parametrize("shape", [(3, 5, 16), (8, 1000, 512), (128, 256, 200)], ids=str)
def test_quantize_matrices(shape, cast):
    torch.manual_seed(0)
    sizes = torch.exp2(torch.randint(-14, 1, (*shape[:2], 1), device="cuda"))
    w = (torch.randn(shape, device="cuda") * sizes).bfloat16()
    data, scale = zip(*(quantize_reference(matrix, cast, None, None, None) for matrix in w), strict=True)
    expected = torch.cat([bits(part) for part in data]).view(cast.fmt.dtype), torch.cat(scale)
    check_bytes(expected, torch.ops.octavo.quantize_matrices, w, cast.spec)


@pytest.mark.parametrize(("m", "f"), [(17, 130), (257, 768), (33, 14336), (9, 20000)])
def test_the_gradient_of_swiglu_by_group(m, f):
    torch.manual_seed(0)
    dh, u = (torch.randn(m, columns, device="cuda").bfloat16() for columns in (f, 2 * f))
    column, group = torch.rand(5, 2 * f, device="cuda"), torch.randint(5, (m,), dtype=torch.int32, device="cuda")
    row, cast = torch.rand(m, 1, device="cuda"), Cast(scale="pow2")
    h_scale = activation_scales_reference(u, "swiglu", Cast())  # with a smaller one, h would be beyond E4M3
    expected = activation_backward_reference(dh, u, "swiglu", cast, column, row, Cast(), h_scale, False, group)
    given = dh, u, "swiglu", cast.spec, column, row, Cast().spec, h_scale, False, group
    check_bytes(expected, torch.ops.octavo.activation_backward, *given)
