"""Launches of known kernels on a GPU: every property of an argument that decides the compiled kernel, in turns."""

import pytest
import torch
from bits import assert_same

from octavo.numerics import Cast
from octavo.ops import launching as module
from octavo.ops import norm_quantize, quantize

pytestmark = pytest.mark.gpu


def test_sizes_and_alignments_in_turns():
    memory = torch.randn(70_000).bfloat16()
    on_gpu = memory.cuda()
    for _ in range(3):
        for m, k in ((1, 256), (3, 100), (16, 256), (17, 130), (1, 1), (48, 1)):
            for offset in (0, 1, 8):
                x, y = (t[offset : offset + m * k].view(m, k) for t in (memory, on_gpu))
                actual, expected = quantize(y, Cast()), quantize(x, Cast())
                assert_same(actual.data, expected.data)
                assert_same(actual.scale, expected.scale)


def test_a_known_launch_is_direct(monkeypatch):
    x = torch.randn(4, 256, device="cuda")
    quantize(x, Cast())
    known = dict(module._cached)
    assert known
    launched = []
    for key, (run, *rest) in known.items():
        monkeypatch.setitem(module._cached, key, (lambda *args, run=run: (launched.append(True), run(*args)), *rest))
    quantize(x, Cast())
    assert launched == [True]
    assert module._cached.keys() == known.keys()


def test_a_tensor_of_another_device_is_refused():
    x, weight = torch.randn(4, 256, device="cuda"), torch.ones(256)
    for _ in range(2):
        norm_quantize(x, None, weight.cuda(), None, 1e-5, Cast(), center=False)
        with pytest.raises(ValueError, match="one device"):
            norm_quantize(x, None, weight, None, 1e-5, Cast(), center=False)


def test_a_launch_goes_to_the_current_stream():
    x = torch.randn(4096, 4096, device="cuda")
    expected = quantize(x, Cast()).scale
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # a second: the host comes back within it
        scale = quantize(x, Cast()).scale
        assert not side.query()
    side.synchronize()
    assert torch.equal(scale, expected)
