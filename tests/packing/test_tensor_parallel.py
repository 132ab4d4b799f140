"""Which models can be split over several devices, against a split that is really made: scales that do not fit raise."""

from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from torch import Tensor

from octavo.artifact.packed.scheme import SCHEMES
from octavo.numerics import QTensor
from octavo.ops import quantize
from octavo.packing import pack
from octavo.packing.tensor_parallel import check_degrees

CONFIG = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYER = "model.layers.0."


def check(scheme: str, leaf: str, size: tuple[int, int], degree: int, **config: int) -> None:
    name = LAYER + leaf
    check_degrees({name: SCHEMES[scheme]}, {name: size}, CONFIG | config, [degree])


@cache
def quantized(scheme: str, size: tuple[int, int]) -> QTensor:
    torch.manual_seed(0)
    return quantize(torch.randn(size), SCHEMES[scheme].weight)


def can_be_cut(scheme: str, size: tuple[int, int], by: int, degree: int) -> bool:
    """Whether each device's part of data and scales is, by itself, the same part of the numbers."""
    if size[by] % degree:
        return False
    q = quantized(scheme, size)
    whole = q.dequantize().chunk(degree, by)
    data: tuple[Tensor, ...] = q.data.chunk(degree, by)
    shared = q.granularity.cols is None and by == 1  # a scale a row goes to every device
    if not shared and q.scale.shape[by] % degree:
        return False
    scales = [q.scale] * degree if shared else list(q.scale.chunk(degree, by))
    try:
        parts = [QTensor(d, s, q.format, q.granularity).dequantize() for d, s in zip(data, scales, strict=True)]
    except ValueError:
        return False
    return all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "static"])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [(256, 512), (512, 256), (1024, 1024), (384, 128), (128, 96 * 4)])
@pytest.mark.parametrize(("leaf", "by"), [("mlp.up_proj", 0), ("mlp.down_proj", 1)])
def test_a_split_is_legal_where_it_can_be_made(
    scheme: str, degree: int, size: tuple[int, int], leaf: str, by: int
) -> None:
    if (scheme == "tensor" and size[by] % degree == 0) or can_be_cut(scheme, size, by, degree):
        check(scheme, leaf, size, degree)
    else:
        with pytest.raises(ValueError, match=rf"{leaf}: \[{size[0]}, {size[1]}\] over {degree} devices"):
            check(scheme, leaf, size, degree)


def test_both_outcomes_occur() -> None:
    assert can_be_cut("block", (512, 256), 0, 4)
    assert not can_be_cut("block", (256, 512), 0, 4)
    assert not can_be_cut("mx", (128, 384), 1, 8)


@pytest.mark.parametrize(
    ("config", "degree", "message"),
    [
        ({}, 16, "8 heads of attention do not divide over 16 devices: take a degree of 1, 2, 4, 8"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "4 heads of keys and values neither divide over 6"),
        ({}, 0, "1 device or more, not 0"),
    ],
)
def test_heads_stay_whole(config: dict[str, int], degree: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check("channel", "self_attn.q_proj", (1024, 1024), degree, **config)


def test_more_devices_than_heads_of_keys_share_them() -> None:
    check("block", "self_attn.k_proj", (512, 1024), 8)  # 4 heads of 128 rows: two devices have the same one
    with pytest.raises(ValueError, match=r"k_proj: \[256, 1024\] over 8 devices gives each 64 rows.*blocks of 128"):
        check("block", "self_attn.k_proj", (256, 1024), 8)


def test_a_layer_that_nobody_knows() -> None:
    check("channel", "score", (64, 64), 1)
    with pytest.raises(ValueError, match="score: how readers split this layer over 2 devices is not known"):
        check("channel", "score", (64, 64), 2)


def test_pack_refuses_before_it_writes(tmp_path: Path) -> None:
    make_model(tmp_path / "source", "llama", hidden_size=256, intermediate_size=384, num_hidden_layers=1, head_dim=64)
    with pytest.raises(ValueError, match=r"gate_proj.*2 devices gives each 192 rows.*'\*.gate_proj=channel' --layer"):
        pack(tmp_path / "source", tmp_path / "out", scheme="block", tensor_parallel=[1, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    pack(tmp_path / "source", tmp_path / "out", scheme="block", layers={"*.mlp.*": "channel"}, tensor_parallel=[1, 2])
