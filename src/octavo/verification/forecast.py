"""How large the packed layers are, and how fast they may be: a forecast by shape, from arithmetic and a table.

    few tokens     a layer reads its weight, and little else: time ~ bytes, so
                   gain = (2 N K + 2 T (N + K)) / (weight and scales + 2 T (N + K))
    many tokens    the gain of the shape in the table of `octavo.nn.speedup.lookup` that is shipped for the H100

The first is what bandwidth allows, with nothing lost to launching or to quantizing the input: an upper bound. The table
holds forward and backward pass of training together, and is used here for the forward alone, for want of a better one.
Neither was measured on this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from octavo.nn.speedup.lookup import SHIPPED
from octavo.nn.speedup.table import Table
from octavo.verification.checks import Shape
from octavo.verification.files import Bytes
from octavo.verification.layer_spec import Words

DECODE, PREFILL = (1, 16, 64), (512, 2048, 8192)
REMARK = (
    "A forecast, not a measurement. Up to 64 tokens: what memory bandwidth allows, BF16 bytes over packed bytes. From "
    "512 on: Octavo's table of an H100, which times training (forward and backward together), not the forward alone."
)


@dataclass(frozen=True)
class Sizes:
    """Bytes: of the linear layers that are packed, scales included, and of all tensors; and the same in BF16."""

    packed: int
    packed_bf16: int
    whole: int
    whole_bf16: int


@dataclass(frozen=True)
class Forecast:
    """Of the `count` packed layers of one shape [N, K] and one way of packing: tokens -> times as fast as BF16.

    None where nothing is known.
    """

    shape: Shape
    words: str
    count: int
    gains: Mapping[int, float | None]


def measure_sizes(read: Bytes, layers: Mapping[str, Words]) -> Sizes:
    """Of the tensors in the files."""
    scales = [f"{name}.{words.scale}" for name, words in layers.items()]
    scales += [f"{name}.{words.input_scale}" for name, words in layers.items() if words.inputs == "static"]
    weights = [f"{name}.weight" for name in layers]
    packed = sum(read.nbytes(name) for name in (*weights, *scales))
    packed_bf16 = 2 * sum(read.nbytes(name) for name in weights)  # they are one byte an element
    whole = sum(read.nbytes(name) for name in read.shapes)
    return Sizes(packed, packed_bf16, whole, whole - packed + packed_bf16)


def forecast(read: Bytes, layers: Mapping[str, Words]) -> list[Forecast]:
    """By shape, the ones that weigh most first."""
    alike: dict[tuple[Shape, Words], list[str]] = {}
    for name, words in layers.items():
        alike.setdefault((read.shapes[f"{name}.weight"], words), []).append(name)
    table = Table.from_json((files("octavo.nn.speedup") / SHIPPED["H100"]).read_text())
    rows = []
    for (shape, words), names in alike.items():
        stored = read.nbytes(f"{names[0]}.weight") + read.nbytes(f"{names[0]}.{words.scale}")
        gains: dict[int, float | None] = {tokens: _decode(shape, stored, tokens) for tokens in DECODE}
        gains |= {tokens: _prefill(table, shape, words, tokens) for tokens in PREFILL}
        rows.append(Forecast(shape, str(words), len(names), gains))
    return sorted(rows, key=lambda row: -row.count * row.shape[0] * row.shape[1])


def _decode(shape: Shape, stored: int, tokens: int) -> float:
    n, k = shape
    activations = 2 * tokens * (n + k)
    return (2 * n * k + activations) / (stored + activations)


def _prefill(table: Table, shape: Shape, words: Words, tokens: int) -> float | None:
    recipe = _recipe(words)
    n, k = shape
    return table.predict(recipe, (tokens, k, n)) if recipe else None


def _recipe(words: Words) -> str:
    """The recipe whose forward GEMM has these scales, or nothing."""
    if words.exponents or words.integers:
        return ""
    if (words.rows, words.columns) == (128, 128) and words.group == 128:
        return "blockwise"
    if words.columns or words.group:
        return ""
    return {"static": "delayed", "tensor": "tensorwise", "token": "rowwise"}.get(words.inputs, "")


def weighted_gain(rows: Sequence[Forecast], tokens: int) -> float | None:
    """Of all packed layers together, each weighing as much as its weight; None where one is unknown."""
    total = slow = 0.0
    for row in rows:
        gain = row.gains[tokens]
        if gain is None:
            return None
        work = row.count * row.shape[0] * row.shape[1]
        total, slow = total + work, slow + work / gain
    return total / slow if slow else None
