"""Hugging Face folders packed by every scheme and in every layout, opened by transformers and by us."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_examples import small_shards
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
)
from verify_examples import MODELS, change_tensors, make_model

from octavo.artifact.packed.scheme import SCHEMES
from octavo.artifact.safetensors_files import ShardReader
from octavo.calibration import Calibration, calibrate
from octavo.evaluation import PromptOptions
from octavo.hf.fused_groups import TOGETHER
from octavo.packing import convert_layout, pack, unpack
from octavo.runtime import load_packed

NAMES = [name for name in MODELS if name != "gpt2"]  # which is packed under other names: test_conv1d
WAYS = [(scheme, "compressed-tensors") for scheme in SCHEMES if scheme != "static"] + [("block", "fp8")]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A BF16 folder of each architecture, with weights that make its outputs large."""
    return {name: make_model(tmp_path_factory.mktemp(name), name) for name in NAMES}


def open_theirs(folder: Path, dtype: torch.dtype | str = "auto") -> Any:
    cls = AutoModel if "bert" in folder.as_posix() else AutoModelForCausalLM
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, local_files_only=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    out: Any = model(torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3)))
    if isinstance(out, Tensor):
        return out.double()
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state).double()


def widened(folder: Path, name: str, scheme: str) -> Tensor:
    """A weight in float64 from the file's bytes, by the words of the specification."""
    stored = load_file(folder / "model.safetensors")
    data = stored[f"{name}.weight"].double()
    scale = stored.get(f"{name}.weight_scale", stored.get(f"{name}.weight_scale_inv"))
    assert scale is not None
    if scheme == "mx":
        return data * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    if scheme.startswith("group"):
        return data * scale.double().repeat_interleave(int(scheme.removeprefix("group")), 1)
    if scheme == "block":
        return data * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return data * scale.double()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("scheme", "layout"), WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_transformers_opens_what_we_pack(
    sources: dict[str, Path], tmp_path: Path, name: str, scheme: str, layout: str
) -> None:
    out = tmp_path / f"{name} packed"
    report = pack(sources[name], out, scheme=scheme, layout=layout)
    linears = 14 if name not in ("opt", "bert") else 12 + (name == "bert")
    assert len(report.packed) == linears
    assert report.ratio < {"group32": 0.563, "group64": 0.532}.get(scheme, 0.52)
    truth = outputs(open_theirs(sources[name], torch.float32))
    theirs = open_theirs(out)
    ours, found = outputs(load_packed(out).model), outputs(theirs)
    assert distance(ours, truth) < 0.2
    assert distance(ours, found) < 1.5 * distance(ours, truth)
    if scheme == "mx" and name != "llama":  # powers of two, and (but for our own Llama) the same modeling code
        assert torch.equal(ours, found)
    layer = next(iter(report.packed))
    weight = theirs.get_submodule(layer).weight.double()
    assert distance(weight, widened(out, layer, scheme)) < 2**-8  # theirs is widened in BF16
    assert (
        distance(widened(out, layer, scheme), load_file(sources[name] / "model.safetensors")[f"{layer}.weight"]) < 0.04
    )


def test_several_schemes_in_one_model(sources: dict[str, Path], tmp_path: Path) -> None:
    report = pack(
        sources["llama"], tmp_path / "out", scheme="block",
        layers={"*.down_proj": "mx", "*.layers.0.*": "channel"}, skip=["*.layers.1.mlp.*"],
    )  # fmt: skip
    assert report.packed["model.layers.0.mlp.down_proj"] == "mx"
    assert report.packed["model.layers.0.mlp.up_proj"] == "channel"
    assert report.packed["model.layers.1.self_attn.q_proj"] == "block"
    assert {f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")} <= report.skipped.keys()
    truth = outputs(open_theirs(sources["llama"], torch.float32))
    ours, theirs = outputs(load_packed(tmp_path / "out").model), outputs(open_theirs(tmp_path / "out"))
    assert distance(ours, truth) < 0.2
    assert distance(ours, theirs) < 1.5 * distance(ours, truth)


def test_fused_layers_share_a_scale_of_whole_tensors(sources: dict[str, Path], tmp_path: Path) -> None:
    pack(sources["mistral"], tmp_path / "out", scheme="tensor")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    plain = load_file(sources["mistral"] / "model.safetensors")
    for layer in range(2):
        for block, group in zip(("self_attn", "mlp"), TOGETHER[:2], strict=True):
            names = [f"model.layers.{layer}.{block}.{leaf}" for leaf in group]
            (scale,) = {float(stored[f"{name}.weight_scale"]) for name in names}
            amax = max(float(plain[f"{name}.weight"].abs().max()) for name in names)
            assert scale == pytest.approx(amax / 448)
            assert all(stored[f"{name}.weight_scale"].shape == (1,) for name in names)
    o_proj = float(stored["model.layers.0.self_attn.o_proj.weight_scale"])
    assert o_proj == pytest.approx(float(plain["model.layers.0.self_attn.o_proj.weight"].abs().max()) / 448)


@pytest.fixture(scope="module")
def calibrated(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The calibration of an architecture, on text of its own."""
    root = tmp_path_factory.mktemp("calibrated")
    (root / "text.txt").write_text(
        "\n\n".join(f"{i} times {j} is {i * j}, said the clerk." for i in range(9) for j in range(9))
    )

    def made(name: str) -> Path:
        if not (root / name).exists():
            calibrate(sources[name], [str(root / "text.txt")], root / name, prompts=PromptOptions(16, 32))
        return root / name

    return made


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("rule", ["amax", "percentile", "mse"])
@pytest.mark.parametrize("name", ["mistral", "qwen3", "opt", "bert"])
def test_static_scales_come_from_calibration(
    sources: dict[str, Path], calibrated: Callable[[str], Path], tmp_path: Path, name: str, rule: str
) -> None:
    out = tmp_path / f"{name} packed"
    report = pack(sources[name], out, scheme="static", calibration=calibrated(name), rule=rule)
    found = Calibration.load(calibrated(name))
    stored = load_file(out / "model.safetensors")
    for layer in report.packed:
        scale = stored[f"{layer}.input_scale"]
        assert scale.shape == (1,)
        assert float(scale) == float(found.scale(layer, rule))
    if name == "mistral":
        q, k, v = (float(stored[f"model.layers.1.self_attn.{x}_proj.input_scale"]) for x in "qkv")
        assert q == k == v
    assert json.loads((out / "octavo.json").read_text())["calibration"]["rule"] == rule
    truth = outputs(open_theirs(sources[name], torch.float32))
    ours, theirs = outputs(load_packed(out).model), outputs(open_theirs(out))
    assert distance(ours, truth) < 0.25
    assert distance(ours, theirs) < 1.5 * distance(theirs, truth)
    assert not convert_layout(out, tmp_path / "by channel", scheme="channel").sqnr.keys() ^ report.packed.keys()
    assert convert_layout(out, tmp_path / "again").lossless
    unpack(out, tmp_path / "plain")


def test_a_calibration_of_another_model(
    sources: dict[str, Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="is a calibration of another model"):
        pack(sources["qwen2"], tmp_path / "out", scheme="static", calibration=calibrated("qwen3"))
    with pytest.raises(ValueError, match="unknown rule 'max'"):
        pack(sources["qwen3"], tmp_path / "out", scheme="static", calibration=calibrated("qwen3"), rule="max")
    with pytest.raises(FileNotFoundError, match=r"calibration\.json is missing"):
        pack(sources["qwen3"], tmp_path / "out", calibration=tmp_path / "nowhere")
    pack(sources["qwen3"], tmp_path / "channel")
    with pytest.raises(ValueError, match="has a calibrated input_scale, which is not here"):
        convert_layout(tmp_path / "channel", tmp_path / "out", scheme="static")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_shards_hold_what_one_file_holds(sources: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    pack(sources["qwen3"], tmp_path / "one", scheme=scheme)
    with small_shards(100_000):
        pack(sources["qwen3"], tmp_path / "many", scheme=scheme)
    one, many = ShardReader(tmp_path / "one"), ShardReader(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert one.specs == many.specs
    for name in one.specs:
        assert torch.equal(one.get(name).view(torch.uint8), many.get(name).view(torch.uint8))
    assert torch.equal(outputs(load_packed(tmp_path / "one").model), outputs(load_packed(tmp_path / "many").model))
    open_theirs(tmp_path / "many")


def test_a_sharded_source_is_read_tensor_by_tensor(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(sources["llama"], dtype="auto")
    model.save_pretrained(tmp_path / "source", max_shard_size="200KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    alive: list[Any] = []
    get = ShardReader.get

    def counted(self: ShardReader, name: str) -> Tensor:
        alive[:] = [t for t in alive if t() is not None]
        assert len(alive) <= 1  # the one before is still a local
        tensor = get(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(ShardReader, "get", counted)
    pack(tmp_path / "source", tmp_path / "out")
    monkeypatch.undo()
    pack(sources["llama"], tmp_path / "whole")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "whole"))
    assert all(torch.equal(a[name].view(torch.uint8), t.view(torch.uint8)) for name, t in b.items())


def test_the_record_beside_it(sources: dict[str, Path], tmp_path: Path) -> None:
    records = []
    changed = shutil.copytree(sources["llama"], tmp_path / "changed")
    change_tensors(changed, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].add_(0.01))
    for i, source in enumerate((sources["llama"], sources["llama"], changed)):
        pack(source, tmp_path / str(i), layers={"*.o_proj": "block"})
        records.append(json.loads((tmp_path / str(i) / "octavo.json").read_text()))
    record = records[0]
    assert record["layout"] == "compressed-tensors"
    assert record["layers"]["model.layers.0.self_attn.o_proj"] == "block"
    assert record["schemes"]["block"]["weight"]["granularity"] == "block:128x128"
    assert record["calibration"] is None
    assert record["source_sha256"] == records[1]["source_sha256"] != records[2]["source_sha256"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("scheme", ["channel", "tensor", "block", "group64"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_transformers_saves_and_loads_it_again(
    sources: dict[str, Path], tmp_path: Path, name: str, scheme: str
) -> None:
    """In float32, in which scales stay what they are."""
    out, again = tmp_path / f"{name} packed", tmp_path / f"{name} again"
    pack(sources[name], out, scheme=scheme)
    theirs = open_theirs(out, torch.float32)
    theirs.save_pretrained(again)
    logits = outputs(theirs)
    before, after = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if tensor.dtype == torch.float8_e4m3fn:
            assert torch.equal(tensor.view(torch.uint8), after[key].view(torch.uint8)), key
        else:
            assert torch.equal(tensor.float(), after[key].float()), key
    assert torch.equal(outputs(open_theirs(again, torch.float32)), logits)
