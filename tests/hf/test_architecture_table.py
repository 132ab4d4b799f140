"""The table of architectures: a new record is all that convert, fusion, fold, pack and plan need for its layers."""

import pytest
import torch
import transformers
from tiny_models import SIZES
from torch import nn
from transformers.models.llama import modeling_llama as llama

import octavo
from octavo.architectures import ARCHITECTURES, LLAMA, Architecture
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.scheme import groups
from octavo.nn.fused_modules import DecoderLayer
from octavo.packing import pack
from octavo.packing.transforms import fold
from octavo.plan.model_shape import describe_architecture

NAMES = (*(f"self_attn.{leaf}_proj" for leaf in "qkvo"), *(f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")))


class ToyConfig(transformers.LlamaConfig):
    model_type = "toy"


class ToyForCausalLM(transformers.LlamaForCausalLM):
    """A Llama whose classes have other names, as a library of models adds an architecture."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        renamed = {
            cls: type(cls.__name__.replace("Llama", "Toy"), (cls,), {"__module__": cls.__module__})
            for cls in (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm)
        }
        for module in self.modules():
            module.__class__ = renamed.get(type(module), type(module))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.double()(torch.arange(1, 33)[None]).logits


def test_groups():
    assert groups([f"a.{name}" for name in NAMES]) == [
        tuple(f"a.self_attn.{p}_proj" for p in "qkv"),
        ("a.self_attn.o_proj",),
        ("a.mlp.gate_proj", "a.mlp.up_proj"),
        ("a.mlp.down_proj",),
    ]
    assert groups(["0.q_proj", "1.q_proj", "0.k_proj"]) == [("0.q_proj", "0.k_proj"), ("1.q_proj",)]
    assert groups(["a.value", "a.output", "a.key"]) == [("a.value", "a.key"), ("a.output",)]


def test_an_architecture_is_one_record(tmp_path, monkeypatch):
    """It is converted, fused, folded, planned, packed and loaded, served fused; without the record most is not."""
    monkeypatch.setattr(transformers, "ToyForCausalLM", ToyForCausalLM, raising=False)
    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "toy", ToyConfig)
    monkeypatch.setitem(transformers.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, ToyConfig, ToyForCausalLM)
    config = ToyConfig(**SIZES, architectures=["ToyForCausalLM"])
    ToyForCausalLM(config).save_pretrained(tmp_path / "toy")

    def made() -> nn.Module:
        return ToyForCausalLM.from_pretrained(tmp_path / "toy")

    assert not octavo.convert(made()).fused
    with pytest.raises(ArtifactError, match="ToyForCausalLM cannot be folded"):
        fold(tmp_path / "toy", tmp_path / "folded", rotate=True)
    with pytest.raises(ValueError, match="model_type must be one of"):
        describe_architecture("toy", config.to_dict())

    monkeypatch.setitem(ARCHITECTURES, "Toy", Architecture("Toy", "toy", LLAMA, fusable=True))
    report = octavo.convert(made())
    assert len(report.converted) == 14
    assert set(report.fused) == {f"model.layers.{i}.{part}" for i in range(2) for part in ("qkv", "mlp")}

    fold(tmp_path / "toy", tmp_path / "folded", rotate=True, dtype="float32")
    folded = ToyForCausalLM.from_pretrained(tmp_path / "folded")
    torch.testing.assert_close(logits(folded), logits(made()), rtol=0, atol=1e-5)
    assert not torch.equal(folded.lm_head.weight, made().get_parameter("lm_head.weight"))

    assert describe_architecture("toy", config.to_dict()).parameters == sum(p.numel() for p in made().parameters())

    pack(tmp_path / "toy", tmp_path / "packed")
    assert isinstance(octavo.load(tmp_path / "packed").get_submodule("model.layers.0"), DecoderLayer)
