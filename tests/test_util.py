"""What every package uses of `octavo.util`: words, files of the user, packages of extras, and devices."""

import json
import math

import pytest
import torch
import transformers

import octavo
from octavo import util
from octavo.checkpoint.files import ArtifactError

# ---- Files of the user


class PanicException(BaseException):
    """As pyo3 raises it where a parser in Rust fails."""


@pytest.mark.parametrize(
    ("fault", "essential"),
    [
        (KeyError("nope"), "KeyError: 'nope'"),
        (TypeError("a\n  b"), "TypeError: a b"),
        (ValueError("no such type"), "no such type"),
        (OSError(36, "File name too long"), "File name too long"),
        (RecursionError("maximum depth"), "it is nested too deeply"),
        (PanicException("regex"), "PanicException: regex"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_a_fault_in_a_file_names_it(fault, essential):
    reading = util.reading("model/config.json", "the description of a model", ArtifactError)
    with pytest.raises(ArtifactError) as caught, reading:
        raise fault
    assert str(caught.value) == f"model/config.json is not the description of a model ({essential})"
    assert caught.value.__cause__ is fault


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("model/config.json: heads must be 1 or more"),
        FileNotFoundError(2, "No such file", "model/config.json"),
        ImportError("transformers is needed"),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(),
    ],
)
def test_what_names_the_file_or_is_no_fault_of_it_is_raised_as_it_is(fault):
    with pytest.raises(type(fault)) as caught, util.reading("model/config.json", "the description of a model"):
        raise fault
    assert caught.value is fault


@pytest.mark.parametrize("form", ["JSON", "TOML"])
def test_damaged_text_is_refused_and_a_byte_order_mark_is_not(form):
    text, deep = {"JSON": ('{"a": 1}', "[" * 100_000), "TOML": ("a = 1", "a = " + "[" * 100_000)}[form]
    for given in (text, text.encode(), text.encode("utf-8-sig")):
        assert util.parse_object(given, "f", toml=form == "TOML") == {"a": 1}
    for damaged in (b"{", b"\xff", deep.encode()):
        with pytest.raises(ArtifactError, match=rf"^f is not valid {form} \(.+\)$"):
            util.parse_object(damaged, "f", ArtifactError, toml=form == "TOML")


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "shown"),
    [
        (int, [0, 10**30], [True, 1.0, "1", None], "a whole number"),
        (float, [0, 1.5, float("nan")], [False, "1", None], "a number"),
        (bool, [True], [1, None], "true or false"),
        (float | None, [None, 1], ["x", [None]], "a number or null"),
        (dict[str, str], [{}, {"a": "b"}], [{"a": 1}, [], None], "an object"),
    ],
)
def test_each_value_is_of_its_kind(kind, right, wrong, shown):
    for value in right:
        util.check_kinds({"a": value, "b": 3}, {"a": kind})
    for value in wrong:
        with pytest.raises(ArtifactError) as caught:
            util.check_kinds({"a": value}, {"a": kind}, "f: ", ArtifactError)
        assert str(caught.value) == f"f: a must be {shown}, got {value!r}"


# ---- Packages of extras, and devices


def test_a_missing_module_says_what_needs_it_and_how_to_install_it_from_a_clone():
    assert util.import_extra("math", "hf", "sums need math") is math
    said = r"^text needs nowhere, and nowhere cannot be imported .*No module named 'nowhere'.*"
    with pytest.raises(ImportError, match=said) as raised:
        util.import_extra("nowhere", "hf", "text needs nowhere")
    assert 'pip install ".[hf]"' in str(raised.value)


@pytest.mark.parametrize("auto", ["AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"])
def test_a_folder_that_needs_its_own_code_is_refused_without_a_question(tmp_path, monkeypatch, auto):
    described = {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", auto: "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    own_tokenizer = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own_tokenizer))
    (tmp_path / "code.py").write_text("raise SystemExit('this code was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asks whether to run the code"))
    with pytest.raises(ValueError, match="octavo runs no code of a model folder"):
        util.open_local(getattr(transformers, auto), tmp_path)


def test_a_model_that_transformers_implements_is_opened_beside_an_auto_map(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "auto_map": {"AutoConfig": "code.C"}}))
    assert util.open_local(transformers.AutoConfig, tmp_path).model_type == "phi3"


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B" in util.hub_hint("Qwen/Qwen3-0.6B")
    (tmp_path / "runs").mkdir()
    for path in ("runs/first", "./nowhere", "models", "/data/models/qwen", "a/b/c", tmp_path / "none"):
        assert util.hub_hint(path) == ""


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): torch says that it sees n GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


def test_auto_is_the_gpu_where_there_is_one_and_a_device_that_is_there_is_taken(gpus):
    for count, chosen in ((0, "cpu"), (2, "cuda")):
        gpus(count)
        assert util.choose_device("auto") == torch.device(chosen)
    for device in ("cpu", "meta", "cuda", "cuda:1", torch.device("cuda", 0)):
        assert util.choose_device(device) == torch.device(device)


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("cuda", 0, r"device cuda was asked for, but this torch \(.*\) sees no GPU: use cpu"),
        (torch.device("cuda", 1), 0, "device cuda:1 was asked for"),
        ("cuda:2", 2, "end with cuda:1: use cuda:1"),
        ("gpu", 2, "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(gpus, device, count, message):
    gpus(count)
    with pytest.raises(ValueError, match=message):
        util.choose_device(device)


@pytest.mark.parametrize(("name", "given"), [("load", ["x"]), ("convert", [torch.nn.Linear(8, 8)]), ("Linear", [8, 8])])
def test_functions_refuse_it_before_anything_else(gpus, name, given):
    gpus(0)
    with pytest.raises(ValueError, match="device cuda was asked for"):
        getattr(octavo, name)(*given, device="cuda")
