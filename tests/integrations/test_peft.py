"""LoRA adapters of PEFT on converted and on packed layers, with the library itself."""

import warnings

import peft
import pytest
import torch
from adapter_oracle import check_layers
from linear_examples import converted_model
from metrics import sqnr
from operation_counts import operations
from other_writers import WRITERS
from tiny_models import IDS, outputs, same_bits, with_slow
from transformers import AutoModelForCausalLM

import octavo
from octavo.inference.engine import parts_of
from octavo.inference.packed_linear import PackedLinear
from octavo.integrations.peft import support
from octavo.packing import unpack

TARGETS = ["q_proj", "v_proj", "down_proj"]
LINEARS = [*TARGETS, "k_proj", "o_proj", "gate_proj", "up_proj"]
LAYERS, STEPS = 14, 3
FUSED = 4 + 4 + 4 + 3  # GEMMs of two blocks: q, k, v as one and gate, up as one; no dx of the first q, k, v


def settings(**more):
    return peft.LoraConfig(r=4, target_modules=TARGETS, **more)


def train(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_training(model, gemms):
    """The loss falls, only adapters train, in high precision, and each step computes so many GEMMs in FP8."""
    torch.manual_seed(0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    frozen = {name: t.clone() for name, t in model.state_dict().items() if name not in trained}
    losses = []
    counts = operations(lambda: losses.extend(train(model)))
    assert losses[-1] < losses[0] - 0.3
    assert counts["octavo::scaled_mm"] == STEPS * gemms
    assert same_bits({name: t for name, t in model.state_dict().items() if name not in trained}, frozen)


@pytest.mark.parametrize(("scheme", "gemms"), [("channel", FUSED), ("mx", LAYERS)])
def test_adapters_train_around_a_packed_model(made, tmp_path, scheme, gemms):
    folder = made("llama", scheme=scheme)
    base = octavo.load(folder)
    before = outputs(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, support(settings()))
    assert torch.equal(outputs(model), outputs(base))
    check_training(model, gemms)

    model.save_pretrained(tmp_path)
    config = support(peft.LoraConfig.from_pretrained(tmp_path))
    opened = peft.PeftModel.from_pretrained(octavo.load(folder), tmp_path, config=config)
    assert torch.equal(outputs(opened), outputs(model.eval()))
    with pytest.raises(NotImplementedError, match="cannot be merged into a weight of eight bits"):
        model.merge_and_unload()
    plain = model.unload()
    assert sum(isinstance(module, PackedLinear) for module in plain.modules()) == LAYERS
    assert torch.equal(outputs(plain), before)


def test_a_variant_that_reads_the_weight_is_refused_on_a_packed_model(made):
    with pytest.raises(ValueError, match="unsupported variant"):
        peft.get_peft_model(octavo.load(made("llama", scheme="channel")), support(settings(use_dora=True)))
    with pytest.raises(TypeError, match="takes a LoraConfig, got IA3Config"):
        support(peft.IA3Config())


def test_adapters_that_are_turned_off_or_exchanged_change_what_a_graph_computes(made):
    model = peft.get_peft_model(octavo.load(made("llama", scheme="channel")), support(settings()))
    model.add_adapter("other", support(settings(modules_to_save=["lm_head"])))
    before = parts_of(model)
    with model.disable_adapter():
        assert parts_of(model) != before
    assert parts_of(model) == before
    model.base_model.model.model.layers[0].self_attn.q_proj.scale_layer(2.0)
    scaled = parts_of(model)
    model.set_adapter("other")
    assert parts_of(model) != scaled != before


# By PEFT alone each layer has a GEMM of y. Those after the first adapter have one of dx: not the first q, k, v.
@pytest.mark.parametrize(("prepare", "gemms"), [(support, FUSED), (lambda config: config, LAYERS + LAYERS - 3)])
def test_adapters_train_around_a_converted_model(made, prepare, gemms):
    base = converted_model(AutoModelForCausalLM.from_pretrained(made("llama"), dtype=torch.float32))
    model = peft.get_peft_model(base, prepare(settings()))
    with octavo.scales.cast_once(model):
        check_training(model, gemms)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    merged = layer.base_layer.weight + layer.get_delta_weight("default")
    changed = outputs(model.eval())
    plain = model.merge_and_unload()
    assert torch.equal(plain.model.layers[1].self_attn.q_proj.weight, merged)
    assert len([module for module in plain.modules() if isinstance(module, octavo.Linear)]) == LAYERS
    assert (outputs(plain) - changed).norm() < 0.3 * changed.norm()  # the merged weight is rounded to eight bits


def test_a_model_with_adapters_is_converted_without_them(made):
    base = AutoModelForCausalLM.from_pretrained(made("llama"), dtype=torch.float32)
    check_training(converted_model(peft.get_peft_model(base, support(settings())), skip=["*lora_*"]), FUSED)


@pytest.mark.parametrize("wrapped", [{"modules_to_save": ["lm_head"]}, {"target_modules": [*TARGETS, "lm_head"]}])
def test_a_head_that_peft_wraps_stays_in_high_precision(made, wrapped):
    base = AutoModelForCausalLM.from_pretrained(made("llama"))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **({"target_modules": TARGETS} | wrapped)))
    report = octavo.convert(model, skip=["*lora_*"])
    assert len(report.converted) == LAYERS
    heads = {row.name: row.reason for row in report.rows if "lm_head" in row.name and "lora_" not in row.name}
    assert set(heads.values()) == {"an output head or router (lm_head)"}


def test_activation_checkpointing_computes_the_same_gradients(made):
    found = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(octavo.load(made("llama", scheme="channel")), support(settings())).train()
        if checkpoints:
            model.activation_checkpointing_enable()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- The gradients of adapters against PEFT in float64, on the numbers that the bytes of the base stand for


def filled(model):
    """The model with adapters that change its output: PEFT begins with B = 0."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator) * (0.1 if "lora_A" in name else 0.05))
    return model


def gradients(model):
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def check_gradients(packed, plain, weights, targets):
    """Those around a packed model against those around its `weights`, put into the model of the folder `plain`."""
    exact = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64, experts_implementation="eager")
    for name, w in weights.items():
        exact.get_submodule(name).weight.data.copy_(w)
    configs = [peft.LoraConfig(r=4, target_modules=targets) for _ in range(2)]
    expected = gradients(filled(peft.get_peft_model(exact, configs[0])))
    actual = gradients(filled(peft.get_peft_model(packed, support(configs[1]))))
    assert expected.keys() == actual.keys()
    for name, g in expected.items():
        assert sqnr(g, actual[name]) > 12, (name, sqnr(g, actual[name]))


# The layouts of torchao are in tests/packing/test_torchao_folders.py.
OTHERS = [
    "compressed-tensors FP8", "compressed-tensors FP8_DYNAMIC", "compressed-tensors FP8_BLOCK",
    "compressed-tensors MXFP8", "no status, no ignore, vectors", "DeepSeek", "DeepSeek, E8M0", "Qwen3",
    "transformers, static", "ModelOpt", "ModelOpt in config.json",
]  # fmt: skip


@pytest.mark.parametrize("writer", with_slow(OTHERS, ("compressed-tensors FP8", "DeepSeek", "ModelOpt", OTHERS[3])))
def test_gradients_around_folders_of_other_programs(writer, tmp_path):
    """Of each layer by itself, and of the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other programs
        weights = WRITERS[writer](tmp_path / "packed")
    config = support(peft.LoraConfig(r=4, target_modules=LINEARS))
    check_layers(peft.get_peft_model(octavo.load(tmp_path / "packed"), config), weights)
    unpack(tmp_path / "packed", tmp_path / "plain")
    check_gradients(octavo.load(tmp_path / "packed"), tmp_path / "plain", weights, LINEARS)


def test_gradients_around_packed_experts(made, tmp_path):
    folder = made("qwen3moe", scheme="channel")
    unpack(folder, tmp_path / "plain")
    check_gradients(octavo.load(folder), tmp_path / "plain", {}, ["q_proj", "k_proj", "v_proj", "o_proj"])
