"""Shared by all tests: those marked gpu need a device, and every test starts from the same seed."""

import gc
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

# PyTorch is imported in functions, as the process that hands tests out to workers needs none, and they wait for it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores, and with a thread for each core they are far slower
os.fsync = lambda _: None  # a test's files need not survive a power cut; the disk takes 2 ms for each of 15,000 calls
gc.set_threshold(50_000)  # the default, 700 objects, starts a collection in every few calls of a model


# For an option -m, what the files say that have no test to run.
WITHOUT = {"gpu": r"\A(?!(?s:.*)mark\.gpu)", "not gpu and not slow": r"(?m)^pytestmark = .*mark\.(gpu|slow)"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test to run are not imported: a GPU machine may lack their needs, and workers wait for them."""
    without = WITHOUT.get(config.getoption("markexpr")) if collection_path.match("test_*.py") else None
    return True if without and re.search(without, collection_path.read_text()) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that the collection makes is garbage: the collector of Python does not look at it, then or later.

    Otherwise each of the many full collections (`torch.compiler.reset` makes one) walks through all tests and modules.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker sends no report of a setup or a teardown that is shown nowhere; a test sends half the messages."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed or report.duration > 0.005:  # the least of --durations
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> Iterator[None]:
    """What is alive after the tests of a file, such as imported modules and compiled code, is not looked at again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    # Without a device, torch.manual_seed keeps the stack of its caller for each kind of device that may come.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """SIGINT and SIGHUP act as in a terminal, also where `nohup` or `&` starts the tests with both ignored."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only one of a group."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The models of `tiny_models`, their calibrations and packings, made when they are asked for. Not to be changed."""
    from tiny_models import folder_maker

    return folder_maker(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every example of `packed_examples`, packed once. A test that changes a folder copies it first (`copy_of`)."""
    from packed_examples import Example, examples, write_run

    from octavo.packing import pack

    root = tmp_path_factory.mktemp("packed models, größer")
    made = {}
    for name, (model, hf, settings) in examples().items():
        run = write_run(root / name, model, hf, **settings)
        out = root / f"{name} packed"
        made[name] = Example(run, model, out, pack(run, out))
    return made


@pytest.fixture
def copy_of(packed: dict[str, Any], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(packed[name].packed, tmp_path / name)


@pytest.fixture(params=["llama", "llama untied", "gpt2", "qwen2"])
def example(request: pytest.FixtureRequest, packed: dict[str, Any]) -> Any:
    return packed[request.param]


@pytest.fixture
def no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` opens its folder with no reader."""
    monkeypatch.setattr("octavo.verification.verifier.Verification.try_readers", lambda verification: None)


@pytest.fixture
def records() -> Callable[..., dict[int, Any]]:
    """records(folder, key): {step: value} of every record in the run's metrics.jsonl that has `key`, each step once."""

    def read(folder: Path, key: str = "loss") -> dict[int, Any]:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        every = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN and Infinity are not JSON
        found = [(record["step"], record[key]) for record in every if key in record]
        assert len(dict(found)) == len(found), "a step stands twice"
        return dict(found)

    return read


@pytest.fixture(scope="session")
def read_once() -> Callable[..., Any]:
    """typer's function that reads the options of all commands, which takes longer than many a command, with a cache."""
    from typer.main import get_command

    return cache(get_command)


@pytest.fixture
def octavo(monkeypatch, capsys, read_once):
    """octavo(*words): (exit code, standard output, standard error) of that command, run in this process."""
    import torch

    from octavo_cli import main

    monkeypatch.setattr("typer.main.get_command", read_once)

    def call(*words: object) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["octavo", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "1000")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # products of a few thousand elements wait for a second one longer than they take
        capsys.readouterr()  # what is there already is not of the command, such as the bar of a model that is written
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            torch.set_num_threads(threads)
        return (ended.value.code, *capsys.readouterr())

    return call


@pytest.fixture
def printed(octavo: Callable[..., tuple[Any, str, str]]) -> Callable[..., str]:
    """printed(*words): the output of that command, which ends well and writes nothing to standard error."""

    def call(*words: object) -> str:
        code, out, err = octavo(*words)
        assert (code, err) == (0, ""), words
        return out

    return call


@pytest.fixture
def refused(octavo: Callable[..., tuple[Any, str, str]]) -> Callable[..., str]:
    """refused(*words): the one line on standard error with which that command ends. It prints at most what it read."""

    def call(*words: object) -> str:
        code, out, err = octavo(*words)
        assert (code, [line for line in out.splitlines() if not line.startswith("read ")]) == (1, []), words
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        return err

    return call
