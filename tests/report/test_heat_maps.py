"""Records as grids: each value is found again in the codes, and long runs share columns by the worst sample."""

import base64

import numpy as np
import pytest
from report_examples import operands_of, watched_of

from octavo.report import heat_maps
from octavo.watching.storage import BINADES

STEPS = np.arange(5, 105, 5)
BY_KEY = {metric.key: metric for metric in heat_maps.METRICS}


def decoded(grid: dict, metric: heat_maps.Metric) -> np.ndarray:
    codes = np.frombuffer(base64.b64decode(grid["codes"]), "<u2").astype(np.float64)
    low, high = grid["low"], grid["high"]
    if metric.log and low == 0:  # no value is above 0
        values = np.zeros_like(codes)
    elif metric.log:
        values = np.where(codes == 0, 0, low * (high / low) ** ((codes - 1) / (heat_maps.LAST - 1)))
    else:
        values = low + codes / heat_maps.LAST * (high - low)
    values[codes == heat_maps.MISSING], values[codes == heat_maps.WRONG] = np.nan, np.inf
    return values


@pytest.mark.parametrize("columns", [20, 7, 1])
@pytest.mark.parametrize("key", ["saturated", "sqnr", "amax"])
def test_a_column_holds_the_worst_of_its_samples(key, columns):
    watched, metric = watched_of(5, STEPS), BY_KEY[key]
    found = heat_maps.metric_grids(watched, heat_maps.columns_of(STEPS, columns))[key]
    parts = np.array_split(operands_of(STEPS, 5).reshape(len(STEPS), 5, 3)[key].astype(np.float64), columns)
    worst = np.nanmax if metric.worst == "highest" else np.nanmin
    for number, operand in enumerate(("x", "w", "dy")):
        expected = [[worst(part[:, layer, number]) for part in parts] for layer in range(4)]
        np.testing.assert_array_equal(found[operand][:4], expected)
        assert np.isnan(found[operand][4]).all() == (key != "amax")  # the head is not quantized


def test_the_spans_of_the_columns_cover_all_steps():
    spans = heat_maps.columns_of(STEPS, 7)
    assert (spans[0][0], spans[-1][1]) == (5, 100)
    assert [first for first, _ in spans[1:]] == [last + 5 for _, last in spans[:-1]]
    assert heat_maps.columns_of(STEPS, 20) == [(step, step) for step in STEPS]
    assert heat_maps.sampled_steps(watched_of(5, STEPS)).tolist() == STEPS.tolist()
    assert heat_maps.spread(STEPS, 3) == [5, 55, 100]
    assert heat_maps.spread(STEPS, 99) == STEPS.tolist()


MANY = [0.0, *np.exp2(np.linspace(-20, 20, 997)), np.nan, np.inf]


@pytest.mark.parametrize("values", [MANY, [3.0, 3.0], [0.0, 0.0], [np.nan, np.inf], [-1.0, 2.0]])
@pytest.mark.parametrize("log", [True, False])
def test_codes_give_the_values_again(values, log):
    array, metric = np.array(values), heat_maps.Metric("amax", "amax", log=log)
    found = decoded(heat_maps.encode_grid(array, metric), metric)
    if log:
        np.testing.assert_allclose(found, np.maximum(array, 0), rtol=5e-4)
    else:
        finite = array[np.isfinite(array)]
        np.testing.assert_allclose(found, array, rtol=0, atol=np.ptp(finite) / heat_maps.LAST if len(finite) else 0)


def test_nan_as_amax_is_shown_and_metrics_without_values_are_not():
    watched = watched_of(5, STEPS)
    watched.operands["amax"][3] = np.nan
    found = heat_maps.metric_grids(watched, heat_maps.columns_of(STEPS, 20))
    assert np.isinf(found["amax"]["x"][1, 0])
    assert "gap" not in found  # no scale was fixed before
    assert "nonfinite" not in found
    assert list(found["shift_lost"]) == ["dy"]
    assert "alignment" not in found  # there is no SwiGLU
    watched.operands["nonfinite"][3] = 0.5
    assert "nonfinite" in heat_maps.metric_grids(watched, heat_maps.columns_of(STEPS, 20))


def test_histograms_are_those_of_their_steps():
    found = heat_maps.histograms_at(watched_of(5, STEPS), [10, 100])
    cube = operands_of(STEPS, 5).reshape(len(STEPS), 5, 3)[[1, 19]]
    dy = found["operands"]["dy"]
    shares = np.frombuffer(base64.b64decode(dy["shares"]), "<u2").reshape(2, 5, BINADES)
    np.testing.assert_array_equal(shares, cube[:, :, 2]["binades"])
    amax = np.frombuffer(base64.b64decode(dy["amax"]), "<f4").reshape(2, 5)
    np.testing.assert_array_equal(amax, cube["amax"][:, :, 2])
    assert found["steps"] == [10, 100]
    assert set(found["operands"]["gradient"]) == {"shares", "amax"}


def test_the_code_points_are_those_of_the_formats():
    points = heat_maps.code_points("e4m3")
    assert (len(points), points[0], points[-1]) == (126, 2.0**-9, 448.0)
    assert (len(heat_maps.code_points("e5m2")), heat_maps.code_points("e5m2")[-1]) == (123, 57344.0)
    assert points == sorted(points)
