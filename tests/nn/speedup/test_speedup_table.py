"""The table of speedups: interpolation, JSON, and the tables that are shipped."""

import json
from collections.abc import Callable
from itertools import product

import pytest
import torch
from scipy.interpolate import RegularGridInterpolator
from speedup_examples import AXES, UNKNOWN, row, table_of

import octavo
from octavo.nn import only_if_faster as lookup
from octavo.rates.measured import Machine, Table, interpolate


def test_interpolation_is_scipys_in_log2_and_the_edge_beyond() -> None:
    values = torch.rand(tuple(map(len, AXES)), dtype=torch.float64) + 0.5
    grid = dict(zip(product(*AXES), values.flatten().tolist(), strict=True))
    logarithms = [torch.tensor(axis).double().log2().numpy() for axis in AXES]
    oracle = RegularGridInterpolator(logarithms, values.numpy())
    points = [tuple(row) for row in torch.exp2(torch.rand(200, 3) * 9 + 8).int().tolist()]
    assert any(p[0] < 2048 for p in points)
    assert any(p[1] > 16384 for p in points)
    for point in [*points, *grid, (1, 1, 1), (10**6, 10**6, 10**6)]:
        inside = [min(max(size, axis[0]), axis[-1]) for size, axis in zip(point, AXES, strict=True)]
        assert interpolate(grid, point) == pytest.approx(oracle(torch.tensor(inside).double().log2().numpy())[0])


def test_single_layers_say_nothing_about_other_sizes() -> None:
    table = Table(UNKNOWN, "made up", shapes=(row((512, 768, 768), 0.75), row((512, 768, 3072), 1.25)))
    assert table.predict("rowwise", (512, 768, 768)) == 0.75
    assert table.predict("rowwise", (512, 768, 3072)) == 1.25
    assert table.predict("rowwise", (512, 768, 1536)) is None
    assert table.predict("tensorwise", (512, 768, 768)) is None


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
