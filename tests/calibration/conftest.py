"""A Llama in several shards, and data to calibrate it with."""

import pytest
from calibration_examples import write_data, write_model


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("models") / "llama", "llama", shards="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder
