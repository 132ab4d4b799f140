"""Checks of live models: faults of the field, built small, and sound models of several libraries."""

import copy
import json

import pytest
import torch
import transformers
from linear_examples import converted_model
from safetensors.torch import load_file, save_file
from tiny_models import IMAGE_MODELS, MODELS, built, open_theirs, same_bits, with_slow
from torch import nn

import octavo
from octavo.numerics import ROW, Cast
from octavo.ops import quantize

BATCH = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))


def kinds(report):
    return [fault.kind for fault in report.faults]


def parts(*layers):
    """Three linear layers of 64 x 64, in training; `layers` replace the second."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 64), *(layers or [nn.Linear(64, 64)]), nn.Linear(64, 64))


class Quantized(nn.Linear):
    """An e4m3 weight with one scale for each block of 32 x 32, dequantized in each call."""

    def __init__(self, features=64):
        super().__init__(features, features, bias=False)
        blocks = self.weight.detach().view(features // 32, 32, features // 32, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        data = (blocks / scale[:, None, :, None]).view(features, features).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(data, requires_grad=False)
        self.register_buffer("weight_scale_inv", scale)

    def dequantized(self):
        return self.weight.float() * self.weight_scale_inv.repeat_interleave(32, 0).repeat_interleave(32, 1)

    def forward(self, x):
        return nn.functional.linear(x, self.dequantized())


# ---- Replays of five threads.


def test_scales_that_a_loader_dropped(made):
    """unslothai/unsloth#6200: weight_scale_inv of some layers was unexpected, and their bytes were multiplied."""
    folder = made("llama", scheme="block", layout="fp8")
    model, sound = open_theirs(folder), open_theirs(folder)  # dequantized on the CPU
    with torch.no_grad():
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name.endswith("gate_proj.weight"):
                model.get_parameter(name).copy_(tensor.float())
    alone, beside = octavo.check(model), octavo.check(model, folder)
    assert kinds(alone) == ["scale"]
    assert alone.faults[0].where.endswith("layers.0.mlp.gate_proj.weight")
    assert alone.faults[0].count == 2
    assert "the bytes of e4m3, up to 240 and more, without their scales" in alone.faults[0].message
    assert kinds(beside) == ["scale", "file"]
    assert octavo.check(sound, folder).ok


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
def test_experts_that_stayed_random(made, name):
    """NVIDIA-NeMo/Automodel#2682: a cast made a copy, the copy was filled, and experts kept normal_(0, 0.02)."""
    folder = made(name, scheme="block", layout="fp8")
    model = open_theirs(folder)  # dequantized on the CPU
    assert octavo.check(model, folder).ok
    key = "model.layers.1.mlp.experts.gate_up_proj"
    nn.init.normal_(model.get_parameter(key)[2], 0, 0.02)
    report = octavo.check(model, folder)
    assert [(fault.kind, fault.where) for fault in report.faults] == [("file", key)]
    assert "matrix 2 has nothing of the folder's" in report.faults[0].message
    assert "never loaded" in report.faults[0].message
    assert "load the tensor again" in repr(report)


class TwoCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, transposed):
        ctx.save_for_backward(transposed)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.saved_tensors[0].mT, None, None


class CopiedLinear(Quantized):
    """y from the rows, dx from a transposed copy, as Transformer Engine on a Hopper."""

    def __init__(self):
        super().__init__()
        self.columnwise = self.dequantized().mT.contiguous()

    def forward(self, x):
        return TwoCopies.apply(x, self.dequantized(), self.columnwise)


def test_a_transposed_copy_that_stayed_zero():
    """modelscope/mcore-bridge#125: the loader filled the rows, and dx was near zero."""
    model = parts(CopiedLinear())
    assert octavo.check(model, batch=BATCH).ok
    model[1].columnwise.zero_()
    report = octavo.check(model, batch=BATCH)
    assert [(fault.kind, fault.where) for fault in report.faults] == [("dx", "1")]
    assert "near zero (0 of its size): a copy of the weight is stale" in report.faults[0].message
    assert "transposed copy" in repr(report)
    stale = copy.deepcopy(model)
    stale[1].columnwise = Quantized().dequantized().mT  # of another weight, such as that before loading
    assert "not dy @ w" in octavo.check(stale, batch=BATCH).faults[0].message


def test_gradients_that_stop():
    """huggingface/transformers#46736: FP8 kernels were called as plain functions; residuals still passed gradients."""

    class Block(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return x + self.layer(x)

    assert octavo.check(parts(Block(Quantized())), batch=BATCH).ok
    layer = Quantized()
    layer.forward = torch.no_grad()(layer.forward)  # a kernel without a backward pass
    model = parts(Block(layer))
    report = octavo.check(model, batch=BATCH)
    assert [(fault.kind, fault.where) for fault in report.faults] == [("gradient", "1.layer")]
    assert "loses its gradient here: earlier layers learn less" in report.faults[0].message
    served = octavo.check(model.eval(), batch=BATCH)
    assert served.ok
    assert served.remarks == ["1.layer (1 such) passes no gradient on"]


def test_fp8_that_trains_in_bf16(monkeypatch):
    """hiyouga/LlamaFactory#9500: `fp8: true` set accelerate's variable, and no layer was converted."""
    model = built("llama").bfloat16().train()
    assert octavo.check(model).ok
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    (fault,) = octavo.check(model).faults
    assert (fault.kind, fault.message) == ("precision", "FP8 was asked for, and all products ran in BF16")
    octavo.convert(model)
    report = octavo.check(model, precision="fp8")
    assert report.ok
    assert "products in FP8 9" in report.verdict


# ---- Other faults.


def test_a_scale_that_is_another_than_the_folders(made):
    folder = made("llama", scheme="channel")
    model = octavo.load(folder)
    model.model.layers[1].mlp.down_proj.weight_scale[5] *= 1.02
    (fault,) = octavo.check(model, folder).faults
    assert (fault.kind, fault.where, round(fault.error, 3)) == ("file", "model.layers.1.mlp.down_proj.weight", 0.02)


def test_weights_cast_once_that_went_stale():
    model = converted_model(built("llama").bfloat16().train())
    with octavo.scales.cast_once(model):
        octavo.check(model)
        nn.init.normal_(model.model.layers[0].mlp.down_proj.weight.data)  # autograd counts no new version
        report = octavo.check(model)
    found = sorted((fault.kind, fault.where) for fault in report.faults)
    assert found == [(kind, "model.layers.0.mlp.down_proj") for kind in ("dx", "y")]


def test_a_weight_without_its_scale_or_with_one_that_cannot_be_right():
    wrong = {
        "no scale": None,
        "fits no block": torch.ones(5, 7),
        "NaN, infinite, zero or negative": Quantized().weight_scale_inv * torch.tensor([1.0, 0.0]),
        "all 1": torch.ones(2, 2),
    }
    for what, scale in wrong.items():
        layer = Quantized()
        layer.weight_scale_inv = scale
        layer.forward = lambda x: x  # it may not run
        assert any(what in fault.message for fault in octavo.check(parts(layer), batch=BATCH).faults), what


def test_a_weight_that_is_held_by_column_is_read_by_row():
    """vLLM holds the bytes of w [N, K] as a view [K, N], beside scales of its rows."""
    layer, q = nn.Linear(64, 64, bias=False), quantize(torch.randn(64, 64) / 8, Cast(granularity=ROW))
    layer.weight, layer.weight_scale = nn.Parameter(q.data.t(), requires_grad=False), q.scale
    layer.forward = lambda x: x @ (layer.weight.float() * layer.weight_scale.t())
    assert octavo.check(parts(layer), batch=BATCH).ok
    layer.weight_scale.fill_(1)
    assert kinds(octavo.check(parts(layer), batch=BATCH)) == ["scale"]


def test_a_stale_copy_in_the_forward_pass_and_a_lost_bias():
    layer = nn.Linear(64, 64)
    layer.copy = layer.weight.detach().clone()
    layer.forward = lambda x: x @ layer.copy.mT + layer.bias
    assert octavo.check(parts(layer), batch=BATCH).ok
    nn.init.normal_(layer.weight)
    assert sorted(kinds(octavo.check(parts(layer), batch=BATCH))) == ["dx", "y"]
    layer.copy = layer.weight
    layer.bias.data.fill_(3)
    layer.forward = lambda x: x @ layer.weight.mT
    assert kinds(octavo.check(parts(layer), batch=BATCH)) == ["y"]


def test_tensors_that_are_not_the_folders(tmp_path):
    model = parts()
    (tmp_path / "config.json").write_text(json.dumps({}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert octavo.check(model, tmp_path, BATCH).ok
    with torch.no_grad():
        model[0].weight *= 3
        model[2].bias.zero_()
    report = octavo.check(model, tmp_path, BATCH)
    assert {(fault.where, round(fault.error, 4)) for fault in report.faults} == {("0.weight", 2), ("2.bias", 1)}
    assert "3 times the folder's" in report.faults[0].message
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        octavo.check(model, tmp_path, BATCH)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Sequential is no model of transformers, whose inputs are known: give batch="),
        ({"batch": BATCH, "precision": "fp4"}, "precision must be"),
        ({"batch": BATCH[:, 1:]}, r"Sequential .torch.float32 on cpu. cannot run on .* torch.float32 .32, 63. .*:"),
    ],
)
def test_what_it_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        octavo.check(parts(), **given)
    with pytest.raises(TypeError, match="check takes a torch.nn.Module"):
        octavo.check("llama")


def test_the_model_stays_as_it_is():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 64))
    model(BATCH).sum().backward()
    before = copy.deepcopy(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.manual_seed(0)
    drawn = torch.rand(4)
    torch.manual_seed(0)
    octavo.check(model, batch=BATCH)
    assert torch.equal(torch.rand(4), drawn)
    assert same_bits(model.state_dict(), before.state_dict())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- Sound models.


@pytest.mark.parametrize("name", with_slow([*MODELS, *IMAGE_MODELS]))
def test_a_sound_model_of_transformers(name):
    model = built(name).bfloat16()
    for report in (octavo.check(model.train()), octavo.check(model.eval())):
        assert report.ok, report
        assert not any(f"{name} of 0" in report.verdict for name in ("y", "dx"))


def test_a_tied_head_is_compared_under_its_other_name(made):
    assert octavo.check(open_theirs(made("qwen2")), made("qwen2")).remarks == []


@pytest.mark.parametrize("recipe", with_slow(octavo.recipe.PRESETS, ("rowwise", "delayed", "mxfp8", "nvfp4")))
def test_a_sound_model_of_ours(recipe):
    model = converted_model(built("llama").bfloat16().train(), recipe)
    assert octavo.check(model).ok
    assert "dx of 15" in octavo.check(model).verdict


SCHEMES = ("channel", "tensor", "static", "block", "mx", "int8", "weight")
PACKED = [("mixtral", "channel"), *(("llama", scheme) for scheme in SCHEMES)]


@pytest.mark.parametrize(("name", "scheme"), with_slow(PACKED, PACKED[:4]))
def test_a_sound_packed_model(made, name, scheme):
    folder = made(name, scheme=scheme)
    ours, theirs = octavo.load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert octavo.check(ours, folder).ok
    assert octavo.check(ours, made(name)).ok
    assert octavo.check(theirs, folder).ok


def test_a_sound_model_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    training = pytest.importorskip("torchao.float8")
    for config in (quantization.Float8WeightOnlyConfig(), quantization.Int8WeightOnlyConfig()):
        model = built("llama").bfloat16().train()
        quantization.quantize_(model, config)
        assert octavo.check(model).ok
    for recipe in ("tensorwise", "rowwise"):
        model = built("llama").bfloat16().train()
        config = training.Float8LinearConfig.from_recipe_name(recipe)
        training.convert_to_float8_training(model, config=config)
        assert octavo.check(model, precision="fp8").ok


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_a_sound_model_of_peft(made, converted, dora):
    peft = pytest.importorskip("peft")
    model = open_theirs(made("llama")).train()
    if converted:
        octavo.convert(model)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=dora)
    assert octavo.check(peft.get_peft_model(model, config), made("llama")).ok


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("MobileBertForMaskedLM", {"embedding_size": 64, "intra_bottleneck_size": 32}),  # has an empty matrix
        ("XLNetLMHeadModel", {"d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 64}),  # states -1 positions
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_sound_model_of_unusual_sizes(tmp_path, architecture, sizes):
    cls = getattr(transformers, architecture)
    given = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    model = cls(cls.config_class(**sizes if "d_model" in sizes else given | sizes))
    model.save_pretrained(tmp_path)
    assert octavo.check(model.train(), tmp_path).ok
