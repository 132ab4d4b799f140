"""E2M1, MXFP4 and NVFP4 against ml_dtypes, against bytes of microxcaling, and against compressed-tensors."""

import ml_dtypes
import numpy as np
import pytest
import torch
from codec_oracle import ALL_BF16, same
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as quantize_by_theirs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

import octavo
from octavo.numerics import Cast, QTensor, group
from octavo.numerics.formats import E2M1, cast, decode, encode
from octavo.numerics.scaling import two_level_scale
from octavo.ops import registration

INDUCTOR = pytest.param("nvfp4", "inductor", marks=pytest.mark.slow)  # its CPU backend has no E8M0, and no other sizes


def codes_of(q: QTensor) -> torch.Tensor:
    return encode(q.data.float(), E2M1)


def test_every_bf16_input_encodes_as_in_ml_dtypes_and_is_cast_to_that_number():
    """NaN alone differs: E2M1 has none, ml_dtypes writes a zero with a sign, and a tensor keeps it."""
    x = ALL_BF16[~ALL_BF16.isnan()]
    expected = x.numpy().astype(ml_dtypes.float4_e2m1fn)
    codes = encode(x, E2M1)
    assert np.array_equal(codes.numpy(), expected.view(np.uint8))
    assert same(cast(x, E2M1).float(), expected.astype(np.float32))
    assert torch.equal(decode(codes, E2M1), cast(x, E2M1).float())
    nan = torch.tensor([torch.nan, -torch.nan])
    assert decode(encode(nan, E2M1), E2M1).tolist() == [0, 0]
    for noise in (None, torch.full((2,), 0.5)):
        assert cast(nan, E2M1, noise).float().isnan().all()


def test_a_cast_with_noise_gives_what_is_encoded_with_it():
    x, noise = torch.rand(1_000_000) * 12 - 6, torch.rand(1_000_000)
    assert torch.equal(cast(x, E2M1, noise).float(), decode(encode(x, E2M1, noise), E2M1))


# `_quantize_mx(x, 8, "fp4_e2m1", axes=[-1], block_size=32, round="even")` of microxcaling 7bc41952 was run once on
# `microxcaling_input`. These are its shared exponents, and its results over them as codes, the first digit that of the
# first number.
EXPONENTS = [-9, -4, 1, 6, 0]
CODES = """
    fb5e96e27c4fa5e06d27c4fa6e16d37c 5f96e27d4fb5e86e27c4fa6e06d37c5f 1e69f5c73d60e6af4c72e68e5bf4d72e
    e17d4000000000000000000000000000 02244667022446670224466702244667
"""


def microxcaling_input() -> torch.Tensor:
    """[5, 32], exact in BF16: a formula in integers over many binades, zeros, and all ties in a block of its own."""
    i = torch.arange(128)
    x = (((i * 37) % 101 - 50) / 32 * torch.exp2((i // 32) * 5.0 - 7)).view(4, 32)
    x[3, 5:] = 0
    x[2] *= -1
    return torch.cat([x, torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0] * 4])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_has_the_bytes_of_microxcaling(dtype):
    q = octavo.quantize(microxcaling_input().to(dtype), "e2m1", "group:32", scale="e8m0_floor")
    assert (q.scale.dtype, q.scale.flatten().view(torch.uint8).tolist()) == (
        torch.float8_e8m0fnu,
        [127 + exponent for exponent in EXPONENTS],
    )
    assert ["".join(f"{code:x}" for code in row) for row in codes_of(q).tolist()] == CODES.split()


def inputs(kind: str) -> torch.Tensor:
    x = torch.randn(48, 96) * torch.exp2(torch.randint(-6, 6, (48, 1)))
    if kind == "ties":  # multiples of 1/4, and an amax of which the divisor is a power of two
        x = (torch.randn(48, 96) * 8).round().clamp(-20, 20) / 4
        x[0, 0] = 5.25
    x[3], x[5, :16] = 0, x[5, :16] * 1e-6  # one block is zero, another has a scale below the smallest of E4M3
    return {"zeros": torch.zeros(48, 96), "tiny": x * 1e-30}.get(kind, x)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_has_the_bytes_of_compressed_tensors(kind, dtype):
    """The packed numbers, the scales in E4M3 and the scale of the tensor."""
    x = inputs(kind).to(dtype).float() + 0.0  # they lose the sign of a zero
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    divisor = generate_gparam(x.amin(), x.amax())
    blocks = x.view(48, 6, 16)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, divisor)
    packed = pack_fp4_to_uint8(quantize_by_theirs(x, scale, None, args, global_scale=divisor))

    stored, own_divisor = two_level_scale(group(16).amax(x), E2M1)
    assert torch.equal(own_divisor.view(1), divisor)
    assert torch.equal(stored.view(torch.uint8), scale.to(torch.float8_e4m3fn).view(torch.uint8))
    q = octavo.quantize(x.to(dtype), "e2m1", "group:16", scale="e4m3")
    assert torch.equal(q.scale, stored.float() / divisor)
    codes = codes_of(q)
    assert torch.equal((codes[:, 1::2] << 4 | codes[:, ::2]).to(torch.uint8), packed)


@torch._inductor.config.patch(fallback_random=True)  # the random numbers of eager code
@pytest.mark.parametrize(("recipe", "backend"), [("mxfp4", "aot_eager"), ("nvfp4", "aot_eager"), INDUCTOR])
def test_compiled_layers_compute_what_eager_ones_do(recipe, backend, monkeypatch):
    """Also where Inductor compiles the references, as it does for a GPU."""
    monkeypatch.setattr(registration, "compiles_alike", lambda given: Cast in map(type, given))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    octavo.convert(model, recipe)
    x = torch.randn(64, 64, requires_grad=True)
    found = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        torch.manual_seed(3)  # of the stochastic rounding
        y = run(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
