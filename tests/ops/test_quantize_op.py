"""The registered operations of quantization: refused inputs, and fakes that agree with the operations."""

import pytest
import torch
from quantize_oracle import CASTS, matrix, name_of

from octavo.numerics import TENSOR, Cast, block, group
from octavo.ops import quantize, quantize_scaled, quantize_transposed


@pytest.mark.parametrize(
    "x", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(4, 4, dtype=torch.int32), torch.tensor(1.0)]
)
def test_only_matrices_of_floats_are_taken(x):
    for call in (lambda: quantize(x, Cast()), lambda: quantize_scaled(x, torch.ones(1, 1), Cast(granularity=TENSOR))):
        with pytest.raises(ValueError, match="takes a matrix of float32, bfloat16 or float16, got"):
            call()


def test_float64_is_refused_as_the_message_says():
    """Rounding it to float32 first would be a second, silent rounding."""
    with pytest.raises(ValueError, match="takes a matrix of float32, bfloat16 or float16, got"):
        quantize(torch.ones(2, 2, dtype=torch.float64), Cast())


@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_shapes_on_the_meta_device(cast):
    real, fake = matrix((17, 130)), torch.empty(17, 130, device="meta")
    scale = torch.ones(1, 1)

    def parts(x, s):
        scaled, amax = quantize_scaled(x, s, cast)
        return [quantize(x, cast), quantize_transposed(x, cast), scaled], amax

    for one, other in zip(parts(real, scale)[0], parts(fake, scale.to("meta"))[0], strict=True):
        for a, b in ((one.data, other.data), (one.scale, other.scale)):
            assert b.device.type == "meta"
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    amax = parts(fake, scale.to("meta"))[1]
    assert (amax.shape, amax.dtype) == ((1, 1), torch.float32)


@pytest.mark.parametrize("cast", [Cast(), Cast("e5m2", group(32), "e8m0"), Cast(granularity=block(4, 4))], ids=name_of)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("given", [(), ("column",), ("row",), ("column", "row")], ids=str)
def test_opcheck_quantize(cast, stochastic, given):
    column_scale = torch.rand(1, 70) if "column" in given else None
    row_scale = torch.rand(5, 1) if "row" in given else None
    seed = torch.tensor(5) if stochastic else None
    arguments = (matrix((5, 70)), cast.spec, column_scale, row_scale, seed)
    torch.library.opcheck(torch.ops.octavo.quantize.default, arguments)


@pytest.mark.parametrize("cast", [Cast(), Cast("e5m2", group(32), "e8m0"), Cast(granularity=block(4, 4))], ids=name_of)
@pytest.mark.parametrize("seed", [None, torch.tensor(5)])
def test_opcheck_quantize_transposed(cast, seed):
    torch.library.opcheck(torch.ops.octavo.quantize_transposed.default, (matrix((5, 70)), cast.spec, seed))


@pytest.mark.parametrize("cast", [Cast(), Cast(granularity=TENSOR), Cast(granularity=group(32))], ids=name_of)
def test_opcheck_of_a_strided_input(cast):
    """Compiled code relies on the strides of the fake implementation."""
    x = matrix((70, 5)).t()
    torch.library.opcheck(torch.ops.octavo.quantize.default, (x, cast.spec, None, None, None))
    torch.library.opcheck(torch.ops.octavo.quantize_transposed.default, (x, cast.spec, None))
    scaled = (x, torch.full((1, 1), 0.1), cast.format, None)
    torch.library.opcheck(torch.ops.octavo.quantize_scaled.default, scaled)


@pytest.mark.parametrize("seed", [None, torch.tensor(5)])
def test_opcheck_quantize_scaled(seed):
    args = (matrix((5, 70), torch.bfloat16), torch.full((1, 1), 0.1), "e4m3", seed)
    torch.library.opcheck(torch.ops.octavo.quantize_scaled.default, args)


@pytest.mark.parametrize("bad", [torch.ones(4, 1), torch.ones(1, 6, dtype=torch.float64)])
def test_a_factor_of_the_wrong_shape_or_dtype_is_refused(bad):
    x = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"column_scale must be torch.float32 \[1, 6\]"):
        quantize(x, Cast(), column_scale=bad)
    with pytest.raises(ValueError, match=r"row_scale must be torch.float32 \[4, 1\]"):
        quantize(x, Cast(), row_scale=bad.t())
