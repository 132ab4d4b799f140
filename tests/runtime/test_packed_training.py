"""A packed model has no gradients, and says so."""

import pytest
import torch
from tiny_models import Folders

import octavo
from octavo.runtime import PackedLinear


@pytest.mark.parametrize("scheme", ["channel", "mx"])  # the first runs norms and MLPs fused with quantization
def test_backward_through_a_packed_model_names_the_way_to_train(made: Folders, scheme: str) -> None:
    model = octavo.load(made("llama", scheme=scheme))
    ids = torch.arange(16)[None]
    before = model(ids).logits
    assert not before.requires_grad
    model.get_input_embeddings().weight.requires_grad_(True)
    logits = model(ids).logits
    assert torch.equal(logits, before)
    with pytest.raises(RuntimeError, match=r"neither has a packed model: it is for inference. To train, take the BF16"):
        logits.sum().backward()


def test_what_other_libraries_print_of_a_packed_layer_says_it(made: Folders) -> None:
    model = octavo.load(made("llama", scheme="channel"))
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 14
    assert all("for inference only" in repr(layer) for layer in layers)
