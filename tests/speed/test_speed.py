"""The speed of generating text: the figures of a row, and `octavo generate --time`."""

import json

import pytest
import torch

from octavo.speed import Grid, Row, time_generation

CPU = torch.device("cpu")
SMALL = ("--time", "--length", "8,16", "--batch", "1,2", "--count", 6, "--rounds", 2, "--device", "cpu")


def counting(ids, tokens):
    return torch.arange(tokens).expand(len(ids), -1)


# --- Figures


@pytest.mark.parametrize(
    ("tokens", "whole", "rate"),
    [(11, [4.0, 3.0, 99.0], 4 * 10 / (4.0 - 2.0)), (1, [], None), (11, [2.0], None)],
    ids=["decoding alone", "the first token alone", "times that are noise"],
)
def test_tokens_per_second(tokens, whole, rate):
    row = Row("a", 4, 128, tokens, prompt_seconds=[1.0, 9.0, 2.0], whole_seconds=whole)
    assert (row.first_token_seconds, row.tokens_per_second) == (2.0, rate)


def test_every_size_is_called_once_before_its_rounds():
    calls = []

    def generate(ids, tokens):
        assert 0 <= int(ids.min()) <= int(ids.max()) < 7
        calls.append((*ids.shape, tokens))
        return counting(ids, tokens)

    rows = time_generation(generate, Grid([2, 1], [16, 8], 4, 3), 7, CPU)
    sizes = [(1, 8), (2, 8), (1, 16), (2, 16)]
    assert [(row.batch, row.prompt) for row in rows] == sizes
    assert calls == [(*size, tokens) for size in sizes for tokens in (4, 1, *(1, 4) * 3)]
    assert {(len(row.prompt_seconds), len(row.whole_seconds), row.peak_bytes) for row in rows} == {(3, 3, None)}
    assert all((row.warm_up_seconds or 0) > 0 for row in rows)


def test_one_new_token_and_memory_that_does_not_suffice():
    [row] = time_generation(counting, Grid([2], [8], 1, 2), 7, CPU)
    assert (len(row.prompt_seconds), row.whole_seconds) == (2, [])

    def generate(ids, tokens):
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nmore lines")
        return counting(ids, tokens)

    small, large = time_generation(generate, Grid([2, 4], [8], 4, 1), 7, CPU)
    assert (small.problem, large.problem) == ("", "does not fit: CUDA out of memory. Tried to allocate 3 GiB")
    assert large.prompt_seconds == []


def test_a_way_that_stops_early_is_an_error():
    with pytest.raises(RuntimeError, match=r"octavo was to generate 1 x 4 tokens, got \[1, 3\]"):
        time_generation(lambda ids, n: counting(ids, max(n - 1, 1)), Grid([1], [8], 4, 1), 7, CPU)


@pytest.mark.gpu
def test_the_peak_of_a_size_is_its_own():
    def generate(ids, tokens):
        torch.zeros(len(ids) << 20, dtype=torch.uint8, device="cuda")
        return counting(ids, tokens)

    small, large = time_generation(generate, Grid([1, 64], [8], 2, 1), 7, torch.device("cuda"))
    assert (large.peak_bytes or 0) - (small.peak_bytes or 0) >= 60 << 20


# --- octavo generate --time


@pytest.mark.parametrize("scheme", ["channel", None], ids=["packed", "not packed"])
def test_the_table(printed, made, scheme):
    folder = made("llama", scheme=scheme) if scheme else made("llama")
    out = printed("generate", folder, *SMALL)
    _, _, *lines = out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [["1", "8"], ["2", "8"], ["1", "16"], ["2", "16"]]
    assert ("FP8 is emulated here" in out) == bool(scheme)


def test_json(printed, made):
    found = json.loads(printed("generate", made("llama"), *SMALL, "--json"), parse_constant=pytest.fail)
    assert (found["tokens"], found["rounds"], len(found["rows"])) == (6, 2, 4)
    assert found["machine"]["torch"] == torch.__version__
    assert {"octavo", "commit", "transformers", "processor", "gpu"} <= found["machine"].keys()
    for row in found["rows"]:
        whole, first = (sorted(row[f"{name}_seconds"]) for name in ("whole", "prompt"))
        seconds = sum(whole) / 2 - sum(first) / 2
        expected = 2 * 5 / seconds * row["batch"] / 2 if seconds > 0 else None
        assert row["tokens_per_second"] == (None if expected is None else pytest.approx(expected))
