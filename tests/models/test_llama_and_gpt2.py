"""Our models against transformers' LlamaForCausalLM and OPTForCausalLM, whose names they have; what both can do."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from model_examples import BOTH, EACH, GPT, GQA, lively, tokens
from torch import nn

from octavo.models import GPT2Config, LlamaConfig, build, from_hf_config

Config = LlamaConfig | GPT2Config


def theirs_of(config: Config, **more: float) -> tuple[transformers.PreTrainedConfig, nn.Module]:
    kind = "Llama" if isinstance(config, LlamaConfig) else "OPT"
    described = getattr(transformers, f"{kind}Config")(**config.to_hf(), **more)
    return described, getattr(transformers, f"{kind}ForCausalLM")(described).eval()


@EACH
def test_names_and_logits_are_those_of_transformers(config: Config) -> None:
    ours, (_, theirs) = lively(config), theirs_of(config)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert want.std() > 0.5
        torch.testing.assert_close(ours(tokens()), want, rtol=0, atol=1e-5)


@EACH
def test_weights_and_config_of_transformers_load_here(config: Config) -> None:
    torch.manual_seed(3)
    scale = {"initializer_range": 0.3} if isinstance(config, LlamaConfig) else {"init_std": 0.3}
    hf, theirs = theirs_of(config, **scale)
    found = from_hf_config(hf.to_diff_dict())
    assert found == config
    ours = build(found)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-5)


@BOTH
def test_checkpointing_gives_identical_gradients_from_less_memory(config: Config) -> None:
    plain = lively(config)
    checkpointed = copy.deepcopy(plain)
    checkpointed.checkpoint_activations = True
    saved = []
    for model in (plain, checkpointed):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: (sizes.append(x.numel()), x)[1], lambda x: x
        ):
            loss = F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())
        loss.backward()
        saved.append(sum(sizes))
    assert saved[1] < saved[0] / 2.5
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("config", "checkpoint"), [(GQA, False), (GQA, True), (GPT, False)], ids=["llama", "checkpointed", "gpt2"]
)
def test_compiles_without_graph_breaks(config: Config, checkpoint: bool) -> None:
    model = lively(replace(config, layers=1))
    model.checkpoint_activations = checkpoint
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(tokens()), model(tokens()), rtol=0, atol=1e-6)


@EACH
def test_meta_construction_then_load(config: Config) -> None:
    source = lively(config)
    with torch.device("meta"):
        model = build(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    assert (model.lm_head.weight is model.embedding.weight) is config.tied
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens()), source(tokens()))


@BOTH
def test_meta_construction_then_init_has_the_documented_statistics(config: Config) -> None:
    with torch.device("meta"):
        model = build(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(0)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            last = any(part in name for part in ("o_proj", "down_proj", "out_proj", "fc2"))
            std = 0.01 if last else 0.02  # 1 / sqrt(2 * 2 layers) = 1/2
            assert abs(parameter.std().item() / std - 1) < 0.12, name


@BOTH
def test_autocast_keeps_the_residual_stream_in_float32(config: Config) -> None:
    model = lively(config)
    seen: dict[str, torch.dtype] = {}
    block = next(module for name, module in model.named_modules() if name.endswith("layers.1"))
    linear = [module for module in block.modules() if isinstance(module, nn.Linear)][-1]
    block.register_forward_hook(lambda module, inputs, output: seen.update(stream=output[0].dtype))
    linear.register_forward_hook(lambda module, inputs, output: seen.update(linear=output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    assert seen == {"stream": torch.float32, "linear": torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert model.to(torch.bfloat16)(tokens()).dtype == torch.bfloat16
    assert seen == {"stream": torch.bfloat16, "linear": torch.bfloat16}


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
def test_features_of_opt_that_are_not_here_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        GPT2Config.from_hf(GPT.to_hf() | change)


def test_sizes_of_gpt2_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        GPT2Config(vocabulary=61, layers=2, width=24, heads=5, context=20)
    with pytest.raises(ValueError, match="at least 1"):
        GPT2Config(vocabulary=61, layers=2, width=24, heads=3, context=0)
