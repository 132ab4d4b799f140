"""What `fp8_all_gather` reports, and what it refuses."""

from typing import Any

import pytest
import torch
from fsdp_examples import batch, blocks, equal, sharded, train
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo import models
from octavo.dist import GatherReport, GatherRow, fp8_all_gather
from octavo.dist.fsdp_units import reducing_units, sharded_weights


def made(recipe: str = "rowwise", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = blocks()
    octavo.convert(model, recipe, **options)
    return model


def refused(model: nn.Module, *inputs: Tensor) -> str:
    """The error of `fp8_all_gather`, or of the forward pass of `inputs`."""
    with pytest.raises(ValueError) as error:  # noqa: PT011, the caller compares the message
        model(*inputs) if inputs else fp8_all_gather(model)
    return str(error.value)


def wide_settings() -> dict[str, dict[str, Any]]:
    """Settings of FSDP2 in which the weights are gathered wide."""
    return {
        "dimension": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None},
        "offloads": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }


def hugging_face() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2))


def reports(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {"train": {}, "reasons": {}}
    for name, options in wide_settings().items():
        model = sharded(made(), **options)
        report = fp8_all_gather(model)
        results["reasons"][name] = (len(report.gathered), *set(report.wide.values()))
        results["train"][name] = equal(train(made()), train(model))

    unit: Any = made()
    for block in unit:
        fully_shard(block.left)
        fully_shard(block.mlp.down_proj)
        fully_shard(block)
    report = fp8_all_gather(unit)
    results["unfused"] = dict(report.unfused)
    results["text"] = str(report)
    unit(batch()).sum().backward()

    model = hugging_face()
    fully_shard(model.model.layers[0].self_attn)
    fully_shard(model.model.layers[0])
    fully_shard(model)
    octavo.convert(model)  # after fully_shard: the layers are no units of their own
    report = fp8_all_gather(model)
    results["attention"] = (dict(report.unfused), len(report.gathered))
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    return results


def test_what_is_gathered_wide_and_what_is_not_fused() -> None:
    for results in run_ranks(2, reports):
        assert all(results["train"].values()), results
        assert {name: found[0] for name, found in results["reasons"].items()} == {"dimension": 0, "offloads": 0}
        for name, (_, reason) in results["reasons"].items():
            assert name in reason
        assert results["unfused"] == {
            "0.left": "0.both", "1.left": "1.both", "0.mlp.down_proj": "0.mlp", "1.mlp.down_proj": "1.mlp",
        }  # fmt: skip
        assert "not fused: 0.both, since 0.left is a unit of FSDP's" in results["text"]
        assert results["attention"] == ({"model.layers.0.self_attn": "model.layers.0.qkv"}, 7)


def neighbours(rank: int) -> dict[str, Any]:
    """Two blocks that `fully_shard` takes as a list, which FSDP2 gathers and reduces together."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    pair: Any = made()
    fully_shard([*pair], mp_policy=policy)
    fully_shard(pair, mp_policy=policy)
    report = fp8_all_gather(pair)
    units = {unit.unit for unit in sharded_weights(pair).values()}
    groups = {unit.group for unit in sharded_weights(pair).values()}
    reducing = len(reducing_units(pair))
    same = equal(train(made()), train(pair))
    return {"report": report, "units": units, "groups": len(groups), "reducing": reducing, "same": same}


def test_a_list_of_modules_is_one_unit() -> None:
    for found in run_ranks(2, neighbours):
        assert not found["report"].wide
        assert not found["report"].unfused
        assert found["units"] == {"0", "1"}
        assert found["groups"] == found["reducing"] == 1
        assert found["same"]


def errors(rank: int) -> dict[str, str]:
    apart: Any = models.build(models.LlamaConfig(40, layers=1, width=32, heads=2, kv_heads=2, mlp_width=48, context=8))
    octavo.convert(apart)
    fully_shard(apart.model.layers[0].self_attn)  # its block reads q, k and v
    fully_shard(apart)
    ran = sharded(made())
    ran(batch())
    changed, restored, delayed = sharded(made()), sharded(made()), sharded(made("delayed"))
    for model in (changed, restored, delayed):
        fp8_all_gather(model)
    octavo.convert(changed, "tensorwise")
    octavo.restore(restored)
    octavo.convert(delayed, "delayed")  # with new histories
    return {
        "converted again": refused(changed, batch()),
        "new histories": refused(delayed, batch()),
        "restored": refused(restored, batch()),
        "not converted": refused(sharded(blocks())),
        "BF16": refused(sharded(made("bf16"))),
        "not sharded": refused(made()),
        "has run": refused(ran),
        "apart": refused(apart),
    }


def test_a_model_that_is_not_ready_is_refused() -> None:
    for messages in run_ranks(2, errors):
        assert "unit '0' was converted to tensorwise after fp8_all_gather" in messages["converted again"]
        assert "unit '0' was converted to delayed after fp8_all_gather" in messages["new histories"]
        assert "unit '0' was restored after fp8_all_gather" in messages["restored"]
        assert "octavo.convert" in messages["not converted"]
        assert "octavo.convert" in messages["BF16"]
        assert "call fully_shard" in messages["not sharded"]
        assert "before the first forward pass" in messages["has run"]
        assert "model.layers.0.qkv reads the weight of model.layers.0.self_attn.q_proj" in messages["apart"]
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module"):
        fp8_all_gather(Tensor())  # type: ignore[arg-type]


def test_the_report_has_a_line_for_each_reason() -> None:
    rows = (GatherRow("a", "fp8"), *(GatherRow(name, "wide", "too far") for name in "bcdef"))
    report = GatherReport(rows, {"x": "norm", "y": "norm"})
    assert str(report).splitlines() == [
        "FP8 all-gather: 1 weight in eight bits, 5 wide",
        "  5 wide: too far (b, c, d and 2 more)",
        "  not fused: norm, since x, y are units of FSDP's: shard the block that holds it instead",
    ]
