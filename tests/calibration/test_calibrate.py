"""Calibration from end to end, against the model run at once; interrupted, resumed, and with bad input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_examples import MODELS, watch_whole, whole_model, write_model
from full_disk import files_of_at_most
from packed_examples import LLAMA, examples, write_run
from safetensors.torch import load_file, save_file
from tiny_models import make_model, same_bits, with_slow
from transformers import AutoConfig, AutoModelForCausalLM

import octavo
from octavo.calibration import calibrator as pipeline
from octavo.calibration.calibrator import Calibration, calibrate
from octavo.calibration.site_statistics import BINS, Statistics
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import LockedError, WriteError, locked_folder
from octavo.evaluation.prompts import PromptOptions, read_prompts
from octavo.hf import block_by_block
from octavo.models import MixtureConfig, build
from octavo.models.tokenizer import open_tokenizer
from octavo.nn import select_linears
from octavo.packing import PackOptions, pack, pack_frozen
from octavo.verification import verify

PROMPTS = PromptOptions(samples=24, context=32, batch=4, seed=3)
FEW = replace(PROMPTS, samples=8)


@pytest.fixture(scope="module")
def expected(llama, data, tmp_path_factory):
    return calibrate(llama, data, tmp_path_factory.mktemp("expected") / "out", prompts=PROMPTS)


def same(one: Calibration, other: Calibration) -> bool:
    equal = all(same_bits(site.to_tensors(), other.sites[name].to_tensors()) for name, site in one.sites.items())
    return equal and list(one.sites) == list(other.sites) and one.layers == other.layers


SHARED = {  # of some kinds, layers that read one tensor
    "llama": ("model.layers.1.self_attn", ["q_proj", "k_proj", "v_proj"]),
    "mistral": ("model.layers.0.mlp", ["gate_proj", "up_proj"]),
    "opt": ("model.decoder.layers.0.self_attn", ["q_proj", "k_proj", "v_proj"]),
    "bert": ("encoder.layer.1.attention.self", ["query", "key", "value"]),
}


@pytest.mark.parametrize("kind", with_slow(["gpt2", *MODELS], ("gpt2", "llama")))
def test_every_site_has_the_statistics_of_the_model_run_at_once(kind, tmp_path, data):
    folder = write_model(tmp_path / kind, kind)
    found = calibrate(folder, data, tmp_path / "out", prompts=PROMPTS)
    prompts = read_prompts(data, open_tokenizer(folder), PROMPTS)
    assert (found.prompts, found.tokens) == (24, prompts.tokens)
    whole = watch_whole(whole_model(folder), prompts.batches(4))
    for site, statistics in found.sites.items():
        if statistics.kind in ("input", "norm"):
            x = torch.cat([t.float().flatten(0, -2) for t in whole[site]]).abs()
            assert statistics.tokens == len(x)
            assert statistics.amax == x.max().item(), site
            assert statistics.history == [t.float().abs().max().item() for t in whole[site]]
            assert torch.equal(statistics.channel_amax, x.amax(0))
            assert found.scale(site).item() == pytest.approx(x.max().item() / 448, rel=2**-23)
            assert statistics.percentile(99.9) == pytest.approx(torch.quantile(x.double(), 0.999).item(), rel=1e-12)
            assert all(len(whole[f"{layer}.input"]) == len(whole[site]) for layer in statistics.layers)
    linears = [layer.name for layer in select_linears(whole_model(folder)) if not layer.reason]
    assert sorted(found.layers) == sorted(linears)
    norms = {site for site in whole if site.endswith(".output")}
    assert {site for site, statistics in found.sites.items() if statistics.kind == "norm"} == norms
    layer = next(iter(found.layers))
    assert torch.equal(found.scale(layer, "mse"), found.scale(found.layers[layer], "mse"))
    if kind in SHARED:
        names = [f"{SHARED[kind][0]}.{leaf}" for leaf in SHARED[kind][1]]
        assert found.sites[f"{names[0]}.input"].layers == names
        assert not any(f"{name}.input" in found.sites for name in names[1:])


def test_attention_gets_rotated_queries_and_keys(tmp_path, data):
    folder = write_model(tmp_path / "qwen3", "qwen3")
    found = calibrate(folder, data, tmp_path / "out", prompts=PROMPTS).sites
    batches = read_prompts(data, open_tokenizer(folder), PROMPTS).batches(4)
    whole = watch_whole(whole_model(folder), batches)
    name = "model.layers.1.self_attn"
    for letter in "qkv":
        statistics = found[f"{name}.{letter}"]
        tensors = [t.float().abs() for t in whole[f"attention.{letter}"][1::3]]  # of the second of three layers
        heads = 2 if letter in "kv" else 4
        assert statistics.channel_amax.shape == (heads * 16,)
        assert statistics.history == [t.max().item() for t in tensors]
        by_head = torch.stack([t.amax(dim=(0, 2)) for t in tensors]).amax(0)
        assert torch.equal(statistics.channel_amax.view(heads, -1), by_head)
    unrotated = max(t.float().abs().max().item() for t in whole[f"{name}.k_norm.output"])
    assert found[f"{name}.k"].amax != unrotated
    assert [found[f"{name}.{x}"].kind for x in "qkv"] == ["query", "key", "value"]


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
    for new, old in {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    assert same(calibrate(folder, data, tmp_path / "out", prompts=PROMPTS), expected)
    del tensors["encoder.layer.1.output.LayerNorm.beta"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"encoder\.layer\.1\.output\.LayerNorm\.bias is missing"):
        calibrate(folder, data, tmp_path / "other", prompts=PROMPTS)


def before_blocks(monkeypatch, note):
    real = block_by_block.BlockModel.run_part

    def run_part(self, part, *args):
        if 0 < part <= len(self.blocks):
            note(self, part - 1)
        return real(self, part, *args)

    monkeypatch.setattr(block_by_block.BlockModel, "run_part", run_part)


def test_memory_holds_one_block_at_a_time(llama, tmp_path, data, monkeypatch):
    """Weights with numbers, counted in every call of a block: the frame's and one block's."""
    counts = []

    def count(parts, index):
        assert all(p.is_meta for p in parts.model.parameters())
        counts.append((index, sum(t.numel() for t in parts.loaded.values())))

    before_blocks(monkeypatch, count)
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

    def die(_, index):
        calls.append(index)
        if calls.count(part) == call:
            raise Killed

    with monkeypatch.context() as patch:
        before_blocks(patch, die)
        with pytest.raises(Killed):
            calibrate(llama, data, out, prompts=PROMPTS)
    assert not out.exists()


@pytest.mark.parametrize("part", with_slow([0, 1, 2], (0, 2)))
def test_a_killed_run_goes_on_with_its_block(part, llama, expected, tmp_path, data, monkeypatch):
    run_until(llama, data, tmp_path / "out", part, 3, monkeypatch)
    ran, steps = [], []
    before_blocks(monkeypatch, lambda _, index: ran.append(index))
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
def test_a_run_is_not_resumed_with_something_else(change, llama, tmp_path, data, monkeypatch):
    model = shutil.copytree(llama, tmp_path / "model")
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


@pytest.mark.parametrize(("limit", "done"), [(100_000, 1), (1_000, 0)])
def test_a_full_disk_keeps_what_is_done(limit, done, llama, expected, tmp_path, data):
    """Statistics pass the greater limit on the size of files, hidden states the smaller."""
    with files_of_at_most(limit), pytest.raises(WriteError, match="could not write .*continues with the part"):
        calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    assert len(list((tmp_path / ".out.calibrating").glob("part-*"))) == done
    assert same(calibrate(llama, data, tmp_path / "out", prompts=PROMPTS), expected)


def test_a_second_calibration_into_one_folder_is_refused_and_loses_nothing(llama, tmp_path, data, monkeypatch):
    with locked_folder(tmp_path / ".out.calibrating"), pytest.raises(LockedError, match="is in use: process"):
        calibrate(llama, data, tmp_path / "out", prompts=PROMPTS)
    assert [path for path in tmp_path.iterdir() if "out" in path.name] == []
    late = tmp_path / "late"  # the first one ends after the second has begun to read the model
    monkeypatch.setattr(pipeline, "locked_folder", lambda folder: late.mkdir() or locked_folder(folder))
    with pytest.raises(FileExistsError):
        calibrate(llama, data, late, prompts=PROMPTS)
    assert not (tmp_path / ".late.calibrating").exists()
    monkeypatch.undo()
    assert calibrate(llama, data, tmp_path / "out", prompts=PROMPTS).prompts > 0


# ---- Calibration of what cannot be calibrated, and calibrations that are damaged


@pytest.fixture(scope="module")
def result(llama, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("result") / "out"
    calibrate(llama, data, out, prompts=FEW)
    return out


def test_a_layer_that_saw_no_token_is_named(tmp_path, data):
    """Cross-attention, to which nobody gives what it attends to."""
    folder = write_model(tmp_path / "bert", "bert", is_decoder=True, add_cross_attention=True)
    said = r"encoder\.layer\.0\.crossattention\.self\.query saw no token .* \(4 layers of"
    with pytest.raises(ValueError, match=said):
        calibrate(folder, data, tmp_path / "out", prompts=FEW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]  # the work is gone too


def test_a_layer_that_no_forward_pass_calls_stays_in_bf16(tmp_path, data):
    folder = make_model(tmp_path / "esm", "esm")
    calibrate(folder, data, tmp_path / "calibrated", prompts=FEW)
    report = pack(folder, tmp_path / "packed", scheme="static", calibration=tmp_path / "calibrated")
    assert report.skipped["esm.contact_head.regression"] == "training left it in BF16, or no text reached it"
    assert verify(report.folder, folder).ok


def test_tokenizers_that_do_not_fit_and_a_folder_that_is_there(tmp_path, data):
    small = write_model(tmp_path / "small", "llama", vocab_size=50)
    no_words = shutil.copytree(small, tmp_path / "no words", ignore=shutil.ignore_patterns("tokenizer*"))
    before = sorted(tmp_path.iterdir())
    for folder, error, message in (
        (small, ArtifactError, "the model has 50 embeddings: the tokenizer is of another model"),
        (no_words, FileNotFoundError, "no tokenizer"),
    ):
        with pytest.raises(error, match=message):
            calibrate(folder, data, tmp_path / "out", prompts=FEW)
    with pytest.raises(FileExistsError, match="small exists already"):
        calibrate(no_words, data, small)
    assert sorted(tmp_path.iterdir()) == before


SITE = "model.layers.0.self_attn.k"
DAMAGES = {
    "version": lambda described, tensors: described.update(format_version=99),
    "no field": lambda described, tensors: described.pop("tokens"),
    "nan": lambda described, tensors: tensors[f"{SITE}.channel_amax"][:1].fill_(torch.nan),
    "other amax": lambda described, tensors: tensors[f"{SITE}.channel_amax"].mul_(2),
    "no history": lambda described, tensors: tensors.pop(f"{SITE}.history"),
    "counts": lambda described, tensors: tensors[f"{SITE}.histogram"][:2].add_(torch.tensor([-(10**6), 10**6])),
    "zero tokens": lambda described, tensors: tensors[f"{SITE}.tokens"].zero_(),
    "site": lambda described, tensors: described["sites"].update(nowhere={"kind": "norm", "layers": []}),
    "kind": lambda described, tensors: described["sites"][SITE].update(kind="other"),
    "bin": lambda described, tensors: tensors[f"{SITE}.first_bin"].add_(BINS),
    "truncated": lambda described, tensors: tensors.clear(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_refused(damage, tmp_path, result):
    out = shutil.copytree(result, tmp_path / "out")
    described, tensors = json.loads((out / "calibration.json").read_text()), load_file(out / "calibration.safetensors")
    DAMAGES[damage](described, tensors)
    (out / "calibration.json").write_text(json.dumps(described))
    save_file(tensors, out / "calibration.safetensors")
    if not tensors:
        (out / "calibration.safetensors").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"calibration\.(json|safetensors)"):
        Calibration.load(out)


# ---- Calibration of runs of the trainer: the statistics of the same weights in a model folder, and packing by them


def as_folder(run: Path, out: Path) -> Path:
    shutil.copytree(run / "model", out)
    shutil.copy(run / "step-00000007" / "model.safetensors", out)
    return out


def write_mixture(path: Path, shared: int = 0) -> Path:
    """A run of a mixture. The router of its first block never chooses experts 2 and 3."""
    torch.manual_seed(0)
    sizes: Any = LLAMA | {"mlp_width": 32}
    model = build(MixtureConfig(**sizes, experts=4, top_k=1, shared_width=shared))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.2)
        router = model.get_submodule("model.layers.0.mlp.gate").weight
        router[1], router[2:] = -router[0], 0  # of the first two one is above zero
    return write_run(path, model, model.config.to_hf(), model="mixture")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory, data):
    """A run of a mixture, and its calibration."""
    root = tmp_path_factory.mktemp("mixture")
    run = write_mixture(root / "run")
    calibrate(run, data, root / "calibrated", prompts=FEW)
    return run, root / "calibrated"


@pytest.mark.parametrize("name", with_slow(["llama", "gpt2", "qwen2"], ("gpt2",)))
def test_a_run_has_the_statistics_of_its_model(name, tmp_path, data):
    model, hf, settings = examples()[name]
    run = write_run(tmp_path / "run", model, hf, **settings)
    save_file({"state": torch.zeros(1)}, run / "step-00000007" / "optimizer.safetensors")
    found = calibrate(run, data, tmp_path / "calibrated", prompts=FEW)
    assert same(found, calibrate(as_folder(run, tmp_path / "folder"), data, tmp_path / "expected", prompts=FEW))
    report = pack(run, tmp_path / "packed", scheme="static", calibration=tmp_path / "calibrated")
    theirs = pack(tmp_path / "folder", tmp_path / "theirs", scheme="static", calibration=tmp_path / "expected")
    one, other = (load_file(each.folder / "model.safetensors") for each in (report, theirs))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one if key.endswith("input_scale"))


def test_a_calibration_is_of_one_checkpoint(tmp_path, data):
    model, hf, settings = examples()["llama"]
    run = write_run(tmp_path / "run", model, hf, **settings)
    save_file({"state": torch.zeros(1)}, run / "step-00000007" / "optimizer.safetensors")
    calibrate(run, data, tmp_path / "calibrated", prompts=FEW, step=7)
    later = shutil.copytree(run / "step-00000007", run / "step-00000009")
    tensors = load_file(later / "model.safetensors")
    save_file({name: t * 2 for name, t in tensors.items()}, later / "model.safetensors")
    how: Any = {"scheme": "static", "calibration": tmp_path / "calibrated"}
    with pytest.raises(ValueError, match="is a calibration of another model than .*step-00000009"):
        pack(run, tmp_path / "packed", **how)
    assert set(pack(run, tmp_path / "packed", **how, step=7).packed.values()) == {"static"}


def test_a_mixture_has_the_statistics_of_the_folder_that_transformers_writes(mixture, tmp_path, data, monkeypatch):
    """A checkpoint of a run holds stacks of experts, the folder of transformers a matrix for each."""
    run, calibrated = mixture
    folder, model = tmp_path / "folder", AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "model"))
    model.load_state_dict(load_file(run / "step-00000007" / "model.safetensors"), strict=False)  # the head is tied
    model.save_pretrained(folder)
    for file in (run / "model").glob("token*"):
        shutil.copy(file, folder)
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in load_file(folder / "model.safetensors")
    found, expected = Calibration.load(calibrated), calibrate(folder, data, tmp_path / "out", prompts=FEW)
    assert same(found, expected)
    with pytest.raises(KeyError, match="no site or linear layer"):
        found.scale("lm_head")
    expected_names = {f"model.layers.0.block_sparse_moe.experts.{e}.w{i}" for e in (2, 3) for i in (1, 2, 3)}
    assert {name for name in found.unseen if ".layers.0." in name} == expected_names
    assert found.record["unseen_experts"] == found.unseen
    path = "model.layers.0.block_sparse_moe.experts"
    for leaf in ("w1", "w2"):  # an expert without tokens has the scale of the others
        seen = [float(found.scale(f"{path}.{e}.{leaf}")) for e in (0, 1)]
        assert float(found.scale(f"{path}.2.{leaf}")) == max(seen) > min(seen) > 0
    calls: list[str] = []
    monkeypatch.setattr(Statistics, "scale", lambda self, *_: calls.append(self.site) or torch.ones(()))
    again = Calibration.load(calibrated)
    assert {float(again.scale(name)) for name in again.layers} == {1.0}
    assert len(calls) == len(set(calls))  # each site once, whatever the number of experts without tokens


def test_a_mixture_with_a_shared_expert(tmp_path, data):
    run = write_mixture(tmp_path / "run", shared=32)
    found = calibrate(run, data, tmp_path / "calibrated", prompts=FEW)
    assert "model.layers.1.mlp.shared_expert.gate_proj.input" in found.sites
    report = pack(run, tmp_path / "packed", experts=True, scheme="static", calibration=tmp_path / "calibrated")
    assert sum(".experts." in name for name in report.packed) == 2 * 4 * 3
    assert json.loads((report.folder / "octavo.json").read_text())["calibration"]["unseen_experts"] == found.unseen
    tensors = load_file(report.folder / "model.safetensors")
    scales = {name: t for name, t in tensors.items() if name.endswith("input_scale") and ".experts." in name}
    assert len(scales) == 2 * 4 * 3
    assert all(t.shape == (1,) and float(t) > 0 and bool(t.isfinite()) for t in scales.values())
    stack = octavo.load(report.folder).model.layers[1].mlp.experts.down_proj
    down = [scales[f"model.layers.1.mlp.experts.{e}.down_proj.input_scale"] for e in range(4)]
    assert torch.equal(stack.input_scale, torch.cat(down))
    assert verify(report.folder, run).ok
    with pytest.raises(ValueError, match="those of experts come from a calibration alone: give --calibration"):
        pack(run, tmp_path / "none", experts=True, layers={"*.experts.*": "static"})


def test_a_warm_up_leaves_experts_to_another_scheme(mixture, tmp_path, data, monkeypatch):
    options = PackOptions(experts=True, layers={"*.experts.*": "channel"})
    report = pack_frozen(mixture[0], tmp_path / "out", data, options, prompts=FEW)
    assert set(report.packed.values()) == {"static", "channel"}
    monkeypatch.setattr("octavo.packing.repacking._warm_up", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"those of experts come from a calibration alone: .*in place of --freeze"):
        pack_frozen(mixture[0], tmp_path / "other", data, PackOptions(experts=True))
