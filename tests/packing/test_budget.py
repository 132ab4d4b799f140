"""What a budget keeps in BF16, and whether the packed folder then holds it, measured here with scipy's KL."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch
from calibration_examples import whole_model, write_data, write_model
from packed_examples import lively, write_run
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.calibration import calibrate
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.evaluation.metrics import Budget
from octavo.evaluation.prompts import PromptOptions, read_prompts
from octavo.hf.source import open_source
from octavo.inference.opening import load_packed
from octavo.models import GPT2, GPT2Config
from octavo.models.tokenizer import open_tokenizer
from octavo.ops import quantize, scaled_mm
from octavo.packing import PackOptions, pack, pack_within
from octavo.packing.budget import PartlyPackedModel

SENSITIVE = "model.layers.1.mlp.down_proj"
KL = [Budget("kl", 0.01)]
FEW, MANY = PromptOptions(10, 40), PromptOptions(32, 40)


def quiet(folder: Path) -> Path:
    """A model that packing hardly changes, but for one layer, with a weight beside which all others are too small."""
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    for name, tensor in tensors.items():
        if "_proj" in name and tensor.ndim == 2:
            tensor.copy_(torch.randn_like(tensor) * (8 if name == f"{SENSITIVE}.weight" else 0.02))
    hard = tensors[f"{SENSITIVE}.weight"]
    hard[:, 0] = 8e6  # of every row; what it is multiplied by is 0
    tensors["model.layers.1.mlp.up_proj.weight"][0] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return quiet(write_model(tmp_path_factory.mktemp("budget") / "llama", "llama"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


def prompts(folder: Path, data: list[str], samples: int) -> list[Tensor]:
    found = read_prompts(data, open_tokenizer(folder), PromptOptions(samples, 40))
    return [torch.tensor([ids]) for ids in found.ids if len(ids) > 1]


@torch.no_grad()
def log_p(model, ids: Tensor) -> np.ndarray:
    out = model(ids)
    return scipy.special.log_softmax((out if isinstance(out, Tensor) else out.logits).double().numpy(), axis=-1)


def measure(source, packed: Path, texts: list[Tensor]) -> tuple[float, float]:
    """KL in nats a token, and the change of perplexity, with a model of the caller's, one prompt at a time."""
    loaded = load_packed(packed).model
    kl, change, tokens, targets = 0.0, 0.0, 0, 0
    for ids in texts:
        p, q = log_p(source, ids), log_p(loaded, ids)
        kl += float((np.exp(p) * (p - q)).sum())
        tokens += ids.numel()
        after = ids[0, 1:].numpy()
        change += float((p - q)[0, np.arange(len(after)), after].sum())
        targets += len(after)
    return kl / tokens, math.exp(change / targets) - 1


def test_the_planted_layer_stays_and_no_other(tmp_path, model, data):
    seen, out = [], tmp_path / "out"
    report, kept = pack_within(model, out, KL, data, prompts=MANY, progress=lambda *done: seen.append(done))
    assert kept.skip == [SENSITIVE]
    assert SENSITIVE not in report.packed
    assert len(report.packed) == 3 * 7 - 1
    texts = prompts(model, data, 32)
    source = whole_model(model)
    kl, _ = measure(source, out, texts)
    assert kl <= 0.01
    assert kl == pytest.approx(kept.quality.kl.value, rel=0.2)  # what is loaded rounds a norm's output elsewhere
    pack(model, tmp_path / "all")
    everything, _ = measure(source, tmp_path / "all", texts)
    assert everything > 0.02
    assert everything == pytest.approx(kept.all_packed.kl.value, rel=0.2)
    assert kept.ranking[0].layers == (SENSITIVE,)
    assert kept.ranking[0].harm == pytest.approx(everything, rel=0.5)
    assert {doing for _, _, doing in seen} == {"packing", "measuring each group", "measuring the whole"}
    assert all(0 < done <= total for done, total, _ in seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "out"]
    record = json.loads((out / "octavo.json").read_text())["budget"]
    (limit,) = record["limits"]
    assert (limit["measure"], limit["limit"]) == ("kl", 0.01)
    assert limit["measured"] == kept.quality.kl.value <= 0.01 < limit["with_all_packed"]
    assert f"on 32 prompts: kl {limit['measured']:.3g}." in (out / "README.md").read_text()
    assert record["kept_in_bf16"] == [[SENSITIVE]]
    assert len(record["groups"]) == 3 * 4
    chosen = read_prompts(data, open_tokenizer(model), MANY)
    assert record["data"]["fingerprint"] == chosen.fingerprint
    assert record["data"]["tokens"] == sum(len(ids) for ids in chosen.ids if len(ids) > 1)
    assert SENSITIVE in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]


def test_keys_and_values_in_eight_bits_count(tmp_path, data):
    """But for no group by itself: they are as far off whichever layers are packed."""
    source = write_model(tmp_path / "llama", "llama")
    calibrate(source, data, tmp_path / "c", prompts=PromptOptions(8, 40))
    loose = Budget("kl", 9)
    _, plain = pack_within(source, tmp_path / "plain", [loose], data, prompts=FEW)
    options = PackOptions(calibration=tmp_path / "c", kv_cache="fp8")
    _, cached = pack_within(source, tmp_path / "cached", [loose], data, options, prompts=FEW)
    assert cached.quality.kl.value > 1.02 * plain.quality.kl.value
    assert [group.harm for group in cached.ranking] == [group.harm for group in plain.ranking]


def test_a_run_of_gpt2_within_a_budget(tmp_path, data):
    gpt2 = lively(GPT2(GPT2Config(256, 2, 64, 4, 48)))
    run = write_run(tmp_path / "run", gpt2, gpt2.config.to_hf(), model="gpt2")
    _, loose = pack_within(run, tmp_path / "all", [Budget("kl", 99)], data, prompts=FEW)
    limit, texts = loose.all_packed.kl.value / 10, prompts(run / "model", data, 10)
    budgets = [Budget("ppl", 9), Budget("kl", limit)]  # the first holds at once
    report, kept = pack_within(run, tmp_path / "out", budgets, data, prompts=FEW)
    assert 1 < kept.kept < 8  # groups: q, k and v are one
    assert kept.quality.kl.value <= limit
    assert all(len({layer in report.packed for layer in group.layers}) == 1 for group in kept.ranking)
    fewer = [layer for group in kept.ranking[: kept.kept - 1] for layer in group.layers]
    pack(run, tmp_path / "fewer", skip=fewer)
    (kl, change), (too_far, _) = (measure(gpt2.bfloat16(), tmp_path / name, texts) for name in ("out", "fewer"))
    assert kl == pytest.approx(kept.quality.kl.value, rel=0.2)
    assert change == pytest.approx(kept.quality.perplexity_ratio.value, abs=0.01)  # BF16, summed in another order
    assert too_far > 0.9 * limit


@pytest.mark.parametrize("scheme", ["tensor", "static"])
def test_other_schemes_and_a_glob_that_is_left_with_nothing(tmp_path, model, data, scheme):
    calibration = tmp_path / "calibrated" if scheme == "static" else None
    if calibration:
        calibrate(model, data, calibration, prompts=PromptOptions(10, 24))
    skip = ["*.o_proj"]
    options = PackOptions(scheme=scheme, calibration=calibration, layers={SENSITIVE: "channel"}, skip=skip)
    report, kept = pack_within(model, tmp_path / "out", KL, data, options, prompts=FEW)
    assert SENSITIVE in kept.skip
    assert Counter(report.packed.values())[scheme] == 3 * 6 - len(kept.skip)
    assert len(kept.ranking) == 3 * 3
    kl, _ = measure(whole_model(model), tmp_path / "out", prompts(model, data, 10))
    assert kl == pytest.approx(kept.quality.kl.value, rel=0.2)


def test_what_cannot_be_held(tmp_path, model, data):
    bert = write_model(tmp_path / "bert", "bert")
    (tmp_path / "short.jsonl").write_text('{"text": "a"}')
    short = [str(tmp_path / "short.jsonl")]
    zero = [Budget("kl", 0.0)]
    for source, budgets, texts, message in (
        (model, zero, data, r"the budget kl=0 leaves nothing to pack: with every layer packed it is kl=0\.\d"),
        (bert, KL, data, "kl and ppl are for language models, those of cosine for encoders.*an encoder"),
        (model, KL, short, "every prompt is one token long"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_within(source, tmp_path / "out", budgets, texts, prompts=FEW)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError):
        pack_within(model, tmp_path / "out", KL, data)


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["channel", "mx", "block"])
def test_what_is_measured_is_what_the_folder_gives(tmp_path, scheme):
    """To the bit, for each combination of layers: against the packed layers put into the model one by one, here."""
    layout = "fp8" if scheme == "block" else "compressed-tensors"
    source = write_model(tmp_path / "llama", "llama", hidden_size=128, intermediate_size=128, num_key_value_heads=4)
    pack(source, tmp_path / "packed", scheme=scheme, layout=layout)
    switched = PartlyPackedModel(open_source(source), PackOptions(scheme=scheme, layout=layout), "cpu")
    plain, packed = whole_model(source), whole_model(source)
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(switched.run(ids), plain(ids).logits)
    tensors = PackedTensors(tmp_path / "packed")
    layer = packed.get_submodule(SENSITIVE)
    layer.forward = lambda x: by_hand(x, tensors.weight(SENSITIVE), tensors.packing.schemes[SENSITIVE])
    found, truth = switched.run(ids, {SENSITIVE}), packed(ids).logits
    assert torch.equal(found, truth)
    assert not torch.equal(found, plain(ids).logits)
    assert torch.equal(switched.run(ids), plain(ids).logits)
    weight = 128 * 128
    assert switched.saved[SENSITIVE] == weight - {"channel": 128 * 4, "mx": weight // 32, "block": 4}[scheme]


def by_hand(x: Tensor, weight, scheme) -> Tensor:
    x_q = quantize(x.flatten(0, 1), scheme.inputs)
    return scaled_mm(x_q, weight, out_dtype=x.dtype, fast_accumulation=True).view(*x.shape[:-1], -1)


# ---- A budget measured on a GPU, by its FP8 GEMMs, against the same on the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["channel", "tensor"])
def test_a_gpu_measures_what_a_cpu_does(tmp_path, scheme):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    source = write_model(tmp_path / "llama", "llama", **sizes)
    data = write_data(tmp_path / "data.jsonl")
    options = PackOptions(scheme=scheme)
    _, free = pack_within(source, tmp_path / "free", [Budget("kl", 99)], data, options, prompts=MANY)
    budget = Budget("kl", free.all_packed.kl.value / 2)
    _, cpu = pack_within(source, tmp_path / "cpu", [budget], data, options, prompts=MANY)
    _, cuda = pack_within(source, tmp_path / "cuda", [budget], data, options, prompts=MANY, device="cuda")
    assert cuda.quality.kl.value <= budget.limit < cuda.all_packed.kl.value
    assert cuda.all_packed.kl.value == pytest.approx(cpu.all_packed.kl.value, rel=0.2)
    harms = {group.layers: group.harm for group in cpu.ranking}
    for group in cuda.ranking:
        assert group.harm == pytest.approx(harms[group.layers], rel=0.5)
    assert {g.layers for g in cuda.ranking[:2]} & {g.layers for g in cpu.ranking[:3]}
