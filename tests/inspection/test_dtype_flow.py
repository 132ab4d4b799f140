"""dtype_flow: the dtypes of operations, and their reasons, against what the documentation of autocast says."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from linear_examples import converted_model
from tiny_models import built
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import octavo
from octavo.hf.meta_model import image_shape
from octavo.ops.registration import FLOPS, OPERATIONS
from octavo.tracing import autocast_policies, compute_dtype, floating, kind_of, names_of


class Calls(nn.Module):
    """Calls a function, with a parameter so that there is a gradient."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.function(x, self.weight)


# (function, operation, its dtype where x is BF16, and w FP32), from "CUDA Op-Specific Behavior" of torch.amp's page
DOCUMENTED = [
    (lambda x, w: x @ w, "mm", "BF16"),
    (lambda x, w: torch.addmm(x, x, w), "addmm", "BF16"),
    (lambda x, w: F.linear(x, w), "mm", "BF16"),
    (lambda x, w: torch.einsum("ij,jk->ik", x, w), "bmm", "BF16"),
    (lambda x, w: F.conv1d(x[None], w[:, :, None]), "convolution", "BF16"),
    (lambda x, w: torch.exp(x) * w, "exp", "FP32"),
    (lambda x, w: x.abs().pow(2) * w, "pow", "FP32"),
    (lambda x, w: F.layer_norm(x, (8,), w[0]), "native_layer_norm", "FP32"),
    (lambda x, w: F.softmax(x, -1) * w, "_softmax", "FP32"),
    (lambda x, w: x.sum() * w, "sum", "FP32"),
    (lambda x, w: F.mse_loss(x, x + w), "mse_loss", "FP32"),
    (lambda x, w: F.log_softmax(x @ w, -1), "_log_softmax", "FP32"),
    (lambda x, w: F.nll_loss(x @ w, torch.zeros(8, dtype=torch.long)), "nll_loss_forward", "FP32"),
    # cross_entropy calls log_softmax with the dtype of the logits, and autocast leaves a dtype that is given
    (lambda x, w: F.cross_entropy(x @ w, torch.zeros(8, dtype=torch.long)), "_log_softmax", "BF16"),
    (lambda x, w: F.cross_entropy(x @ w, torch.zeros(8, dtype=torch.long)), "nll_loss_forward", "FP32"),
    (lambda x, w: torch.cumsum(x, 0) * w, "cumsum", "FP32"),
    (lambda x, w: F.relu(x) @ w, "relu", "BF16"),
    (lambda x, w: x + w, "add", "FP32"),
    (lambda x, w: F.gelu(x) @ w, "gelu", "BF16"),
    (lambda x, w: torch.addcmul(x, x, w), "addcmul", "FP32"),
]


def dtypes(flow):
    """Operation of the forward pass -> the dtypes that it computes in, without casts and copies."""
    found = {}
    for each in flow.operations:
        if each.phase == "forward" and each.kind not in ("cast", "copy"):
            found.setdefault(each.name, set()).add(each.computes_in)
    return found


@pytest.mark.parametrize(("function", "operation", "dtype"), DOCUMENTED)
def test_an_operation_runs_where_the_documentation_of_autocast_says(function, operation, dtype):
    assert dtypes(octavo.dtype_flow(Calls(function), torch.randn(8, 8).bfloat16()))[operation] == {dtype}


def test_the_reason_names_the_operation_that_autocast_lists():
    flow = octavo.dtype_flow(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8))
    reasons = {each.name: each.reason for each in flow.operations if each.phase == "forward"}
    assert reasons["addmm"] == "autocast runs linear in BF16"
    assert reasons["native_layer_norm"] == "autocast runs layer_norm in FP32"
    assert {each.adds_in for each in flow.operations if each.name in ("addmm", "sum")} == {"FP32"}


def test_autocast_is_as_before_after_a_trace():
    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.exp(torch.ones(4, dtype=torch.bfloat16)).dtype, (torch.ones(4, 4) @ torch.ones(4, 4)).dtype

    before = run()
    octavo.dtype_flow(nn.Linear(8, 8), torch.randn(4, 8))
    assert run() == before == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(("autocast", "dtype", "named"), [(torch.float16, "FP16", "FP16"), (None, "FP32", "off")])
def test_other_autocast(autocast, dtype, named):
    flow = octavo.dtype_flow(nn.Linear(8, 8), torch.randn(4, 8), autocast=autocast)
    assert (dtypes(flow)["addmm"], flow.autocast) == ({dtype}, named)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def test_recomputation_repeats_the_forward_pass_of_the_block():
    model = converted_model(encoder(), "rowwise")
    plain = octavo.dtype_flow(model, torch.randn(2, 4, 32))
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    flow = octavo.dtype_flow(model, torch.randn(2, 4, 32))
    assert "recomputation" not in plain.flops
    assert flow.flops["recomputation"] == flow.flops["forward"] == plain.flops["forward"]
    assert flow.flops["backward"] == plain.flops["backward"]
    assert {each.module for each in flow.operations} == {each.module for each in plain.operations}


def test_what_convert_leaves_out_of_an_encoder_is_named():
    model = encoder()
    before = octavo.dtype_flow(model, torch.randn(2, 4, 32))
    reason = next(each.reason for each in before.left_out if "linear1" in each.module)
    assert "octavo.convert(model) would run it in FP8" in reason
    octavo.convert(model, "rowwise", skip=["*.self_attn"])
    flow = octavo.dtype_flow(model, torch.randn(2, 4, 32))
    found = {each.what: each for each in flow.left_out}
    assert found.keys() == {"packed attention projection", "attention"}
    assert found["packed attention projection"].module == "layers.*.self_attn"
    assert found["packed attention projection"].count == 3
    by_dtype = {d: sum(each.get(d, 0) for each in flow.flops.values()) for d in ("BF16", "FP8")}
    assert sum(each.share for each in flow.left_out) == pytest.approx(by_dtype["BF16"] / sum(by_dtype.values()))
    (remark,) = flow.remarks
    assert remark.startswith("layers.*.self_attn.out_proj (NonDynamicallyQuantizableLinear, 3 times) is never called:")
    octavo.convert(model, "rowwise")
    flow = octavo.dtype_flow(model, torch.randn(2, 4, 32))
    assert [each.what for each in flow.left_out] == ["attention"]
    assert flow.remarks == ()


@pytest.mark.parametrize(("recipe", "count"), [("bf16", 5), ("rowwise_dw_bf16", 2), ("rowwise_forward", 3)])
def test_a_gemm_that_a_recipe_leaves_in_bf16_has_the_recipe_as_its_reason(recipe, count):
    """Of the five GEMMs of two layers, as the input has no gradient; dw reads no parameter."""
    model = converted_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipe)
    found = octavo.dtype_flow(model, torch.randn(32, 32)).left_out
    assert all(each.reason.startswith(f"the recipe {recipe} ") for each in found)
    assert sum(each.share for each in found) == pytest.approx(count / 5)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        return torch.bmm(x.expand(4, *x.shape), self.weight)


def test_a_stack_of_experts_is_named():
    model = converted_model(nn.Sequential(nn.Linear(8, 8), Experts()), "tensorwise")
    flow = octavo.dtype_flow(model, torch.randn(16, 8))
    assert [(each.module, each.what) for each in flow.left_out] == [("1", "3-D weight")]
    assert flow.left_out[0].share == pytest.approx(12 / 14)  # y, dx, dw of four; y and dw of the first layer


def test_experts_that_convert_knows_are_said_to_run_in_fp8_once_converted():
    model, offsets = octavo.nn.GroupedLinear(2, 32, 32), torch.tensor([3, 8], dtype=torch.int32)
    (left,) = octavo.dtype_flow(model, torch.randn(8, 32), offsets).left_out
    assert (left.what, left.reason) == ("experts", "not converted: octavo.convert(model) would run it in FP8")
    octavo.convert(model)
    assert octavo.dtype_flow(model, torch.randn(8, 32), offsets).left_out == ()


def test_the_model_stays_as_it_is():
    model = converted_model(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "delayed")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    scales = octavo.scales.scale_state(model)
    octavo.dtype_flow(model, torch.randn(4, 8))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert str(octavo.scales.scale_state(model)) == str(scales)
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks


def test_one_module_can_be_selected():
    flow = octavo.dtype_flow(encoder(), torch.randn(2, 4, 32))
    expected = {f"layers.1.{name}" for name in ("self_attn", "norm1", "norm2", "linear1", "linear2")}
    assert {each.module for each in flow.select("layers.1.*").operations} == expected
    with pytest.raises(ValueError, match="matches no module that runs an operation; there are layers.0.self_attn"):
        flow.select("blocks.*")


@pytest.mark.parametrize(
    ("model", "keywords", "error", "message"),
    [
        ("gpt2", {}, TypeError, "takes a torch.nn.Module, got 'gpt2'"),
        (nn.Linear(8, 8), {"autocast": torch.int8}, ValueError, "autocast must be torch.bfloat16"),
        (nn.Linear(8, 8).requires_grad_(False), {}, ValueError, "has no gradient"),
        (nn.LazyLinear(8), {}, ValueError, "has no shape yet"),
        (Calls(lambda x, w: x @ w if x.sum() > 0 else w), {}, ValueError, "depends on the values of a tensor"),
        (nn.Linear(9, 8), {}, RuntimeError, "Linear fails in a trace"),
    ],
)
def test_bad_input(model, keywords, error, message):
    with pytest.raises(error, match=message):
        octavo.dtype_flow(model, torch.randn(8, 8), **keywords)


# ---- A trace predicts the dtypes that autocast gives on a real GPU


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        kind = kind_of(name, func.namespace)
        self.dtypes[name] = compute_dtype(name, kind, names_of(floating(args)), names_of(floating(out)))
        return out


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "operation", "dtype"), DOCUMENTED)
def test_an_operation_runs_on_the_gpu_as_in_the_trace(function, operation, dtype):
    model, x = Calls(function), torch.randn(8, 8).bfloat16()
    traced = {each.name: each.computes_in for each in octavo.dtype_flow(model, x).operations if each.phase == "forward"}
    with torch.device("cuda"), torch.autocast("cuda", torch.bfloat16), Seen() as seen:
        model.cuda()(x.cuda())
    assert seen.dtypes[operation] == traced[operation] == dtype


# ---- dtype_flow of models of transformers and of ours: FLOPs of the phases, and what stays out of FP8


IDS = torch.zeros(1, 16, dtype=torch.long)
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.fixture
def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=300)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return converted_model(model, "rowwise", device="cpu").train()


def test_a_llama_of_transformers(llama):
    flow = octavo.dtype_flow(llama, IDS, labels=IDS, use_cache=False)
    layers = 2 * 16 * 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert flow.flops["forward"]["FP8"] == layers
    assert flow.flops["backward"]["FP8"] == 2 * layers
    assert {each.module for each in flow.left_out} == {"lm_head", "model.layers.*.self_attn"}
    norms = [row for row in flow.rows if row.module == "model.layers.*.input_layernorm"]
    assert {row.computes_in for row in norms if row.kind != "cast"} == {"FP32"}
    assert {row.count % 3 for row in norms} == {0}


def test_its_reentrant_checkpointing_recomputes_the_blocks(llama):
    llama._set_gradient_checkpointing(
        True, lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)
    )
    flow = octavo.dtype_flow(llama, IDS, labels=IDS, use_cache=False)
    assert flow.flops["recomputation"]["FP8"] == flow.flops["forward"]["FP8"]


def test_a_vision_transformer():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=32, patch_size=8))
    octavo.convert(model, "tensorwise", skip=["*.projection"])
    flow = octavo.dtype_flow(model, torch.randn(2, 3, 32, 32))
    assert {each.what for each in flow.left_out} == {"convolution", "attention", "linear layer"}
    convolution = next(each for each in flow.left_out if each.what == "convolution")
    assert convolution.reason == "not converted: octavo.convert(model) would run it in FP8"
    total = sum(sum(each.values()) for each in flow.flops.values())
    assert convolution.share * total == pytest.approx(2 * 2 * 2 * 16 * 64 * 3 * 8 * 8)  # y and dw: the image has no dx


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "vit"])
def test_pytorchs_counter_counts_a_converted_model_as_it_was(name, recipe, monkeypatch):
    """The experts run one by one before, in products that PyTorch counts."""
    model, counted = built(name, experts_implementation="eager"), []
    inputs = torch.randn(2, *image_shape(model)) if name == "vit" else IDS
    for _ in range(2):
        for each in FLOPS:  # as before the first call: a counter copies the registry when it is made
            monkeypatch.delitem(flop_registry, getattr(torch.ops.octavo, each), raising=False)
        with FlopCounterMode(display=False) as counter:
            model(inputs).logits.sum().backward()
        counted.append(counter.get_total_flops())
        fused = octavo.convert(model, recipe).fused
    flow = octavo.dtype_flow(model, inputs, autocast=None)  # the counter has no formula for attention on a CPU
    traced = sum(each.flops for each in flow.operations if each.kind != "attention")
    assert counted == [traced, traced]
    assert bool(fused) == (recipe == "rowwise" and name != "vit")
    assert FLOPS.keys() == {each for each in OPERATIONS if re.search("mm|prod|attention", each)}
    assert {kind_of(each, "octavo") for each in FLOPS} == {"product", "attention"}
    assert compute_dtype("weight_only_mm", "product", ("FP32", "BF16", "FP8"), ("BF16",)) == "BF16"


# ---- The lists of autocast name every operation that it has a kernel for


def test_every_operation_that_autocast_handles_on_a_gpu_is_listed(monkeypatch, tmp_path):
    handled = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    policies = autocast_policies()
    assert len(handled) > 100
    assert handled - policies.keys() <= {"binary_cross_entropy"}  # an error under autocast
    assert set(policies.values()) == {"lower", "fp32", "result", "promote"}
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(RuntimeError, match=r"autocast_mode.h .* is missing: install PyTorch with its headers"):
        autocast_policies.__wrapped__()
