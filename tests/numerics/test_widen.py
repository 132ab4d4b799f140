"""`widen` against `decode`: all 256 codes, wherever and however it runs."""

import pytest
import torch
from codec_oracle import FP8, same

from octavo.numerics.codec import decode, widen
from octavo.numerics.formats import FORMATS

CODES = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
NUMBERS = torch.tensor([1.0, -2.0, 0.0, -0.0])  # no NaN among them


@pytest.mark.parametrize("name", FP8)
def test_every_code_is_widened_as_it_is_decoded(name):
    codes = CODES.view(FORMATS[name].dtype)
    wide = widen(codes)
    assert (wide.dtype, wide.shape) == (torch.float32, codes.shape)
    assert same(wide, decode(CODES, FORMATS[name]).numpy())
    transposed = codes.transpose(0, 2)
    assert same(widen(transposed), decode(CODES, FORMATS[name]).transpose(0, 2).numpy())
    empty = widen(transposed[:0])
    assert (empty.dtype, empty.shape) == (torch.float32, (0, 8, 2))


@pytest.mark.parametrize("name", FP8)
def test_the_bytes_are_left_alone_and_the_result_is_memory_of_its_own(name):
    codes = CODES.clone()
    widen(codes.view(FORMATS[name].dtype)).fill_(7)
    assert torch.equal(codes, CODES)


@pytest.mark.parametrize("name", FP8)
def test_numbers_alone_are_widened_as_beside_nan(name):
    """The search for NaN must change no number."""
    codes = CODES.flatten()
    number = decode(codes, FORMATS[name]).isfinite()
    wide = widen(codes[number].view(FORMATS[name].dtype))
    assert same(wide, widen(codes.view(FORMATS[name].dtype))[number].numpy())
    assert wide.isfinite().all()


@pytest.mark.parametrize("name", FP8)
def test_it_is_exact_where_subnormals_are_flushed(name):
    """FP8's subnormals are normal numbers in float32: `torch.set_flush_denormal` must not change them."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        wide = widen(CODES.view(FORMATS[name].dtype))
    finally:
        torch.set_flush_denormal(False)
    assert same(wide, decode(CODES, FORMATS[name]).numpy())


@pytest.mark.parametrize("name", FP8)
def test_it_takes_the_device_of_its_data_whatever_the_context(name):
    """A model is often created under `torch.device("meta")`: no tensor of that device may be cached."""
    data = NUMBERS.to(FORMATS[name].dtype)
    expected = data.float()
    with torch.device("meta"):
        shadow = widen(data.to("meta"))
        real = widen(data)
    assert (shadow.device.type, shadow.dtype, shadow.shape) == ("meta", torch.float32, (4,))
    assert real.device.type == "cpu"
    assert same(real, expected.numpy())
    assert same(widen(data), expected.numpy())


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "aot_eager") for name in FP8), ("e5m2", "inductor"), ("e4m3fnuz", "inductor")]
)
def test_it_compiles_into_one_graph(name, backend):
    torch.compiler.reset()
    compiled = torch.compile(widen, fullgraph=True, backend=backend)
    for codes in (CODES, CODES.flatten()[:7]):  # with NaN, and without
        assert same(compiled(codes.view(FORMATS[name].dtype)), decode(codes, FORMATS[name]).numpy())
