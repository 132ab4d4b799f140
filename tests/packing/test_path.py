"""The way of a model through the files of packing, as the docstring of `octavo.packing.pipeline` describes it."""

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import golden_models
import pytest

import octavo
from octavo.packing import pack, pipeline

SOURCES = Path(octavo.__file__).parent
FILES = ["packing/pipeline.py", *dict.fromkeys(re.findall(r"\S+/\S+\.py", str(pipeline.__doc__)))]
_opened: list[str] | None = None


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(args[0]))


sys.addaudithook(_on_event)  # a hook cannot be removed: it records nothing but inside of `files_opened`


def files_opened(run: Callable[[], object]) -> list[str]:
    global _opened
    _opened = []
    try:
        run()
        return _opened
    finally:
        _opened = None


def entries(run: Callable[[], object]) -> dict[str, set[str]]:
    """File -> the other files whose functions call functions of it. Reading a property is not a call."""
    found: dict[str, set[str]] = defaultdict(set)
    fields = properties()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file, caller = file_of(frame), frame.f_back
        if event == "call" and file and frame.f_code not in fields:
            while caller is not None and not file_of(caller):
                caller = caller.f_back
            if caller is not None and file_of(caller) != file:
                found[file].add(file_of(caller))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def file_of(frame: FrameType) -> str:
    """A path below src/octavo, or nothing."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(SOURCES)) if path.is_relative_to(SOURCES) else ""


def properties() -> set[CodeType]:
    """The code of every property of a class of FILES."""
    modules = [import_module(f"octavo.{file.removesuffix('.py').replace('/', '.')}") for file in FILES]
    classes = [found for module in modules for _, found in inspect.getmembers(module, inspect.isclass)]
    members = [member for found in classes for member in vars(found).values()]
    functions: list[Any] = [getattr(m, "fget", None) or getattr(m, "func", None) for m in members]
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return golden_models.write_model(tmp_path / "model", "llama")


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_a_model_enters_each_file_from_two_others_at_most(tmp_path: Path, model: Path, scheme: str) -> None:
    pack(model, tmp_path / "first")  # imports, and operations that are registered at their first call
    found = entries(lambda: pack(model, tmp_path / "packed", scheme=scheme))
    assert len(FILES) >= 7
    assert [file for file in FILES if (SOURCES / file).is_file()] == FILES
    within = {file: {caller for caller in found[file] if caller in FILES} for file in FILES}
    entered = {file for file, callers in within.items() if callers}
    assert entered == set(FILES) - {"packing/pipeline.py", "packing/report.py"}  # the first file, and a mere record
    assert {file: callers for file, callers in within.items() if len(callers) > 2} == {}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_config_json_is_read_once(tmp_path: Path, name: str) -> None:
    model = golden_models.write_model(tmp_path / "model", name)
    opened = files_opened(lambda: pack(model, tmp_path / "packed"))
    assert opened.count(str(model / "config.json")) == 1


def test_the_config_json_of_a_run_is_read_once(tmp_path: Path) -> None:
    run = golden_models.write_run(tmp_path / "run", "llama", "rowwise")
    opened = files_opened(lambda: pack(run, tmp_path / "packed"))
    assert [opened.count(str(path)) for path in (run / "config.json", run / "model" / "config.json")] == [1, 1]
