"""The scales of packed weights: those of a run's training, shared ones, powers of two, and those of least error."""

import json
import shutil
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from packed_examples import load_float32, write_run
from safetensors.torch import load_file, save_file
from saved_checkpoints import save_checkpoint, state_of
from tiny_models import make_model, open_theirs, outputs, same_bits, with_slow
from torch import nn

from octavo import convert
from octavo.calibration import calibrate
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import RunFolder
from octavo.checkpoint.scheme import SCHEMES
from octavo.evaluation.prompts import PromptOptions
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.nn import Linear
from octavo.numerics import TENSOR, Cast, History, group
from octavo.ops import quantize
from octavo.packing import pack, scale_search
from octavo.recipe import delayed
from octavo.scales import update_scales
from octavo.train.saving import load_checkpoint

CONFIGS = {
    "llama": LlamaConfig(256, layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=48),
    "gpt2": GPT2Config(256, 2, 64, 4, 48),
}


def build(name):
    """A model by `delayed`, which has no margin, so that weights outgrow their scales."""
    torch.manual_seed(0)
    model = Llama(CONFIGS[name]) if name == "llama" else GPT2(CONFIGS[name])
    convert(model, delayed(history=History(margin=0.0)), skip=["*.down_proj"] if name == "llama" else [])
    return model


def tokens(seed):
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(seed))


def train(root, name):
    """A run's folder after four steps, whose weights have outgrown the scales of the last."""
    model = build(name)
    state = state_of(model.train(), 3e-3)
    for step in range(4):
        batch = tokens(step)
        nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        update_scales(model)
    with torch.no_grad():  # all else as the folder holds it, in BF16
        linears = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, Linear)}
        for key, parameter in model.named_parameters():
            parameter.copy_(parameter * 1.2 if key in linears else parameter.bfloat16())
    state.step = 4
    run = write_run(root, model, CONFIGS[name].to_hf(), step=1, recipe="delayed", model=name)
    save_checkpoint(RunFolder(run), state, keep=1)
    return run


def restored(run, name):
    """The model that goes on training, in evaluation; every layer runs by itself, as the packed model's do."""
    model = build(name)
    load_checkpoint(RunFolder(run).newest(), state_of(model, 3e-3))
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    return model.eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    return {name: train(root / name, name) for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_delayed_run_packs_its_forward_pass(runs, tmp_path, name):
    run = runs[name]
    report = pack(run, tmp_path / "out")
    assert set(report.packed.values()) == {"static"}
    trained = restored(run, name)
    assert torch.equal(load_float32(tmp_path / "out")(tokens(9)), trained(tokens(9)))
    fresh = restored(run, name)
    for module in fresh.modules():
        if isinstance(module, Linear):
            for history in module.histories.values():
                history.ready = False
    assert not torch.equal(fresh(tokens(9)), trained(tokens(9)))  # so the scales are not those of the tensors now
    assert json.loads((tmp_path / "out" / "octavo.json").read_text())["calibration"] == {"rule": "history"}
    if name == "llama":
        assert report.skipped["model.layers.0.mlp.down_proj"] == "training left it in BF16, or no text reached it"
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "model.layers.1.mlp.down_proj" in config["quantization_config"]["ignore"]


def test_a_calibration_gives_the_scales_of_a_kv_cache_alone(runs, tmp_path):
    """The layers of a run keep the bytes and scales of training, unless both a scheme and a calibration are given."""
    run = runs["llama"]
    (tmp_path / "text.txt").write_text("folio quarto octavo duodecimo " * 40)
    prompts = PromptOptions(samples=2, context=16)
    found = calibrate(run, [str(tmp_path / "text.txt")], tmp_path / "calibrated", prompts=prompts)
    pack(run, tmp_path / "own")
    calibrated = {"calibration": tmp_path / "calibrated", "kv_cache": "fp8"}
    ones = dict.fromkeys(found.layers, torch.ones(1))
    without = pack(run, tmp_path / "without static", scheme="channel", input_scales=ones, **calibrated)
    assert (set(without.packed.values()), without.cached) == ({"channel"}, 2)
    record = json.loads((tmp_path / "without static" / "octavo.json").read_text())["calibration"]
    assert (record["rule"], "calibration_rule" in record) == ("amax", False)  # no scale was frozen
    report = pack(run, tmp_path / "cache", **calibrated)
    pack(run, tmp_path / "asked", scheme="static", **calibrated)
    own, cache, asked = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "cache", "asked"))
    assert same_bits({name: cache[name] for name in own}, own)
    scales = {f"model.layers.{i}.self_attn.{x}" for i in range(2) for x in "kv"}
    assert cache.keys() - own.keys() == {f"{name}_scale" for name in scales}
    assert all(float(cache[f"{name}_scale"]) == float(found.scale(name, "amax")) for name in scales)
    record = json.loads((tmp_path / "cache" / "octavo.json").read_text())["calibration"]
    assert (record["rule"], record["kv_cache"], record["prompts"]) == ("history", "fp8", 2)
    assert record["calibration_rule"] == "amax"
    for name in report.packed:
        assert float(asked[f"{name}.input_scale"]) == float(found.scale(name, "amax"))
        assert not torch.equal(asked[f"{name}.input_scale"], own[f"{name}.input_scale"])


def test_states_that_give_no_scale(runs, tmp_path):
    run = shutil.copytree(runs["llama"], tmp_path / "run")
    path = RunFolder(run).newest() / "state.safetensors"
    state = load_file(path)
    key = "model.layers.1.self_attn.k_proj.histories.w"
    for change, message in (
        ({f"{key}.steps": torch.tensor(0)}, "has no entry yet.*--scheme channel"),
        ({f"{key}.scale": torch.zeros(1, 1)}, "must be one positive number"),
    ):
        save_file(state | change, path)
        with pytest.raises(ArtifactError, match=message):
            pack(run, tmp_path / "out")
    save_file({"random.cpu": torch.zeros(1)}, path)
    with pytest.raises(ArtifactError, match="not of a run that was trained with delayed"):
        pack(run, tmp_path / "out")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"state.safetensors is missing"):
        pack(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert set(pack(run, tmp_path / "out", scheme="channel").packed.values()) == {"channel"}


# ---- Packing with scales of least squared error and of powers of two, and which layers share a scale


Q_K_V = tuple(f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("llama"), "llama", seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def packing(source, tmp_path_factory):
    """packing(scheme, weights, pow2): the report of that packing, which is made once."""
    root = tmp_path_factory.mktemp("packed")

    @cache
    def make(scheme, weights, pow2):
        return pack(source, root / f"{scheme} {weights} {pow2}", scheme=scheme, weights=weights, pow2=pow2)

    return make


def errors(packed, source, scheme):
    """The squared error of each packed weight, as transformers widens it; mx, which is exact in BF16, in that alone."""
    theirs = open_theirs(packed, torch.bfloat16 if scheme == "mx" else torch.float32)
    plain = load_file(source / "model.safetensors")
    outputs(theirs)  # it widens at the first call
    layers = json.loads((packed / "octavo.json").read_text())["layers"]
    wide = {name: theirs.get_submodule(name).weight.double() for name in layers}
    return {name: float((w - plain[f"{name}.weight"].double()).square().sum()) for name, w in wide.items()}


ONCE = ("channel", "tensor", "block", "mx", "group64", "int8")  # the others take their paths


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("scheme", with_slow([name for name in SCHEMES if name != "static"], ONCE))
def test_the_gain_by_layer_is_that_of_the_files(source, packing, scheme, pow2):
    amax, report = packing(scheme, "amax", pow2), packing(scheme, "mse", pow2)
    assert report.gains.keys() == report.packed.keys()
    before, after = (errors(each.folder, source, scheme) for each in (amax, report))
    for name, gain in report.gains.items():
        ratio = torch.tensor(before[name] / after[name], dtype=torch.float64)
        assert gain == pytest.approx(10 * float(ratio.log10()), abs=2e-3)
        assert gain >= 0 or scheme == "tensor"  # the least error of layers that share a scale may cost one of them
    if not pow2 and scheme.startswith("group"):
        assert min(report.gains.values()) > 0.8
    record = json.loads((report.folder / "octavo.json").read_text())["weight_scales"]
    assert record["rule"] == "mse"
    assert record["sqnr_gain_db"] == report.gains
    plain = json.loads((amax.folder / "octavo.json").read_text())
    assert plain["weight_scales"] == {"rule": "amax", "pow2": pow2}
    assert plain["schemes"][scheme]["weight"]["scale"] == ("e8m0" if scheme == "mx" else "pow2" if pow2 else "fp32")


@pytest.mark.parametrize("rule", ["amax", "mse", "history"])
def test_fused_layers_share_a_scale_or_keep_their_own(source, runs, tmp_path, rule):
    """They share it unless told otherwise, but for a run that was trained with scales of its own."""
    trained = rule == "history"
    model, how = (runs["llama"], {}) if trained else (source, {"scheme": "tensor", "weights": rule})
    own = pack(model, tmp_path / "own", share=None if trained else False, **how)
    shared = pack(model, tmp_path / "shared", share=True if trained else None, **how)
    mine, ours = (load_file(report.folder / "model.safetensors") for report in (own, shared))
    scales = [float(mine[f"{name}.weight_scale"]) for name in Q_K_V]
    assert len(set(scales)) == 3
    assert own.ratios[", ".join(Q_K_V)] == pytest.approx(max(scales) / min(scales))
    assert len(own.ratios) == (4 if trained else 2)  # of q, k, v and of gate, up in each layer
    assert not shared.ratios
    (scale,) = {float(ours[f"{name}.weight_scale"]) for name in Q_K_V}
    assert scale == max(scales) or rule == "mse"
    o_proj = "model.layers.0.self_attn.o_proj.weight_scale"
    assert torch.equal(mine[o_proj], ours[o_proj])
    if trained:
        assert len({float(mine[f"{name}.input_scale"]) for name in Q_K_V}) == 1  # they read one tensor
    else:
        plain = load_file(source / "model.safetensors")
        amax = max(float(plain[f"{name}.weight"].abs().max()) for name in Q_K_V)
        assert scale == pytest.approx(amax / 448) or rule == "mse"


# ---- The search of scales, against a search in float64 with ml_dtypes' casts, block by block


CASTS = {scheme.name: scheme.weight for scheme in SCHEMES.values() if scheme.name != "static"}
CASTS |= {"channel pow2": Cast(scale="pow2"), "group64 pow2": Cast(granularity=group(64), scale="pow2")}


def blocks(w, scale, cast):
    """Each block of `w` with the place of its scale."""
    r, c = cast.granularity.block(tuple(w.shape))
    rows, cols = scale.shape
    return [((i, j), w[i * r : (i + 1) * r, j * c : (j + 1) * c]) for i in range(rows) for j in range(cols)]


def rounding_error(w, scale, cast):
    exact = w.double().numpy() / scale
    if cast.format == "int8":
        return float(((np.clip(np.rint(exact), -127, 127) - exact) ** 2).sum()) * scale**2
    q = np.clip(exact, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return float(((q - exact) ** 2).sum()) * scale**2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_no_scale_of_the_grid_is_better(name, dtype):
    cast = CASTS[name]
    w = (torch.randn(256, 384) * torch.logspace(-2, 1, 256)[:, None]).to(dtype)
    first = quantize(w, cast).scale.float()
    found = scale_search.search_scale(w, first, cast)
    factors = scale_search.INTEGER_FACTORS if cast.format == "int8" else scale_search.FACTORS
    factors = scale_search.POWER_OF_TWO_FACTORS if cast.power_of_two else factors
    before = after = 0.0
    for place, block in blocks(w, first, cast):
        errors = [rounding_error(block, float(first[place]) * factor, cast) for factor in factors]
        chosen = rounding_error(block, float(found.scale[place]), cast)
        assert chosen <= min(errors) * (1 + 1e-5)
        before, after = before + errors[0], after + chosen
    assert float(found.before) == pytest.approx(before, rel=1e-5)
    assert float(found.after) == pytest.approx(after, rel=1e-5)
    error = (scale_search.cast_by(w, found.scale, cast).dequantize().double() - w.double()).square().sum()
    assert float(error) == pytest.approx(after, rel=1e-5)


def test_one_scale_for_several_is_the_best_for_all_of_them():
    weights = [torch.randn(64, 96), torch.randn(32, 96) * 0.7]
    cast = Cast(granularity=TENSOR)
    scale = quantize(weights[0], cast).scale
    found = scale_search.search_shared_scale(iter(weights), scale, cast)
    together = scale_search.search_scale(torch.cat(weights), scale, cast)
    assert torch.equal(found.scale, together.scale)
    assert found.before.shape == found.after.shape == (2,)
    assert float(found.after.sum()) == pytest.approx(float(together.after), rel=1e-6)


@pytest.mark.parametrize("name", CASTS)
def test_the_cast_by_the_first_scale_is_the_quantizer(name):
    cast = CASTS[name]
    w = torch.randn(256, 384) * torch.logspace(-3, 1, 256)[:, None]
    w[3], w[4, :5] = 0, 1e-30
    q = quantize(w, cast)
    again = scale_search.cast_by(w, q.scale.float(), cast)
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


@pytest.mark.parametrize("fill", [0.0, 1e-38, 1e-44, 3e38])
def test_the_ends_of_float32(fill):
    for cast in (Cast(), Cast(granularity=TENSOR), Cast(granularity=group(32)), Cast(scale="pow2")):
        w = torch.full((2, 64), fill)
        found = scale_search.search_scale(w, quantize(w, cast).scale.float(), cast)
        assert (found.scale >= 2.0**-126).all()
        assert found.scale.isfinite().all()
        assert found.before.isfinite().all()
        assert (found.after <= found.before).all()
        assert not scale_search.cast_by(w, found.scale, cast).data.float().isnan().any()
