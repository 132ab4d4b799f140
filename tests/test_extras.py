"""What is said where a package of an extra is not installed."""

import json
import math
import tomllib
from pathlib import Path

import pytest

from octavo.util import hub_hint, import_extra, open_local

ROOT = Path(__file__).parents[1]


def test_a_module_that_is_there_is_imported():
    assert import_extra("math", "hf", "sums need math") is math


def test_a_missing_module_says_what_needs_it_and_how_to_install_it_from_a_clone():
    with pytest.raises(
        ImportError, match=r"^text needs nowhere, and nowhere cannot be imported .*No module named 'nowhere'.*"
    ) as raised:
        import_extra("nowhere", "hf", "text needs nowhere")
    assert 'pip install ".[hf]"' in str(raised.value)


def test_no_message_installs_octavo_from_an_index():
    """It is on none: pip finds no distribution of that name."""
    sources = [path for path in (ROOT / "src").rglob("*.py") if "install" in path.read_text()]
    assert sources
    assert [str(path) for path in sources if 'install "octavo' in path.read_text()] == []


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"hf", "gguf", "bpe", "cudnn", "optim", "tensorboard"} <= extras.keys()


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
def test_a_folder_that_needs_its_own_code_is_refused_without_a_question(tmp_path, monkeypatch, auto):
    transformers = pytest.importorskip("transformers")
    described = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", auto: "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    own_tokenizer = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own_tokenizer))
    (tmp_path / "code.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run the code"))
    with pytest.raises(ValueError, match="octavo runs no code of a model folder"):
        open_local(getattr(transformers, auto), tmp_path)


def test_a_model_that_transformers_implements_is_opened_beside_an_auto_map(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "auto_map": {"AutoConfig": "code.C"}}))
    assert open_local(transformers.AutoConfig, tmp_path).model_type == "phi3"


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in hub_hint("Qwen/Qwen3-0.6B")
    (tmp_path / "runs").mkdir()
    for path in ("runs/first", "./nowhere", "models", "/data/models/qwen", "a/b/c", tmp_path / "none"):
        assert hub_hint(path) == ""
