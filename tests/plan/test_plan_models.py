"""The parameters that a plan counts, against models of transformers and Octavo on the meta device."""

import json
import math

import pytest
import torch
from torch import nn

from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.plan.cases import find_architecture, model_presets
from octavo.plan.model_shape import describe_architecture
from octavo.train.config import Config

SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 64}
OURS = LlamaConfig(**SMALL, kv_heads=2, mlp_width=96)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def as_few_layers(fields: dict, layers: int) -> dict:
    """The config of a model with fewer blocks, since transformers takes long to build many."""
    changed = {name: layers for name in ("n_layer", "num_hidden_layers") if name in fields}
    return fields | changed | ({"first_k_dense_replace": 1} if "first_k_dense_replace" in fields else {})


@pytest.mark.parametrize("name", [name for name, fields in model_presets().items() if fields["model_type"] != "dit"])
def test_a_preset_has_the_parameters_of_its_model_in_transformers(name):
    transformers = pytest.importorskip("transformers")
    fields = as_few_layers({k: v for k, v in model_presets()[name].items() if k != "source"}, 2)
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**fields)
        if name.startswith("vit"):
            model = transformers.ViTModel(config, add_pooling_layer=False)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    bias = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert describe_architecture(name, fields).parameters == count(model) + bias


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124439808),
        ("gpt-3-175b", 174.604259328),
        ("llama-2-7b", 6.738415616),
        ("llama-3.1-8b", 8.030261248),
        ("llama-3.1-70b", 70.553706496),
        ("llama-3-405b", 405.853388800),
        ("mixtral-8x7b", 46.702792704),
        ("deepseek-v3", 671.026419200),
        ("dit-xl-2", 0.675),  # the table of the paper says 675 million
        ("dit-sdxl", 2.6),  # SDXL's report says 2.6 billion
        ("vit-h-14", 0.632),  # the table of the paper says 632 million, with its classifier
    ],
)
def test_the_published_counts(name, billions):
    digits = 1e-9 if len(str(billions)) > 8 else 0.008
    assert find_architecture(name, Config()).parameters / 1e9 == pytest.approx(billions, rel=digits)


def test_experts_count_once_in_memory_and_by_use_in_time():
    mixtral = find_architecture("mixtral-8x7b", Config())
    assert mixtral.active_parameters / 1e9 == pytest.approx(12.75, rel=1e-2)  # arXiv:2401.04088 says 13 billion active


@pytest.mark.parametrize("config", [OURS, GPT2Config(**SMALL)])
def test_octavos_own_models_are_counted_exactly(config):
    with torch.device("meta"):
        model = build(config)
    architecture = describe_architecture("ours", config.to_hf())
    assert architecture.parameters == count(model)
    linears = [m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert architecture.block_weights == sum(linears)


def test_a_folder_and_a_file_are_read(tmp_path):
    fields = OURS.to_hf()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    expected = describe_architecture("x", fields).parameters
    for path in (tmp_path, tmp_path / "config.json"):
        assert find_architecture(str(path), Config()).parameters == expected


def test_settings_give_octavos_own_model():
    config = Config(layers=3, width=64, heads=4, kv_heads=2, mlp_width=128, tokenizer="bpe", vocabulary=512)
    with torch.device("meta"):
        model = build(LlamaConfig(512, 3, 64, 4, 2, 128, config.context))
    assert find_architecture("", config).parameters == count(model)


@pytest.mark.parametrize("shared", [0, 48])
def test_settings_give_octavos_mixture(shared):
    sizes = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 32}
    experts = {"count": 4, "top_k": 2, "shared_width": shared}
    config = Config.from_dict(sizes | {"model": "mixture", "experts": experts, "tokenizer": "bpe", "vocabulary": 512})
    described = MixtureConfig(**sizes, vocabulary=512, context=config.context, experts=4, top_k=2, shared_width=shared)
    with torch.device("meta"):
        parameters = count(build(described))
    assert find_architecture("", config).parameters == parameters
    assert describe_architecture("ours", described.to_hf()).parameters == parameters


def test_an_unknown_architecture_gets_the_nearest_one():
    with pytest.raises(ValueError, match=r"got 'mistral3': the nearest is mistral"):
        describe_architecture("config.json", {"model_type": "mistral3"})
    with pytest.raises(ValueError, match="got 'gemma2': write a config.json"):  # nothing is near
        describe_architecture("config.json", {"model_type": "gemma2"})
    with pytest.raises(ValueError, match="model_type must be one of"):
        describe_architecture("config.json", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama"}', "must state 'hidden_size'"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "config.json is not valid JSON .it is nested too deeply"),
        ('{"model_type": "vit", "hidden_size": "wide"}', "must state 'num_hidden_layers'"),
        (
            '{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}',
            "num_experts_per_tok must be at most the number of experts, got 9 of 8",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_architecture(str(tmp_path), Config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "wide"}, "must be whole numbers of at least 1"),
        ({"hidden_size": None}, "must be whole numbers of at least 1"),
        ({"num_hidden_layers": 0}, "every size of a model must be at least 1; got 0"),
    ],
)
def test_an_impossible_size(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(OURS.to_hf() | change))
    with pytest.raises(ValueError, match=message):
        find_architecture(str(tmp_path), Config())


def test_a_dit_block_counts_as_one_written_in_pytorch():
    width, mlp = 1152, 4 * 1152
    layers = [(width, 3 * width), (width, width), (width, mlp), (mlp, width), (width, 6 * width)]
    expected = sum(count(nn.Linear(k, n, device="meta")) for k, n in layers)
    assert math.isclose(find_architecture("dit-xl-2", Config()).blocks[0].parameters, expected)
