"""`convert(..., only_if_faster=True)` leaves in BF16 what FP8 would not speed up: tables, their files, and timing."""

import json
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy.interpolate import RegularGridInterpolator
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import octavo
from octavo.nn import conversion
from octavo.nn import only_if_faster as lookup
from octavo.nn.only_if_faster import cache_path, find_speedups, never_faster, read_table, table_key, write_table
from octavo.ops import Backend
from octavo.rates.measured import Machine, Measurement, Shape, Table
from octavo.recipe import PRESETS, get_recipe, rowwise

UNKNOWN = Machine("Fast GPU 9000", "9.9", "13.0", "2.11.0+cu130", "0.1.0")
H100 = Machine("NVIDIA H100 80GB HBM3", "9.0", "13.0", "2.11.0+cu130", "0.1.0")
CUDA = torch.device("cuda", 0)
NATIVE = dict.fromkeys(("y", "dx", "dw"), Backend("cublaslt", "row x row scales"))
AXES = ((2048, 8192, 32768), (1024, 2048, 16384), (1024, 4096))


def row(shape: Shape, speedup: float, recipe: str = "rowwise") -> Measurement:
    return Measurement(recipe, *shape, bf16_ms=2 * speedup, fp8_ms=2.0)


def table_of(speedup: Callable[[int, int, int], float], machine: Machine = UNKNOWN) -> Table:
    return Table(machine, "made up", grid=tuple(row(shape, speedup(*shape)) for shape in product(*AXES)))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Shape]]:
    """pretend(machine): this CPU is that GPU, its speedups 1.5 for N > 4096, else 0.5; returns the shapes timed.
    pretend(machine, speedup): a table of it was measured here before."""
    timed: list[Shape] = []

    def time_linears(recipe: object, shapes: list[Shape], device: object, done: Callable[[], None]) -> list:
        timed.extend(shapes)
        return [(done(), (3.0, 2.0 if n > 4096 else 6.0))[1] for _, _, n in shapes]

    def call(machine: Machine, measured: Callable[[int, int, int], float] | None = None) -> list[Shape]:
        if measured is not None:
            write_table(cache_path(machine), table_of(measured, machine))
        monkeypatch.setattr(conversion, "gemm_backends", lambda *_, **__: NATIVE)
        monkeypatch.setattr(lookup, "this_machine", lambda device: machine)
        monkeypatch.setattr(lookup, "time_linears", time_linears)
        return timed

    return call


def mixed() -> nn.ModuleDict:
    with torch.device("meta"):
        wide, narrow, head = nn.Linear(2048, 4096), nn.Linear(2048, 1024), nn.Linear(2048, 4096)
        return nn.ModuleDict({"wide": wide, "narrow": narrow, "lm_head": head})


def test_each_layer_is_judged_by_its_sizes(pretend: Callable) -> None:
    pretend(UNKNOWN, lambda m, k, n: 1.43 if n == 4096 else 0.93)
    model = mixed()
    report = octavo.convert(model, only_if_faster=True, tokens=32768)
    assert report.converted == ["wide"]
    assert report.skipped == {"narrow": "0.93x: left in BF16", "lm_head": "an output head or router (lm_head)"}
    assert [r.speedup for r in report.rows] == [pytest.approx(1.43), pytest.approx(0.93), None]
    assert [type(m) for m in model.values()] == [octavo.Linear, nn.Linear, nn.Linear]
    assert f"only if faster: from 1.05x on, measured on this GPU ({cache_path(UNKNOWN)})" in str(report)


def test_tokens_are_the_rows_of_a_forward_pass(pretend: Callable) -> None:
    pretend(UNKNOWN, lambda m, k, n: {2048: 0.8, 8192: 1.0, 32768: 1.2}[m])
    assert octavo.convert(mixed(), only_if_faster=True, tokens=32768).converted == ["wide", "narrow"]
    assert octavo.convert(mixed(), only_if_faster=True, tokens=16384).rows[0].speedup == pytest.approx(1.1)
    assert octavo.convert(mixed(), only_if_faster=True).converted == []
    with pytest.raises(ValueError, match=r"tokens.* must be at least 1, got \(M, K, N\) \(0, 2048, 1024\)"):
        octavo.convert(mixed(), only_if_faster=True, tokens=0)


@pytest.mark.parametrize(("speedup", "pays"), [(1.0, False), (1.049, False), (1.051, True)])
def test_a_speedup_within_the_noise_does_not_count(speedup: float, pays: bool, pretend: Callable) -> None:
    pretend(UNKNOWN, lambda m, k, n: speedup)
    assert bool(octavo.convert(mixed(), only_if_faster=True, tokens=32768).converted) is pays


def test_a_model_of_little_work_is_left_to_bf16(pretend: Callable) -> None:
    pretend(UNKNOWN, lambda m, k, n: 1.4)
    report = octavo.convert(mixed(), only_if_faster=True)  # 0.5e12 operations, 1.0e12 hide the launches of two layers
    assert report.converted == []
    assert "GPU would wait for the host" in report.skipped["wide"]
    assert report.rows[0].speedup == pytest.approx(1.4)
    assert octavo.convert(mixed(), only_if_faster=True, tokens=32768).converted == ["wide", "narrow"]


@pytest.mark.parametrize(
    ("shapes", "hidden"),
    [
        ([(4096, 4096, 4096)], False),  # measured on an H200: 0.84x
        ([(4096, 4096, 8192)], True),  # 1.19x
        ([(4096, 4096, 2048)] * 12, False),
        ([(4096, 4096, 8192)] * 12, True),
    ],
)
def test_one_layer_needs_more_work_to_hide_the_launches(shapes: list[tuple[int, int, int]], hidden: bool) -> None:
    assert lookup.hides_launching(shapes) is hidden


def test_on_a_cpu_nothing_is_converted_and_the_report_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    octavo.convert(model[1], "delayed")  # converted before, now BF16 again
    keys = model.state_dict().keys()
    report = octavo.convert(model, only_if_faster=True)
    assert report.converted == []
    assert set(report.skipped.values()) == {"cpu emulates FP8, which is never faster than BF16"}
    assert "cpu emulates FP8" in str(report)
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]
    assert model.state_dict().keys() == keys
    assert not octavo.scales.scale_state(model)
    x = torch.randn(3, 8)
    assert torch.equal(model(x), F.linear(F.linear(x, model[0].weight, model[0].bias), model[1].weight, model[1].bias))
    assert octavo.convert(model).converted == ["0", "1"]


def test_the_batch_gives_the_tokens_of_each_layer(pretend: Callable) -> None:
    class Two(nn.ModuleDict):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return self["few"](self["many"](x)[:, 0]) * scale

    with torch.device("meta"):
        model = Two({"many": nn.Linear(2048, 4096), "few": nn.Linear(4096, 2048), "never": nn.Linear(2048, 2048)})
    pretend(UNKNOWN, lambda m, k, n: {2048: 0.8, 8192: 1.0, 32768: 1.2}[m])
    batch = {"x": torch.empty(2048, 16, 2048, device="meta"), "scale": 0.5}
    report = octavo.convert(model, only_if_faster=True, tokens=8192, batch=batch)
    assert [row.speedup for row in report.rows] == [pytest.approx(1.2), pytest.approx(0.8), None]
    assert report.skipped == {"few": "0.80x: left in BF16", "never": "the batch does not reach it: left in BF16"}


# ---- Where speedups come from: a table measured here, a shipped table, or timing now; and where tables are stored


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

    def full_disk(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text[:99].encode())
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_table(path, Table(UNKNOWN, "other"))
    assert read_table(path) == table
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"grid": []}', "\x00"])
def test_a_cached_table_that_cannot_be_read_says_which_and_what_to_do(text, folder, pretend):
    pretend(H100)
    folder.mkdir()
    cache_path(H100).write_text(text)
    with pytest.raises(ValueError, match="move it elsewhere, or measure anew with octavo doctor") as error:
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
    assert measured == lookup.Speedups(dict.fromkeys(shapes, 7.0), measured.source)
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
    old = NATIVE | {"dw": Backend("none", "too old")}
    assert "dw has no FP8 GEMM here (too old)" in never_faster(rowwise(), old, CUDA)
    assert never_faster(rowwise(), NATIVE, CUDA) == ""
    assert never_faster(get_recipe("rowwise_dw_bf16"), NATIVE | {"dw": Backend("bf16", "no cast")}, CUDA) == ""


# ---- Timing linear layers in BF16 and FP8


@pytest.mark.parametrize(("gigabytes", "widest"), [(80, 32768), (48, 16384), (24, 8192), (2, 1024)])
def test_the_grid_is_what_the_memory_holds_and_an_error_says_how_much_is_needed(gigabytes: int, widest: int) -> None:
    shapes = lookup.grid_shapes(gigabytes * 10**9)
    assert max(shapes) == (32768, widest, widest)
    axes = [sorted(set(axis)) for axis in zip(*shapes, strict=True)]
    assert sorted(shapes) == list(product(*axes))
    assert axes[0] == [512, 2048, 8192, 32768]
    with pytest.raises(RuntimeError, match=r"needs 1\.5 GB of free GPU memory, 1\.0 GB are"):
        lookup.grid_shapes(10**9)


class Mark(float):
    """A time in milliseconds, as an event of a GPU."""

    def elapsed_time(self, end: float) -> float:
        return end - self


def test_medians_of_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(lookup, "_mark", lambda: Mark(sum(taken)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    short, long = (lambda: taken.append(50.0 if len(taken) == 6 else 1.0)), (lambda: taken.append(4.0))  # one outlier
    assert lookup.interleaved_medians([short, long]) == [1.0, 4.0]
    order = ["long" if ms == 4.0 else "short" for ms in taken]
    assert order[:4] == ["short", "short", "long", "long"]  # how long they take
    assert order[4:] == ["short", "short", "short", "long"] * lookup.TURNS  # three of one are a turn


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_the_layers_compile_once_for_every_size(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compilations))
    forward = lookup.compiled(lookup.Linear(1, 1, bias=False, recipe=get_recipe(recipe)))
    for m, k, n in [(32, 48, 64), (48, 64, 32), (96, 80, 112), (32, 32, 32), (64, 32, 32)]:
        x, w = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(n, k, dtype=torch.bfloat16, requires_grad=True)
        expected = lookup.Linear(k, n, bias=False, recipe=get_recipe(recipe))
        expected.weight = nn.Parameter(w.detach())
        assert torch.equal(forward(x, w), expected(x))
    assert compilations.frame_count == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_gpu_is_timed_and_its_random_state_left() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = torch.cuda.get_rng_state()
    shapes = [(256, 512, 1024), (8192, 4096, 4096), (256, 64, 64), (512, 512, 512)]
    for name in ("tensorwise", "rowwise", "rowwise_dw_bf16", "delayed", "blockwise"):
        done = count()
        with torch.no_grad():
            rows = lookup.measure_shapes(get_recipe(name), shapes, device, partial(next, done))
        assert next(done) == len(shapes)
        assert [r.shape for r in rows] == shapes
        flops = 6 * 8192 * 4096 * 4096
        assert flops / (1e-3 * rows[1].bf16_ms) < 2.5e15  # FLOP/s: no GPU is faster, and one with other work is slower
    assert torch.equal(torch.cuda.get_rng_state(), state)


# ---- The table of speedups: interpolation, JSON, and the tables that are shipped


def test_predictions_are_those_measured_or_scipys_interpolation_in_log2_and_the_edge_beyond() -> None:
    values = torch.rand(tuple(map(len, AXES)), dtype=torch.float64) + 0.5
    known = {(8192, 3000, 2000): 7.0, (2048, 1024, 4096): 9.0, (1, 1, 1): 8.0}  # the second one has a point of the grid
    shapes = *(row(shape, speedup) for shape, speedup in known.items()), row((64, 64, 64), 6.0, "tensorwise")
    grid = tuple(map(row, product(*AXES), values.flatten().tolist()))
    table = Table(UNKNOWN, "made up", grid, shapes)
    logarithms = [torch.tensor(axis).double().log2().numpy() for axis in AXES]
    oracle = RegularGridInterpolator(logarithms, values.numpy())
    points = [tuple(row) for row in torch.exp2(torch.rand(200, 3) * 9 + 8).int().tolist()]
    for point in [*points, *known, *product(*AXES), (64, 64, 64), (10**6, 10**6, 10**6)]:
        inside = [min(max(size, axis[0]), axis[-1]) for size, axis in zip(point, AXES, strict=True)]
        expected = known.get(point, oracle(torch.tensor(inside).double().log2().numpy())[0])
        assert table.predict("rowwise", point) == pytest.approx(expected)
        assert table.predict("tensorwise", point) == (6.0 if point == (64, 64, 64) else None)


def test_json_round_trip_a_measurement_a_line() -> None:
    grid = table_of(lambda m, k, n: 1 + n / 8192).grid
    table = Table(UNKNOWN, "made up", grid, (row((5, 6, 7), 1.5, "mine-0123abcd"),))
    text = table.to_json()
    assert Table.from_json(text) == table
    assert sum('"fp8_ms"' in line for line in text.splitlines()) == len(grid) + 1
    known = json.loads(text)["shapes"][0]
    assert known == {"recipe": "mine-0123abcd", "M": 5, "K": 6, "N": 7, "bf16_ms": 3.0, "fp8_ms": 2.0}
    assert Table.from_json(Table(UNKNOWN, "empty").to_json()) == Table(UNKNOWN, "empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["grid"].pop(), "every combination"),
        (lambda f: f["grid"].append(f["grid"][0]), "every combination"),
        (lambda f: f["grid"][0].update(fp8_ms=0.0), "positive sizes and times"),
        (lambda f: f["grid"][0].update(fp8_ms=float("nan")), "positive sizes and times"),
        (lambda f: f["grid"][0].update(K=0), "positive sizes and times"),
        (lambda f: f["grid"][0].update(K=1024.5), "positive sizes and times"),
        (lambda f: f["grid"][0].pop("N"), "not a table of speedups"),
        (lambda f: f["grid"][0].update(fp8_ms="fast"), "not a table of speedups"),
        (lambda f: f.pop("machine"), "not a table of speedups"),
        (lambda f: f.update(more=1), "not a table of speedups"),
        (lambda f: f.update(grid=7), "not a table of speedups"),
    ],
)
def test_a_table_that_is_not_whole_is_refused(change: Callable[[dict], object], message: str) -> None:
    fields = json.loads(table_of(lambda m, k, n: 1.0).to_json())
    change(fields)
    with pytest.raises(ValueError, match=message):
        Table.from_json(json.dumps(fields))


@pytest.mark.parametrize("part", lookup.SHIPPED)
def test_shipped_tables_know_what_the_gpu_can_run(part: str) -> None:
    ((source, table),) = lookup.known_tables(Machine(f"NVIDIA {part} NVL", "9.0", "13.0", "2.13.0", "9"))
    assert table.machine.gpu in source
    assert table.method in source
    recipes = {r.recipe for r in table.grid}
    assert {"rowwise"} <= recipes <= set(octavo.recipe.PRESETS)
    for recipe in recipes:
        assert {r.shape for r in table.grid if r.recipe == recipe} == set(lookup.grid_shapes(80 * 10**9))
