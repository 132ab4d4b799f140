"""Runs that were trained with a scale for each tensor, packed with their own bytes and scales."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_examples import load_float32, write_run
from safetensors.torch import load_file, save_file
from saved_checkpoints import save_checkpoint
from tiny_models import open_theirs
from torch import Tensor, nn
from typer.testing import CliRunner

from octavo import convert, update_scales
from octavo.artifact.files import ArtifactError
from octavo.artifact.run import RunFolder
from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.nn import Linear
from octavo.numerics import History
from octavo.packing import pack
from octavo.recipe import delayed
from octavo.train.checkpoint import TrainState, load_checkpoint
from octavo_cli.app import app

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(256, layers=2, width=64, heads=4, kv_heads=2, mlp_width=96, context=48),
    "gpt2": GPT2Config(256, 2, 64, 4, 48),
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return Llama(CONFIGS[name]) if name == "llama" else GPT2(CONFIGS[name])


def state_of(model: nn.Module) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu"), "data")


def tokens(seed: int) -> Tensor:
    return torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(seed))


def train(root: Path, name: str, recipe: str) -> Path:
    """A run's folder after four steps, whose weights have outgrown the scales of the last."""
    model = build(name)
    # Without a margin, so that weights outgrow their scales.
    convert(
        model,
        delayed(history=History()) if recipe == "delayed" else recipe,
        skip=["*.down_proj"] if name == "llama" else [],
    )
    state = state_of(model.train())
    for step in range(4):
        batch = tokens(step)
        loss = nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        update_scales(model)
    with torch.no_grad():  # all else as the folder holds it, in BF16
        linears = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, Linear)}
        for key, parameter in model.named_parameters():
            parameter.copy_(parameter * 1.2 if key in linears else parameter.bfloat16())
    state.step = 4
    run = write_run(root, model, CONFIGS[name].to_hf(), step=1, recipe=recipe, model=name)
    save_checkpoint(RunFolder(run), state, keep=1)
    return run


def restored(run: Path, name: str, recipe: str) -> Any:
    """The model that goes on training, in evaluation; every layer runs by itself, as the packed model's do."""
    model = build(name)
    # Without a margin, so that weights outgrow their scales.
    convert(
        model,
        delayed(history=History()) if recipe == "delayed" else recipe,
        skip=["*.down_proj"] if name == "llama" else [],
    )
    load_checkpoint(RunFolder(run).newest(), state_of(model))
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    return model.eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    return {
        (name, recipe): train(root / f"{name}-{recipe}", name, recipe)
        for name, recipe in (("llama", "delayed"), ("gpt2", "delayed"), ("llama", "tensorwise"))
    }


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_delayed_run_packs_its_forward_pass(runs: dict[tuple[str, str], Path], tmp_path: Path, name: str) -> None:
    run = runs[name, "delayed"]
    report = pack(run, tmp_path / "out")
    assert set(report.packed.values()) == {"static"}
    trained = restored(run, name, "delayed")
    assert torch.equal(load_float32(tmp_path / "out")(tokens(9)), trained(tokens(9)))
    fresh = restored(run, name, "delayed")
    for module in fresh.modules():
        if isinstance(module, Linear):
            for history in module.histories.values():
                history.ready = False  # type: ignore[assignment]
    assert not torch.equal(fresh(tokens(9)), trained(tokens(9)))  # so the scales are not those of the tensors now
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["calibration"] == {"rule": "history"}
    if name == "llama":
        assert report.skipped["model.layers.0.mlp.down_proj"] == "training left it in BF16"
        assert (
            "model.layers.1.mlp.down_proj"
            in json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
        )


def test_the_scales_are_those_of_the_checkpoint(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    run = runs["llama", "delayed"]
    report = pack(run, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    state = load_file(RunFolder(run).newest() / "state.safetensors")
    masters = load_file(RunFolder(run).newest() / "model.safetensors")
    for name in report.packed:
        for leaf, operand in (("weight_scale", "w"), ("input_scale", "x")):
            assert torch.equal(stored[f"{name}.{leaf}"], state[f"{name}.histories.{operand}.scale"].reshape(1))
        scale = float(stored[f"{name}.weight_scale"])
        want = (masters[f"{name}.weight"].double() / scale).clamp(-448, 448)
        assert (stored[f"{name}.weight"].double() - want).abs().max() <= 16.001  # half a step of the topmost binade
    assert float(masters["model.layers.0.mlp.up_proj.weight"].abs().max()) > 448 * float(
        stored["model.layers.0.mlp.up_proj.weight_scale"]
    )  # what outgrew its scale saturates, as in training


def test_a_calibration_gives_the_scales_of_a_kv_cache_alone(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """The layers of a run keep the bytes and scales of training, unless both a scheme and a calibration are given."""
    run = runs["llama", "delayed"]
    (tmp_path / "text.txt").write_text("folio quarto octavo duodecimo " * 40)
    prompts = PromptOptions(samples=2, context=16)
    found = calibrate(run, [str(tmp_path / "text.txt")], tmp_path / "calibrated", prompts=prompts)
    pack(run, tmp_path / "own")
    with pytest.raises(ValueError, match="--kv-cache stores scales of keys and values: give --calibration"):
        pack(run, tmp_path / "none", kv_cache="fp8")
    calibrated = {"calibration": tmp_path / "calibrated", "kv_cache": "fp8"}
    report = pack(run, tmp_path / "cache", **calibrated)
    pack(run, tmp_path / "asked", scheme="static", **calibrated)
    own, cache, asked = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "cache", "asked"))
    for name, tensor in own.items():
        assert torch.equal(tensor.view(torch.uint8), cache[name].view(torch.uint8)), name
    scales = {f"model.layers.{i}.self_attn.{x}" for i in range(2) for x in "kv"}
    assert cache.keys() - own.keys() == {f"{name}_scale" for name in scales}
    assert all(float(cache[f"{name}_scale"]) == float(found.scale(name, "amax")) for name in scales)
    record = json.loads((tmp_path / "cache" / "octavo.json").read_text())["calibration"]
    assert (record["rule"], record["kv_cache"], record["prompts"]) == ("history", "fp8", 2)
    assert record["calibration_rule"] == "amax"
    for name in report.packed:
        assert float(asked[f"{name}.input_scale"]) == float(found.scale(name, "amax"))
        assert not torch.equal(asked[f"{name}.input_scale"], own[f"{name}.input_scale"])


def test_fused_layers_keep_the_scales_of_training_unless_asked(
    runs: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    run = runs["llama", "delayed"]
    own = pack(run, tmp_path / "own")
    shared = pack(run, tmp_path / "shared", share=True)
    q_k_v = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    mine, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "shared"))
    scales = [float(mine[f"{name}.weight_scale"]) for name in q_k_v]
    assert len(set(scales)) == 3
    assert own.ratios[", ".join(q_k_v)] == pytest.approx(max(scales) / min(scales))
    assert len(own.ratios) == 4  # of q, k, v and of gate, up in two layers
    assert not shared.ratios
    assert {float(ours[f"{name}.weight_scale"]) for name in q_k_v} == {max(scales)}
    o_proj = "model.layers.0.self_attn.o_proj.weight_scale"
    assert torch.equal(mine[o_proj], ours[o_proj])
    inputs = {float(mine[f"{name}.input_scale"]) for name in q_k_v}
    assert len(inputs) == 1  # they read one tensor


@torch.no_grad()
def test_a_tensorwise_run_packs_its_bytes(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Its inputs are scaled by token here and by tensor in training: the same weights, near logits."""
    run = runs["llama", "tensorwise"]
    report = pack(run, tmp_path / "out", skip=["*.down_proj"])
    assert set(report.packed.values()) == {"tensor"}
    stored = load_file(tmp_path / "out" / "model.safetensors")
    masters = load_file(RunFolder(run).newest() / "model.safetensors")
    for name in report.packed:
        amax = masters[f"{name}.weight"].abs().max()
        assert torch.equal(stored[f"{name}.weight_scale"], (amax / 448).reshape(1))
    assert len(report.ratios) == 4
    trained = restored(run, "llama", "tensorwise")
    y, want = load_float32(tmp_path / "out")(tokens(9)), trained(tokens(9))
    assert 1e-5 < distance(y, want) < 0.1


@torch.no_grad()
def test_transformers_opens_a_delayed_run(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """Its emulation in float32 is our arithmetic: only the order of sums differs, which can turn a rounding."""
    for name in CONFIGS:
        pack(runs[name, "delayed"], tmp_path / name)
        theirs = open_theirs(tmp_path / name, torch.float32)
        texts = torch.randint(256, (32, 6), generator=torch.Generator().manual_seed(4))
        y = load_float32(tmp_path / name)(texts).flatten(1)
        off = (theirs(texts).logits.flatten(1) - y).norm(dim=1) / y.norm(dim=1)
        assert off.median() < 1e-4, name


def test_states_that_give_no_scale(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["llama", "delayed"], tmp_path / "run")
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


def test_a_run_of_another_recipe_has_no_static_scales(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stores scales of inputs: give --calibration, .*--freeze 64 --data TEXT"):
        pack(runs["llama", "tensorwise"], tmp_path / "out", scheme="static")


def test_the_command_says_what_is_not_shared(runs: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    run, out = str(runs["llama", "delayed"]), tmp_path / "out"
    done = CliRunner().invoke(app, ["pack", run, str(out)], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "4 groups that vLLM casts again" in done.output
    done = CliRunner().invoke(app, ["pack", run, str(tmp_path / "shared"), "--share-scales"], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    assert "casts again" not in done.output
