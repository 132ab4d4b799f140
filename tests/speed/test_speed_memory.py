"""The memory of a way while another model holds memory in the same process."""

import pytest
import torch

from octavo.speed.memory import Meter

GPU = torch.device("cuda")


class FakeGPU:
    """The counters of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
        self.now = self.most = held
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.most)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(self, "most", self.now))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000 - self.now, 1000))

    def allocate(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


def test_the_memory_of_others_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch, held=500)  # of which 100 are this way's weights
    meter = Meter(GPU, weights=100)
    with meter:
        gpu.allocate(70)
        gpu.allocate(-50)  # 20 stay
    assert meter.peak == 170
    gpu.allocate(200)  # another way's
    with meter:
        gpu.allocate(60)
        gpu.allocate(-60)
    assert meter.peak == 100 + 20 + 60
    meter.reset()
    with meter:
        gpu.allocate(5)
    assert meter.peak == 105


def test_of_another_process_everything_in_use_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGPU(monkeypatch, held=0)
    meter = Meter(GPU, apart=True)
    with meter:
        gpu.allocate(300)
    assert meter.peak == 300


def test_nothing_is_counted_on_a_cpu() -> None:
    meter = Meter(torch.device("cpu"), weights=100)
    with meter:
        torch.zeros(1000)
    assert meter.peak is None
