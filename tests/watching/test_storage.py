import json
from dataclasses import replace

import numpy as np
import pytest
from full_disk import files_of_at_most
from verify_examples import change_settings
from watch_examples import event, sample, watched_layers

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import WriteError
from octavo.watching.storage import LAYER, OPERAND, WatchWriter, read_watch, watch_folder


def written(run, steps=(1, 50, 100), **options):
    writer = WatchWriter(run, watched_layers(), interval=50, **options)
    for step in steps:
        writer.write(*sample(step))
        writer.write_event(event(step))
    return writer


def steps_of(run):
    watched = read_watch(run)
    assert set(watched.layer_records["step"]) == set(watched.operands["step"])
    return sorted(set(watched.operands["step"].tolist()))


def test_what_is_written_is_read(tmp_path):
    written(tmp_path)
    watched = read_watch(tmp_path)
    assert watched.layers == watched_layers()
    assert watched.interval == 50
    assert np.array_equal(np.array(watched.operands).view(np.uint8)[:840], sample(1)[0].view(np.uint8))
    assert watched.operands["step"].tolist() == [1] * 6 + [50] * 6 + [100] * 6
    assert watched.layer_records["gradient_norm"].tolist() == [1, 1, 50, 50, 100, 100]
    assert watched.events == [event(1), event(50), event(100)]
    assert (OPERAND.itemsize, LAYER.itemsize) == (140, 120)  # of version 1


def test_a_run_without_a_sample_is_empty_and_numbers_that_are_not_finite_are_null_in_an_event(tmp_path):
    writer = written(tmp_path, steps=())
    watched = read_watch(tmp_path)
    assert (len(watched.operands), len(watched.layer_records), watched.events) == (0, 0, [])
    assert watched.operands.dtype == OPERAND
    writer.write_event(event(7, float("nan")))
    assert read_watch(tmp_path).events[0].value is None


@pytest.mark.parametrize("name", ["operands.bin", "layers.bin", "events.jsonl"])
def test_a_record_that_is_half_written_is_not_read_and_a_resumed_run_removes_it(tmp_path, name):
    written(tmp_path)
    with (watch_folder(tmp_path) / name).open("ab") as file:
        file.write(b'{"step": 150, ')
    assert steps_of(tmp_path) == [1, 50, 100]
    assert len(read_watch(tmp_path).events) == 3
    written(tmp_path, (150,), resumed_at=100)
    assert steps_of(tmp_path) == [1, 50, 100, 150]
    assert len(read_watch(tmp_path).events) == 4


def test_a_resumed_run_drops_later_steps_and_a_new_one_is_refused(tmp_path):
    written(tmp_path / "unwatched", (101,), resumed_at=100)
    assert steps_of(tmp_path / "unwatched") == [101]
    written(tmp_path)
    written(tmp_path, (90,), resumed_at=70)
    assert steps_of(tmp_path) == [1, 50, 90]
    assert [found.step for found in read_watch(tmp_path).events] == [1, 50, 90]
    with pytest.raises(FileExistsError, match=r"earlier watch, up to step 90: give .* another folder, or .*_at=90"):
        written(tmp_path, (1,))


def test_a_run_goes_on_with_the_layers_that_it_had(tmp_path):
    written(tmp_path)
    with pytest.raises(ArtifactError, match=r"another model: only one .* has blocks\.2\.up of shape \[64, 32\]"):
        WatchWriter(tmp_path, watched_layers(3), interval=50, resumed_at=100)
    new = [replace(layer, gemms={}) for layer in watched_layers()]
    WatchWriter(tmp_path, new, interval=50, resumed_at=100)
    assert read_watch(tmp_path).layers == watched_layers()


def test_a_run_that_went_back_drops_the_samples_after_and_marks_the_events(tmp_path):
    writer = written(tmp_path)
    writer.drop_after(50)
    assert steps_of(tmp_path) == [1, 50]
    assert [found.step for found in read_watch(tmp_path).events] == [1, 50, 100]
    writer.undo_events_after(50)
    writer.write_event(event(60))
    events = [(found.step, found.undone) for found in read_watch(tmp_path).events]
    assert events == [(1, False), (50, False), (100, True), (60, False)]


EVENT = json.dumps(event(20).to_dict() | {"layer": 5})


@pytest.mark.parametrize("line", ["[]", "", "{", '{"step": 5}', '{"step": "a", "rule": "b"}', EVENT, "\xff\xfe"])
def test_a_damaged_line_hides_no_other_event(tmp_path, line):
    written(tmp_path)
    path = watch_folder(tmp_path) / "events.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(first + line + "\n" + "".join(rest))
    found = read_watch(tmp_path)
    assert ([each.step for each in found.events], found.damaged) == ([1, 50, 100], [2])
    written(tmp_path, (), resumed_at=70)
    assert path.read_text() == first + line + "\n" + rest[0]


def test_records_that_reach_the_limit_are_thinned_and_the_interval_doubles(tmp_path):
    size = sum(part.nbytes for part in sample(1))
    writer = written(tmp_path, range(8), limit=8 * size)
    assert steps_of(tmp_path) == list(range(8))
    before = read_watch(tmp_path)  # a reader that has the file open keeps its records
    writer.write(*sample(8))
    assert steps_of(tmp_path) == [0, 2, 4, 6, 8]
    assert writer.interval == read_watch(tmp_path).interval == 100
    assert before.operands["step"].tolist() == [step for step in range(8) for _ in range(6)]
    assert read_watch(tmp_path).operands["amax"][6:12].tolist() == sample(2)[0]["amax"].tolist()
    assert written(tmp_path, (), limit=8 * size, resumed_at=8).interval == 100
    written(tmp_path / "other", (1, 2, 3), limit=10)
    assert steps_of(tmp_path / "other") == [1]  # a single one stays, whatever its size


def test_a_full_disk_loses_the_sample_and_nothing_before(tmp_path):
    writer = written(tmp_path)
    with files_of_at_most(18 * OPERAND.itemsize + 100), pytest.raises(WriteError, match="watch"):
        writer.write(*sample(150))
    with files_of_at_most(100), pytest.raises(WriteError, match="could not write .*watch"):
        writer.write_layers(watched_layers())
    assert steps_of(tmp_path) == [1, 50, 100]
    writer.write(*sample(200))
    assert steps_of(tmp_path) == [1, 50, 100, 200]


def changed(run, **fields):
    change_settings(watch_folder(run) / "layers.json", **fields)


def with_layer(run, **fields):
    first, *rest = json.loads((watch_folder(run) / "layers.json").read_text())["layers"]
    changed(run, layers=[first | fields, *rest])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (watch_folder(run) / "layers.json").unlink(), "was not watched. .* interval is 0"),
        (lambda run: changed(run, version=2), "version 2 .* reads version 1"),
        (lambda run: changed(run, layers=[{"name": "a"}]), "layers.json is not a description"),
        (lambda run: (watch_folder(run) / "layers.json").write_text("{"), "not valid JSON"),
        (lambda run: with_layer(run, gemms={"y": {"precision": "fp8", "kernel": "emulated", "why": 1.0}}), "why must"),
        (lambda run: with_layer(run, formats={"x": 8}), "formats must be an object, got {'x': 8}"),
    ],
)
def test_a_damaged_watch_is_refused_with_a_reason(tmp_path, damage, message):
    written(tmp_path)
    damage(tmp_path)
    with pytest.raises(ArtifactError, match=message):
        read_watch(tmp_path)
    if (watch_folder(tmp_path) / "layers.json").exists():
        with pytest.raises(ArtifactError, match=rf"{message}.*Move .*watch out of the run, to watch it anew"):
            written(tmp_path, (), resumed_at=70)


@pytest.mark.parametrize(("name", "dtype", "field"), [("operands", OPERAND, "operand"), ("layers", LAYER, "layer")])
def test_records_of_unknown_layers_and_operands_are_refused(tmp_path, name, dtype, field):
    written(tmp_path)
    path = watch_folder(tmp_path) / f"{name}.bin"
    records = np.fromfile(path, dtype)
    records[field][-1] = 3
    records.tofile(path)
    with pytest.raises(ArtifactError, match=f"the records of the watch are damaged: .*{field} 3"):
        read_watch(tmp_path)
