"""What `pack` makes of the examples, made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from packed_examples import Example, examples, write_run

from octavo import serve


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On matrices this small, threads do little but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Example]:
    """Every example, packed; tests that change a folder copy it first."""
    root = tmp_path_factory.mktemp("packed models, größer")
    made = {}
    for name, (model, hf, settings) in examples().items():
        run = write_run(root / name, model, hf, **settings)
        out = root / f"{name} packed"
        made[name] = Example(run, model, out, serve.pack(run, out))
    return made


@pytest.fixture
def copy_of(packed: dict[str, Example], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a packed folder, to be changed."""

    def copy(name: str) -> Path:
        return shutil.copytree(packed[name].packed, tmp_path / name)

    return copy


@pytest.fixture(params=["llama", "llama untied", "gpt2", "qwen2"])
def example(request: pytest.FixtureRequest, packed: dict[str, Example]) -> Example:
    return packed[request.param]
