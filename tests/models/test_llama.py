"""What only Llama has: RoPE, grouped heads, and a checkpoint whose tied matrix is stored once."""

import pytest
import torch
from model_examples import GQA, lively, tokens
from transformers import LlamaConfig as HFConfig

from octavo.models import Llama, LlamaConfig, from_hf_config


def test_rope_theta_is_read_from_both_places_and_written_to_both() -> None:
    hf = GQA.to_hf()
    assert HFConfig(**hf).rope_parameters["rope_theta"] == 500.0
    for key in ("rope_theta", "rope_parameters"):
        assert LlamaConfig.from_hf({k: v for k, v in hf.items() if k != key}) == GQA


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    sizes = {
        "vocab_size": 97, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 24,
    }  # fmt: skip
    assert LlamaConfig.from_hf(sizes) == LlamaConfig.from_hf(HFConfig(**sizes).to_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"head_dim": 16},
        {"hidden_size": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_features_that_are_not_here_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rotary|attention_bias|mlp_bias|hidden_act|head_dim|hidden_size"):
        LlamaConfig.from_hf(GQA.to_hf() | change)


def test_other_architectures_are_not_ours() -> None:
    assert from_hf_config({"architectures": ["MambaForCausalLM"]}) is None
    assert from_hf_config({}) is None


@pytest.mark.parametrize("change", [{"heads": 5}, {"kv_heads": 3}, {"layers": 0}, {"width": 36, "heads": 12}])
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    sizes = {"vocabulary": 9, "layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 8, "context": 8}
    with pytest.raises(ValueError, match="must be"):
        LlamaConfig(**(sizes | change))  # type: ignore[arg-type]


def test_wrong_tokens_are_refused() -> None:
    model = lively(GQA)
    with pytest.raises(ValueError, match="context is 24"):
        model(tokens(1, 25))
    with pytest.raises(ValueError, match="int64"):
        model(tokens().int())


@pytest.mark.parametrize("assign", [False, True])
def test_tied_checkpoint_may_store_the_matrix_once(assign: bool) -> None:
    source, model = lively(GQA), Llama(GQA)
    state = source.state_dict()
    del state["lm_head.weight"]
    model.load_state_dict(state, assign=assign)
    assert model.lm_head.weight is model.embedding.weight
    assert torch.equal(model(tokens()), source(tokens()))
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        Llama(LlamaConfig(**(vars(GQA) | {"tied": False}))).load_state_dict(state)
