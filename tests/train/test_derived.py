"""What was not given follows from what was, and a resumed run keeps what it had."""

import json

import pytest

from octavo.train.config import Config, ConfigError
from octavo.train.derived import RULES
from octavo.train.schedule import learning_rate


def load(*words):
    return Config.load(None, words)


def test_the_defaults_do_not_contradict_each_other():
    assert (load("--steps", "10").warmup, load("--steps", "1").warmup) == (1, 0)
    assert load("--learning-rate", "1e-5").min_learning_rate == pytest.approx(1e-6)
    assert load("--heads", "1").kv_heads == load("--heads", "1").heads
    assert load("--heads", "16", "--schedule", "wsd", "--decay", "1").warmup == 0


def test_without_settings_the_numbers_are_those_that_they_were():
    config = Config()
    found = [config.learning_rate, config.min_learning_rate, config.warmup, config.context, config.kv_heads]
    assert found == [1e-3, 1e-4, 20, 512, 2]
    assert (load("--steps", "200").warmup, config.decay_steps) == (20, 500)  # the demo's


def test_a_model_of_a_folder_learns_slowly(tmp_path):
    config = Config(model=str(tmp_path))
    assert (config.learning_rate, config.min_learning_rate) == (2e-5, pytest.approx(2e-6))
    assert Config(model=str(tmp_path), learning_rate=1e-3).min_learning_rate == 1e-4


def test_what_is_given_is_not_derived():
    config = load("--learning-rate", "0.5", "--min-learning-rate", "0.4", "--warmup", "7", "--decay-steps", "50")
    assert (config.min_learning_rate, config.warmup, config.decay_steps) == (0.4, 7, 50)
    assert config.derived == {"kv_heads", "context"}
    with pytest.raises(ConfigError, match="warmup 500"):
        load("--warmup", "500")


def test_a_change_derives_what_follows_from_it_and_nothing_else():
    recorded = Config.from_dict(json.loads(json.dumps(load("--steps", "100", "--learning-rate", "1e-2").to_dict())))
    assert recorded.derived == RULES.keys() - {"learning_rate"}
    longer = recorded.replace(["--steps", "400"])
    assert (longer.decay_steps, longer.warmup, longer.min_learning_rate) == (400, 20, 1e-3)
    assert longer == load("--steps", "400", "--learning-rate", "1e-2")
    slower = recorded.replace(["--learning-rate", "1e-5"])
    assert (slower.min_learning_rate, slower.warmup) == (pytest.approx(1e-6), recorded.warmup)
    given = recorded.replace(["--warmup", "9"]).replace(["--steps", "50"])
    assert (given.warmup, given.decay_steps) == (9, 50)


def test_recorded_values_hold_although_the_rules_may_change():
    """Another version of octavo may derive another warmup: a run that goes on keeps its own."""
    recorded = Config().to_dict() | {"warmup": 3}
    assert Config.from_dict(recorded).warmup == 3
    assert Config.from_dict(recorded).replace(["--batch", "8"]).warmup == 3
    assert Config.from_dict(recorded).replace(["--steps", "80"]).warmup == 8


def test_the_settings_of_a_run_are_a_configuration_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load("--steps", "40", "--data", "a", "b").to_dict()))
    assert Config.load(path) == load("--steps", "40", "--data", "a", "b")
    assert Config.load(path, ["--steps", "4"]) == load("--steps", "4", "--data", "a", "b")
    path.write_text('{"derived": ["steps"]}')
    with pytest.raises(ConfigError, match=r"derived in .*config.json must be a list of some of learning_rate, "):
        Config.load(path)
    for text, reason in (("{", "is not valid JSON"), ("[]", "must hold a JSON object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            Config.load(path)


def test_flags_need_no_value():
    config = load("--tensorboard", "--no-tied", "--compile", "true", "--deterministic=false")
    assert (config.tensorboard, config.tied, config.compile.blocks, config.deterministic) == (True, False, True, False)
    with pytest.raises(ConfigError, match="no_steps"):
        load("--no-steps")
    with pytest.raises(ConfigError, match="must be given once"):
        load("--tied", "--no-tied")


def test_the_rate_stays_at_its_end_after_the_last_step_of_the_decay():
    """nanoGPT calls it lr_decay_iters."""
    config = Config(steps=100, decay_steps=40, warmup=10, learning_rate=1.0, min_learning_rate=0.1)
    whole = Config(steps=40, warmup=10, learning_rate=1.0, min_learning_rate=0.1)
    assert [learning_rate(s, config) for s in range(41)] == [learning_rate(s, whole) for s in range(41)]
    assert {learning_rate(s, config) for s in range(40, 100)} == {0.1}
    cut = Config(steps=20, decay_steps=40, warmup=10, learning_rate=1.0, min_learning_rate=0.1)
    assert [learning_rate(s, cut) for s in range(20)] == [learning_rate(s, whole) for s in range(20)]


@pytest.mark.parametrize("seed", ["99999999999999999999", "-1", str(1 << 63)])
def test_a_seed_beyond_what_a_generator_takes(seed):
    with pytest.raises(ConfigError, match=rf"seed must be an integer from 0 to 2\^63 - 1; got {seed}"):
        load("--seed", seed)
