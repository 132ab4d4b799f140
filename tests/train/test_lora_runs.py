"""`octavo train --lora`: adapters of PEFT around the frozen weights of a folder, in BF16 or packed."""

import json
import re
import shutil

import peft
import pytest
import torch
from early_warning_examples import DOWN, event, layer_of
from safetensors.torch import load_file
from tiny_models import same_bits, with_slow
from transformers import AutoModelForCausalLM

import octavo
from octavo.checkpoint.files import ArtifactError
from octavo.integrations.peft import support
from octavo.train.config import ConfigError
from octavo.train.finished import open_run

IDS = torch.arange(32)[None] + 65
RATE = {"lora": 4, "learning_rate": 5e-3, "min_learning_rate": 5e-3, "warmup": 0}
FILES = ["adapter_config.json", "adapter_model.safetensors", "checksums.json", "optimizer.safetensors",
         "state.safetensors", "train.json"]  # fmt: skip


# Each kind of base: a model of `tiny_models`, and how it is packed. Llama has 14 linear layers below its head.
KIND = {"bf16": ("llama", {}), "packed": ("llama", {"scheme": "channel"}), "moe": ("qwen3moe", {}), "gpt": ("gpt2", {})}


@pytest.fixture(params=["bf16", "packed"])
def base(request, made):
    name, how = KIND[request.param]
    return made(name, **how)


def opened_by_peft(base, checkpoint):
    if "channel" in base.name:
        model = octavo.load(base)
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        octavo.convert(model)
    config = support(peft.LoraConfig.from_pretrained(checkpoint))
    return peft.PeftModel.from_pretrained(model, checkpoint, config=config).eval()


@torch.no_grad()
def logits(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=IDS).logits


def test_adapters_alone_train_and_peft_opens_them(begin, records, base, tmp_path):
    trainer = begin(model=str(base), steps=6, **RATE)
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 14
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())
    frozen = {name: t.clone() for name, t in trainer.model.state_dict().items() if name not in trained}
    trainer.run()
    losses = list(records(tmp_path / "run").values())
    assert losses[-1] < losses[0] - 0.05
    assert same_bits({name: trainer.model.state_dict()[name] for name in frozen}, frozen)
    checkpoint = tmp_path / "run" / "step-00000006"
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    theirs = opened_by_peft(base, checkpoint)
    assert torch.equal(logits(theirs), logits(trainer.model.eval()))
    assert torch.equal(logits(open_run(tmp_path / "run").model), logits(theirs))
    described = json.loads((checkpoint / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (4, 8, str(base))
    leaves = {name.rpartition(".")[2] for name in described["target_modules"]}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("base", with_slow(["bf16", "packed"], ("bf16",)), indirect=True)
def test_a_run_resumes_bit_for_bit(begin, go_on, records, base, tmp_path):
    how = RATE | {"accumulate": 2, "targets": ("q_proj", "0.mlp.up_proj"), "sample": 4}
    begin(model=str(base), out=str(tmp_path / "whole"), **how).run()
    begin(model=str(base), **how).run()
    shutil.rmtree(tmp_path / "run" / "step-00000008")
    trainer = go_on(tmp_path / "run")
    assert trainer.state.step == 4
    trainer.run()
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    found, whole = (tmp_path / run / "step-00000008" for run in ("run", "whole"))
    assert all((found / name).read_bytes() == (whole / name).read_bytes() for name in FILES)
    saved = {name.rpartition(".lora_")[0] for name in load_file(found / "adapter_model.safetensors")}
    layers = ["0.self_attn.q_proj", "1.self_attn.q_proj", "0.mlp.up_proj"]
    assert saved == {f"base_model.model.model.layers.{layer}" for layer in layers}
    with pytest.raises(ArtifactError, match="adapter_model.safetensors is of another model: .* must have shape"):
        go_on(tmp_path / "run", "--lora", "8", "--steps", "9")
    with pytest.raises(ArtifactError, match="holds adapters alone: keep the setting lora of its run"):
        go_on(tmp_path / "run", "--lora", "0", "--steps", "9", "--targets=")


def test_the_layer_within_adapters_is_promoted(begin, found, made):
    trainer = begin(model=str(made("llama")), **RATE, watch={"on_warning": "promote"})
    found(4, event(DOWN))
    trainer.run()
    assert layer_of(trainer.model).base_layer.recipe.name == "bf16"


@pytest.mark.parametrize("changes", [{"recipe": "bf16", "precision": "fp32"}, {"optimizer.weights": "bf16"}])
def test_it_learns_in_other_precisions(begin, records, eager, made, tmp_path, changes):
    begin(model=str(made("llama")), **RATE, **changes).run()
    losses = list(records(tmp_path / "run").values())
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which torch.compile hides otherwise
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_compute_the_same(begin, records, base, tmp_path, mode):
    compiled = {"compile.blocks": True, "compile.backend": "aot_eager", "activation_checkpointing.mode": mode}
    begin(model=str(base), out=str(tmp_path / "eager"), **RATE).run()
    begin(model=str(base), **RATE, **compiled).run()
    pairs = zip(records(tmp_path / "run").values(), records(tmp_path / "eager").values(), strict=True)
    assert all(abs(a - b) < 5e-3 for a, b in pairs)


REFUSED = [  # settings, the kind of base, and what the error says
    ({"model": "llama"}, "bf16", "lora 4 requires the weights of a Hugging Face folder; got model llama: give --model"),
    ({"lora": 0, "alpha": 8.0}, "bf16", "alpha 8.0 requires adapters; got lora 0: give a rank, as --lora 16"),
    ({"targets": ("q",)}, "bf16", "targets has 'q', and the linear layers are down_proj, gate_proj, k_proj"),
    ({"optimizer.offload": True}, "bf16", "optimizer.offload True requires a run that trains all weights; got lora 4"),
    ({"lora": 100_000}, "packed", "lora 100000 requires layers with as many features; got model.layers.0."),
    ({"recipe": "tensorwise"}, "packed", "its layers compute by its schemes: leave recipe, skip,"),
    ({}, "moe", "model.layers.0.mlp.experts (2 such modules) has stacked experts; PEFT would add"),
    ({"targets": ("c_attn",)}, "gpt", "lora requires an nn.Linear below the head, and this model has none: leave"),
]


@pytest.mark.parametrize(("changes", "base", "said"), REFUSED, indirect=["base"])
def test_what_makes_no_sense_is_refused(begin, base, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        begin(**{"model": str(base), "lora": 4} | changes)
    assert not (tmp_path / "run").exists()


def test_experts_stay_as_they_are_where_the_targets_say_so(begin, made):
    trainer = begin(model=str(made("qwen3moe")), targets=("q_proj", "o_proj"), **RATE)
    assert sum(p.requires_grad for p in trainer.model.parameters()) == 2 * 2 * 2
    trainer.run()
