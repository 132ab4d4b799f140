"""One choice of a device for all commands."""

import pytest
import torch

import octavo
from octavo.util import choose_device


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): torch says that it sees n GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.mark.parametrize(("count", "chosen"), [(0, "cpu"), (2, "cuda")])
def test_auto_is_the_gpu_where_there_is_one(gpus, count, chosen):
    gpus(count)
    assert choose_device("auto") == torch.device(chosen)


def test_a_device_that_is_there_is_taken(gpus):
    gpus(2)
    for device in ("cpu", "meta", "cuda", "cuda:1", torch.device("cuda", 0)):
        assert choose_device(device) == torch.device(device)


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
        choose_device(device)


def test_load_refuses_it_before_it_reads_the_folder(gpus, tmp_path):
    gpus(0)
    with pytest.raises(ValueError, match="device cuda was asked for"):
        octavo.load(tmp_path / "nowhere", "cuda")
