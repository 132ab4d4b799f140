"""The presets: whole models by name, of the sizes that their names say."""

from pathlib import Path

import pytest
import torch

from octavo.models.tokenizer import ByteTokenizer
from octavo.train.config import Config, ConfigError
from octavo.train.memory import total_memory
from octavo.train.mesh import check_parallel, find_degrees
from octavo.train.model import check_memory, make_model
from octavo.train.settings import PRESETS

LLAMA_VOCABULARY = 128_256


@pytest.mark.parametrize(
    ("name", "billions", "processes"),
    [("llama-1b", 1.2358, 1), ("llama-3-8b", 8.0303, 8), ("llama-3-70b", 70.5537, 64)],
)
def test_a_preset_has_the_parameters_and_the_processes_of_its_model(name, billions, processes):
    config = Config.load(name)
    with torch.device("meta"):
        model = make_model(config, LLAMA_VOCABULARY, Path("none"))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-4)
    check_parallel(config, find_degrees(config.parallel, processes))
    assert (config.batch * config.accumulate * config.context) & 0x7FFFF == 0  # a multiple of 524,288 tokens a step
    assert config.tokenizer.startswith("hf:meta-llama/")
    assert config.compile.blocks


def test_every_file_is_a_preset_that_an_error_names(tmp_path, monkeypatch):
    assert PRESETS.keys() == {"llama-1b", "llama-3-8b", "llama-3-70b"}
    with pytest.raises(ConfigError, match="llama-7b cannot be read.*presets are llama-1b, llama-3-70b, llama-3-8b"):
        Config.load("llama-7b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-1b").write_text("layers = 3")
    assert Config.load("llama-1b").layers == 3
    with pytest.raises(ConfigError, match="give a TOML file of settings, or the config.json of a run"):
        Config.load(tmp_path)
    assert Config.load("llama-3-8b", ["--layers", "2", "--parallel.tp", "2"]).layers == 2


def test_memory_counts_the_parts_of_each_process(monkeypatch):
    monkeypatch.setattr("octavo.train.model.total_memory", lambda device: 80e9)
    config, gpu = Config.load("llama-3-70b"), torch.device("cuda")
    with pytest.raises(ConfigError, match=r"divided among 8 processes, 141 GB .* 80 GB.*torchrun"):
        check_memory(config, LLAMA_VOCABULARY, gpu, parts=8)
    check_memory(config, LLAMA_VOCABULARY, gpu, parts=64)


def test_a_tokenizer_by_its_name(begin, go_on, tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer")
    trainer = begin(tokenizer=f"hf:{tmp_path / 'tokenizer'}", steps=4)
    assert trainer.data.tokenizer.encode("ab") == [97, 98]
    trainer.run()
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    assert go_on(tmp_path / "run", "--steps", "5").run().step == 5
    with pytest.raises(ValueError, match=r"hf:no/such/name cannot be opened .* or a local folder"):
        begin(tokenizer="hf:no/such/name", out=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="tokenizer must be one of bytes, characters, bpe, or hf:"):
        begin(tokenizer="words")


def test_processes_share_the_memory_of_their_machine(monkeypatch):
    whole = total_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert total_memory(torch.device("cpu")) == whole // 4
