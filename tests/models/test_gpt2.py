"""GPT-2 against transformers' OPTForCausalLM, whose names it has."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import OPTConfig, OPTForCausalLM

from octavo.models import GPT2, GPT2Config, build, from_hf_config

TIED = GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=20)
UNTIED = GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=20, tied=False)
WITHOUT_BIAS = GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=20, bias=False)
CONFIGS = pytest.mark.parametrize("config", [TIED, UNTIED, WITHOUT_BIAS], ids=["tied", "untied", "without bias"])


def tokens(batch: int = 2, length: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(61, (batch, length), generator=generator)


def lively(config: GPT2Config) -> GPT2:
    """A model whose biases, norms and logits are far from trivial, so that a mistake anywhere moves the logits."""
    torch.manual_seed(0)
    model = GPT2(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@CONFIGS
def test_names_and_logits_are_those_of_opt(config: GPT2Config) -> None:
    ours, theirs = lively(config), OPTForCausalLM(OPTConfig(**config.to_hf())).eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert want.std() > 0.5
        torch.testing.assert_close(ours(tokens()), want, rtol=0, atol=1e-5)


@CONFIGS
def test_opt_weights_and_config_load_here(config: GPT2Config) -> None:
    torch.manual_seed(3)
    hf = OPTConfig(**config.to_hf(), init_std=0.3)
    theirs = OPTForCausalLM(hf).eval()
    found = from_hf_config(hf.to_diff_dict())
    assert found == config
    ours = build(found)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-5)


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
        GPT2Config.from_hf(TIED.to_hf() | change)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        GPT2Config(vocabulary=61, layers=2, width=24, heads=5, context=20)
    with pytest.raises(ValueError, match="at least 1"):
        GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=0)


def test_checkpointing_gives_identical_gradients() -> None:
    plain = lively(TIED)
    checkpointed = copy.deepcopy(plain)
    checkpointed.checkpoint_activations = True
    runs = {"plain": 0, "checkpointed": 0}
    for name, model in (("plain", plain), ("checkpointed", checkpointed)):
        hook = lambda module, inputs, name=name: runs.update({name: runs[name] + 1})  # noqa: E731
        model.model.decoder.layers[0].mlp.register_forward_pre_hook(hook)
        F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    assert runs == {"plain": 1, "checkpointed": 2}
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_compiles_without_graph_breaks() -> None:
    model = lively(TIED)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()), model(tokens()), rtol=0, atol=1e-6)


@CONFIGS
def test_meta_construction_then_load(config: GPT2Config) -> None:
    source = lively(config)
    with torch.device("meta"):
        model = build(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    assert (model.lm_head.weight is model.embedding.weight) is config.tied
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens()), source(tokens()))


def test_initial_weights_have_the_documented_statistics() -> None:
    torch.manual_seed(0)
    for name, parameter in GPT2(TIED).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "layer_norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            std = 0.01 if "out_proj" in name or "fc2" in name else 0.02  # 1 / sqrt(2 * 2 layers) = 1/2
            assert abs(parameter.std().item() / std - 1) < 0.12, name


def test_autocast_keeps_the_residual_stream_in_float32() -> None:
    model = lively(TIED)
    seen: list[torch.dtype] = []
    model.model.decoder.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    model.to(torch.bfloat16)(tokens())
    assert seen == [torch.float32, torch.bfloat16]
