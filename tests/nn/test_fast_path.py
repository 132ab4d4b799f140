"""PyTorch's encoder layers call their converted layers in evaluation mode too."""

import pytest
import torch
from torch import nn

import octavo


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()


@pytest.mark.parametrize("make", [encoder_layer, lambda: nn.TransformerEncoder(encoder_layer(), 2).eval()])
def test_evaluation_without_gradients_runs_in_fp8(make) -> None:
    model, x = make(), torch.randn(2, 6, 32)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    in_high_precision = model(x, src_key_padding_mask=padding).detach()
    octavo.convert(model, "rowwise")
    with_gradients = model(x, src_key_padding_mask=padding).detach()
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
    not_padding = ~padding
    torch.testing.assert_close(y[not_padding], with_gradients[not_padding], rtol=1e-5, atol=1e-5)
    assert (y - in_high_precision)[not_padding].abs().max() > 1e-3


def test_the_class_is_one_of_its_own_with_the_same_name_and_settings() -> None:
    layer = encoder_layer()
    octavo.convert(layer)
    assert isinstance(layer, nn.TransformerEncoderLayer)
    assert type(layer).__name__ == "TransformerEncoderLayer"
    assert vars(layer)["activation_relu_or_gelu"] == 1
    octavo.convert(layer, "tensorwise")
    assert type(layer).__mro__.count(nn.TransformerEncoderLayer) == 1


def test_a_layer_whose_linear_layers_are_skipped_keeps_the_fast_path() -> None:
    model = nn.ModuleDict({"encoder": encoder_layer(), "body": nn.Linear(8, 8)})
    octavo.convert(model, skip=["encoder.*"])
    assert type(model["encoder"]) is nn.TransformerEncoderLayer


def test_restore_gives_the_fast_path_back() -> None:
    model, x = nn.TransformerEncoder(encoder_layer(), 2).eval(), torch.randn(2, 6, 32)
    with torch.no_grad():
        before = model(x)
        octavo.convert(model)
        assert set(octavo.restore(model)) >= {"", "layers.0", "layers.1", "layers.0.linear1"}
        assert torch.equal(model(x), before)
    assert type(model) is nn.TransformerEncoder
    assert type(model.layers[0]) is nn.TransformerEncoderLayer
