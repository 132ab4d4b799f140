"""Stacks of matrices, up to three of which one launch serves: the kernels in the interpreter against the references."""

from itertools import product

import pytest
import torch
from torch import Tensor

from octavo.numerics import ROW, TENSOR, Cast, block
from octavo.ops.quantization import quantize_stack_reference, requantize_reference

pytestmark = pytest.mark.triton

K = 40
# Tiles have 64 rows, or those of row_tile(K).
ROWS = [(70,), (70, 1), (33, 1, 70), (1, 1, 1), (5, 0, 3), (64, 128, 66, 1, 7), (3, 64, 2, 0)]
Results = tuple[list[Tensor | None], list[str]]


def matrices(rows: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Powers of two and, in each row, 448 times one: the interpreter rounds other numbers in its own way."""
    drawn = torch.Generator().manual_seed(0)

    def matrix(m: int) -> Tensor:
        x = 2.0 ** torch.randint(0, 9, (m, K), generator=drawn)
        x[:, 3] = -448
        return (x * 2.0 ** torch.randint(0, 5, (m, 1), generator=drawn)).to(dtype)

    return [matrix(m) for m in rows]


def interpreted(name: str, *args: object) -> Results:
    """The results of a kernel and the names of what it launches."""
    from octavo.ops.kernels import quantization

    launched: list[str] = []

    def launcher(kernel, grid: tuple[int, ...]):
        launched.append(kernel.fn.__name__)
        return kernel[grid]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "launcher", launcher)
        result = getattr(quantization, name)(*args)
    results = result if isinstance(result, tuple) else (result,)
    return [None if t is None else t.float() for t in results], launched


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("number", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("scale", "floor"), [*product(("fp32", "pow2"), (0.0, 0.25)), ("e8m0", 0.0)], ids=lambda value: str(value)
)
def test_every_matrix_is_quantized_as_by_itself(kernels, rows, number, scale, floor):
    tensors, cast = matrices(rows), Cast(scale=scale, relative_floor=floor)
    tensors[0][-1, 5] = number
    compare(kernels, tensors, cast, -(-len(rows) // 3))


def test_matrices_of_two_dtypes_have_launches_of_their_own(kernels):
    compare(kernels, [*matrices((5, 7)), *matrices((9,), torch.float32)], Cast(relative_floor=0.25), 3)


def compare(kernels, tensors: list[Tensor], cast: Cast, launches: int) -> None:
    (data, scales), launched = kernels.submit(interpreted, "quantize_stack", tensors, cast, True).result()
    expected, expected_scales = quantize_stack_reference(tensors, cast, True)
    assert torch.equal(scales.nan_to_num(7), expected_scales.float().nan_to_num(7))
    whole = scales.isfinite().view(-1)  # the interpreter casts NaN to a number
    assert torch.equal(data[whole], expected.float()[whole])
    assert launched == (["_row_kernel", "_floor_kernel"] if cast.relative_floor else ["_row_kernel"]) * launches


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_scales_alone(kernels, rows):
    tensors, cast = matrices(rows), Cast(relative_floor=0.25)
    (data, scales), launched = kernels.submit(interpreted, "quantize_stack", tensors, cast, False).result()
    assert data is None
    assert torch.equal(scales, quantize_stack_reference(tensors, cast, False)[1])
    assert launched == ["_row_kernel"] * -(-len(rows) // 3)


@pytest.mark.parametrize(
    ("granularity", "rows"),
    [*product((ROW, TENSOR), ROWS), *product((block(64, 64), block(128, 128)), ((70,), (300,)))],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_scales_given_for_the_stack(kernels, rows, granularity, transposed):
    tensors = matrices(rows)
    blocks = granularity.scale_shape((sum(rows), K))
    scale = 2.0 ** (4 + torch.arange(blocks[0] * blocks[1]).view(blocks) % 3)  # nothing saturates
    args = tensors, scale, Cast().fmt, granularity, transposed
    (data,), launched = kernels.submit(interpreted, "requantize", *args).result()
    assert torch.equal(data, requantize_reference(*args).float())
    assert launched == ["_requantize_kernel"] * -(-len(rows) // 3)
