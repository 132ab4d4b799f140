"""Layers whose sizes a scheme cannot have: one message names all of them."""

import re
from fnmatch import fnmatchcase

import pytest

from octavo.artifact.packed.scheme import get_scheme
from octavo.packing.misfits import check_shapes

SHAPES = {
    "layers.0.mlp.experts.0.gate_proj": (192, 256),
    "layers.0.mlp.experts.0.up_proj": (256, 256),
    "layers.0.mlp.experts.1.gate_proj": (192, 256),
    "layers.0.mlp.experts.1.up_proj": (256, 256),
    "layers.0.mlp.shared.gate_proj": (256, 256),
    "layers.0.mlp.shared.up_proj": (256, 256),
    "layers.0.mlp.shared.down_proj": (96, 256),
    "layers.1.mlp.shared.down_proj": (128, 256),
    "layers.1.fc": (256, 256),
}


def refusal(shapes, scheme="block"):
    with pytest.raises(ValueError, match="cannot be packed|no multiple") as error:
        check_shapes({name: get_scheme(scheme) for name in shapes}, shapes)
    return str(error.value)


def test_the_options_match_the_layers_that_do_not_fit_and_those_fused_with_them():
    globs = re.findall(r"--layer '(\S+)=channel'", refusal(SHAPES))
    assert globs == ["*.experts.*.gate_proj", "*.experts.*.up_proj", "layers.0.mlp.shared.down_proj"]
    changed = {name for name in SHAPES if any(fnmatchcase(name, glob) for glob in globs)}
    check_shapes({name: get_scheme("channel" if name in changed else "block") for name in SHAPES}, SHAPES)


def test_a_model_of_which_nothing_fits_takes_another_scheme():
    shapes = dict.fromkeys(SHAPES, (96, 96))
    message = refusal(shapes)
    assert "layers.0.mlp.experts.0.gate_proj: [96, 96] is no multiple of 128 x 128, the blocks of block" in message
    assert "and 8 other layers cannot be packed either: pack by channel (--scheme channel)" in message
    check_shapes({name: get_scheme("channel") for name in shapes}, shapes)


def test_one_layer_is_not_many():
    assert "other" not in refusal({"fc": (64, 64), "out": (128, 128)})
    assert "--layer 'fc=channel'" in refusal({"fc": (64, 64), "out": (128, 128)})
