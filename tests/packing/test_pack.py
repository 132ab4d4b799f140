"""Packed folders, opened by transformers and compressed-tensors.

On a CPU these two emulate: weights are widened to data * scale in the model's dtype, and activations rounded to e4m3
before each linear layer, with the scale amax/448 of each token, computed in the model's dtype (and of the whole tensor
where a layer's input has no batch dimension, as in OPT's MLP). So as they come the two runtimes agree to the noise that
rounding activations makes; given the recipe's token scales, they agree to float32's rounding.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_examples import LLAMA, Example, load_float32, write_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import open_theirs, outputs
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.artifact.files import ArtifactError
from octavo.models import Llama, LlamaConfig
from octavo.nn import convert
from octavo.ops import quantize
from octavo.packing import pack
from octavo.recipe import ROW_W, ROW_X
from octavo.runtime import load_packed


def dequantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of a packed file in float64, scales multiplied in."""
    return {
        name: t.double() * stored[f"{name}_scale"].double() if f"{name}_scale" in stored else t.double()
        for name, t in stored.items()
        if not name.endswith("_scale")
    }


def test_transformers_widens_to_data_times_scale(example: Example) -> None:
    stored = load_file(example.packed / "model.safetensors")
    theirs = open_theirs(example.packed, torch.float32)
    packed = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert packed
    for name in packed:
        assert theirs.get_submodule(name).weight_scale.dtype == torch.float32
    outputs(theirs)  # it widens at the first call
    for name in packed:
        weight = theirs.get_submodule(name).weight
        assert torch.equal(weight, stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"])


def test_every_linear_is_packed_or_ignored(example: Example) -> None:
    stored = load_file(example.packed / "model.safetensors")
    config = json.loads((example.packed / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(example.packed))
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    scaled = {name.removesuffix(".weight_scale") for name in stored if name.endswith("_scale")}
    ignored = config["quantization_config"]["ignore"]
    assert scaled | set(ignored) == linears
    assert len(scaled) + len(ignored) == len(linears)
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_transformers_gives_our_logits(example: Example) -> None:
    """Both as they come, in BF16: each is off the unquantized activations by its own rounding, ours by no more."""
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(example.packed), dtype=torch.float64)
    stored = load_file(example.packed / "model.safetensors")
    assert not reference.load_state_dict(dequantized(stored), strict=False).unexpected_keys
    reference.tie_weights()
    truth = outputs(reference.eval())
    ours, theirs = outputs(load_packed(example.packed).model), outputs(open_theirs(example.packed))
    assert truth.std() > 0.3
    assert 1e-3 < distance(theirs, truth) < 0.2  # it does round activations
    assert distance(ours, truth) < 1.5 * distance(theirs, truth)
    assert distance(ours, theirs) < 2 * distance(theirs, truth)


@torch.no_grad()
def test_transformers_with_our_token_scales_gives_our_logits(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arithmetic, once activations are scaled alike: in float32, so that only the order of sums differs.

    That can turn the rounding of an activation, and with it what follows in its text: hence many short ones, and the
    median over them. With another token scale every one of them is off by some percent.
    """
    cast = ROW_X

    def by_token(value: Tensor, args: Any, module: nn.Module, global_scale: None) -> tuple[Tensor, Tensor]:
        scale = value.abs().amax(-1, keepdim=True) / 448
        if cast.power_of_two:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        return scale, torch.zeros_like(scale)

    theirs, ours = open_theirs(example.packed, torch.float32), load_float32(example.packed)
    monkeypatch.setattr("compressed_tensors.quantization.lifecycle.forward.compute_dynamic_scales_and_zp", by_token)
    texts = torch.randint(256, (32, 6), generator=torch.Generator().manual_seed(4))
    y, expected = (outputs(model, texts).flatten(1) for model in (ours, theirs))
    off = (y - expected).norm(dim=1) / y.norm(dim=1)
    assert off.median() < 1e-4


def test_the_bytes_are_those_of_training(example: Example) -> None:
    stored = load_file(example.packed / "model.safetensors")
    cast = ROW_W
    for name in example.report.packed:
        master = example.model.get_parameter(f"{name}.weight").detach()
        q = quantize(master, cast)
        for key, tensor in ((f"{name}.weight", q.data), (f"{name}.weight_scale", q.scale)):
            assert stored[key].dtype == tensor.dtype
            assert torch.equal(stored[key].view(torch.uint8), tensor.view(torch.uint8)), key
        # What it is for: half a step of e4m3, relative (2^-4) or at the bottom of the row's range (2^-10).
        error = (q.data.double() * q.scale.double() - master.double()).abs()
        assert (error <= 1.001 * torch.maximum(master.double().abs() * 2**-4, q.scale.double() * 2**-10)).all()


def test_the_rest_is_bf16_and_a_tied_head_is_stored_once(packed: dict[str, Example]) -> None:
    for name, example in packed.items():
        stored = load_file(example.packed / "model.safetensors")
        assert ("lm_head.weight" in stored) == (name == "llama untied")
        rest = [t.dtype for key, t in stored.items() if f"{key}_scale" not in stored and not key.endswith("_scale")]
        assert set(rest) == {torch.bfloat16}
        with safe_open(example.packed / "model.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["octavo_source"] == "step-00000007"
    untied = load_file(packed["llama untied"].packed / "model.safetensors")
    assert untied["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16  # --skip


def test_transformers_in_bf16_rounds_scales(packed: dict[str, Example]) -> None:
    """Theirs, not ours: it makes the scales' parameters in the model's dtype. The file keeps all of float32's bits."""
    theirs = open_theirs(packed["llama"].packed)
    name = "model.layers.0.mlp.up_proj"
    stored = load_file(packed["llama"].packed / "model.safetensors")[f"{name}.weight_scale"]
    assert stored.dtype == torch.float32
    assert torch.equal(theirs.get_submodule(name).weight_scale, stored.bfloat16())
    assert not torch.equal(stored, stored.bfloat16().float())


def test_the_report_counts_what_is_on_disk(tmp_path: Path) -> None:
    config = LlamaConfig(256, layers=1, width=256, heads=4, kv_heads=4, mlp_width=704, context=32)
    torch.manual_seed(0)
    run, out = write_run(tmp_path / "run", Llama(config), config.to_hf()), tmp_path / "out"
    seen: list[tuple[int, int]] = []
    report = pack(run, out, progress=lambda *done: seen.append(done[:2]))
    linear = 4 * 256 * 256 + 3 * 256 * 704
    assert report.bf16_bytes == 2 * linear
    assert report.packed_bytes == linear + 4 * (4 * 256 + 2 * 704 + 256)
    assert report.ratio == report.packed_bytes / report.bf16_bytes < 0.52
    assert report.folder_bytes == sum(os.path.getsize(path) for path in out.iterdir())
    assert len(report.packed) == 7
    assert list(report.skipped) == ["lm_head"]
    assert seen == [(i, 11) for i in range(1, 12)]  # 7 linears, 3 norms, and the embedding, which is the head too


def test_the_checkpoint_asked_for_is_packed(tmp_path: Path, packed: dict[str, Example]) -> None:
    run = shutil.copytree(packed["llama"].run, tmp_path / "run")
    older = run / "step-00000002"
    older.mkdir()
    tensors = load_file(run / "step-00000007" / "model.safetensors")
    save_file({name: 2 * t for name, t in tensors.items()}, older / "model.safetensors")
    assert pack(run, tmp_path / "new").source.name == "step-00000007"
    assert pack(run, tmp_path / "old", step=2).source == older
    name = "model.layers.0.mlp.up_proj.weight_scale"
    new, old = (load_file(tmp_path / out / "model.safetensors")[name] for out in ("new", "old"))
    assert torch.equal(old, 2 * new)
    with pytest.raises(ArtifactError, match="no checkpoint of step 5: it keeps 2, 7"):
        pack(run, tmp_path / "none", step=5)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [("rowwise", "channel"), ("blockwise", "block"), ("groupwise", "group64"), ("bf16", "channel")],
)
@torch.no_grad()
def test_a_packed_run_repeats_its_forward_pass(tmp_path: Path, recipe: str, scheme: str) -> None:
    """Bit for bit where the scheme is the recipe's: the model in FP32 but for what the folder holds in BF16."""
    config = LlamaConfig(256, layers=2, width=128, heads=4, kv_heads=4, mlp_width=256, context=48)
    torch.manual_seed(0)
    model = Llama(config).eval()
    for parameter in model.parameters():
        parameter.copy_((parameter * 3).bfloat16())
    run = write_run(tmp_path / "run", model, config.to_hf(), recipe=recipe)
    report = pack(run, tmp_path / "out")
    assert set(report.packed.values()) == {scheme}
    packed = load_float32(tmp_path / "out")
    convert(model, recipe)
    found, trained = outputs(packed), outputs(model)
    assert torch.equal(found, trained) if recipe != "bf16" else distance(found, trained) > 1e-4


def test_all_tokenizer_files_come_along(tmp_path: Path, packed: dict[str, Example]) -> None:
    run = shutil.copytree(packed["qwen2"].run, tmp_path / "run")
    for name in ("merges.txt", "special_tokens_map.json"):
        (run / "model" / name).write_text(name)
    pack(run, tmp_path / "out")
    for path in (run / "model").iterdir():
        assert path.name == "config.json" or (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_an_existing_folder_is_left_alone(tmp_path: Path, packed: dict[str, Example]) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="choose another folder"):
        pack(packed["llama"].run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("diverged", "up_proj.weight holds inf or NaN.*earlier checkpoint"),
        ("missing", "tensor model.norm.weight is missing"),
        ("another", "must have shape"),
        ("truncated", "model.safetensors is truncated"),
    ],
)
def test_a_run_that_cannot_be_packed(tmp_path: Path, packed: dict[str, Example], change: str, message: str) -> None:
    run = shutil.copytree(packed["llama"].run, tmp_path / "run")
    path = run / "step-00000007" / "model.safetensors"
    tensors = load_file(path)
    if change == "diverged":
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    elif change == "missing":
        del tensors["model.norm.weight"]
    elif change == "another":
        (run / "model" / "config.json").write_text(json.dumps(LlamaConfig(**LLAMA | {"width": 32}).to_hf()))  # type: ignore[arg-type]
    save_file(tensors, path)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=message):
        pack(run, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
