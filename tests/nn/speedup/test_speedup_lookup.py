"""Where speedups come from: a table measured here, a shipped table, or timing now; and where tables are stored."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from speedup_examples import H100, NATIVE, UNKNOWN, row, table_of
from torch import nn

import octavo
from octavo.nn import only_if_faster as lookup
from octavo.nn.only_if_faster import (
    Speedups,
    cache_path,
    find_speedups,
    never_faster,
    read_table,
    table_key,
    write_table,
)
from octavo.ops import Backend
from octavo.rates.measured import Table
from octavo.recipe import PRESETS, get_recipe, rowwise

CUDA = torch.device("cuda", 0)


# ---- files


def test_the_file_has_the_names_of_what_times_depend_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "speedups-nvidia-h100-80gb-hbm3-2.11.0-cu130-0.1.0.json"
    assert cache_path(H100) == folder / name
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_path(H100) == Path("/somewhere/octavo") / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_path(H100) == Path.home() / ".cache/octavo" / name


def test_a_table_is_written_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, table = cache_path(UNKNOWN), table_of(lambda m, k, n: 1.0)
    write_table(path, table)
    assert read_table(path) == table

    def full_disk(self: Path, text: str) -> None:
        self.write_bytes(text[:99].encode())
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_table(path, Table(UNKNOWN, "other"))
    assert read_table(path) == table
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"grid": []}', "\x00"])
def test_a_cached_table_that_cannot_be_read_says_which_and_what_to_do(
    text: str, folder: Path, pretend: Callable
) -> None:
    pretend(H100)
    folder.mkdir()
    cache_path(H100).write_text(text)
    with pytest.raises(ValueError, match="move it elsewhere, or measure anew with `octavo doctor") as error:
        octavo.convert(nn.Sequential(nn.Linear(8, 8)), only_if_faster=True)
    assert str(cache_path(H100)) in str(error.value)


# ---- lookup


def test_a_table_measured_here_comes_before_the_shipped_one(pretend: Callable) -> None:
    timed = pretend(H100)
    shapes = {(8192, 4096, 4096), (8192, 4096, 1024)}
    shipped = find_speedups(rowwise(), NATIVE, CUDA, shapes)
    assert "shipped for H100" in shipped.source
    write_table(cache_path(H100), table_of(lambda m, k, n: 7.0, H100))
    measured = find_speedups(rowwise(), NATIVE, CUDA, shapes)
    assert measured == Speedups(dict.fromkeys(shapes, 7.0), measured.source)
    assert f"measured on this GPU ({cache_path(H100)})" in measured.source
    assert "shipped" not in measured.source
    assert shipped.by_shape.keys() == shapes
    assert max(shipped.by_shape.values()) < 7
    assert timed == []
    write_table(cache_path(H100), Table(H100, "made up", shapes=(row((8192, 4096, 4096), 7.0),)))
    both = find_speedups(rowwise(), NATIVE, CUDA, shapes)  # one shape of each table
    assert "shipped" in both.source
    assert both.by_shape == shipped.by_shape | {(8192, 4096, 4096): 7.0}
    assert timed == []


def test_an_unknown_gpu_times_the_layers_once_and_stores_the_times(pretend: Callable) -> None:
    timed = pretend(UNKNOWN)
    shapes = {(8192, 4096, 8192), (8192, 4096, 4096)}
    first = find_speedups(rowwise(), NATIVE, CUDA, shapes)
    assert first.by_shape == {(8192, 4096, 8192): 1.5, (8192, 4096, 4096): 0.5}
    assert f"measured now, stored in {cache_path(UNKNOWN)}" in first.source
    assert timed == sorted(shapes)
    again = find_speedups(rowwise(), NATIVE, CUDA, {*shapes, (8192, 64, 64)})
    assert again.by_shape == {**first.by_shape, (8192, 64, 64): 0.5}
    assert timed == [*sorted(shapes), (8192, 64, 64)]
    assert "measured on this GPU" in again.source
    assert {r.shape for r in read_table(cache_path(UNKNOWN)).shapes} == set(timed)
    find_speedups(rowwise("e5m2"), NATIVE, CUDA, {(8192, 64, 64)})  # another recipe of the same name
    assert timed[3:] == [(8192, 64, 64)]


def test_a_cache_that_cannot_be_written_is_reported_and_no_error(folder: Path, pretend: Callable) -> None:
    pretend(UNKNOWN)
    folder.write_text("a file where a folder should be")
    actual = find_speedups(rowwise(), NATIVE, CUDA, {(8192, 4096, 8192)})
    assert actual.by_shape == {(8192, 4096, 8192): 1.5}
    assert "measured now, not stored: " in actual.source


def test_no_memory_to_time_a_layer(pretend: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(UNKNOWN)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lookup, "time_linears", full)
    with pytest.raises(RuntimeError, match=r"up to \(8192, 4, 8\): run `octavo doctor --measure-layers` once"):
        find_speedups(rowwise(), NATIVE, CUDA, {(8192, 4, 8), (8192, 4, 4)})


def test_a_table_calls_a_recipe_by_what_it_is() -> None:
    assert [table_key(preset()) for preset in PRESETS.values()] == list(PRESETS)
    keys = {table_key(recipe) for recipe in (rowwise(), rowwise("e5m2"), octavo.Recipe("rowwise"), octavo.Recipe("x"))}
    assert len(keys) == 4
    assert all(key.startswith(("rowwise", "x-")) for key in keys)


def test_where_fp8_is_never_faster() -> None:
    cpu = torch.device("cpu")
    emulated = dict.fromkeys(("y", "dx", "dw"), Backend("emulated", "cpu has no FP8 GEMM"))
    assert never_faster(rowwise(), emulated, cpu) == "cpu emulates FP8, which is never faster than BF16"
    assert "quantizes nothing" in never_faster(get_recipe("bf16"), dict.fromkeys(NATIVE, Backend("bf16", "")), CUDA)
    assert "dw has no FP8 GEMM here (too old)" in never_faster(
        rowwise(), NATIVE | {"dw": Backend("none", "too old")}, CUDA
    )
    assert never_faster(rowwise(), NATIVE, CUDA) == ""
    assert never_faster(get_recipe("rowwise_dw_bf16"), NATIVE | {"dw": Backend("bf16", "no cast")}, CUDA) == ""
