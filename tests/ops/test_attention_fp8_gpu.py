"""cuDNN against float64 and the reference, over poisoned memory and in a CUDA graph."""

import attention_fp8_oracle as oracle
import pytest
import torch
from gpus import no_waits, poison, replayed
from metrics import sqnr

from octavo.ops import fp8_attention, fp8_attention_limit

pytest.importorskip("cudnn")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own

# Batch, heads, heads of keys, tokens, keys, and the elements of a head where it has not 128
SHAPES = [(2, 8, 2, 512, 512), (2, 8, 2, 512, 512, 64), (1, 4, 4, 128, 128), (1, 4, 1, 1152, 1152)]


def forward(x):
    q, k, v = map(oracle.quantized, x)
    return q, k, v, fp8_attention(q.data, k.data, v.data, q.scale, k.scale, v.scale)


def test_this_gpu_has_it():
    assert fp8_attention_limit(torch.device("cuda", torch.cuda.current_device()), 128) == ""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_passes(shape):
    x = oracle.given(*shape, device="cuda")
    expected = oracle.exact(*x)
    poison()
    actual, _, amax = oracle.both_passes(x, poison)
    on_cpu = oracle.both_passes([t.cpu() for t in x])[0] if shape[3] <= 512 else expected
    for name, exact, found, ours in zip(("y", "dq", "dk", "dv"), expected, actual, on_cpu, strict=True):
        print(shape, name, f"{sqnr(exact, found):.1f} dB, the reference {sqnr(exact, ours):.1f} dB")
        assert found.shape == exact.shape
        assert sqnr(exact, found) > min(sqnr(exact, ours) - 1.5, 20)
    assert torch.allclose(amax.double(), torch.stack([g.abs().amax() for g in expected[1:]]), rtol=0.15)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 300), (2, 2), (63, 63), (200, 200), (1000, 1000)])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_forward_pass_takes_any_length(tokens, keys, dim):
    torch.manual_seed(4)
    x = oracle.given(2, 4, 2, tokens, keys, dim, device="cuda")[:3]
    poison()
    assert sqnr(oracle.exact(*x, torch.zeros_like(x[0]))[0], forward(x)[3].y) > 20


def test_the_gradient_refuses_other_lengths():
    with pytest.raises(RuntimeError, match="a multiple of 128 on a GPU, got 200 queries"):
        oracle.both_passes(oracle.given(1, 4, 4, 200, 200, device="cuda"))


@pytest.mark.parametrize("keys", [512, 1000, 4096])
def test_a_piece_of_a_text_sees_the_tokens_before_it(keys):
    """Keys and values are views of a cache with room for more tokens, whose numbers must not be read."""
    torch.manual_seed(1)
    x = oracle.given(1, 8, 2, 400, keys, device="cuda")[:3]
    q, k, v = map(oracle.quantized, x)
    room = [torch.full((1, 2, keys + 77, 128), 448.0, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    for cache, data in zip(room, (k.data, v.data), strict=True):
        cache.view(torch.uint8)[:, :, :keys] = data.view(torch.uint8)
    stored = [cache[:, :, :keys] for cache in room]
    poison()
    found = fp8_attention(q.data, *stored, q.scale, k.scale, v.scale).y
    assert sqnr(oracle.exact(*x, torch.zeros_like(x[0]))[0], found) > 20


def test_in_a_cuda_graph_without_waiting():
    torch.manual_seed(2)
    q, k, v, expected = forward(oracle.given(1, 4, 2, 256, 256, device="cuda")[:3])
    scales = q.scale, k.scale, v.scale
    torch.cuda.synchronize()
    assert torch.equal(replayed(lambda: fp8_attention(q.data, k.data, v.data, *scales).y), expected.y)
    with no_waits():
        again = fp8_attention(q.data, k.data, v.data, *scales)
    assert torch.equal(again.y, expected.y)
