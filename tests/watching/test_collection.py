"""What a watch records of layers that train, against the tensors that they computed with."""

import copy
import io

import numpy as np
import pytest
import torch
from linear_examples import converted_model, without_chance
from torch import nn
from torch._dynamo.utils import counters
from watch_examples import backward, binades, check, describe, matrix, one_layer, tiny_model

import octavo
from octavo.integrations.peft import inject
from octavo.numerics.scaling import scale_exponent, scale_mantissa
from octavo.ops import quantize
from octavo.train.config import Config
from octavo.train.model import prepare_blocks
from octavo.watching import read_watch
from octavo.watching.storage import FULL_SHARE, OPERANDS, RECOMPUTED, UNQUANTIZED

T, K, N = 48, 80, 64


def train(model, steps=1, x=None, dy=None, watch=None):
    x = matrix(T, K, spread=1) if x is None else x
    dy = matrix(T, N, spread=1, seed=1) * 1e-3 if dy is None else dy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(x.clone().requires_grad_()).backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        octavo.scales.update_scales(model)
        if watch is not None:
            watch.step()


def sampled(model):
    with octavo.watch(model, interval=1000) as watch:
        train(model, watch=watch)
        sample = watch.latest()
    return {OPERANDS[r["operand"]]: r for r in sample.operands}, sample.layer_records


@pytest.mark.parametrize("name", octavo.recipe.PRESETS)
def test_the_operands_of_a_layer(name):
    model = one_layer(without_chance(name))
    recipe, w = model[0].recipe, model[0].weight.detach().clone()
    x, dy = matrix(T, K, spread=1), matrix(T, N, spread=1, seed=1) * 1e-3
    if "y" in recipe.rotate:
        x, w = octavo.numerics.hadamard(x), octavo.numerics.hadamard(w)
    if "dx" in recipe.rotate:
        dy = octavo.numerics.hadamard(dy)
    found, _ = sampled(model)
    check(found["x"], describe(x.numpy(), recipe.x))
    check(found["w"], describe(w.numpy(), recipe.w))
    folded = recipe.dx is not None and recipe.dx.b.granularity == octavo.numerics.ROW
    check(found["dy"], describe(dy.numpy(), None if folded else recipe.dy))
    assert all((r["flags"] == UNQUANTIZED) == (getattr(recipe, operand) is None) for operand, r in found.items())


def test_the_folded_gradient_and_what_its_shift_loses():
    """g = dy * s_w * m in float64; h_q: its bytes, divided by 2^shift."""
    model = one_layer()
    recipe, w = model[0].recipe, model[0].weight.detach()
    x, dy = matrix(T, K, spread=6), matrix(T, N, spread=6, seed=1) * 1e-3
    s_x, s_w = quantize(x, recipe.x).scale, quantize(w, recipe.w).scale
    m, e = scale_mantissa(s_x), scale_exponent(s_x)
    factor = (m * s_w.t()).double().numpy()
    g = (dy.double().numpy() * factor).astype(np.float32)
    with octavo.watch(model) as watch:
        train(model, x=x, dy=dy, watch=watch)
        found = watch.latest().operands[2]
    check(found, describe(dy.numpy()))
    s_g = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(g).max(1, keepdims=True) / 448, 2.0**-126)))
    codes = torch.from_numpy(g / s_g).float().to(torch.float8_e4m3fn).double().numpy()
    error = dy.double().numpy() - codes * s_g / factor
    assert found["sqnr"] == pytest.approx(10 * np.log10((dy.double().numpy() ** 2).sum() / (error**2).sum()), rel=1e-5)
    assert found["flushed"] == pytest.approx(((codes == 0) & (dy.numpy() != 0)).mean(), rel=1e-5)
    c = e.numpy() + np.log2(s_g)
    shifted = torch.from_numpy(codes * 2.0 ** (c - c.max())).float().to(torch.float8_e4m3fn).float().numpy()
    lost = ((shifted == 0) & (codes != 0)).sum() / (codes != 0).sum()
    assert found["shift_lost"] == pytest.approx(lost, rel=1e-6)
    assert 0.1 < lost < 0.99
    assert found["scale"] == pytest.approx((s_g / m.numpy()).max() / s_w.min().item(), rel=1e-5)


def test_the_weight_its_gradient_and_its_change():
    model = one_layer("bf16")
    before = model[0].weight.detach().clone().double()
    x, dy = matrix(T, K, spread=1), matrix(T, N, spread=1, seed=1) * 1e-3
    gradient = (dy.t() @ x).double()
    _, (found,) = sampled(model)
    after = model[0].weight.detach().double()
    assert found["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert found["gradient_amax"] == pytest.approx(gradient.abs().max().item(), rel=1e-5)
    assert found["gradient_nonfinite"] == 0
    assert found["weight_smallest"] == after.min().float().item()
    assert found["weight_largest"] == after.max().float().item()
    assert found["weight_norm"] == pytest.approx(after.norm().item(), rel=1e-6)
    rows = octavo.observation.operand_statistics.sampled_rows(N, 16, before.device)
    ratio = (after - before)[rows].norm() / before[rows].norm()
    assert found["update_ratio"] == pytest.approx(ratio.item(), rel=1e-5)
    assert np.isnan(found["alignment"])
    assert found["gradient_binades"] / FULL_SHARE == pytest.approx(binades(gradient.float().numpy()), abs=1e-3)


def test_gradients_before_clipping():
    model = one_layer()
    with octavo.watch(model) as watch:
        model(matrix(T, K)).sum().backward()
        norm = model[0].weight.grad.norm().item()
        watch.read_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), norm / 100)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        watch.step()
        assert watch.latest().layer_records["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_seen_in_every_row():
    model = nn.Sequential(nn.Linear(8, 500, bias=False))
    with octavo.watch(model, rows=4) as watch:
        model(torch.ones(1, 8)).sum().backward()
        model[0].weight.grad[411, 3] = torch.inf
        watch.read_gradients()
        watch.step()
        assert watch.latest().layer_records["gradient_nonfinite"] == pytest.approx(1 / 4000)


def test_the_gap_of_a_delayed_scale():
    model = one_layer("delayed")
    with octavo.watch(model, interval=1) as watch:
        train(model, watch=watch)
        assert np.isnan(watch.latest().operands["gap"]).all()
        train(model, x=matrix(T, K, spread=1) * 4, watch=watch)
        found = {OPERANDS[r["operand"]]: r for r in watch.latest().operands}
    margin = model[0].recipe.x.history.margin
    assert found["x"]["gap"] == pytest.approx(margin - 2, abs=1e-5)
    assert found["x"]["saturated"] > 0
    assert found["dy"]["gap"] == pytest.approx(margin, abs=1e-5)


def test_micro_batches_add_up_and_evaluation_does_not_count():
    model = one_layer()
    x, dy = matrix(2 * T, K, spread=1), matrix(2 * T, N, spread=1, seed=1)
    with octavo.watch(model) as watch:
        model.eval()
        model(x * 1000)
        model.train()
        for part in (slice(None, T), slice(T, None)):
            model(x[part]).backward(dy[part])
        watch.step()
        found = watch.latest().operands
    check(found[0], describe(x.numpy(), model[0].recipe.x))
    check(found[2], describe(dy.numpy()))


def test_the_first_step_and_each_interval_are_sampled(tmp_path):
    model, heard, folder = one_layer(), [], tmp_path / "runs" / "own"  # which is made
    with octavo.watch(model, interval=4, folder=folder) as watch:
        watch.done = 5
        watch.listeners.append(lambda sample: heard.append(sample.step))
        train(model, 8, watch=watch)
        assert [operands["step"][0] for operands, _ in watch.take()] == [6, 10]  # those for the rules
        assert watch.take() == []
        assert (watch.latest().step, watch.interval) == (12, 4)
        train(model, 8, watch=watch)
        assert [operands["step"][0] for operands, _ in watch.take()] == [20]
        assert watch.latest().step == 20
    assert heard == np.unique(read_watch(str(folder)).operands["step"]).tolist() == [6, 8, 12, 16, 20]


def test_a_run_that_goes_back(tmp_path):
    model = one_layer()
    with octavo.watch(model, interval=1, folder=tmp_path) as watch:
        train(model, 3, watch=watch)
        watch.go_back(1)
        assert (watch.done, watch.latest().step) == (1, 1)
        train(model, watch=watch)
        assert [operands["step"][0] for operands, _ in watch.take()] == [1]
    assert read_watch(tmp_path).operands["step"].tolist() == [1, 1, 1, 2, 2, 2]


def test_what_ran_is_described_and_described_anew(tmp_path):
    model = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, 8))
    octavo.convert(model, "rowwise_dw_bf16", skip=["1"])
    with octavo.watch(model, folder=tmp_path, dtype=torch.float32) as watch:
        assert watch.layers[0].gemms == {}
        train(model, dy=torch.ones(T, 8), watch=watch)
        watch.latest()
        layer = watch.layers[0]
        runs = {name: (gemm.precision, gemm.kernel) for name, gemm in layer.gemms.items()}
        assert runs == {"y": ("fp8", "emulated"), "dx": ("fp8", "emulated"), "dw": ("fp32", "torch")}
        assert "cpu has no FP8 GEMM" in layer.gemms["y"].why
        assert (layer.name, layer.kind, layer.shape) == ("0", "Linear", (N, K))
        model[0].recipe = octavo.recipe.bf16()
        watch.refresh()
        assert watch.layers[0].recipe == "bf16"
    first, second = read_watch(tmp_path).layers
    assert {name: gemm.precision for name, gemm in first.gemms.items()} == {"y": "fp32", "dx": "fp32", "dw": "fp32"}
    assert (second.recipe, second.formats["x"], second.gemms["y"].why) == ("", "fp32", "the layer was not converted")


def test_a_disk_that_is_full_ends_the_watch_and_not_the_run(tmp_path):
    model = one_layer()
    with octavo.watch(model, interval=1, folder=tmp_path) as watch:
        (tmp_path / "watch" / "operands.bin").unlink()
        with pytest.warns(RuntimeWarning, match="no longer watched"):
            train(model, 3, watch=watch)
        assert watch.latest().step == 3


def test_a_watch_leaves_no_trace():
    model = one_layer()
    before = set(model[0].__dict__)
    with octavo.watch(model) as watch:
        assert copy.deepcopy(model)[0].observer is None
        torch.save(model, file := io.BytesIO())
        assert torch.load(io.BytesIO(file.getvalue()), weights_only=False)[0].observer is None
        with pytest.raises(ValueError, match="watched already"):
            octavo.watch(model)
    octavo.watch(model)  # which nobody keeps
    assert set(model[0].__dict__) == before
    with pytest.raises(ValueError, match=r"the watch is closed: call step inside its with block"):
        watch.step()
    assert octavo.observation.operands.Sampling.active is False


@pytest.mark.parametrize(("model", "options", "message"), [
    (nn.ReLU(), {}, "no linear layer"),
    *((nn.Linear(4, 4), {name: value}, f"resumed_at .from 0. are integers, got .*{value}")
      for name, value in (("interval", 0), ("interval", 2.5), ("rows", 0), ("limit", -5), ("resumed_at", -1))),
])  # fmt: skip
def test_what_cannot_be_watched_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        octavo.watch(model, **options)


def test_attention_and_convolutions_are_watched():
    attention, patches = nn.MultiheadAttention(16, 2, batch_first=True), nn.Conv2d(24, 16, 4, stride=4)
    model = converted_model(nn.ModuleDict({"attention": attention, "patches": patches}))
    x = matrix(2 * 24, 64, spread=1).view(2, 24, 8, 8)
    with octavo.watch(model) as watch:
        y = model["patches"](x).flatten(2).transpose(1, 2)
        model["attention"](y, y, y)[0].sum().backward()
        watch.read_gradients()
        watch.step()
        sample, described = watch.latest(), {layer.name: layer for layer in watch.layers}
    shapes = {name: layer.shape for name, layer in described.items()}
    assert shapes == {"attention": (48, 16), "attention.out_proj": (16, 16), "patches": (16, 384)}
    assert all(layer.gemms["y"].precision == "fp8" for layer in described.values())
    assert len(sample.layer_records) == 3
    weight = next(r for r in sample.operands if (r["layer"], r["operand"]) == (list(described).index("patches"), 1))
    check(weight, describe(patches.weight.detach().flatten(1).numpy(), model["patches"].recipe.w))


def test_a_sample_without_operands_warns():
    model = one_layer()
    with octavo.watch(model, interval=1) as watch:
        watch.step()
        with pytest.warns(RuntimeWarning, match="no operand .* CUDA graph"):
            assert len(watch.latest().operands) == 0
        watch.step()
        watch.latest()


# ---- Fused modules, compiled code and activation checkpointing

# The fused modules never hold the output of their norm and of their activation, nor the gradient of its input. In
# float32 their records must be those of the same layers, run one by one.


def blocks_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def step(model, optimizer=None):
    loss = backward(model)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    octavo.scales.update_scales(model)
    return loss


def sample(model, watch):
    for p in model.parameters():
        p.grad = None
    step(model)
    watch.read_gradients()
    watch.step()
    return watch.latest()


def agree(found, expected, *, rel, db=0.05, shares=0.02):
    """Whether two records of the same tensors, computed in another order, agree."""
    assert np.array_equal(found[["layer", "operand"]], expected[["layer", "operand"]])
    for name in ("amax", "rms", "crest", "kurtosis"):
        assert found[name] == pytest.approx(expected[name], rel=rel), name
    assert found["sqnr"] == pytest.approx(expected["sqnr"], abs=db)
    for name in ("saturated", "flushed", "zero_rows", "shift_lost"):
        assert found[name] == pytest.approx(expected[name], abs=shares), name


@pytest.mark.parametrize(("name", "adapters"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_fused_modules_record_what_their_layers_record_one_by_one(name, adapters):
    model = tiny_model(name, layers=2)
    if adapters:
        inject(model, 2, 4.0, (), torch.float32, "")
    with octavo.watch(model, interval=1) as watch:
        fused = sample(model, watch).operands
        assert any("in " in layer.gemms["y"].why for layer in watch.layers if layer.recipe)
        for module in model.modules():
            if isinstance(module, octavo.Linear):
                module.register_forward_pre_hook(lambda *args: None)  # a hook keeps it from being fused
        apart = sample(model, watch).operands
    x_and_w = fused["operand"] < 2
    assert len(fused) == sum(len(layer.formats) for layer in watch.layers if layer.recipe) - 3 * adapters
    agree(fused[x_and_w], apart[x_and_w], rel=1e-4)
    # Another order of sums puts elements on the other side of a code's border, and their error into all gradients.
    # Stacked layers share the scale of a row of dy, so that less of dy is flushed one by one.
    # A frozen layer alone quantizes another dy: without the scales of w that the fused pass multiplies into it.
    agree(fused[~x_and_w], apart[~x_and_w], rel=0.05, db=2 if adapters else 0.6, shares=0.05)
    assert fused["scale"][x_and_w] == pytest.approx(apart["scale"][x_and_w], rel=1e-4)


TRAINED = [("llama", "rowwise"), ("gpt2", "rowwise"), ("llama", "delayed"), ("mixture", "rowwise")]


@pytest.mark.parametrize(("name", "recipe"), TRAINED)
def test_the_numbers_of_training_do_not_change(name, recipe):
    def losses(watched):
        model = tiny_model(name, recipe, layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watch = octavo.watch(model, interval=2) if watched else None
        found = []
        for _ in range(4):
            found.append(step(model, optimizer))
            if watch is not None:
                watch.step()
        if watch is not None:
            watch.close()
        return torch.stack(found), [p.detach() for p in model.parameters()]

    (plain, weights), (watched, watched_weights) = losses(False), losses(True)
    assert torch.equal(plain, watched)
    assert all(torch.equal(a, b) for a, b in zip(weights, watched_weights, strict=True))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_recomputation_is_recorded_and_not_counted(compiled):
    torch._dynamo.reset()
    model = tiny_model("llama")
    with octavo.watch(model) as watch:
        expected = sample(model, watch).operands
        assert "recomputation" not in watch.layers[0].gemms
    table = {"compile": {"blocks": compiled, "backend": "aot_eager"}, "activation_checkpointing": {"mode": "full"}}
    prepare_blocks(model, Config.from_dict(table))
    counters.clear()
    with octavo.watch(model) as watch:
        found = sample(model, watch).operands
        runs = [layer.gemms["recomputation"].precision for layer in watch.layers if layer.recipe]
    assert runs == ["fp8"] * 7
    assert counters["stats"]["unique_graphs"] == compiled
    agree(found, expected, rel=1e-4)
    assert (found["flags"][found["operand"] == 0] == (0 if compiled else RECOMPUTED)).all()


@pytest.mark.slow
def test_compiled_code_records_the_same_without_a_break_or_a_recompilation():
    torch._dynamo.reset()
    model = tiny_model("llama", layers=2)
    with octavo.watch(model, interval=3) as watch:
        for _ in range(3):
            step(model)
            watch.step()
        expected = watch.latest().operands
        for block in blocks_of(model):
            block.compile(fullgraph=True, backend="aot_eager")
        counters.clear()
        for _ in range(2):
            step(model)
            watch.step()
        graphs = counters["stats"]["unique_graphs"]
        step(model)
        watch.step()
        assert counters["stats"]["unique_graphs"] == graphs == 2
        found = watch.latest()
        assert (found.step, len(found.operands)) == (6, len(expected))
    agree(found.operands, expected, rel=1e-4)


def test_two_forward_passes_before_their_backward_passes():
    model = one_layer()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with octavo.watch(model) as watch:
        y = [run(matrix(48, 80, seed=seed).requires_grad_()) for seed in (0, 1)]
        for each in y:
            each.sum().backward()
        watch.step()
        assert (watch.latest().operands["rms"] > 0).all()


def test_gate_and_up_that_are_aligned():
    model = tiny_model("llama", layers=2)
    mlp = blocks_of(model)[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight.copy_(mlp.gate_proj.weight * -3)
    with octavo.watch(model) as watch:
        found = sample(model, watch).layer_records
        names = [layer.name for layer in watch.layers]
    alignment = {names[r["layer"]].split(".", 2)[-1]: r["alignment"] for r in found}
    assert alignment["0.mlp.gate_proj"] == alignment["0.mlp.up_proj"] == pytest.approx(1, rel=1e-5)
    assert 0.05 < alignment["1.mlp.gate_proj"] < 0.3
    assert np.isnan(alignment["0.mlp.down_proj"])
