"""A tiny run: two layers of width 32 on 20 kB of text. A step takes some milliseconds on one thread."""

import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from tiny_runs import TINY, one_thread, tiny, write_text  # noqa: F401, pytest finds the fixture one_thread here

from octavo.train.config import Config
from octavo.train.supervision import Supervisor
from octavo.train.trainer import resume_run, start_run


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory, 300)


@pytest.fixture
def settings(tmp_path, text):
    """settings(**overrides): the configuration of a tiny run in `tmp_path`/run."""

    def make(**overrides):
        found = tiny(TINY | {"data": (str(text),), "out": str(tmp_path / "run")}, overrides)
        return Config.from_dict({key: value for key, value in found.items() if value is not None})

    return make


@pytest.fixture
def begin(settings):
    """begin(**overrides): the `Trainer` of a new tiny run."""
    return lambda **overrides: start_run(settings(**overrides), Console(quiet=True))


@pytest.fixture
def go_on():
    """go_on(folder, *overrides): the `Trainer` of a run taken up again."""
    return lambda folder, *overrides: resume_run(folder, overrides, Console(quiet=True))


@pytest.fixture
def spawn(settings, tmp_path):
    """spawn(**overrides): the process of `octavo train` with these settings, its output piped unless `stdout` or
    `stderr` is given; ended with the test."""
    started = []

    def start_process(**overrides):
        streams = {name: overrides.pop(name, subprocess.PIPE) for name in ("stdout", "stderr")}
        path = tmp_path / f"settings-{len(started)}.json"
        path.write_text(json.dumps(settings(**overrides).to_dict()))
        words = [sys.executable, "-m", "octavo", "train", str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(words, env=environment, text=True, **streams))
        return started[-1]

    yield start_process
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def eager():
    """Without compilation: torchao compiles its steps for half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def found(monkeypatch):
    """found(step, *events): the events that the rules over samples find at the check of that step."""
    at = {}
    monkeypatch.setattr(Supervisor, "_judge_samples", lambda supervisor: at.pop(supervisor.state.step, []))
    return lambda step, *events: at.__setitem__(step, list(events))
