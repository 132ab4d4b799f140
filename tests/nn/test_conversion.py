"""Conversion changes the classes of linear layers, reports it, and changes nothing else."""

import copy
import io
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_examples import converted_model
from tiny_models import built
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.models import GPT2Config, LlamaConfig, build
from octavo.nn import select_linears
from octavo.nn.conversion import recompute_hidden
from octavo.nn.selection import skipped_by_name

LLAMA = LlamaConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16, tied=False)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_linears_change_class_and_nothing_else(recipe: str) -> None:
    model = build(LLAMA)
    before = copy.deepcopy(model.state_dict())
    parameters = [(name, id(p)) for name, p in model.named_parameters()]
    report = octavo.convert(model, recipe)
    assert len(report.converted) == 14
    assert report.skipped == {"lm_head": "an output head or router (lm_head)"}
    assert "88.2 % of the FLOPs (estimated from the sizes of the weights)" in str(report.coverage)
    assert [(name, id(p)) for name, p in model.named_parameters()] == parameters
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)  # no histories of delayed scaling
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = converted_model(build(LLAMA), "delayed")
        assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 64)
        assert converted_model(built("qwen2").to("meta"))(torch.zeros(2, 16, dtype=torch.int64)).logits.is_meta
    model.to_empty(device="cpu")
    assert all(not t.any() for t in octavo.scales.scale_state(model).values())


def test_the_device_decides_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    for weights, device, expected in (("meta", None, "xpu"), ("meta", "cpu", "cpu"), ("cpu", None, "cpu")):
        model = build(LLAMA).to(weights)
        reasons = {backend.reason for backend in octavo.convert(model, device=device).backends.values()}
        assert reasons == {f"{expected} has no FP8 GEMM: exact in float32, slower than BF16"}


def quantized() -> nn.Module:
    layer = nn.Module()
    layer.register_buffer("weight", torch.zeros(16, 16, dtype=torch.float8_e4m3fn))
    return nn.ModuleDict({"layer": layer})


MODULE = r"takes a torch\.nn\.Module, got"
EIGHT_BITS = "weights in eight bits already: convert the model in BF16.*unpack"
ONE = nn.Sequential(nn.Linear(4, 4))
REFUSED = [
    (lambda: octavo.convert(nn.Linear), rf"{MODULE} .*\.Linear.*: pass"),
    (lambda: octavo.convert(torch.ones(9, 9)), rf"{MODULE} a Tensor: pass"),
    (lambda: octavo.convert(ONE, octavo.recipe.PRESETS["rowwise"]), r"call it, rowwise\(\)"),
    (lambda: octavo.convert(ONE, emulate="no"), "recipe rowwise: emulate must be true or false, got 'no'"),
    (lambda: octavo.convert(ONE, recompute="no"), "^recompute must be true or false, got 'no'"),
    (lambda: octavo.convert(ONE, "rowise"), "rowwise, rowwise_dw_bf16"),
    (lambda: octavo.convert(ONE, skip=["block*"]), "matches no linear layer; the model has 1, named '0'$"),
    (lambda: octavo.convert(nn.ModuleDict({"lm_head": nn.Linear(4, 4)})), "every linear layer"),
    (lambda: select_linears(nn.Sequential(nn.Conv2d(1, 1, 1))), r"no linear layer.*are 0\.weight .convolution"),
    (lambda: select_linears(nn.LayerNorm(4)), "None of its other parameters"),
    (lambda: select_linears(nn.MultiheadAttention(8, 2)), "multi-head attention reads its weight directly"),
    (lambda: select_linears(quantized()), EIGHT_BITS),
    (lambda: select_linears(nn.ModuleDict({"layer": quantized(), "lm_head": nn.Linear(16, 16)})), EIGHT_BITS),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_converted_says_so(call, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
    assert type(ONE[0]) is nn.Linear


# ---- `convert(model, batch=...)`: a traced forward pass gives the FLOPs of the report


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.patches = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 32, 4, 4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.unused, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.encoder(x).mean(1))


FLOPS = {  # 2 * rows * N * K by hand; 8 patches of 2 images
    "stem.weight": 2 * (2 * 16 * 8) * 3 * 27,
    "patches.weight": 2 * 16 * 32 * 48,
    "encoder.self_attn.in_proj_weight": 2 * 16 * 96 * 32,
    "encoder.self_attn.out_proj.weight": 2 * 16 * 32 * 32,
    "encoder.linear1.weight": 2 * 16 * 64 * 32,
    "encoder.linear2.weight": 2 * 16 * 64 * 32,
    "head.weight": 2 * 2 * 10 * 32,
    "attention": 2 * 2 * 2 * 8 * 8 * 32,
}


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("converted_before", [False, True])
def test_the_shares_are_those_of_the_flops_of_the_pass(converted_before: bool, evaluation: bool) -> None:
    model = Vision().eval() if evaluation else Vision()
    model.requires_grad_(not evaluation)  # PyTorch's fast path would hide the layers
    if converted_before:
        octavo.convert(model, "tensorwise")
    coverage, total = octavo.convert(model, batch=torch.randn(2, 3, 16, 8)).coverage, sum(FLOPS.values())
    expected = {name: pytest.approx(FLOPS[name] / total) for name in ("stem.weight", "patches.weight", "head.weight")}
    assert {entry.name: entry.flops for entry in coverage.left} == expected
    assert coverage.activations == pytest.approx(FLOPS["attention"] / total)
    assert coverage.flops + coverage.activations + sum(e.flops for e in coverage.left) == pytest.approx(1)
    assert f"{100 * coverage.flops:.1f} % of the FLOPs (of the batch)" in str(coverage)


def test_a_layer_whose_weight_is_read_and_that_is_never_called_is_skipped() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.called(x), self.read.weight)

    assert octavo.convert(Reads()).converted == ["called", "read"]
    report = octavo.convert(Reads(), batch=torch.randn(4, 8))
    assert report.skipped == {"read": "the model reads its weight without calling it"}


def test_a_pass_that_cannot_be_traced_changes_nothing() -> None:
    class Looks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = Looks(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="Looks cannot be traced: its code depends on the values of a tensor"):
        octavo.convert(model, batch=torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="fails in a trace with these inputs"):
        octavo.convert(nn.Sequential(nn.Linear(8, 8)), batch=torch.randn(4, 7))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("converted_before", [False, True])
def test_experts_count_the_rows_that_are_routed_to_them(converted_before: bool) -> None:
    model = built("mixtral", num_hidden_layers=1)
    if converted_before:
        octavo.convert(model)
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "use_cache": False}
    left = {entry.name: entry.flops for entry in octavo.convert(model, skip=["*.experts"], batch=batch).coverage.left}
    head, experts = 2 * 32 * 256 * 128, 2 * (2 * 32) * 3 * 64 * 128  # 32 tokens, each through 2 experts
    found = sum(flops for name, flops in left.items() if ".experts." in name)
    assert found / left["lm_head.weight"] == pytest.approx(experts / head)


# ---- The way back from a conversion, and copies of converted models on disk


Registering = type("Registering", (nn.Linear,), {"__init_subclass__": classmethod(lambda cls, key: None)})
MODELS = {
    "registering": lambda: nn.Sequential(nn.Embedding(64, 32), Registering(32, 32)),
    "transformers": lambda: built("llama"),
    "FalconLinear": lambda: built("falcon", num_hidden_layers=1),
    "experts of transformers": lambda: built("mixtral", num_hidden_layers=1),
    "Conv1D": lambda: built("gpt2", num_hidden_layers=1).eval(),
    "llama": lambda: build(replace(LLAMA, layers=1, tied=True)),
    "gpt2": lambda: build(GPT2Config(vocabulary=64, layers=1, width=32, heads=2, context=16)),
    "encoder": lambda: nn.Sequential(
        nn.Embedding(64, 32),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 1),
    ),
}


STACKED = r"\.in_proj_weight$|(?<=\.experts)\.\w+$"  # the last part of a name that is no module's


def output(model: nn.Module) -> torch.Tensor:
    y = model(torch.arange(24).view(2, 12))
    return y if isinstance(y, torch.Tensor) else y.logits


def attributes(model: nn.Module) -> dict[str, tuple[type, set[str]]]:
    return {name: (type(m), set(vars(m)) | set(m._modules)) for name, m in model.named_modules()}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_model_is_the_one_that_was_never_converted(name: str, recipe: str) -> None:
    model = MODELS[name]()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    for module in linears:
        module.name = module.recipe = module.observer = "theirs"
    if name == "registering":  # octavo's own modules read it of their layers
        linears[0].parallel = "theirs"
    plain, known, parameters = copy.deepcopy(model), attributes(model), list(model.parameters())
    octavo.convert(model)
    recompute_hidden(model)
    report = octavo.convert(model, recipe)
    assert {module.name for module in linears} == {"theirs"}  # which may be a property
    recompute_hidden(model)
    output(model).square().mean().backward()
    assert set(octavo.restore(model)) >= {re.sub(STACKED, "", name) for name in report.converted}
    model.zero_grad()
    assert attributes(model) == known
    assert {(module.name, module.recipe) for module in linears} == {("theirs", "theirs")}
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    y, exact = output(model), output(plain)
    assert torch.equal(y, exact)
    y.square().mean().backward()
    exact.square().mean().backward()
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), key
    assert octavo.restore(model) == []


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_can_be_saved_whole(name: str) -> None:
    model = converted_model(MODELS[name]().eval())
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert torch.equal(output(loaded), output(model))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    assert set(octavo.restore(loaded)) == set(octavo.restore(model))


# ---- Which linear layers of a model are selected, and why the others are not; asking changes nothing


def skipped(model: nn.Module, *skip: str) -> dict[str, str]:
    return {layer.name: layer.reason for layer in select_linears(model, skip) if layer.reason}


def test_asking_changes_no_module_and_conversion_gives_the_same_answer() -> None:
    with torch.device("meta"):
        model = build(LLAMA)
    classes = [type(module) for module in model.modules()]
    layers = select_linears(model, ["*.down_proj"])
    assert [type(module) for module in model.modules()] == classes
    assert all(model.get_submodule(layer.name) is layer.module for layer in layers)
    report = octavo.convert(model, skip=["*.down_proj"])
    assert report.converted == [layer.name for layer in layers if not layer.reason]
    assert report.skipped == {layer.name: layer.reason for layer in layers if layer.reason}


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ScaledConv1D(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "body": nn.Linear(8, 8), "out": nn.Linear(8, 16, bias=False)})
    model["out"].weight = model["embed"].weight
    return model


def state_space() -> nn.Module:
    mixer = nn.Module()
    mixer.A_log, mixer.dt_proj, mixer.x_proj = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8), nn.Linear(8, 8)
    return mixer


def square(*names: str, n: int = 8) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, n) for name in names}


SELECTED = {
    "a tied head, whatever its name": (tied(), ["body"], {"out": "it shares its weight with the embedding"}),
    "a head in a wrapper": (
        nn.ModuleDict(square("body") | {"lm_head": checkpoint_wrapper(nn.Linear(8, 8))}),
        ["body"],
        {"lm_head._checkpoint_wrapped_module": "an output head or router (lm_head)"},
    ),
    "routers and globs": (
        nn.ModuleDict(square("router", "gate", n=4) | square("gate_proj", "down_proj")),
        ["gate_proj"],
        {
            "router": "an output head or router (router)",
            "gate": "an output head or router (gate)",
            "down_proj": "skip='down*'",
        },
    ),
    "the gate of an MLP is no router": (nn.ModuleDict({"mlp": nn.ModuleDict(square("gate", n=24))}), ["mlp.gate"], {}),
    "subclasses with a forward of their own": (
        nn.ModuleDict(
            {"attention": nn.MultiheadAttention(8, 2), "scaled": Scaled(8, 8)}
            | {"mlp": type("Named", (nn.Linear,), {})(8, 8), "conv1d": Conv1D(8, 8), "own_conv1d": ScaledConv1D(8, 8)}
        ),
        ["mlp", "conv1d"],
        {
            "attention.out_proj": "multi-head attention reads its weight directly and never calls it",
            "scaled": "a Scaled, whose forward is its own",
            "own_conv1d": "a ScaledConv1D, whose forward is its own",
        },
    ),
    "the step of a state-space layer": (
        state_space(),
        ["x_proj"],
        {"dt_proj": "the state-space layer reads its weight directly and never calls it"},
    ),
    "a dtype": (
        nn.ModuleDict({"waves": nn.Linear(8, 8, dtype=torch.complex64), "body": nn.Linear(8, 8)}),
        ["body"],
        {"waves": "its weight is torch.complex64: FP8 is computed from float32, bfloat16 or float16"},
    ),
}


def test_routers_of_transformers_are_skipped() -> None:
    """Of Zaya, HunYuan, Doge, Gemma 3n, Granite Docling and DBRX. A gate of an MLP with as many outputs runs."""
    routers = ["mlp.gate.down_proj", "mlp.gate.wg", "mlp.gate.router_mlp.fc1", "mlp.router_gate"]
    routers += ["altup.modality_router", "model.density_router.fc1", "ffn.router.layer"]
    assert [name for name in routers if not skipped_by_name(name, 16, 64, ())] == []
    assert skipped_by_name("mlp.gate.router_mlp.fc2", 64, 64, ())
    assert not skipped_by_name("mlp.gate.down_proj", 64, 64, ())


@pytest.mark.parametrize(("model", "chosen", "reasons"), SELECTED.values(), ids=SELECTED)
def test_which_layers_are_skipped_and_why(model: nn.Module, chosen: list[str], reasons: dict[str, str]) -> None:
    globs = ["down*"] if "down_proj" in reasons else []
    assert [layer.name for layer in select_linears(model, globs) if not layer.reason] == chosen
    assert skipped(model, *globs) == reasons


def test_a_weight_that_is_computed_from_parameters_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", 0.5)
    before = copy.deepcopy(model.state_dict())
    assert skipped(model) == {
        "0": "its weight is no parameter, but computed from some, as torch.nn.utils.prune does",
        "1": "a ParametrizedLinear, whose forward is its own",
    }
    report = octavo.convert(model, only_if_faster=True, batch=torch.randn(4, 8))
    assert [row.name for row in report.rows] == ["0", "1", "2"]
    torch.testing.assert_close(model.state_dict(), before)  # computing a weight changes the buffers of spectral_norm
    attention = nn.MultiheadAttention(8, 2)
    parametrizations.weight_norm(attention.out_proj)
    assert octavo.convert(attention).converted == ["in_proj_weight"]


def test_a_module_whose_forward_was_replaced_is_skipped_and_not_restored() -> None:
    experts = built("mixtral", num_hidden_layers=1).model.layers[0].mlp.experts
    model = nn.ModuleDict({"linear": nn.Linear(8, 8), "attention": nn.MultiheadAttention(8, 2), "experts": experts})
    model["conv"] = nn.Conv2d(32, 8, 1)
    for module in model.values():
        module.forward = module.forward  # the method of the class that it has before
    model["mlp"] = nn.Linear(8, 8)
    report = octavo.convert(model)
    skipped = {name.split(".")[0] for name, reason in report.skipped.items() if "forward was replaced" in reason}
    assert (report.converted, skipped) == (["mlp"], {*model} - {"mlp"})
    model["mlp"].forward = model["mlp"].forward
    for undo in (octavo.restore, partial(octavo.convert, skip=["mlp"])):
        with pytest.raises(ValueError, match="^mlp was converted, and then its forward was replaced.*remove_hook"):
            undo(model)


def test_a_layer_that_was_parametrized_after_a_conversion_still_runs_its_recipe() -> None:
    model = converted_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    parametrizations.weight_norm(model[0])
    for skip in ((), ("0",)):
        assert skipped(model, *skip) == {"0": "it was parametrized after an earlier conversion: it still runs rowwise"}
    with pytest.raises(ValueError, match=r"^0 was converted and then parametrized.*remove_parametrizations"):
        octavo.restore(model)
    assert isinstance(model[1], octavo.nn.Linear)
    parametrize.remove_parametrizations(model[0], "weight")
    assert octavo.restore(model) == ["0", "1"]
    assert type(model[0]) is nn.Linear
