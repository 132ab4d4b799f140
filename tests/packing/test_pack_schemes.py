"""Hugging Face folders packed by every scheme and in every layout, opened by transformers and by us."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from packed_examples import small_shards
from safetensors.torch import load_file
from tiny_models import Folders, open_theirs, outputs, same_bits, same_bytes
from torch import Tensor
from transformers import AutoModelForCausalLM
from verify_examples import change_tensors

from octavo.artifact.packed.scheme import SCHEMES
from octavo.artifact.safetensors_files import ShardReader
from octavo.calibration import Calibration
from octavo.hf.fused_groups import TOGETHER
from octavo.packing import convert_layout, pack, unpack
from octavo.runtime import load_packed

# The Llama in every way, the others in two; OPT and BERT too where inputs or layers are of their own shape.
OTHERS = ["mistral", "qwen2", "qwen3", "opt", "bert", "gemma2"]
WAYS = [("llama", scheme, "compressed-tensors") for scheme in SCHEMES if scheme != "static"]
WAYS += [(name, scheme, "compressed-tensors") for name in OTHERS for scheme in ("channel", "mx")]
WAYS += [("llama", "block", "fp8"), ("opt", "tensor", "compressed-tensors"), ("bert", "block", "fp8")]


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
@pytest.mark.parametrize(("name", "scheme", "layout"), WAYS)
def test_transformers_opens_what_we_pack(made: Folders, tmp_path: Path, name: str, scheme: str, layout: str) -> None:
    out = tmp_path / f"{name} packed"
    report = pack(made(name), out, scheme=scheme, layout=layout)
    linears = 14 if name not in ("opt", "bert") else 12 + (name == "bert")
    assert len(report.packed) == linears
    assert report.ratio < {"group32": 0.563, "group64": 0.532}.get(scheme, 0.52)
    truth = outputs(open_theirs(made(name), torch.float32))
    theirs = open_theirs(out)
    ours, found = outputs(load_packed(out).model), outputs(theirs)
    assert distance(ours, truth) < 0.2
    assert distance(ours, found) < 1.5 * distance(ours, truth)
    if scheme == "mx" and name != "llama":  # powers of two, and (but for our own Llama) the same modeling code
        assert torch.equal(ours, found)
    layer = next(iter(report.packed))
    weight = theirs.get_submodule(layer).weight.double()
    assert distance(weight, widened(out, layer, scheme)) < 2**-8  # theirs is widened in BF16
    assert distance(widened(out, layer, scheme), load_file(made(name) / "model.safetensors")[f"{layer}.weight"]) < 0.04


def test_several_schemes_in_one_model(made: Folders, tmp_path: Path) -> None:
    report = pack(
        made("llama"), tmp_path / "out", scheme="block",
        layers={"*.down_proj": "mx", "*.layers.0.*": "channel"}, skip=["*.layers.1.mlp.*"],
    )  # fmt: skip
    assert report.packed["model.layers.0.mlp.down_proj"] == "mx"
    assert report.packed["model.layers.0.mlp.up_proj"] == "channel"
    assert report.packed["model.layers.1.self_attn.q_proj"] == "block"
    assert {f"model.layers.1.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")} <= report.skipped.keys()
    truth = outputs(open_theirs(made("llama"), torch.float32))
    ours, theirs = outputs(load_packed(tmp_path / "out").model), outputs(open_theirs(tmp_path / "out"))
    assert distance(ours, truth) < 0.2
    assert distance(ours, theirs) < 1.5 * distance(ours, truth)


def test_fused_layers_share_a_scale_of_whole_tensors(made: Folders, tmp_path: Path) -> None:
    pack(made("mistral"), tmp_path / "out", scheme="tensor")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    plain = load_file(made("mistral") / "model.safetensors")
    for layer in range(2):
        for block, group in zip(("self_attn", "mlp"), TOGETHER[:2], strict=True):
            names = [f"model.layers.{layer}.{block}.{leaf}" for leaf in group]
            (scale,) = {float(stored[f"{name}.weight_scale"]) for name in names}
            amax = max(float(plain[f"{name}.weight"].abs().max()) for name in names)
            assert scale == pytest.approx(amax / 448)
            assert all(stored[f"{name}.weight_scale"].shape == (1,) for name in names)
    o_proj = float(stored["model.layers.0.self_attn.o_proj.weight_scale"])
    assert o_proj == pytest.approx(float(plain["model.layers.0.self_attn.o_proj.weight"].abs().max()) / 448)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "rule"),
    [("mistral", "percentile"), ("mistral", "mse"), *((name, "amax") for name in ("mistral", "qwen3", "opt", "bert"))],
)
def test_static_scales_come_from_calibration(made: Folders, tmp_path: Path, name: str, rule: str) -> None:
    out = tmp_path / f"{name} packed"
    report = pack(made(name), out, scheme="static", calibration=made(name, "calibrated"), rule=rule)
    found = Calibration.load(made(name, "calibrated"))
    stored = load_file(out / "model.safetensors")
    for layer in report.packed:
        scale = stored[f"{layer}.input_scale"]
        assert scale.shape == (1,)
        assert float(scale) == float(found.scale(layer, rule))
    if name == "mistral":
        q, k, v = (float(stored[f"model.layers.1.self_attn.{x}_proj.input_scale"]) for x in "qkv")
        assert q == k == v
    assert json.loads((out / "octavo.json").read_text())["calibration"]["rule"] == rule
    truth = outputs(open_theirs(made(name), torch.float32))
    ours, theirs = outputs(load_packed(out).model), outputs(open_theirs(out))
    assert distance(ours, truth) < 0.25
    assert distance(ours, theirs) < 1.5 * distance(theirs, truth)
    assert not convert_layout(out, tmp_path / "by channel", scheme="channel").sqnr.keys() ^ report.packed.keys()
    assert convert_layout(out, tmp_path / "again").lossless
    unpack(out, tmp_path / "plain")


def test_a_calibration_of_another_model(made: Folders, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a calibration of another model"):
        pack(made("qwen2"), tmp_path / "out", scheme="static", calibration=made("qwen3", "calibrated"))
    with pytest.raises(ValueError, match="unknown rule 'max'"):
        pack(made("qwen3"), tmp_path / "out", scheme="static", calibration=made("qwen3", "calibrated"), rule="max")
    with pytest.raises(FileNotFoundError, match=r"calibration\.json is missing"):
        pack(made("qwen3"), tmp_path / "out", calibration=tmp_path / "nowhere")
    pack(made("qwen3"), tmp_path / "channel")
    with pytest.raises(ValueError, match="static stores the scale of the input, which is not here"):
        convert_layout(tmp_path / "channel", tmp_path / "out", scheme="static")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_shards_hold_what_one_file_holds(made: Folders, tmp_path: Path, scheme: str) -> None:
    with small_shards(100_000):
        pack(made("qwen3"), tmp_path / "many", scheme=scheme)
    one, many = ShardReader(made("qwen3", scheme=scheme)), ShardReader(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert same_bits(*({name: reader.get(name) for name in reader.specs} for reader in (one, many)))
    open_theirs(tmp_path / "many")
    load_packed(tmp_path / "many")


def test_a_sharded_source_is_read_tensor_by_tensor(
    made: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(made("llama"), dtype="auto")
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
    assert same_bytes(tmp_path / "out", made("llama", scheme="channel"))


def test_the_record_beside_it(made: Folders, tmp_path: Path) -> None:
    records = []
    changed = shutil.copytree(made("llama"), tmp_path / "changed")
    change_tensors(changed, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].add_(0.01))
    for i, source in enumerate((made("llama"), made("llama"), changed)):
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
def test_transformers_saves_and_loads_it_again(made: Folders, tmp_path: Path, name: str, scheme: str) -> None:
    """In float32, in which scales stay what they are."""
    out, again = made(name, scheme=scheme), tmp_path / "again"
    theirs = open_theirs(out, torch.float32)
    theirs.save_pretrained(again)
    logits = outputs(theirs)
    before, after = load_file(out / "model.safetensors"), load_file(again / "model.safetensors")
    assert same_bits(*({key: t.float() for key, t in tensors.items()} for tensors in (before, after)))
    assert all(after[key].dtype == t.dtype for key, t in before.items() if t.dtype == torch.float8_e4m3fn)
    assert torch.equal(outputs(open_theirs(again, torch.float32)), logits)
