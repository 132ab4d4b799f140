"""The vision transformer and the diffusion transformer: their functions, conversion, and inputs that do not fit."""

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.models.vision import DiffusionTransformer, ImageConfig, VisionTransformer, flow_loss, sample

CONFIG = ImageConfig(image=8, patch=2, channels=1, classes=4, layers=2, width=32, heads=2)
IMAGES, CLASSES = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])


def test_the_images_are_classified_as_plain_pytorch_does() -> None:
    model = VisionTransformer(CONFIG)
    patches = F.unfold(IMAGES, 2, stride=2).transpose(1, 2)
    x = F.linear(patches, model.patches.proj.weight.flatten(1), model.patches.proj.bias) + model.patches.positions
    for block in model.blocks:
        encoder = torch.nn.TransformerEncoderLayer(32, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        names = {"self_attn.in_proj_": block.attention.qkv, "self_attn.out_proj.": block.attention.proj}
        names |= {"linear1.": block.fc1, "linear2.": block.fc2, "norm1.": block.norm1, "norm2.": block.norm2}
        leaves = ("weight", "bias")
        encoder.load_state_dict({f"{name}{leaf}": getattr(m, leaf) for name, m in names.items() for leaf in leaves})
        x = encoder(x)
    torch.testing.assert_close(model(IMAGES), model.head(model.norm(x).mean(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_they_learn_in_fp8(recipe: str) -> None:
    models = VisionTransformer(CONFIG), DiffusionTransformer(CONFIG)
    batches = IMAGES, (IMAGES, torch.rand(6), CLASSES)
    for model, batch in zip(models, batches, strict=True):
        report = octavo.convert(model, recipe, batch=batch)
        assert report.coverage.flops > 0.9
        assert {entry.name for entry in report.coverage.left} == {"head.weight", "patches.proj.weight"}
    classify, diffuse = models
    losses = []
    optimizer = torch.optim.AdamW([*classify.parameters(), *diffuse.parameters()], lr=3e-3)
    for _ in range(12):
        torch.manual_seed(1)
        loss = F.cross_entropy(classify(IMAGES), CLASSES) + flow_loss(diffuse, IMAGES, CLASSES)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert sample(diffuse, CLASSES, steps=2).shape == IMAGES.shape


def test_the_velocity_of_a_new_model_is_zero_and_sampling_returns_the_noise() -> None:
    model = DiffusionTransformer(CONFIG)
    assert not model(IMAGES, torch.rand(6), CLASSES).any()
    torch.manual_seed(5)
    made = sample(model, CLASSES, steps=3)
    torch.manual_seed(5)
    assert torch.equal(made, torch.randn(6, 1, 8, 8))
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        sample(model, CLASSES, steps=0)


@pytest.mark.parametrize("shape", [(2, 1, 8, 9), (2, 3, 8, 8), (1, 8, 8)])
def test_images_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images must be \[B, 1, 8, 8\], got"):
        VisionTransformer(CONFIG)(torch.randn(shape))
