"""The pictures of docs/figures: their numbers against other sources, and the files in the repository."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from code_blocks import DOCS, ROOT

from bench.figures import formats, products
from bench.figures.__main__ import FIGURES, FOLDER, main
from bench.report.filler import load
from octavo.numerics.formats import E4M3, E5M2

pytestmark = pytest.mark.slow


def words(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.DOTALL)


def test_the_pictures_in_the_repository_are_those_that_are_drawn(tmp_path: Path) -> None:
    main(tmp_path, ".svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in FOLDER.glob("*.svg"))
    for path in tmp_path.iterdir():  # by their words: another version of matplotlib draws other bytes
        assert words(path) == words(FOLDER / path.name), f"{path.name}: run make docs"
        assert "<image" not in path.read_text()
        assert path.stat().st_size < 250_000


def test_every_picture_is_on_a_page_and_has_a_text_for_those_who_do_not_see_it() -> None:
    pages = "".join((ROOT / page).read_text() for page in DOCS)
    shown = re.findall(r"!\[(.+?)\]\((?:\.\./)?figures/(\w+)\.svg\)", pages)
    assert sorted(name for _, name in shown) == sorted(draw.__name__ for draw in FIGURES)
    assert all(len(text) > 20 for text, _ in shown)


@pytest.mark.parametrize(("fmt", "dtype"), [(E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)])
def test_the_number_line_has_every_number(fmt, dtype) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    expected = np.unique(every[np.isfinite(every) & (every >= 0)])
    assert formats.numbers(fmt).tolist() == expected.tolist()


def test_the_largest_error_is_half_a_spacing() -> None:
    """Just above a power of two the spacing is widest: half of it over 1 + half of it."""
    for fmt in (E4M3, E5M2):
        half = 2.0 ** -(fmt.mantissa_bits + 1)
        assert formats.largest_error(formats.to_format(fmt), 3, fmt.max) == pytest.approx(half / (1 + half), rel=0.01)
    assert formats.largest_error(formats.to_format(E4M3), -12, E4M3.max) == 1  # underflow


def test_the_model_of_accumulation_gives_what_was_measured() -> None:
    for row in load()["gpu_ceilings"]["accumulation"]:
        if row["data"] in products.DATA and row["k"] < 28672:
            for kind in ("fast", "promoted"):
                found = products.decibels(row["data"], row["k"], fast=kind == "fast")
                assert found == pytest.approx(row[kind]["gemm"], abs=2), (row["data"], row["k"], kind)


def test_stochastic_updates_arrive_and_others_do_not() -> None:
    noise = torch.rand(formats.STEPS, 400, generator=torch.Generator().manual_seed(3))
    exact = 1 + formats.STEPS * formats.UPDATE
    assert float(formats.updated(noise)[-1].mean()) == pytest.approx(exact, abs=0.01)
    assert float(formats.updated(None)[-1]) == 1


def test_an_outlier_costs_a_tensor_its_bits_and_a_row_only_that_row() -> None:
    x = formats.with_outlier(2.0**24)
    assert formats.others(x, formats.int8(x)) < 1
    row = 10 * np.log10(256)  # one row of 256 is lost
    assert formats.others(x, formats.octavo.quantize(x).dequantize()) == pytest.approx(row, abs=1)
