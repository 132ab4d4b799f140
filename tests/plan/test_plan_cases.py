"""Cases, comparisons and bad input."""

import pytest

from octavo.checkpoint.run import RunFolder
from octavo.plan.cases import Case, find_runs, make_cases, parse_count
from octavo.plan.setup import find_gemms
from octavo.rates.measured import find_gpu, known_gpus
from octavo.recipe import get_recipe
from octavo.train.config import Config, write_settings


def test_the_defaults_of_a_plan():
    setup = Case("llama-3.2-1b", gpus=8).training().setup
    config = setup.config
    assert (config.batch, config.context, config.compile.blocks) == (8, 8192, True)
    assert (setup.recipe.name, setup.tokens) == ("rowwise", 8192)
    eager = Case("gpt2", ("--no-compile.blocks", "--batch", "2", "--context", "512")).training().setup.config
    assert (eager.batch, eager.context, eager.compile.blocks) == (2, 512, False)


def test_a_file_of_settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('layers = 2\nwidth = 64\nheads = 4\nbatch = 3\n[optimizer]\nstate = "8bit"\n')
    plan = Case(str(path), ("--context", "128")).training()
    assert plan.setup.tokens == 3 * 128
    assert plan.setup.model.depth == 2
    assert plan.memory.optimizer == pytest.approx((2 + 8 / 256) * plan.setup.model.parameters)


def test_a_run_has_its_settings(tmp_path):
    run = RunFolder(tmp_path)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    write_settings(Config.load(None, ("--layers", "2", "--width", "64", "--batch", "3", "--recipe", "bf16")), run)
    setup = Case(str(tmp_path), ("--context", "128")).training().setup
    assert (setup.model.depth, setup.model.width, setup.tokens, setup.recipe.name) == (2, 64, 3 * 128, "bf16")


def test_a_preset_of_training():
    setup = Case("llama-1b", ("--tokenizer", "bpe", "--vocabulary", "50257", "--batch", "8")).training().setup
    assert setup.config.accumulate > 1
    assert setup.model.parameters > 1e9
    for name, parameters, gpus in (("llama-1b", 1.236e9, 1), ("llama-3-8b", 8.03e9, 8), ("llama-3-70b", 70.55e9, 64)):
        setup = Case(name, gpus=gpus).training().setup
        assert setup.model.parameters == pytest.approx(parameters, rel=1e-3)
        assert setup.config == Config.load(name, ())  # with its gathers, checkpointing and batch
    scaled = Case("llama-3-8b", gpus=64).training().setup.config
    assert (scaled.batch, scaled.accumulate, scaled.parallel.gather_dtype) == (64, 8, "bf16")


@pytest.mark.parametrize(
    ("compare", "labels"),
    [
        ([], ["gpt2"]),
        (["recipe=bf16,rowwise"], ["recipe bf16", "recipe rowwise"]),
        (["gpus=1,8"], ["gpus 1", "gpus 8"]),
        (["model=gpt2,gpt2-xl"], ["model gpt2", "model gpt2-xl"]),
        (["optimizer.state=fp32,8bit"], ["optimizer.state fp32", "optimizer.state 8bit"]),
        (["gpus=1,2", "recipe=bf16,rowwise"], [f"gpus {n}, recipe {r}" for n in (1, 2) for r in ("bf16", "rowwise")]),
    ],
)
def test_each_case_of_a_comparison_has_its_value(compare, labels):
    cases = make_cases(Case("gpt2", ("--recipe", "tensorwise", "--batch", "8")), compare)
    assert [label for label, _ in cases] == labels
    for label, case in cases:
        setup = case.training().setup
        found = {
            "recipe": setup.recipe.name,
            "gpus": str(setup.degrees.processes),
            "model": setup.model.name,
            "optimizer.state": setup.config.optimizer.state,
        }
        for each in label.split(", "):
            name, _, value = each.partition(" ")
            assert found.get(name, "gpt2") == (value or label)


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
        assert set(gpu.origins) == {"attention", "memory", "links"}
        assert gpu.instruction_rate == gpu.fp32 / 2 < gpu.bf16 / 2  # less without its tensor cores


def test_auto_is_the_best_recipe_of_the_gpu():
    found = [Case("gpt2", ("--recipe", "auto"), gpu=gpu).training().setup.recipe.name for gpu in ("a100", "h100")]
    assert found == ["bf16", "rowwise"]


def test_the_largest_batch_fits_and_the_next_does_not():
    plan = Case("llama-3.1-8b", gpus=8).training()
    most = plan.largest_batch
    assert most % 8 == 0
    for batch, fits in ((most, True), (most + 8, False)):
        assert Case("llama-3.1-8b", ("--batch", str(batch)), gpus=8).training().fits == fits


def test_mfu_counts_queries_and_values_at_their_own_widths():
    plan = Case("deepseek-v3", ("--parallel.tp", "8"), gpus=512).training()
    flops = 6 * plan.setup.model.active_parameters + 6 * 61 * 128 * (192 + 128) * 4096
    assert plan.utilization == pytest.approx(flops * plan.tokens_per_second / plan.setup.gpu.bf16)


def test_a_plan_that_does_not_fit_finds_what_does():
    plan = Case("llama-3.1-8b", ("--batch", "16"), "h100", 4).training()
    assert not plan.fits
    assert plan.to_dict()["utilization"] is None
    assert "--batch 4 --accumulate 4" in plan.fitting
    for options, other in plan.fitting.items():
        words = ["--batch", "16", *options.split()]
        gpus = int(words[words.index("--gpus") + 1]) if "--gpus" in words else 4
        given = {name: value for name, value in zip(words[::2], words[1::2], strict=True) if name != "--gpus"}
        again = Case("llama-3.1-8b", tuple(w for pair in given.items() for w in pair), "h100", gpus).training()
        assert other.memory.peak == again.memory.peak <= again.setup.gpu.memory
    two = Case("llama-3.1-70b", gpus=1, gpu="h100").training().fitting  # none is enough alone
    assert two
    assert all(options.count("--") >= 2 for options in two)
    assert Case("gpt2").training().fitting == {}


def test_runs_that_end_in_time():
    runs = find_runs(Case("llama-3-8b"), 1e12, 14)
    assert {plan.setup.recipe.name for plan in runs} == {"bf16", "rowwise"}
    costs = [plan.cost(1e12, 1) for plan in runs]
    assert costs == sorted(costs)
    for plan in runs:
        assert plan.fits
        assert plan.days(1e12) <= 14
        assert plan.tokens_per_step == pytest.approx(2**22, rel=0.3)
    smaller = min(plan.gpus for plan in runs) - 8
    assert Case("llama-3-8b", ("--batch", str(4 * smaller)), gpus=smaller).training().days(1e12) > 14
    [recipe] = {p.setup.recipe.name for p in find_runs(Case("gpt2", ("--recipe", "tensorwise"), gpu="h100"), 1e10, 1)}
    assert recipe == "tensorwise"
    assert all(plan.setup.degrees.tp == 8 for plan in find_runs(Case("llama-3-70b"), 1e12, 30))
    with pytest.raises(ValueError, match=r"trains on 1e\+15 tokens in 1 days: \d+ take [\d,.]+ days"):
        find_runs(Case("llama-3-8b", ("--recipe", "rowwise")), 1e15, 1)
