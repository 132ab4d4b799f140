"""Llama against transformers' LlamaForCausalLM."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from octavo.models import Llama, LlamaConfig, build, from_hf_config

GQA = LlamaConfig(vocabulary=97, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=24, rope_theta=500.0)
MHA = LlamaConfig(
    vocabulary=97, layers=2, width=32, heads=4, kv_heads=4, mlp_width=48, context=24, tied=False, norm_eps=1e-3
)
CONFIGS = pytest.mark.parametrize("config", [GQA, MHA], ids=["gqa-tied", "mha-untied"])


def tokens(batch: int = 2, length: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(97, (batch, length), generator=generator)


def lively(config: LlamaConfig) -> Llama:
    """A model whose norms and logits are far from trivial, so that a mistake anywhere moves the logits."""
    torch.manual_seed(0)
    model = Llama(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@CONFIGS
def test_state_names_and_logits_are_those_of_transformers(config: LlamaConfig) -> None:
    ours, theirs = lively(config), LlamaForCausalLM(HFConfig(**config.to_hf()))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert want.std() > 0.5
        torch.testing.assert_close(ours(tokens()), want, rtol=0, atol=1e-5)


@CONFIGS
def test_transformers_weights_and_config_load_here(config: LlamaConfig) -> None:
    torch.manual_seed(3)
    hf = HFConfig(**config.to_hf(), initializer_range=0.3)
    theirs = LlamaForCausalLM(hf).eval()
    found = from_hf_config(hf.to_diff_dict())
    assert found == config
    ours = build(found)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-5)


def test_rope_theta_is_read_from_both_places_and_written_to_both() -> None:
    hf = GQA.to_hf()
    assert HFConfig(**hf).rope_parameters["rope_theta"] == 500.0
    for key in ("rope_theta", "rope_parameters"):
        assert LlamaConfig.from_hf({k: v for k, v in hf.items() if k != key}) == GQA


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    sizes = {
        "vocab_size": 97,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 24,
    }
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


def test_checkpointing_gives_identical_gradients_from_less_memory() -> None:
    plain = lively(GQA)
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
    assert saved[1] < saved[0] / 3
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_compiles_without_graph_breaks(checkpoint: bool) -> None:
    model = lively(GQA)
    model.checkpoint_activations = checkpoint
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()), model(tokens()), rtol=0, atol=1e-6)


@CONFIGS
def test_meta_construction_then_load(config: LlamaConfig) -> None:
    source = lively(config)
    with torch.device("meta"):
        model = build(config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    assert (model.lm_head.weight is model.embedding.weight) is config.tied
    model.load_state_dict(source.state_dict())
    assert torch.equal(model(tokens()), source(tokens()))


def test_meta_construction_then_init_has_the_documented_statistics() -> None:
    with torch.device("meta"):
        model = build(GQA)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(0)
    model.init_weights()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            std = 0.01 if "o_proj" in name or "down_proj" in name else 0.02  # 1 / sqrt(2 * 2 layers) = 1/2
            assert abs(parameter.std().item() / std - 1) < 0.1, name


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


def test_autocast_keeps_the_residual_stream_in_float32() -> None:
    model = lively(GQA)
    seen: dict[str, torch.dtype] = {}
    block = model.model.layers[1]
    block.register_forward_hook(lambda module, inputs, output: seen.update(stream=output[0].dtype))
    block.mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.update(linear=output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    assert seen == {"stream": torch.float32, "linear": torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    assert model.to(torch.bfloat16)(tokens()).dtype == torch.bfloat16
    assert seen == {"stream": torch.bfloat16, "linear": torch.bfloat16}
