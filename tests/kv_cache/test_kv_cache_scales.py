"""The scales of keys and values that a calibration gives."""

import pytest
import torch
from kv_cache_examples import LARGEST, model_of

from octavo.calibration.folder import Calibration
from octavo.calibration.observer import Observed
from octavo.calibration.statistics import Statistics
from octavo.kv_cache.transformers_cache import QuantizedKVCache, scales_from_calibration


def calibration() -> Calibration:
    observed = {}
    for layer in range(11):
        for kind, name in (("key", "k"), ("value", "v"), ("query", "q")):
            site = f"model.layers.{layer}.self_attn.{name}"
            x = torch.randn(5, 32) * (layer + 1)
            observed[site] = Observed(kind, Statistics(site).update(x))
    return Calibration(observed, "", {}, {}, 5, 5)


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_scales_of_a_calibration(dtype, heads):
    source = calibration()
    result = scales_from_calibration(source, dtype, heads=heads)
    assert list(result) == [f"model.layers.{layer}.self_attn" for layer in range(11)]
    for name, scales in result.items():
        for scale, kind in zip(scales, "kv", strict=True):
            amax = source.sites[f"{name}.{kind}"].channel_amax.view(heads or 1, -1).amax(1)
            assert torch.allclose(scale, amax / LARGEST[dtype])
    if dtype == "fp8" and heads is None:
        name = "model.layers.3.self_attn"
        assert torch.equal(result[name][0].view(()), source.scale(f"{name}.k"))


def test_scales_by_name_go_to_their_layers():
    order = (10, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9)
    scales = {f"model.layers.{i}.self_attn": (torch.tensor([i + 1.0]), torch.tensor([1.0])) for i in order}
    cache = QuantizedKVCache(model_of("llama", num_hidden_layers=11).config, 9, scales=scales)
    assert [float(k) for k, _ in cache.model_cache.scales] == [i + 1.0 for i in range(11)]


def test_a_calibration_without_keys_is_refused():
    with pytest.raises(ValueError, match="no keys and values"):
        scales_from_calibration(Calibration({}, "", {}, {}, 0, 0))


def test_bf16_has_no_scales():
    with pytest.raises(ValueError, match="dtype must be 'fp8' or 'int8', got 'bf16'"):
        scales_from_calibration(calibration(), "bf16")
