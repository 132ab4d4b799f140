"""Streaming statistics against the same numbers computed at once, and the sites of a model, experts among them."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from calibration_examples import whole_model, write_model
from safetensors.torch import load_file
from tiny_models import make_model
from torch import Tensor, nn

from octavo.calibration import calibrate
from octavo.calibration.site_statistics import BINS, OUTLIER_MULTIPLE, PERCENTILES, Observer, Statistics
from octavo.checkpoint.files import ArtifactError
from octavo.evaluation.prompts import PromptOptions, read_prompts
from octavo.hf.block_by_block import BlockModel
from octavo.hf.source import open_source
from octavo.models.tokenizer import open_tokenizer

BOUND = 2.0**-8  # what the module promises of percentiles; the issue asks for 1%


def drifting(samples: int, dtype: torch.dtype) -> list[Tensor]:
    """A stream whose range wanders over ten octaves, with outliers, and with the largest value in its middle."""
    torch.manual_seed(3)
    size = 2.0 ** (5 * torch.sin(torch.arange(samples) / 40))
    stream = [(torch.randn(1 + i % 7, 24) * size[i]).to(dtype) for i in range(samples)]
    stream[samples // 2][0, 5] = 6789.125
    return stream


def seen(stream: list[Tensor]) -> Statistics:
    statistics = Statistics("a.site")
    for x in stream:
        statistics.update(x)
    return statistics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_of_512_samples_with_a_drifting_range(dtype):
    stream = drifting(512, dtype)
    statistics, whole = seen(stream), torch.cat(stream).double().abs()
    assert statistics.tokens == len(whole)
    assert statistics.amax == whole.max().item()
    assert torch.equal(statistics.channel_amax.double(), whole.amax(0))
    assert statistics.history == [float(x.double().abs().max()) for x in stream]
    assert statistics.scale("amax").item() == pytest.approx(whole.max().item() / 448, rel=2**-23)
    for percent in (0.0, 12.5, 50.0, *PERCENTILES, 100.0):
        true = torch.quantile(whole.flatten(), percent / 100).item()
        assert statistics.percentile(percent) == pytest.approx(true, rel=BOUND if dtype == torch.float32 else 1e-12)


def test_outlier_channels():
    x = torch.randn(500, 40)
    x[:, 7] *= 60
    x[3, 31] = -OUTLIER_MULTIPLE * 20
    statistics = Statistics("s").update(x)
    assert statistics.outlier_channels().tolist() == [7, 31]
    assert statistics.outlier_channels(1000.0).tolist() == []


def test_merging_is_seeing_one_after_the_other():
    stream = drifting(60, torch.bfloat16)
    whole, merged = seen(stream), Statistics("a.site")
    for part in (stream[:17], [], stream[17:18], stream[18:]):
        other = Statistics.from_tensors("a.site", seen(part).to_tensors(), "input", [])
        assert len(other._counts) < BINS / 8  # as read from a file: a mixture of 128 experts has 10,000 sites
        before = {name: t.clone() for name, t in other.to_tensors().items()}
        merged.merge(other)
        assert all(torch.equal(t, before[name]) for name, t in other.to_tensors().items())
    for name, tensor in whole.to_tensors().items():
        assert torch.equal(merged.to_tensors()[name], tensor)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inf_and_nan_name_the_site_and_change_nothing(bad, dtype):
    statistics = Statistics("model.layers.3.mlp.down_proj.input").update(torch.ones(2, 8))
    x = torch.randn(3, 5, 8).to(dtype)
    x[1, 2, 6] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.down_proj\.input: channel 6 holds inf or NaN"):
        statistics.update(x)
    assert (statistics.tokens, statistics.amax) == (2, 1.0)
    statistics.update(torch.full((1, 8), 3.4e38))  # beyond BF16, and finite
    assert statistics.amax == torch.tensor(3.4e38).item()
    assert statistics.percentile(100) == pytest.approx(3.4e38, rel=BOUND)


@pytest.mark.parametrize("rule", ["amax", "percentile", "mse"])
def test_scales_are_never_nan_or_zero(rule):
    for x in (torch.zeros(4, 4), torch.full((4, 4), 1e-40), torch.full((4, 4), 3.3e38), torch.randn(4, 4)):
        scale = Statistics("s").update(x).scale(rule)
        assert (scale.ndim, scale.dtype) == (0, torch.float32)
        assert 0 < scale < torch.inf


SPARSE = torch.eye(100)[:, :1]  # one of 100 is not 0
REFUSED = [
    *[
        (lambda s, ask=ask: ask(s.update(torch.empty(0, 16))), r"a\.site saw no token")
        for ask in (
            lambda s: s.amax, lambda s: s.percentile(99.9), lambda s: s.outlier_channels(), lambda s: s.scale(),
            lambda s: s.scale("mse"),
        )
    ],
    (lambda s: s.update(SPARSE).scale("percentile", 98.9), "take a higher percentile"),
    (lambda s: s.update(SPARSE).scale("entropy"), "choose one of amax, percentile, mse"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "message"), REFUSED)
def test_what_statistics_refuse(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(Statistics("a.site"))


def test_the_mse_scale_is_the_best_of_its_grid():
    torch.manual_seed(5)
    x = (1.06 + 0.05 * torch.randn(400, 32)).bfloat16()  # most of it just above a power of two, once scaled by amax
    x[0, 0] = 7.0
    statistics = Statistics("s").update(x)

    def error(scale: float) -> float:
        q = (x.double() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        return float((q - x.double()).square().mean())

    grid = [7 / 448 * 2 ** (-i / 8) for i in range(41)]
    best = min(grid, key=error)
    assert statistics.scale("mse").item() == pytest.approx(best, rel=1e-6)
    assert error(best) < error(grid[0])


# ---- Observing a model


def test_equal_tensors_that_are_not_the_same_keep_their_sites(tmp_path):
    model = nn.Module()
    model.a, model.b, model.c = (nn.Linear(4, 4) for _ in range(3))
    observer = Observer(model, ["a", "b", "c"], {})
    x = torch.randn(2, 4)
    observer._looking = True
    with torch.no_grad():
        observer._before_linear("a", model.a, (x,), {})
        observer._before_linear("b", model.b, (x.clone(),), {})
        x.mul_(2)
        observer._before_linear("c", model.c, (x,), {})
    found = observer.take()
    assert {site: o.layers for site, o in found.items()} == {"a.input": ["a"], "b.input": ["b"], "c.input": ["c"]}
    assert found["c.input"].amax == 2 * found["a.input"].amax


def test_the_watch_leaves_nothing_behind(tmp_path):
    model = whole_model(write_model(tmp_path / "llama", "llama"))
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, ids = set(functions), torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        observer = Observer(model, ["model.layers.0.mlp.up_proj"], {})
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


TINY = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 9}
ONE_EACH = {
    "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        ("OpenAIGPTLMHeadModel", {"n_embd": 8, "n_layer": 1, "n_head": 1}, "its layers are Conv1D"),
        ("BartForConditionalGeneration", {"vocab_size": 9, **ONE_EACH}, "it has an encoder and a decoder"),
        ("Gemma4ForCausalLM", {**TINY, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 9}, "its last blocks"),
        (
            "GptOssForCausalLM",
            {**TINY, "num_key_value_heads": 1, "num_local_experts": 4},
            r"it has a tensor of three dimensions \(model\.layers\.0\.mlp\.experts.* that Octavo does not know",
        ),
    ],
)
def test_what_is_not_supported_says_so(cls, settings, message, tmp_path):
    made = getattr(transformers, cls)
    made(made.config_class(**settings)).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=f"config.json: {cls} cannot be calibrated, {message}.*Llama, Mistral"):
        BlockModel(open_source(tmp_path), "cpu")


# ---- Calibration of the experts of a mixture, against the model run at once; and static scales that follow from it


PROMPTS = PromptOptions(samples=8, context=32, batch=4, seed=3)
NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("kind", NAMES)
def test_the_amax_of_every_expert_is_that_of_the_model_run_at_once(kind, tmp_path, data):
    folder = make_model(tmp_path / kind, kind, moe_intermediate_size=48, intermediate_size=48)
    found = calibrate(folder, data, tmp_path / "out", prompts=PROMPTS)
    prompts = read_prompts(data, open_tokenizer(folder), PROMPTS)
    seen: dict[str, list[torch.Tensor]] = {}
    model, state = whole_model(folder), load_file(folder / "model.safetensors")
    block, gate, up, down = NAMES[kind]

    def note(name, args):
        x, index, _ = args
        for e in range(4):
            n = x[(index == e).any(1)]
            path = f"{name}.experts.{e}"
            inner, outer = (F.linear(n, state[f"{path}.{leaf}.weight"].bfloat16()) for leaf in (gate, up))
            seen.setdefault(f"{path}.{gate}", []).append(n)
            seen.setdefault(f"{path}.{down}", []).append(F.silu(inner) * outer)

    for i, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, at=f"model.layers.{i}.{block}": note(at, args))
    with torch.no_grad():
        for batch in prompts.batches(4):
            model(batch)
    assert len(seen) == 2 * 4 * 2
    for name, tensors in seen.items():
        x = torch.cat(tensors).float().abs()
        statistics = found.sites[f"{name}.input"]
        assert statistics.tokens == len(x), name
        assert statistics.amax == x.max().item(), name
    assert found.layers[f"model.layers.1.{block}.experts.2.{up}"] == f"model.layers.1.{block}.experts.2.{gate}.input"
    assert found.unseen == []
