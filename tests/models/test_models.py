"""Our models against those of transformers, whose names they have, and against plain PyTorch; what they can do."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from model_examples import BOTH, EACH, GPT, GQA, WITHOUT_BIAS, lively, tokens
from safetensors.torch import save_file
from torch import nn

from octavo import convert
from octavo.models import GPT2Config, Llama, LlamaConfig, Mixture, MixtureConfig, build, from_hf_config
from octavo.models.vision import DiffusionTransformer, ImageConfig, VisionTransformer, flow_loss, sample

Config = LlamaConfig | GPT2Config
MIXTURE = MixtureConfig(
    vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=32, tied=False, experts=4
)
VISION = ImageConfig(image=8, patch=2, channels=1, classes=4, layers=2, width=32, heads=2)
IMAGES, CLASSES = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])


@EACH
def test_names_config_weights_and_logits_are_those_of_transformers(config: Config) -> None:
    """A folder of theirs states the scale of its first weights too."""
    kind, scale = ("Llama", "initializer_range") if isinstance(config, LlamaConfig) else ("OPT", "init_std")
    hf = getattr(transformers, f"{kind}Config")(**config.to_hf(), **{scale: 0.3})
    ours, theirs = lively(config), getattr(transformers, f"{kind}ForCausalLM")(hf).eval()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    found = from_hf_config(hf.to_diff_dict())
    assert found == config
    loaded = build(found)
    loaded.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        want = theirs(tokens()).logits
        assert want.std() > 0.5
        for model in (ours, loaded):
            torch.testing.assert_close(model(tokens()), want, rtol=0, atol=1e-5)


@BOTH
def test_compiles_without_graph_breaks(config: Config) -> None:
    model = lively(replace(config, layers=1))
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


@pytest.mark.parametrize(
    "config", [GQA, GPT, replace(MIXTURE, width=64, mlp_width=96)], ids=["llama", "gpt2", "mixture"]
)
def test_meta_construction_then_init_has_the_documented_statistics(config: Config) -> None:
    with torch.device("meta"):
        model = build(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
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
    ("config", "change"),
    [
        (GQA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        (GQA, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        (GQA, {"attention_bias": True}),
        (GQA, {"mlp_bias": True}),
        (GQA, {"hidden_act": "gelu"}),
        (GQA, {"head_dim": 16}),
        (GQA, {"hidden_size": None}),
        (GPT, {"activation_function": "relu"}),
        (GPT, {"do_layer_norm_before": False}),
        (GPT, {"_remove_final_layer_norm": True}),
        (GPT, {"word_embed_proj_dim": 12}),
        (GPT, {"layer_norm_elementwise_affine": False}),
        (GPT, {"ffn_dim": 100}),
        (GPT, {"vocab_size": None}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_features_that_are_not_here_are_refused_by_name(config: Config, change: dict[str, object]) -> None:
    name = next(iter(change))
    with pytest.raises(ValueError, match="unscaled, full rotary positions" if "rope" in name else name):
        type(config).from_hf(config.to_hf() | change)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (GQA, {"heads": 5}, "even multiple of heads, got width=32, heads=5"),
        (GQA, {"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        (GQA, {"layers": 0}, "must be at least 1"),
        (GQA, {"width": 36, "heads": 12}, "even multiple of heads"),
        (GPT, {"heads": 5}, "multiple of heads"),
        (GPT, {"context": 0}, "must be at least 1"),
        (MIXTURE, {"top_k": 5}, "top_k must be at least 1 and at most the number of experts, got top_k=5 of 4 experts"),
        (MIXTURE, {"top_k": 0}, "got top_k=0 of 4 experts"),
        (MIXTURE, {"shared_width": -1}, "must be 0 or more, got -1 and 0.01"),
        (MIXTURE, {"balance": -1.0}, "must be 0 or more, got 0 and -1.0"),
        (VISION, {"image": 9}, "multiple of patch, got image=9, patch=2: resize or pad the images to 10"),
        (VISION, {"width": 33}, "multiple of heads, got width=33, heads=2"),
        (VISION, {"layers": 0}, "must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


# ---- Dropout, and GPT-2 without biases


@BOTH
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_dropout_is_of_training_alone_and_repeats_with_the_seed(config, recipe):
    model = build(replace(config, dropout=0.5))
    if recipe:
        convert(model, recipe)
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(tokens()))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@BOTH
def test_without_dropout_no_random_number_is_drawn(config):
    model = build(config).train()
    state = torch.get_rng_state()
    trained = model(tokens())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(trained, model.eval()(tokens()))


@BOTH
def test_dropout_acts_where_gpt2_has_it(config, monkeypatch):
    """On the embeddings, and in each layer on the attention's probabilities and on both sums to the stream."""
    model = build(replace(config, dropout=0.25)).train()
    places, probabilities = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, args, output, name=name: places.append(name))
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(*args, dropout_p=0.0, **kwargs):
        probabilities.append(dropout_p)
        return attention(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    model(tokens())
    assert len(places) == len(set(places)) == 1 + 2 * 2
    assert probabilities == [0.25, 0.25]
    model.eval()(tokens())
    assert probabilities[2:] == [0.0, 0.0]


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gpt2_without_bias_has_none_and_trains_none(recipe):
    model = build(WITHOUT_BIAS)
    if recipe:
        convert(model, recipe)
    model(tokens()).square().mean().backward()
    assert not [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 5
    for norm in norms:
        assert norm.bias.grad is None
        assert not norm.bias.any()
        assert norm.weight.grad.any()


# ---- What only Llama has: RoPE, grouped heads, and a checkpoint whose tied matrix is stored once


def test_rope_theta_is_read_from_both_places_and_written_to_both() -> None:
    hf = GQA.to_hf()
    assert transformers.LlamaConfig(**hf).rope_parameters["rope_theta"] == 500.0
    for key in ("rope_theta", "rope_parameters"):
        assert LlamaConfig.from_hf({k: v for k, v in hf.items() if k != key}) == GQA


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    sizes = {
        "vocab_size": 97, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 24,
    }  # fmt: skip
    assert LlamaConfig.from_hf(sizes) == LlamaConfig.from_hf(transformers.LlamaConfig(**sizes).to_dict())


def test_other_architectures_are_not_ours() -> None:
    assert from_hf_config({"architectures": ["MambaForCausalLM"]}) is None
    assert from_hf_config({}) is None


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


# ---- A mixture


def built(**changes: object) -> Mixture:
    model = Mixture(replace(MIXTURE, **changes))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


@pytest.mark.parametrize(("shared", "name"), [(0, "MixtralForCausalLM"), (16, "Qwen2MoeForCausalLM")])
def test_transformers_opens_it_and_computes_the_same(tmp_path, shared, name):
    model = built(shared_width=shared).eval()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf() | {"dtype": "float32"}))
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == name
    assert not any(loaded.values())
    tokens = torch.randint(64, (2, 16))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_the_balance_loss_is_that_of_the_switch_transformer():
    model = built(balance=0.5)
    tokens, seen = torch.randint(64, (2, 16)), []
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda module, args, logits: seen.append(logits.detach().double()))
    assert model.take_balance() is None  # before the first forward pass
    model(tokens)
    expected = []
    for logits in seen:
        p = logits.softmax(-1)
        shares = torch.nn.functional.one_hot(p.topk(2).indices, 4).double().mean((0, 1))
        expected.append(0.5 * 4 * (shares * p.mean(0)).sum())
    found = model.take_balance()
    assert model.take_balance() is None
    torch.testing.assert_close(found.double(), torch.stack(expected).mean(), rtol=1e-6, atol=0)
    found.backward()
    assert all(block.mlp.gate.weight.grad.any() for block in model.model.layers)
    model.eval()(tokens)
    assert model.take_balance() is None
    without = built(balance=0.0)
    without(tokens)
    assert without.take_balance() is None


# ---- The vision transformer and the diffusion transformer


def test_the_images_are_classified_as_plain_pytorch_does() -> None:
    model = VisionTransformer(VISION)
    patches = F.unfold(IMAGES, 2, stride=2).transpose(1, 2)
    x = F.linear(patches, model.patches.proj.weight.flatten(1), model.patches.proj.bias) + model.patches.positions
    for block in model.blocks:
        encoder = nn.TransformerEncoderLayer(32, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        names = {"self_attn.in_proj_": block.attention.qkv, "self_attn.out_proj.": block.attention.proj}
        names |= {"linear1.": block.fc1, "linear2.": block.fc2, "norm1.": block.norm1, "norm2.": block.norm2}
        leaves = ("weight", "bias")
        encoder.load_state_dict({f"{name}{leaf}": getattr(m, leaf) for name, m in names.items() for leaf in leaves})
        x = encoder(x)
    torch.testing.assert_close(model(IMAGES), model.head(model.norm(x).mean(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_they_learn_in_fp8(recipe: str) -> None:
    models = VisionTransformer(VISION), DiffusionTransformer(VISION)
    batches = IMAGES, (IMAGES, torch.rand(6), CLASSES)
    for model, batch in zip(models, batches, strict=True):
        report = convert(model, recipe, batch=batch)
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
    model = DiffusionTransformer(VISION)
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
        VisionTransformer(VISION)(torch.randn(shape))
