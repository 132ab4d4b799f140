"""The record of PyTorch's dispatch: each line is complete, and names where it comes from."""

import json
from importlib.resources import files

from octavo.numerics.granularity import parse_granularity
from octavo.ops.gemm.dispatch import LINES
from octavo.ops.gpu_architecture import ARCHITECTURES

RECORD = json.loads((files("octavo.ops.gemm") / "dispatch.json").read_text())
GPUS = ARCHITECTURES.keys() - {"unknown", "amd_newer"} | {"hopper_cuda_12.8"}


def test_each_line_has_a_source():
    for row in RECORD["gemms"]:
        assert row["source"]
        assert set(row["source"].split()) <= RECORD["sources"].keys()
    assert {name for row in RECORD["gemms"] for name in row["source"].split()} == RECORD["sources"].keys()


def test_only_lines_of_hopper_are_measured():
    assert {row["gpus"] for row in RECORD["gemms"] if "measured" in row["source"]} == {"hopper"}


def test_a_line_is_a_gemm_or_a_refusal():
    for row in RECORD["gemms"]:
        rest = row.keys() - {"gpus", "scales", "source"}
        assert rest in ({"refusal"}, {"library", "formats", "out", "fast_accumulation"})


def test_no_line_is_recorded_twice_and_each_gpu_has_all_scales():
    keys = [(gpu, row["scales"]) for row in RECORD["gemms"] for gpu in row["gpus"].split()]
    assert sorted(keys) == sorted(LINES)
    scales = {pair for _, pair in keys}
    assert set(keys) == {(gpu, pair) for gpu in GPUS for pair in scales}
    for pair in scales:
        for each in pair.split(", "):
            parse_granularity(each.removesuffix(" e8m0"))
