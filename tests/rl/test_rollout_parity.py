"""How far a live engine is from the model in training: against transformers alone, and with planted faults."""

import math
from dataclasses import replace

import peft
import pytest
import torch
from ranks import run_ranks
from tiny_models import IDS, built
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.inference.transformers_cache import CACHE
from octavo.integrations.peft import support
from octavo.report.training_page import page_of_runs
from octavo.rl import DriftError, parity, push
from octavo.train.run_records import read_runs
from octavo.watching.storage import read_watch


def pair(made, recipe="rowwise", **settings):
    model = built("llama", seed=1).eval()
    for parameter in model.parameters():  # the rotary frequencies stay in float32, as in a model that is opened
        parameter.data = parameter.data.bfloat16()
    if recipe is not None:
        octavo.convert(model, recipe)
    served = octavo.load(made("llama", scheme="channel"), **settings)
    push(model, served)
    return model, served


def alone(found):
    return {name: kl for name, kl, _ in found.sources}


@torch.no_grad()
def test_the_numbers_are_those_of_transformers(made):
    """Against a decoding by hand, with transformers' own cache."""
    model, served = pair(made)
    found = parity(model, served, IDS)
    p, q, cache = model(IDS).logits[:, :-1].double().log_softmax(-1), [], None
    with torch.no_grad():
        for t in range(IDS.shape[1] - 1):
            out = served(IDS[:, t : t + 1], **{CACHE: cache}, use_cache=True)
            cache = out[CACHE]
            q.append(out.logits[:, -1].double().log_softmax(-1))
    theirs = torch.stack(q, 1)
    kl = float((p.exp() * (p - theirs)).sum(-1).mean())
    # Two attentions that round in another order, before a cast: of one size, and not the same.
    assert 0.3 * kl < found.kl < 3 * kl
    row, position, log_p, log_q = found.worst
    assert log_p == pytest.approx(float(p[row, position - 1, IDS[row, position]]))
    assert abs(log_p - log_q) > found.mean > 0
    assert found.tokens == IDS[:, 1:].numel()
    assert alone(found)["weights"] == alone(found)["attention"] == alone(found)["head"] == 0


def test_models_of_the_same_bits_have_no_sources(made):
    served = octavo.load(made("llama", scheme="channel"))
    other = octavo.load(made("llama", scheme="channel"))
    found = parity(served, other, IDS)
    assert found.first == ""
    assert set(alone(found).values()) - {alone(found)["sampling"]} == {0.0}
    assert found.kl == alone(found)["sampling"]
    one_byte(other)
    assert parity(served, other, IDS).first == "model.layers.1.mlp.down_proj"
    one_byte(other)
    served.octavo_engine = None
    del other.octavo_engine
    found = parity(served, other, IDS)
    assert (found.kl, found.mean, found.first) == (0.0, 0.0, "")


def one_byte(served):
    weight = served.model.layers[1].mlp.down_proj.weight.view(torch.uint8)
    weight[3, 5] ^= 0x70  # three bits of the exponent


@pytest.mark.parametrize(
    ("plant", "settings", "source", "detail"),
    [
        (one_byte, {}, "weights", "1 tensors differ, most model.layers.1.mlp.down_proj.weight, 1 of 32768"),
        (lambda served: served.set_attn_implementation("eager"), {}, "attention", "sdpa in training, eager in the"),
        (lambda served: None, {"head": "rowwise"}, "head", "in high precision in training, by channel in the"),
    ],
)
def test_a_planted_fault_is_named(made, plant, settings, source, detail):
    model, served = pair(made, **settings)
    before = alone(parity(model, served, IDS))
    plant(served)
    found = parity(model, served, IDS)
    if not settings:
        assert before[source] == 0
    assert alone(found)[source] > 0
    others = {"weights", "attention", "head"} - {source}
    assert all(alone(found)[name] == 0 for name in others)
    assert detail in next(said for name, _, said in found.sources if name == source)
    assert source in repr(found)
    with pytest.raises(DriftError, match="above 1e-12"):
        found.check(kl=1e-12)
    found.check(kl=1.0)


def test_experts_multiply_the_same_numbers(made):
    model, served = built("mixtral", seed=1).bfloat16().eval(), octavo.load(made("mixtral", experts=True))
    octavo.convert(model, "rowwise")
    push(model, served)
    assert ("weights", 0.0, "none: the same numbers") in parity(model, served, IDS).sources


@pytest.mark.parametrize("name", ["gemma2", "mistral", "deepseekv3"])  # a softcap, a window of 8 tokens, latents
def test_a_model_that_transformers_own_cache_serves(made, name):
    served, other = (octavo.load(made(name, scheme="channel")) for _ in range(2))
    found = parity(served, other, IDS)
    assert found.tokens == IDS[:, 1:].numel()
    assert found.kl == alone(found)["sampling"] < 0.01


def test_a_token_that_neither_model_gives(made):
    """Some models give the rest of a padded vocabulary the logit -inf."""
    model, served = pair(made)
    for each in (model, served):
        each.lm_head.bias = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
        each.lm_head.bias.data[255] = -torch.inf
    assert 0 < parity(model, served, IDS[:, IDS.ne(255).all(0)]).kl < 0.1


def test_a_weight_that_is_no_number_is_named(made):
    model, served = pair(made)
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    found = parity(model, served, IDS)
    assert "most model.layers.0.mlp.down_proj.weight, 256 of" in found.sources[0][2]  # its row
    with pytest.raises(DriftError, match="KL of training and sampling is nan"):
        found.check(kl=1.0)


def test_a_model_in_bf16_against_eight_bits(made):
    """The mismatch of the field: weights, and activations, differ everywhere."""
    model, served = pair(made, None)
    found = parity(model, served, IDS)
    assert alone(found)["weights"] > 1e-4
    assert alone(found)["activations"] > 1e-4
    assert found.kl > 1e-3
    assert "layers.0" in found.first
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), pair(made, None)[0].parameters(), strict=True))


def test_adapters_and_padding(made):
    model, served = pair(made)
    config = support(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    wrapped = peft.get_peft_model(model, config)
    push(wrapped, served)
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    found = parity(wrapped, served, {"input_ids": IDS, "attention_mask": mask})
    assert found.tokens == IDS[:, 6:].numel()
    assert 0 < found.kl < 0.5
    merged = parity(wrapped.merge_and_unload(), served, {"input_ids": IDS, "attention_mask": mask})
    assert alone(merged)["weights"] == 0


def test_what_parity_refuses(made):
    model, served = pair(made)
    with pytest.raises(ValueError, match="two tokens of each row"):
        parity(model, served, IDS[:, :1])
    with pytest.raises(ValueError, match=r"the trained model has no .*: load"):
        parity(served, built("qwen3").bfloat16(), IDS)
    with pytest.raises(TypeError, match="parity takes a model of transformers, got a Linear"):
        parity(torch.nn.Linear(2, 2), served, IDS)
    for name in ("bert", "t5"):
        with pytest.raises(ValueError, match=r"causal language models .*, got a (Bert|T5)"):
            parity(built(name), octavo.load(made(name, scheme="channel")), IDS)


def of_sharded(rank, folder):
    model = fully_shard(built("llama"))
    with pytest.raises(ValueError, match="parity takes") as error:
        parity(model, octavo.load(folder), IDS)
    return str(error.value)


def test_a_sharded_model_is_refused_on_every_rank(made):
    found = run_ranks(2, of_sharded, made("llama", scheme="channel"))
    assert found == ["parity takes a model that is not sharded: gather it on one device"] * 2


def test_drift_is_an_event_of_the_watch_and_in_the_report(made, tmp_path):
    model, served = pair(made)
    drifted = replace(parity(model, served, IDS), kl=0.5)
    assert drifted.event(3, kl=0.5) is None
    with octavo.watch(model.train(), folder=tmp_path / "run", interval=1) as watch:
        model(IDS, labels=IDS).loss.backward()
        watch.step()
        watch.write_event(drifted.event(1, kl=0.1))
    (event,) = (each for each in read_watch(tmp_path / "run").events if each.rule == "rollout_drift")
    assert (event.step, event.value, event.limit) == (1, 0.5, 0.1)
    page = page_of_runs(read_runs([tmp_path / "run"]))
    assert "KL of training and sampling is 0.5 nats a token, above 0.1" in repr(page)
    assert replace(drifted, kl=math.nan).event(2, kl=0.1) is not None
