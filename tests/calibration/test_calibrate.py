"""Calibration from end to end, against the model run at once; interrupted, resumed, and with bad input."""

import json
import resource
from dataclasses import replace

import pytest
import torch
import transformers
from calibration_examples import watch_whole, whole_model, write_model
from safetensors.torch import load_file, save_file

from octavo.artifact.atomic_folder import WriteError
from octavo.artifact.files import ArtifactError
from octavo.artifact.lock import FolderLock, LockedError
from octavo.calibration import pipeline
from octavo.calibration.folder import Calibration, hash_model
from octavo.calibration.pipeline import calibrate
from octavo.evaluation import PromptOptions
from octavo.evaluation.prompts import open_tokenizer, read_prompts
from octavo.hf import block_by_block

PROMPTS = PromptOptions(samples=24, context=32, batch=4, seed=3)


@pytest.fixture(scope="module")
def expected(llama, data, tmp_path_factory):
    return calibrate(llama, data, tmp_path_factory.mktemp("expected") / "out", prompts=PROMPTS)


def same(one: Calibration, other: Calibration) -> bool:
    pairs = [(one.sites[name].to_tensors(), other.sites[name].to_tensors()) for name in one.sites]
    equal = all(torch.equal(a[leaf], b[leaf]) for a, b in pairs for leaf in a)
    return equal and list(one.sites) == list(other.sites) and one.layers == other.layers


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "bert masked"])
def test_the_amax_of_every_site_is_that_of_the_model_run_at_once(kind, tmp_path, data):
    folder = write_model(tmp_path / kind, kind)
    found = calibrate(folder, data, tmp_path / "out", prompts=PROMPTS)
    prompts = read_prompts(data, open_tokenizer(folder), PROMPTS)
    assert (found.prompts, found.tokens) == (24, prompts.tokens)
    whole = watch_whole(whole_model(folder), prompts.batches(4))
    checked = 0
    for site, statistics in found.sites.items():
        if site in whole:
            x = torch.cat([t.float().reshape(-1, t.shape[-1]) for t in whole[site]]).abs()
            assert statistics.amax == x.max().item(), site
            assert torch.equal(statistics.channel_amax, x.amax(0))
            assert found.scale(site).item() == pytest.approx(x.max().item() / 448, rel=2**-23)
            assert statistics.percentile(99.9) == pytest.approx(torch.quantile(x.double(), 0.999).item(), rel=1e-12)
            checked += 1
    assert checked == len(found.sites) - 3 * 3  # queries, keys and values of three blocks: test_observe
    layer = next(iter(found.layers))
    assert torch.equal(found.scale(layer, "mse"), found.scale(found.layers[layer], "mse"))


def test_512_samples_of_drifting_range(tmp_path):
    """The embedding grows along the vocabulary, and the prompts walk through that."""
    folder = write_model(tmp_path / "opt", "opt", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.embed_tokens.weight"] *= torch.logspace(-2, 2, 256)[:, None]
    save_file(tensors, folder / "model.safetensors")
    rows = [{"text": chr(32 + i % 90) * (1 + i // 90)} for i in range(600)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = calibrate(folder, [str(tmp_path / "rows.jsonl")], tmp_path / "out", prompts=PromptOptions(512, batch=2))
    prompts = read_prompts([str(tmp_path / "rows.jsonl")], open_tokenizer(folder), PromptOptions(512, 40))
    batches = prompts.batches(2)
    whole = watch_whole(whole_model(folder), batches)
    assert sum(map(len, batches)) == 512
    for site, statistics in found.sites.items():
        if site in whole:
            assert statistics.history == [t.float().abs().max().item() for t in whole[site]]
            assert statistics.amax == max(statistics.history)
    first = found.sites["model.decoder.project_in.input"]
    assert max(first.history) > 20 * min(first.history)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_gpu_sees_what_the_whole_model_sees_there(kind, tmp_path, data):
    folder = write_model(tmp_path / kind, kind)
    found = calibrate(folder, data, tmp_path / "out", prompts=PROMPTS, device="cuda")
    prompts = read_prompts(data, open_tokenizer(folder), PROMPTS)
    batches = [batch.cuda() for batch in prompts.batches(4)]
    whole = watch_whole(whole_model(folder).cuda(), batches)
    for site, statistics in found.sites.items():
        if site in whole:
            assert statistics.amax == max(t.float().abs().max().item() for t in whole[site]), site


def test_older_names_of_norms(tmp_path, data):
    """BERT's first checkpoints say gamma and beta."""
    folder = write_model(tmp_path / "bert", "bert")
    expected = calibrate(folder, data, tmp_path / "expected", prompts=PROMPTS)
    tensors = load_file(folder / "model.safetensors")
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in older.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert same(calibrate(folder, data, tmp_path / "out", prompts=PROMPTS), expected)
    del tensors["encoder.layer.1.output.LayerNorm.beta"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"encoder\.layer\.1\.output\.LayerNorm\.bias is missing"):
        calibrate(folder, data, tmp_path / "other", prompts=PROMPTS)


def test_the_result_is_read_back(llama, tmp_path, data):
    found = calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    back = Calibration.load(tmp_path / "out")
    assert same(found, back)
    assert back.model_hash == hash_model(llama)
    assert (back.prompts, back.tokens, back.settings["seed"]) == (found.prompts, found.tokens, 3)
    assert back.versions["transformers"] == transformers.__version__
    assert back.layers["model.layers.1.mlp.up_proj"] == "model.layers.1.mlp.gate_proj.input"
    with pytest.raises(KeyError, match="no site and no linear layer"):
        back.scale("lm_head")


def test_memory_holds_one_block_at_a_time(llama, tmp_path, data, monkeypatch):
    """Parameters with numbers, counted in every call of a block: the frame's and one block's."""
    counts = []
    real = block_by_block.BlockModel.run_block

    def counting(self, index, *args):
        counts.append((index, sum(p.numel() for p in self.model.parameters() if not p.is_meta)))
        return real(self, index, *args)

    monkeypatch.setattr(block_by_block.BlockModel, "run_block", counting)
    calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    model = whole_model(llama)
    block = sum(p.numel() for p in model.model.layers[0].parameters())
    frame = model.model.embed_tokens.weight.numel() + model.model.norm.weight.numel()
    assert {count for _, count in counts} == {frame + block}
    assert {index for index, _ in counts} == {0, 1, 2}
    assert frame + 2 * block < sum(p.numel() for p in model.parameters())


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches SIGKILL."""


def run_until(llama, data, out, part, call, monkeypatch):
    """A calibration that dies in that call of that part."""
    calls = []
    real = block_by_block.BlockModel.run_block

    def dying(self, index, *args):
        calls.append(index)
        if calls.count(part) == call:
            raise Killed
        return real(self, index, *args)

    with monkeypatch.context() as patch:
        patch.setattr(block_by_block.BlockModel, "run_block", dying)
        with pytest.raises(Killed):
            calibrate(llama, data, out, prompts=PROMPTS)
    assert not out.exists()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_killed_run_goes_on_with_its_block(part, llama, expected, tmp_path, data, monkeypatch):
    run_until(llama, data, tmp_path / "out", part, 3, monkeypatch)
    ran, steps = [], []
    real = block_by_block.BlockModel.run_block

    def recording(self, index, *args):
        ran.append(index)
        return real(self, index, *args)

    monkeypatch.setattr(block_by_block.BlockModel, "run_block", recording)
    found = calibrate(llama, data, tmp_path / "out", prompts=PROMPTS, progress=lambda *done: steps.append(done[:2]))
    assert set(ran) == set(range(part, 3))
    assert steps == [(done, 5) for done in range(part + 1, 6)]
    assert same(found, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_run_killed_at_the_very_end_only_writes(llama, tmp_path, data, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "save", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    monkeypatch.setattr(pipeline, "_run_part", None)
    assert calibrate(llama, data, tmp_path / "out", prompts=PROMPTS).tokens > 0


@pytest.mark.parametrize("change", ["seed", "data", "model", "batch"])
def test_a_run_is_not_resumed_with_something_else(change, model, tmp_path, data, monkeypatch):
    run_until(model, data, tmp_path / "out", 1, 1, monkeypatch)
    prompts = PROMPTS
    if change in ("seed", "batch"):
        prompts = replace(PROMPTS, **{change: getattr(PROMPTS, change) + 1})
    elif change == "data":
        (tmp_path / "other.txt").write_text("other text")
        data = [str(tmp_path / "other.txt")]
    else:
        shard = sorted(model.glob("*.safetensors"))[-1]
        save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    named = {"data": "prompts", "seed": "prompts, seed"}.get(change, change)
    with pytest.raises(ArtifactError, match=rf"begun with other settings \({named}\).*choose another folder"):
        calibrate(model, data, tmp_path / "out", prompts=prompts)


@pytest.mark.parametrize(("limit", "done"), [(100_000, 1), (10_000, 0)])
def test_a_full_disk_keeps_what_is_done(limit, done, llama, expected, tmp_path, data):
    """A limit on the size of files stands for it: statistics pass the greater one, hidden states the smaller."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(WriteError, match="could not write .*continues with the part"):
            calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    work = tmp_path / ".out.calibrating"
    assert len(list(work.glob("part-*.safetensors"))) == done
    assert same(calibrate(llama, data, tmp_path / "out", prompts=PROMPTS), expected)


def test_a_second_calibration_into_one_folder_is_refused_and_loses_nothing(llama, tmp_path, data):
    with FolderLock(tmp_path / ".out.calibrating"), pytest.raises(LockedError, match="is in use: process"):
        calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    assert [path for path in tmp_path.iterdir() if "out" in path.name] == []
    assert calibrate(llama, data, tmp_path / "out", prompts=PROMPTS).prompts > 0
