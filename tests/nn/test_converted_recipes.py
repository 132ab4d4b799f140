"""The report of a conversion names every matrix that stays in high precision, with its share of the parameters."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from linear_examples import FOUR_BITS, FOUR_BITS_DB, QUANTIZED, K, N, T, converted, exact_gradients, run, without_chance
from metrics import sqnr
from tiny_models import built
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.evaluation import metrics
from octavo.nn.conversion_report import find_coverage
from octavo.numerics.scaling import RULES, History
from octavo.ops.dispatch import choose_recipe, gemm_backends, pick_recipe
from octavo.ops.launching import ARCHITECTURES
from octavo.recipe import GEMMS, PRESETS, delayed, fnuz, get_recipe


def share(*parameters: nn.Parameter, of: nn.Module) -> float:
    return sum(p.numel() for p in parameters) / sum(p.numel() for p in of.parameters())


def test_stacked_experts_are_named_with_their_share() -> None:
    with torch.device("meta"):
        model = built("mixtral")
    report = octavo.convert(model, skip=["*.experts"])
    experts = [layer.mlp.experts for layer in model.model.layers]
    left = {entry.name: entry for entry in report.coverage.left}
    down = left["model.layers.*.mlp.experts.down_proj"]
    assert (down.kind, down.count, down.shape) == ("expert stack", 2, (4, 128, 64))
    assert down.share == pytest.approx(share(*(e.down_proj for e in experts), of=model))
    assert left["model.layers.*.mlp.gate.weight"].kind == "matrix of MixtralTopKRouter"
    assert left["lm_head.weight"].kind == "linear layer"
    computed = [model.get_submodule(name).weight for name in report.converted]
    assert report.coverage.computed == pytest.approx(share(*computed, of=model))


def test_the_shares_add_up_to_one() -> None:
    coverage = octavo.convert(built("mixtral")).coverage
    parts = [coverage.computed, *(entry.share for entry in coverage.left), coverage.embeddings, coverage.other]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) > 0
    assert octavo.convert(nn.Sequential(nn.Linear(8, 8)), "bf16").coverage.computed == 0


@pytest.mark.parametrize(
    ("module", "leaf", "kind"),
    [
        (nn.MultiheadAttention(8, 2), "in_proj_weight", "packed attention projection"),
        (nn.MultiheadAttention(8, 2, kdim=4), "k_proj_weight", "packed attention projection"),
        (nn.Conv2d(3, 8, 3), "weight", "convolution"),
        (nn.Conv1d(8, 8, 4, groups=8), "weight", "convolution"),
        (Conv1D(8, 4), "weight", "Conv1D"),
        (nn.Bilinear(4, 4, 4), "weight", "bilinear layer"),
        (nn.LSTM(4, 4), "weight_hh_l0", "recurrent layer"),
        (nn.ParameterDict({"experts": torch.zeros(4, 8, 8)}), "experts", "expert stack"),
        (nn.ParameterDict({"w1": torch.zeros(4, 8, 8)}), "w1", "stack of matrices"),
        (nn.ParameterDict({"mix": torch.zeros(8, 8)}), "mix", "matrix of ParameterDict"),
    ],
)
def test_each_kind_of_matrix_is_named(module: nn.Module, leaf: str, kind: str) -> None:
    left = find_coverage(nn.ModuleDict({"part": module, "body": nn.Linear(8, 8)}), ["body"]).left
    assert (f"part.{leaf}", kind) in {(entry.name, entry.kind) for entry in left}


def test_embeddings_norms_and_vectors_are_totals() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.body = nn.Embedding(16, 8), nn.LayerNorm([4, 8]), nn.Linear(8, 8)
            self.pos_embed, self.cls_token = nn.Parameter(torch.zeros(1, 9, 8)), nn.Parameter(torch.zeros(1, 1, 8))

    model = Patches()
    coverage = octavo.convert(model).coverage
    assert coverage.left == ()
    assert coverage.embeddings == pytest.approx(share(model.embed.weight, model.pos_embed, of=model))
    others = model.norm.weight, model.norm.bias, model.body.bias, model.cls_token
    assert coverage.other == pytest.approx(share(*others, of=model))


def test_a_shared_parameter_counts_once_and_as_the_work_it_does() -> None:
    parts = {"embed": nn.Embedding(16, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 16, bias=False)}
    parts["head"].weight = parts["embed"].weight
    coverage = octavo.convert(nn.ModuleDict(parts | {"again": parts["body"]})).coverage
    assert coverage.parameters == 16 * 8 + 8 * 8 + 8
    assert [(entry.name, entry.shape) for entry in coverage.left] == [("head.weight", (16, 8))]
    assert coverage.embeddings == 0


# ---- The backends that are reported are those that a scaled GEMM chooses


def test_every_recipe_runs_on_a_cpu_by_emulation() -> None:
    for name, preset in octavo.recipe.PRESETS.items():
        backends = gemm_backends(preset(), torch.device("cpu"))
        assert list(backends) == ["y", "dx", "dw"]
        for gemm, backend in backends.items():
            wide = {"bf16": [*backends], "rowwise_dw_bf16": ["dw"], "rowwise_forward": ["dx", "dw"]}.get(name, [])
            assert backend.name == ("bf16" if gemm in wide else "emulated"), (name, gemm)


@pytest.mark.parametrize(
    ("capability", "hip", "picked", "library"),
    [
        ((9, 0), None, "rowwise", "cublaslt"),
        ((8, 9), None, "rowwise", "cutlass"),
        ((10, 0), None, "rowwise", "cutlass"),
        ((12, 0), None, "rowwise", "cutlass"),
        ((9, 4), "7.0", "rowwise_fnuz", "hipblaslt"),
        ((9, 5), "7.0", "rowwise", "hipblaslt"),
    ],
)
def test_a_recipe_is_picked_that_runs(monkeypatch: pytest.MonkeyPatch, capability, hip, picked, library) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    recipe = pick_recipe(torch.device("cuda"))
    assert recipe.name == picked
    assert choose_recipe("auto", torch.device("cpu")) == PRESETS["rowwise"]()
    assert {backend.name for backend in gemm_backends(recipe, torch.device("cuda")).values()} == {library}


def test_a_preset_on_an_mi300_gets_its_formats(tmp_path) -> None:
    """A recipe that states its formats keeps them."""
    mi300 = ARCHITECTURES["mi300"]
    assert choose_recipe("tensorwise", mi300).name == "tensorwise_fnuz"
    assert choose_recipe("bf16", mi300).name == "bf16"
    assert choose_recipe(octavo.recipe.PRESETS["tensorwise"](), mi300).name == "tensorwise"
    path = tmp_path / "mine.json"
    path.write_text(octavo.recipe.PRESETS["tensorwise"]().to_json())
    assert choose_recipe(str(path), mi300).name == "tensorwise"
    for place in (ARCHITECTURES["mi350"], ARCHITECTURES["ada"], torch.device("cpu")):
        assert choose_recipe("tensorwise", place).name == "tensorwise"


def test_convert_on_an_ampere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.nn.conversion.choose_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    model = nn.Sequential(nn.Linear(64, 64, device="meta"))
    message = r"cannot run the recipe rowwise \(y, dx, dw: Ampere .* has no FP8 GEMM\).*emulate=True"
    with pytest.raises(ValueError, match=message):
        octavo.convert(model, "rowwise", device="cuda")
    with pytest.raises(ValueError, match=r"Ampere .* has no FP8 GEMM: FP8 needs an Ada.*train in BF16 here"):
        octavo.convert(model, "auto", device="cuda")
    assert octavo.convert(model, "rowwise", device="cuda", emulate=True).converted == ["0"]


# ---- The formats of AMD's MI300 through the same layers: as exact as the OCP formats, by emulation


def passes(recipe: octavo.Recipe | None) -> list[Tensor]:
    """y, dx and dw of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 64))
    if recipe is not None:
        octavo.convert(model, recipe)
    x, dy = torch.randn(80, 96, requires_grad=True), torch.randn(80, 64)
    y = model(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(layer.weight.grad for layer in (model[0], model[2]))]


@pytest.mark.parametrize("preset", ["rowwise", "rowwise_dw_bf16", "tensorwise", "delayed"])
@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_both_passes_are_as_exact_as_with_the_ocp_formats(preset: str, gradients: str) -> None:
    recipe, exact = octavo.recipe.PRESETS[preset](gradients), passes(None)
    for wide, ocp, own in zip(exact, passes(recipe), passes(fnuz(recipe)), strict=True):
        assert not torch.equal(ocp, own)
        assert sqnr(wide, own) > sqnr(wide, ocp) - 1
        assert sqnr(wide, own) > 18


# ---- Recipes as a person may write them to a file: the settings of each operand drawn at random, or chosen


def operand(draw: random.Random) -> dict:
    fields = {
        "format": draw.choice(("e4m3", "e5m2")),
        "granularity": draw.choice(("tensor", "row", "group:32", "group:128", "block:32x32", "block:1x64")),
        "scale": draw.choice(("fp32", "pow2", "e8m0")),
        "rounding": draw.choice(("nearest", "stochastic")),
        "relative_floor": draw.choice((0, 2**-8)),
    }
    if fields["granularity"] == "tensor" and draw.random() < 0.5:
        fields["history"] = {"length": draw.choice((1, 4)), "rule": draw.choice(RULES)}
        fields["history"] |= {"margin": draw.choice((0, 1, 2)), "interval": draw.choice((1, 3))}
    return fields


def drawn(draw: random.Random) -> dict:
    """A recipe in which each operand has one cast, or another in its second GEMM, and some GEMMs are in BF16."""
    casts = {name: operand(draw) for name in ("x", "w", "dy")}

    def second(name: str) -> dict:
        return casts[name] if draw.random() < 0.7 else operand(draw)

    gemms = {
        "y": {"x": casts["x"], "w": casts["w"]},
        "dx": {"dy": casts["dy"], "w": second("w")},
        "dw": {"dy": second("dy"), "x": second("x")},
    }
    gemms = {name: g for name, g in gemms.items() if draw.random() < 0.85}
    return {"rotate": [name for name in gemms if draw.random() < 0.2]} | gemms


def trained(recipe: Path | None) -> tuple[Tensor, ...]:
    """y, dx and dw of the third step of a layer; without a recipe in float32."""
    torch.manual_seed(0)
    x, dy = torch.randn(48, 128) * torch.rand(48, 1).exp(), torch.randn(48, 256) * 1e-3
    layer = nn.Linear(128, 256)
    if recipe is not None:
        octavo.convert(layer, recipe)
    for _ in range(3):
        found = run(layer, x, dy)
        octavo.scales.update_scales(layer)
    return found


def check(recipe: Path) -> None:
    for exact, actual in zip(trained(None), trained(recipe), strict=True):
        assert metrics.sqnr(*metrics.energies(exact, actual)) > 12, recipe.read_text()


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in (2, 3))])
def test_recipes_drawn_at_random_train(tmp_path: Path, part: int) -> None:
    draw, path, accepted = random.Random(part), tmp_path / "mine.json", 0
    for _ in range(40):
        path.write_text(json.dumps(drawn(draw)))
        try:
            get_recipe(path)
        except ValueError:  # no GEMM takes these casts together
            continue
        check(path)
        accepted += 1
    assert accepted > 20


@pytest.mark.parametrize(
    ("granularity", "history"), [("tensor", None), ("tensor", {"margin": 1, "interval": 2}), ("block:32x32", None)]
)
def test_scales_of_one_byte_train_by_tensor_and_by_square(tmp_path, granularity, history):
    cast = {"granularity": granularity, "scale": "e8m0", "history": history}
    gemms = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({gemm: dict.fromkeys(operands, cast) for gemm, operands in gemms.items()}))
    check(path)


# ---- Modules of one class, converted with different recipes and compiled in one process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


@pytest.mark.slow
def test_a_second_recipe_compiles_after_the_first() -> None:
    original, x = Block(), torch.randn(16, 32)
    recipes = [PRESETS[name]() for name in ("rowwise", "tensorwise", "blockwise", "rowwise_dw_bf16")]
    recipes += [delayed(history=History(margin=margin)) for margin in (1.0, 2.0)]
    found = []
    for recipe in recipes:
        eager, compiled = (copy.deepcopy(original) for _ in range(2))
        for model in (eager, compiled):
            octavo.convert(model, recipe)
        compiled.compile(backend="aot_eager")
        for model in (eager, compiled):
            for _ in range(2):
                model(x).square().sum().backward()
                octavo.scales.update_scales(model)
        for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        found.append(compiled.a.weight.grad)
    assert not any(torch.equal(found[0], other) for other in found[1:])


# ---- Layers with some of their three GEMMs in BF16 (`Recipe.in_bf16`)


RECIPES_PARTLY_BF16 = [name for name in QUANTIZED if name not in ("rowwise_dw_bf16", "rowwise_forward")]


def products(recipe: octavo.Recipe) -> dict[str, torch.Tensor]:
    """The three products of the same operands: the second step, in which `delayed` has its scales."""
    torch.manual_seed(0)
    linear, x, dy = converted(recipe), torch.randn(T, K), torch.randn(T, N) * torch.randn(T, 1).exp()
    for _ in range(2):
        found = run(linear, x, dy)
        octavo.scales.update_scales(linear)
    exact = [x @ linear.weight.t(), *exact_gradients(x, linear.weight, dy)[1:]]
    return dict(zip(GEMMS, found, strict=True)) | {"exact": exact}


@pytest.mark.parametrize("name", RECIPES_PARTLY_BF16)
@pytest.mark.parametrize("gemm", GEMMS)
def test_one_gemm_in_bf16_is_exact_and_the_others_are_those_of_the_recipe(name, gemm):
    whole, partly = products(without_chance(name)), products(without_chance(name).in_bf16(gemm))
    for product, exact in zip(GEMMS, partly["exact"], strict=True):
        if product == gemm:  # in the dtype of the input, float32 here
            assert sqnr(exact, partly[product]) > 100
            assert sqnr(exact, whole[product]) < 40
        elif gemm == "y" or product == "y" or name != "rowwise":
            assert torch.equal(partly[product], whole[product]), product
        else:  # of dx and dw, scales of the one are folded into the dy of the other
            assert sqnr(exact, partly[product]) > sqnr(exact, whole[product]) - 0.5


@pytest.mark.parametrize("name", RECIPES_PARTLY_BF16)
@pytest.mark.parametrize("gemm", GEMMS)
def test_one_gemm_in_eight_bits(name, gemm):
    others = [product for product in GEMMS if product != gemm]
    found, least = products(without_chance(name).in_bf16(*others)), FOUR_BITS_DB if name in FOUR_BITS else 20
    for product, exact in zip(GEMMS, found["exact"], strict=True):
        assert sqnr(exact, found[product]) > 100 if product in others else least < sqnr(exact, found[product]) < 40
