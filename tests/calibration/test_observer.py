"""Sites: which there are, what passes them, and a model run in parts against the model run at once."""

import pytest
import torch
import transformers
from calibration_examples import MODELS, watch_whole, whole_model, write_model
from torch import nn

from octavo.artifact.files import ArtifactError
from octavo.calibration.observer import Observer, check_seen
from octavo.hf.block_by_block import BlockModel
from octavo.nn import select_linears

KINDS = ["gpt2", *MODELS]


def some_batches():
    torch.manual_seed(4)
    return [torch.randint(0, 256, shape) for shape in ((3, 17), (2, 17), (1, 9), (1, 1))]


def in_parts(folder, batches):
    """Everything that an observer sees of a model that runs block by block, and what the last block returns."""
    parts = BlockModel(folder, "cpu")
    linears = [layer.name for layer in select_linears(parts.model) if not layer.reason]
    observer = Observer(parts.model, linears)
    with observer.watch(), parts.loaded_frame():
        hidden = [parts.embed(ids, observer.looking) for ids in batches]
        for i in range(len(parts.blocks)):
            with parts.loaded_block(i):
                hidden = [parts.run_block(i, ids, h, observer.looking) for ids, h in zip(batches, hidden, strict=True)]
        for ids, h in zip(batches, hidden, strict=True):
            parts.finish(ids, h, observer.looking)
    found = observer.take()
    check_seen(found, linears, "the model")
    return found, linears


@pytest.mark.parametrize("kind", KINDS)
def test_parts_see_what_the_whole_model_sees(kind, tmp_path):
    folder, batches = write_model(tmp_path / kind, kind), some_batches()
    found, linears = in_parts(folder, batches)
    whole = watch_whole(whole_model(folder), batches)
    for site, observed in found.items():
        if observed.kind in ("input", "norm"):
            tensors = whole[site]
            assert observed.statistics.amax == max(t.float().abs().max().item() for t in tensors), site
            assert observed.statistics.history == [t.float().abs().max().item() for t in tensors]
            assert observed.statistics.tokens == sum(t.numel() // t.shape[-1] for t in tensors)
            assert all(len(whole[f"{layer}.input"]) == len(batches) for layer in observed.layers)
    read = [layer for observed in found.values() for layer in observed.layers]
    assert sorted(read) == sorted(linears)
    norms = {site for site in whole if site.endswith(".output")}
    assert {site for site, observed in found.items() if observed.kind == "norm"} == norms


def test_attention_gets_rotated_queries_and_keys(tmp_path):
    folder, batches = write_model(tmp_path / "qwen3", "qwen3"), some_batches()[:2]
    found, _ = in_parts(folder, batches)
    model = whole_model(folder)
    attention = model.model.layers[1].self_attn
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention

    def sdpa(q, k, v, **kwargs):
        calls.append((q, k, v))
        return real(q, k, v, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
        whole = watch_whole(model, batches)
    for position, letter in enumerate("qkv"):
        statistics = found[f"model.layers.1.self_attn.{letter}"].statistics
        tensors = [call[position].float().abs() for call in calls[1::3]]
        heads = 2 if letter in "kv" else 4
        assert statistics.channel_amax.shape == (heads * attention.head_dim,)
        assert statistics.history == [t.max().item() for t in tensors]
        by_head = torch.stack([t.amax(dim=(0, 2)) for t in tensors]).amax(0)
        assert torch.equal(statistics.channel_amax.view(heads, -1), by_head)
    unrotated = max(t.float().abs().max().item() for t in whole["model.layers.1.self_attn.k_norm.output"])
    assert found["model.layers.1.self_attn.k"].statistics.amax != unrotated
    assert [found[f"model.layers.1.self_attn.{x}"].kind for x in "qkv"] == ["query", "key", "value"]


@pytest.mark.parametrize(
    ("kind", "site", "layers"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.input", ["q_proj", "k_proj", "v_proj"]),
        ("mistral", "model.layers.0.mlp.gate_proj.input", ["gate_proj", "up_proj"]),
        ("llama", "model.layers.2.mlp.down_proj.input", ["down_proj"]),
        ("opt", "model.decoder.layers.0.self_attn.q_proj.input", ["q_proj", "k_proj", "v_proj"]),
        ("bert", "encoder.layer.1.attention.self.query.input", ["query", "key", "value"]),
        ("bert", "pooler.dense.input", ["dense"]),
    ],
)
def test_layers_that_read_one_tensor_share_a_site(kind, site, layers, tmp_path):
    found, _ = in_parts(write_model(tmp_path / kind, kind), some_batches()[:2])
    prefix = site.removesuffix(".input").rpartition(".")[0]
    assert found[site].layers == [f"{prefix}.{layer}" for layer in layers]
    assert all(f"{layer}.input" not in found for layer in found[site].layers[1:])


def test_equal_tensors_that_are_not_the_same_keep_their_sites(tmp_path):
    model = nn.Module()
    model.a, model.b, model.c = (nn.Linear(4, 4) for _ in range(3))
    observer = Observer(model, ["a", "b", "c"])
    x = torch.randn(2, 4)
    observer._looking = True
    with torch.no_grad():
        observer._see_input("a", x)
        observer._see_input("b", x.clone())
        x.mul_(2)
        observer._see_input("c", x)
    found = observer.take()
    assert {site: o.layers for site, o in found.items()} == {"a.input": ["a"], "b.input": ["b"], "c.input": ["c"]}
    assert found["c.input"].statistics.amax == 2 * found["a.input"].statistics.amax


def test_the_watch_leaves_nothing_behind(tmp_path):
    model = whole_model(write_model(tmp_path / "llama", "llama"))
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, ids = set(functions), torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        observer = Observer(model, ["model.layers.0.mlp.up_proj"])
        with observer.watch():
            model(ids)
        assert observer.take() == {}  # not looking
        with observer.watch(), observer.looking():
            assert torch.equal(model(ids).logits, expected)
        assert "model.layers.0.mlp.up_proj.input" in observer.take()
        with pytest.raises(KeyError), observer.watch():
            raise KeyError
        assert torch.equal(model(ids).logits, expected)
    assert set(functions) == before
    assert model.config._attn_implementation == "sdpa"
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_layer_without_tokens_is_named():
    found, linears = {}, ["block.0.expert.3", "block.0.expert.4"]
    with pytest.raises(
        ValueError, match=r"block\.0\.expert\.3 saw no token in all of the data \(2 layers of block 0\)"
    ):
        check_seen(found, linears, "block 0")


def test_only_the_frame_and_one_block_have_numbers(tmp_path):
    parts = BlockModel(write_model(tmp_path / "llama", "llama"), "cpu")

    def real() -> set[str]:
        return {name for name, p in parts.model.named_parameters() if not p.is_meta}

    assert real() == set()
    with parts.loaded_frame():
        assert real() == {"model.embed_tokens.weight", "model.norm.weight"}
        with parts.loaded_block(1):
            names = real() - {"model.embed_tokens.weight", "model.norm.weight"}
            assert len(names) == 9
            assert all(name.startswith("model.layers.1.") for name in names)
    assert real() == set()


@pytest.mark.parametrize(
    ("cls", "config", "message"),
    [
        ("OpenAIGPTLMHeadModel", transformers.OpenAIGPTConfig(n_embd=8, n_layer=1, n_head=1), "its layers are Conv1D"),
        (
            "BartForConditionalGeneration",
            transformers.BartConfig(vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1,
                                    encoder_attention_heads=1, decoder_attention_heads=1),
            "it has an encoder and a decoder",
        ),
        (
            "GptOssForCausalLM",
            transformers.GptOssConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                      num_key_value_heads=1, num_local_experts=4, vocab_size=9),
            r"its experts are one tensor \(model\.layers\.0\.mlp\.experts.* that Octavo does not know",
        ),
    ],
)  # fmt: skip
def test_what_is_not_supported_says_so(cls, config, message, tmp_path):
    config.architectures = [cls]
    config.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=f"config.json: {cls} cannot be calibrated, {message}.*Llama, Mistral"):
        BlockModel(tmp_path, "cpu")


def test_descriptions_that_cannot_be_followed(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        BlockModel(tmp_path, "cpu")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ArtifactError, match="calibrate the BF16 model that it was packed from"):
        BlockModel(tmp_path, "cpu")
