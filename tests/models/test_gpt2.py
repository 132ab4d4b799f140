"""What GPT-2 refuses."""

import pytest
from model_examples import GPT

from octavo.models import GPT2Config


@pytest.mark.parametrize(
    "change",
    [
        {"activation_function": "relu"},
        {"do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"word_embed_proj_dim": 12},
        {"layer_norm_elementwise_affine": False},
        {"ffn_dim": 100},
        {"vocab_size": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_opt_features_that_are_not_here_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        GPT2Config.from_hf(GPT.to_hf() | change)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        GPT2Config(vocabulary=61, layers=2, width=24, heads=5, context=20)
    with pytest.raises(ValueError, match="at least 1"):
        GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=0)
