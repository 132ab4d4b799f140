"""The order and the batches of bench/gpu/layer.py, and the processes that prepare and measure its cells."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import record
from bench.gpu import layer
from bench.gpu.workers import Workers


def test_batches_hold_each_cell_once_and_fit_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "SIZES", (1024, 2048, 4096, 8192, 16384, 32768))
    cells, memory = layer.order(), 100 << 30
    batches = list(layer.batches(cells, 12, memory, 2))
    assert [cell for batch in batches for cell in batch] == cells
    assert len(set(cells)) == 216
    assert {size for cell in cells[:27] for size in cell} == {1024, 8192, 32768}
    assert max(map(len, batches)) == 12
    assert all(sum(map(layer.bytes_of, batch[gpu::2])) <= memory for batch in batches for gpu in range(2))
    alone = list(layer.batches(cells[:3], 12, 1, 1))
    assert alone == [[cell] for cell in cells[:3]]


def test_cells_of_another_commit_are_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert layer.measured_before() == []
    path = record.write("gpu_layer", {"cells": [{"m": 16}]})
    assert layer.measured_before() == [{"m": 16}]
    found = json.loads(path.read_text())
    found["machine"] |= {"measured": "2020-01-01"}
    path.write_text(json.dumps(found))
    assert layer.measured_before() == [{"m": 16}]
    found["machine"] |= {"commit": "another"}
    path.write_text(json.dumps(found))
    assert layer.measured_before() == []


@pytest.mark.slow
def test_workers_measure_each_job_and_report_what_failed() -> None:
    workers = Workers(partial(partial, abs), 2)  # prepares the job -3 as abs(-3), to be called when it is measured
    assert list(workers.measure([-3, -4])) == [(-3, 3), (-4, 4)]
    assert list(workers.measure(["five"])) == [("five", "TypeError: bad operand type for abs(): 'str'")]
    assert list(workers.measure([-6])) == [(-6, 6)]
    assert workers.gpus == max(1, torch.cuda.device_count())


@pytest.mark.slow
def test_workers_of_one_gpu_measure_one_at_a_time_and_of_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(gpus: int) -> int:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        spans = [span for _, span in Workers(partial(partial, span_of_a_second), 4).measure([1, 2, 3, 4])]
        return max(sum(start <= at < end for start, end in spans) for at, _ in spans)

    assert at_once(1) == 1
    assert at_once(2) == 2


def span_of_a_second(job: int) -> tuple[float, float]:
    start = time.monotonic()
    time.sleep(1)
    return start, time.monotonic()
