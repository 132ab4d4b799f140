"""Where a plan has its settings and its model from, searches and their tables, and the parameters that it counts."""

import csv
import json
import math
import re

import pytest
import torch
from torch import nn

from octavo.checkpoint.folder import RunFolder
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.plan.cases import Case, built_in_architecture, find_architecture, find_runs, model_presets, parse_count
from octavo.plan.model_shape import describe_architecture
from octavo.plan.setup import find_gemms
from octavo.rates.measured import find_gpu, known_gpus
from octavo.recipe import get_recipe
from octavo.train.config import Config, write_settings
from octavo.train.settings import load_config, parse


def test_a_file_of_settings_and_a_run_have_their_own(tmp_path):
    path, run = tmp_path / "run.toml", RunFolder(tmp_path)
    path.write_text('layers = 2\nwidth = 64\nheads = 4\nbatch = 3\nrecipe = "bf16"\n[optimizer]\nstate = "8bit"\n')
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    write_settings(load_config(str(path), ()), run)
    for source in (path, tmp_path):
        plan = Case(str(source), {"context": 128}).training()
        setup = plan.setup
        assert (setup.model.depth, setup.model.width, setup.tokens, setup.recipe.name) == (2, 64, 3 * 128, "bf16")
        assert plan.memory.parts["optimizer"] == pytest.approx((2 + 8 / 256) * setup.model.parameters)


def test_a_preset_of_training():
    setup = Case("llama-1b", {"tokenizer": "bpe", "vocabulary": 50257, "batch": 8}).training().setup
    assert setup.config.accumulate > 1
    assert setup.model.parameters > 1e9
    for name, parameters, gpus in (("llama-1b", 1.236e9, 1), ("llama-3-8b", 8.03e9, 8), ("llama-3-70b", 70.55e9, 64)):
        setup = Case(name, gpus=gpus).training().setup
        assert setup.model.parameters == pytest.approx(parameters, rel=1e-3)
        assert setup.config == load_config(name, ())  # with its gathers, checkpointing and batch
    scaled = Case("llama-3-8b", gpus=64).training().setup.config
    assert (scaled.batch, scaled.accumulate, scaled.parallel.gather_dtype) == (64, 8, "bf16")


def test_numbers_with_a_unit():
    counts = {"7B": 7e9, "1.5t": 1.5e12, "300M": 3e8, "2K": 2000, "1e12": 1e12, "1.5E+9": 1.5e9, "50000": 5e4}
    assert {text: parse_count(text) for text in counts} == counts
    assert [text for text in ("7", "B", "e12", "") if parse_count(text) is not None] == []


def test_every_gpu_is_complete():
    for name, gpu in known_gpus().items():
        assert find_gpu(name.upper()) is gpu
        assert gpu.bandwidth / 1e12 < gpu.bf16 / 1e12  # more arithmetic than bytes
        assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02)
        assert gpu.source
        found = find_gemms(get_recipe("rowwise"), gpu)
        assert {backend.name == "none" for backend in found.values()} == {gpu.fp8 is None}
        assert gpu.fp32 < gpu.bf16  # less without its tensor cores


def test_auto_is_the_best_recipe_of_the_gpu():
    found = [Case("gpt2", {"recipe": "auto"}, gpu=gpu).training().setup.recipe.name for gpu in ("a100", "h100")]
    assert found == ["bf16", "rowwise"]


def test_the_largest_batch_fits_and_the_next_does_not():
    most = Case("llama-3.1-8b", gpus=8).training().largest_batch
    assert most % 8 == 0
    for batch, fits in ((most, True), (most + 8, False)):
        assert Case("llama-3.1-8b", {"batch": batch}, gpus=8).training().fits == fits


def test_mfu_counts_queries_and_values_at_their_own_widths():
    plan = Case("deepseek-v3", {"parallel.tp": 8}, gpus=512).training()
    flops = 6 * plan.setup.model.active_parameters + 6 * 61 * 128 * (192 + 128) * 4096
    assert plan.utilization == pytest.approx(flops * plan.tokens_per_second / plan.setup.gpu.bf16)


def test_a_plan_that_does_not_fit_finds_what_does():
    plan = Case("llama-3.1-8b", {"batch": 16}, "h100", 4).training()
    assert not plan.fits
    assert plan.to_dict()["utilization"] is None
    assert "--batch 4 --accumulate 4" in plan.fitting
    for options, other in plan.fitting.items():
        gpus, words = re.search(r"--gpus (\d+)", options), re.sub(r"--gpus \d+", "", options).split()
        again = Case("llama-3.1-8b", {"batch": 16} | parse(words), "h100", int(gpus[1]) if gpus else 4).training()
        assert other.memory.peak == again.memory.peak <= again.setup.gpu.memory
    two = Case("llama-3.1-70b", gpus=1, gpu="h100").training().fitting  # none is enough alone
    assert two
    assert all(options.count("--") >= 2 for options in two)
    assert Case("gpt2").training().fitting == {}


def test_no_number_of_gpus_ends_in_time():
    with pytest.raises(ValueError, match=r"trains on 1e\+15 tokens in 1 days: \d+ take [\d,.]+ days"):
        find_runs(Case("llama-3-8b", {"recipe": "rowwise"}), 1e15, 1)


def test_a_table_of_cases_replaces_the_one_before(printed, tmp_path):
    table = tmp_path / "plan.csv"
    for _ in range(2):
        printed("plan", "gpt2", "--compare", "batch=1,2", "--csv", table)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["case"] for row in rows] == ["batch 1", "batch 2"]
    assert float(rows[0]["memory.peak"]) < float(rows[1]["memory.peak"])


# ---- The parameters that a plan counts, against models of transformers and Octavo on the meta device


SMALL = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 320}
OURS = LlamaConfig(**SMALL, kv_heads=2, mlp_width=96)


def ours(**changes: object) -> str:
    return json.dumps(OURS.to_hf() | changes)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name, fields in model_presets().items() if fields["model_type"] != "dit"),
        ("qwen3-8b", MOE | {"mlp_only_layers": [1]}),
        ("qwen3-8b", MOE | {"decoder_sparse_step": 2}),
        ("mixtral-8x7b", {"moe_intermediate_size": 256, "decoder_sparse_step": 2}),  # of other mixtures: not read
        ("deepseek-v3", {"q_lora_rank": None}),
        ("deepseek-v3", {"first_k_dense_replace": 0}),
        ("deepseek-v3", {"first_k_dense_replace": 3}),  # more than the model has
    ],
)
def test_a_model_has_the_parameters_that_it_has_in_transformers(name, changes):
    transformers = pytest.importorskip("transformers")
    fields = {k: v for k, v in model_presets()[name].items() if k != "source"}
    few = {"n_layer": 2, "num_hidden_layers": 2, "first_k_dense_replace": 1}  # transformers takes long to build many
    fields |= {k: v for k, v in few.items() if k in fields} | changes
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**fields)
        if name.startswith("vit"):
            model = transformers.ViTModel(config, add_pooling_layer=False)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    bias = sum(b.numel() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert describe_architecture(name, fields).parameters == count(model) + bias


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-3-175b", 174.604259328),
        ("llama-3.1-8b", 8.030261248),
        ("mixtral-8x7b", 46.702792704),
        ("deepseek-v3", 671.026419200),
        ("dit-xl-2", 0.675),  # the table of the paper says 675 million
        ("dit-sdxl", 2.6),  # SDXL's report says 2.6 billion
        ("vit-h-14", 0.632),  # the table of the paper says 632 million, with its classifier
    ],
)
def test_the_published_counts(name, billions):
    digits = 1e-9 if len(str(billions)) > 8 else 0.008
    assert find_architecture(name).parameters / 1e9 == pytest.approx(billions, rel=digits)


def test_experts_count_once_in_memory_and_by_use_in_time():
    mixtral = find_architecture("mixtral-8x7b")
    assert mixtral.active_parameters / 1e9 == pytest.approx(12.75, rel=1e-2)  # arXiv:2401.04088 says 13 billion active


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (OURS, {}),
        (GPT2Config(**SMALL), {"model": "gpt2"}),
        *(
            (
                MixtureConfig(**SMALL, kv_heads=2, mlp_width=96, experts=4, top_k=2, shared_width=shared),
                {"model": "mixture", "experts": {"count": 4, "top_k": 2, "shared_width": shared}},
            )
            for shared in (0, 48)
        ),
    ],
)
def test_octavos_own_models_are_counted_exactly(config, settings, tmp_path):
    with torch.device("meta"):
        model = build(config)
    fields = config.to_hf()
    (tmp_path / "config.json").write_text(json.dumps(fields))
    architecture = describe_architecture("ours", fields)
    own = Config.from_dict(SMALL | {"kv_heads": 2, "mlp_width": 96, "tokenizer": "bpe"} | settings)
    found = [architecture, built_in_architecture(own)]
    found += [find_architecture(str(path)) for path in (tmp_path, tmp_path / "config.json")]
    assert {each.parameters for each in found} == {count(model)}
    if not isinstance(config, MixtureConfig):
        linears = [m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
        assert architecture.block_weights == sum(linears)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama"}', "must state 'hidden_size'"),
        ('{"model_type": "mistral3"}', "got 'mistral3': the nearest is mistral"),
        ('{"model_type": "gemma2"}', "got 'gemma2': write a config.json"),  # nothing is near
        ("{}", "model_type must be one of"),
        (ours(hidden_size="wide"), "must be whole numbers of at least 1"),
        (ours(num_hidden_layers=0), "sizes must be whole numbers of at least 1; got 0"),
        (ours(num_hidden_layers=2.5), "sizes must be whole numbers of at least 1; got 2.5"),
        (ours(head_dim=None, num_attention_heads=3), "must divide hidden_size and be a multiple of"),
        (ours(head_dim=None, num_key_value_heads=3), "must divide hidden_size and be a multiple of"),
        ("{", "is not valid JSON"),
        (
            '{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 9}',
            "num_experts_per_tok must be at most the number of experts, got 9 of 8",
        ),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_architecture(str(tmp_path))


def test_a_dit_block_counts_as_one_written_in_pytorch():
    width, mlp = 1152, 4 * 1152
    layers = [(width, 3 * width), (width, width), (width, mlp), (mlp, width), (width, 6 * width)]
    expected = sum(count(nn.Linear(k, n, device="meta")) for k, n in layers)
    assert math.isclose(find_architecture("dit-xl-2").blocks[0].parameters, expected)
