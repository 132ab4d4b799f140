"""`bisect` with the trainer: planted faults, noise, memory of runs."""

import gc
import warnings

import pytest
from ranks import run_ranks
from rich.console import Console
from tiny_models import make_model, with_slow
from tiny_runs import SMALLEST, one_thread, write_text  # noqa: F401, pytest finds the fixture one_thread here

from octavo.bisection import Part, ShortRuns, bisect, find_checkpoint
from octavo.checkpoint.files import ArtifactError
from octavo.nn import linear_function
from octavo.train import model as trained_model
from octavo.train.config import Config, ConfigError
from octavo.train.trainer import resume_run, settle, start_run

LAYER, EXPERTS = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.experts"
TINY = SMALLEST | {
    "width": 16, "mlp_width": 32, "batch": 4, "steps": 12, "save_every": 4, "evaluate_every": 12, "evaluate_batches": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory, 100)


@pytest.fixture
def settings(tmp_path, text):
    """settings(**overrides): the configuration of a run in `tmp_path`/run, whose steps take some milliseconds."""
    base = TINY | {"data": (str(text),), "out": str(tmp_path / "run")}
    return lambda **overrides: Config.from_dict(base | overrides)


@pytest.mark.parametrize(
    ("layer", "model", "gemms"),
    [
        (LAYER, {"recipe": "tensorwise"}, ("y",)),
        pytest.param(EXPERTS, {"model": "mixture", "layers": 2}, ("y", "dx", "dw"), marks=pytest.mark.slow),
    ],
)
def test_a_layer_that_is_broken_in_fp8_is_named(settings, tmp_path, monkeypatch, layer, model, gemms):
    """Its outputs are 1000 times too large where y runs in FP8. Experts run in FP8 in all GEMMs, or in none."""
    convert = trained_model.convert

    def convert_and_break(model, recipe, **options):
        report = convert(model, recipe, **options)
        if any(name.startswith(layer) for name in report.converted) and report.recipe.y is not None:
            model.get_submodule(layer).register_forward_hook(lambda module, args, y: 1000 * y)
        return report

    monkeypatch.setattr(trained_model, "convert", convert_and_break)
    found = bisect(settings(skip=("*.self_attn.[qkv]*",), **model), tmp_path / "out", seeds=2)
    assert (found.verdict, found.gemms, found.causes) == ("found", gemms, [layer])
    others = found.trials[-1]  # all but the layer in FP8
    assert others.part.layers == tuple(name for name in found.layers if name != layer)
    assert abs(others.mean) < 0.1 * found.whole.mean


def test_a_layer_in_adapters_has_its_name_in_the_model(settings, tmp_path):
    make_model(tmp_path / "base", "llama")
    config = settle(settings(model=str(tmp_path / "base"), lora=2))
    runs = ShortRuns(config, tmp_path / "out", 1, None, Part(("y",)), lambda run, count: None)
    with runs.opened():
        assert LAYER in runs.run(runs.whole, 0).converted
        assert runs.run(Part(("y",), (LAYER,)), 0).converted == (LAYER,)


def test_a_dw_of_the_wrong_sign_is_named(settings, tmp_path, monkeypatch):
    dw = linear_function._dw

    def negated(*arguments):
        *_, call = arguments
        whole = dw(*arguments)
        return whole if call.recipe.dw is None else -whole

    monkeypatch.setattr(linear_function, "_dw", negated)
    skip = ("*.q_proj", "*.k_proj", "*.v_proj")
    found = bisect(settings(recipe="tensorwise", skip=skip), tmp_path / "out", seeds=2)
    assert (found.verdict, found.gemms) == ("found", ("dw",))
    [y_and_dx] = [trial for trial in found.trials if trial.part.gemms == ("y", "dx")]
    assert abs(y_and_dx.mean) < 0.1 * found.whole.mean


def test_a_sound_recipe_has_no_gap_to_resolve(settings, tmp_path):
    made, done = [], []
    hooks = {"on_run": lambda run, count: made.append(run), "progress": lambda *each: done.append(each)}
    found = bisect(settings(), tmp_path / "out", steps=6, **hooks)
    assert done == [(step, 6, f"short run {run}") for run in range(1, 7) for step in range(1, 7)]
    assert (found.verdict, found.causes, found.steps) == ("unresolved", [], 6)
    assert found.whole.seeds_needed > 3
    expected = [(gemms, seed, 6) for seed in range(3) for gemms in (("y", "dx", "dw"), ())]
    assert [(run.part.gemms, run.seed, len(run.losses)) for run in made] == expected
    again = bisect(settings(), tmp_path / "out", steps=6, on_run=lambda run, count: pytest.fail("it is remembered"))
    assert again == found
    for recipe, run in (("rowwise", made[2]), ("bf16", made[3])):  # the losses are those of the trainer
        trainer = start_run(settings(recipe=recipe, seed=1, out=str(tmp_path / recipe)), Console(quiet=True))
        with trainer.lock:
            assert run.losses == tuple(float(trainer.step()[0]) for _ in range(6))


def test_an_interrupted_search_continues(settings, tmp_path):
    made = []

    def interrupt(run, count):
        made.append(run)
        if len(made) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bisect(settings(), tmp_path / "out", seeds=2, steps=3, on_run=interrupt)
    log = tmp_path / "out" / "runs.jsonl"
    log.write_text(log.read_text() + '{"gemms": ["y"')  # killed while it wrote
    found = bisect(settings(), tmp_path / "out", seeds=2, steps=3, on_run=lambda run, count: made.append(run))
    assert len({(run.part, run.seed) for run in made}) == len(made) == found.runs == 4
    more = bisect(settings(), tmp_path / "out", seeds=3, steps=3, on_run=lambda run, count: made.append(run))
    assert {run.seed for run in made[4:]} == {2}
    assert more.runs == 6


@pytest.mark.parametrize("recipe", with_slow(["delayed", "rowwise"], ("rowwise",)))
def test_it_starts_from_a_checkpoint_of_any_recipe(settings, tmp_path, recipe):
    run = settings(recipe="delayed", steps=4)
    start_run(run, Console(quiet=True)).run()
    made = []
    found = bisect(
        settings(recipe=recipe), tmp_path / "out", seeds=2, steps=3, checkpoint=find_checkpoint(tmp_path / "run"),
        on_run=lambda run, count: made.append(run),
    )  # fmt: skip
    fresh = bisect(settings(recipe=recipe), tmp_path / "fresh", seeds=2, steps=3)
    assert found.losses[0] < fresh.losses[0] - 0.1
    if recipe == "delayed":
        trainer = resume_run(tmp_path / "run", ("--steps", "12"), Console(quiet=True))
        with trainer.lock:
            losses = tuple(float(trainer.step()[0]) for _ in range(3))
        assert made[0].losses == pytest.approx(losses, rel=1e-6)  # the same weights, moments, scales and batches


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"recipe": "bf16"}, {}, "recipe bf16 runs no GEMM in FP8"),
        ({}, {"seeds": 1}, "seeds must be at least 2"),
        ({}, {"steps": 0}, "steps of a short run must be at least 1"),
        ({}, {"least": -0.1}, "the smallest gap .* must be 0% or more; got -10.00%"),
    ],
)
def test_what_cannot_be_bisected(settings, tmp_path, changed, options, message):
    with pytest.raises(ConfigError, match=message):
        bisect(settings(**changed), tmp_path / "out", **options)


def test_a_folder_of_something_else(settings, tmp_path):
    def search(message, steps=1, **changed):
        with pytest.raises((ConfigError, ArtifactError, FileExistsError), match=message):
            bisect(settings(**changed), tmp_path / "out", seeds=2, steps=steps)

    with pytest.raises(ArtifactError, match="no run of octavo train"):
        find_checkpoint(tmp_path)
    (tmp_path / "out").mkdir()
    thesis, log = tmp_path / "out" / "thesis.txt", tmp_path / "out" / "runs.jsonl"
    thesis.touch()
    search("is not empty and has no short runs")
    thesis.unlink()
    bisect(settings(), tmp_path / "out", seeds=2, steps=1)
    search(r"short runs of other settings: batch is 4 there and 2 here. Choose another", batch=2)
    search("other settings: steps is 1 there and 2 here", steps=2)
    log.write_text('{"gemms": ["y"]}\n' + log.read_text())
    search(r"runs.jsonl, line 1 is not .* move that line to another file")
    (tmp_path / "out" / "bisect.json").write_text("{")
    search("bisect.json")


def test_bf16_that_diverges_is_not_blamed_on_fp8(settings, tmp_path):
    """And the objects that the caller froze stay so."""
    gc.freeze()
    with pytest.raises(ConfigError, match="the run in BF16 with seed 0 diverged at step"):
        bisect(settings(learning_rate=1e38, min_learning_rate=1.0, clip=0.0), tmp_path / "out", seeds=2)
    assert gc.get_freeze_count() > 0


# --- A search whose short runs are divided among two processes


def search(rank, folder, settings):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    made = []
    found = bisect(Config.from_dict(settings), folder, seeds=2, steps=2, on_run=lambda run, count: made.append(run))
    return found.to_dict(), [(run.part, run.seed) for run in made]


@pytest.mark.slow
def test_two_processes_share_each_short_run(settings, tmp_path):
    first, second = run_ranks(2, search, tmp_path / "out", settings().to_dict())
    assert first == second
    assert len(first[1]) == first[0]["runs"] == 4
    alone = bisect(settings(), tmp_path / "alone", seeds=2, steps=2)
    assert [round(loss, 4) for loss in alone.losses] == [round(loss, 4) for loss in first[0]["bf16_losses"]]
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 4, "one rank writes"
