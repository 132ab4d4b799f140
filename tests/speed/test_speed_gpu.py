"""Comparisons of speed on a GPU: times, memory, and the compilation of the static cache apart from them."""

import pytest
import torch
from speed_examples import too_large
from tiny_models import Folders

from octavo.speed import Grid, Opened, Program, compare_speed, measure_programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]


def test_a_packed_folder_beside_bf16(made: Folders) -> None:
    report = compare_speed(made("llama", scheme="channel"), made("llama"), Grid([1, 4], [16], 8, 2), "cuda")
    assert report.check is not None
    assert report.check.ok
    assert report.interleaved
    assert report.process_peak_bytes is None
    weights = {start.program: start.weight_bytes or 0 for start in report.starts}
    workspace = 64 << 20  # of cuBLAS, which whoever loads first allocates
    assert 0 < weights["octavo"] < weights["transformers, BF16"] + workspace
    rows = {(row.way, row.batch): row for row in report.rows}
    assert len(rows) == 6
    for (way, _), row in rows.items():
        assert row.problem == ""
        assert row.tokens_per_second is not None
        assert (row.peak_bytes or 0) > weights["octavo" if way == "octavo" else "transformers, BF16"]
    static = rows["BF16, static", 1]
    assert (static.warm_up_seconds or 0) > 3 * max(static.whole_seconds)


def test_memory_that_is_exhausted_is_free_again(made: Folders) -> None:
    """What the call held when it failed, here a gigabyte, is free for the next way."""

    def exhausts(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        return too_large(1)(ids, tokens + 0 * held.numel()).to("cuda")

    def measures(ids: torch.Tensor, tokens: int) -> torch.Tensor:
        if len(ids) > 1:
            free.append(torch.cuda.memory_allocated())
        return torch.zeros(len(ids), tokens, dtype=torch.int64, device="cuda")

    free: list[int] = []
    folder = made("llama")
    programs = [
        Program(name, (name,), folder, lambda generate=generate, name=name: Opened({name: generate}))
        for name, generate in (("a", exhausts), ("b", measures))
    ]
    report = measure_programs(programs, Grid([4], [16], 2, 1), torch.device("cuda"))
    assert [bool(row.problem) for row in report.rows] == [True, False]
    assert max(free) < 1 << 30
