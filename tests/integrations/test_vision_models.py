"""Models of timm and diffusers are converted as they are."""

import pytest
import torch
from metrics import sqnr
from torch import Tensor, nn

import octavo


def check(model: nn.Module, batch, left: set[str]) -> None:
    """Converted with the batch, `model` leaves the kinds `left` in high precision, and computes the same to 18 dB.
    `octavo.check` finds no fault in it, before and after."""

    def output() -> Tensor:
        found = model(**batch) if isinstance(batch, dict) else model(batch)
        return found if isinstance(found, Tensor) else found.sample

    assert octavo.check(model, batch=batch).ok
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = output()
        report = octavo.convert(model.eval(), batch=batch, device="cpu")
        assert {entry.kind for entry in report.coverage.left} == left
        assert sqnr(expected, output()) > 18
        assert list(model.state_dict()) == keys
        with torch.enable_grad():
            assert octavo.check(model, batch=batch).ok
        octavo.restore(model)
        assert torch.equal(output(), expected)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto"])
def test_models_of_timm(name: str) -> None:
    model = pytest.importorskip("timm").create_model(name).eval()
    check(model, torch.randn(2, 3, 224, 224), {"linear layer", "convolution"})


def test_a_diffusion_transformer_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, num_layers=2, sample_size=8,
        norm_type="ada_norm_zero", num_embeds_ada_norm=10,
    )  # fmt: skip
    steps = torch.tensor([1, 2])
    batch = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": steps, "class_labels": steps}
    check(model.eval(), batch, {"convolution"})  # of the patches


def test_a_unet_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=8,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    prompt = torch.randn(2, 5, 32)
    batch = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 2]), "encoder_hidden_states": prompt}
    check(model.eval(), batch, {"convolution"})
