"""The operations of the activations: when the kernels run, and refused inputs."""

import pytest
import torch
from activation_oracle import KINDS
from bits import bits
from fused_op_examples import FLOAT, REFUSED, kernels_on_the_cpu
from torch import Tensor

from octavo.numerics import Cast
from octavo.ops import activation, activation_backward, activation_quantize
from octavo.ops.activation.reference import activation_backward_reference, activation_quantize_reference
from octavo.ops.triton_support import LONGEST_ROW

E4M3 = Cast()
REFERENCES = {
    "activation_quantize": activation_quantize_reference,
    "activation_backward": activation_backward_reference,
}


def run_both(u: Tensor, dh: Tensor, kind: str, cast: Cast, h_cast: Cast) -> list[Tensor]:
    """The results of both operations, with factors that are not contiguous if their shape allows it."""
    column_scale, row_scale = torch.ones(1, 1).expand(1, u.shape[1]), torch.ones(1, 1).expand(u.shape[0], 1)
    q = activation_quantize(u, kind, cast)
    factors = {"column_scale": column_scale, "row_scale": row_scale, "h_scale": row_scale}
    actual = activation_backward(dh, u, kind, cast, h_cast=h_cast, biased=True, **factors)
    return [q.data, q.scale, actual.du.data, actual.du.scale, actual.h.data, actual.dbias]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "fmt", "h_fmt", "ran"),
    [
        ((5, 70), "e4m3", "e5m2", 2),
        ((5, 70), "e4m3fnuz", "e4m3", 0),
        ((5, 70), "e4m3", "e5m2fnuz", 1),
        ((1, LONGEST_ROW), "e4m3", "e4m3", 2),
        ((1, LONGEST_ROW + 1), "e4m3", "e4m3", 0),
        ((0, 7), "e4m3", "e4m3", 0),
        ((5, 0), "e4m3", "e4m3", 0),
    ],
    ids=str,
)
def test_kernels_run_for_their_formats_and_lengths(shape, fmt, h_fmt, ran, kind, monkeypatch):
    values = torch.randn(shape[0], shape[1] * KINDS[kind]), torch.randn(shape), kind, Cast(fmt), Cast(h_fmt)
    expected = run_both(*values)
    calls = kernels_on_the_cpu(monkeypatch, activation, **REFERENCES)
    actual = run_both(*values)
    assert len(calls) == ran
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(actual, expected, strict=True))


def test_kernels_get_contiguous_tensors(monkeypatch):
    calls = kernels_on_the_cpu(monkeypatch, activation, **REFERENCES)
    run_both(torch.randn(140, 5).t(), torch.randn(70, 5).t(), "swiglu", E4M3, E4M3)
    tensors = [value for values in calls for value in values if isinstance(value, Tensor)]
    assert len(tensors) == 1 + 5
    assert all(t.is_contiguous() for t in tensors)


# ---- what is refused


@pytest.mark.parametrize("cast", REFUSED, ids=str)
def test_casts_that_the_kernels_do_not_do_are_refused(cast):
    u, row, column = torch.ones(3, 8), torch.ones(3, 1), torch.ones(1, 8)
    message = r"takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', .*got Cast\(.*: change the cast"
    factors = {"column_scale": column, "row_scale": row, "h_scale": row}
    with pytest.raises(ValueError, match="activation_quantize " + message):
        activation_quantize(u, "gelu", cast)
    for du_cast, h_cast in ((cast, E4M3), (E4M3, cast)):
        with pytest.raises(ValueError, match="activation_backward " + message):
            activation_backward(u, u, "gelu", du_cast, h_cast=h_cast, biased=False, **factors)


BAD = [
    ("relu", torch.ones(3, 8), "unknown activation 'relu': choose one of swiglu, geglu, gelu"),
    ("swiglu", torch.ones(3, 7), r"swiglu takes a matrix .* whose columns divide by 2, got torch.float32 \[3, 7\]"),
    ("swiglu", torch.ones(8), r"swiglu takes a matrix .* whose columns divide by 2, got torch.float32 \[8\]"),
    ("gelu", torch.ones(2, 3, 8), r"gelu takes a matrix of .* got torch.float32 \[2, 3, 8\]"),
    (
        "gelu",
        torch.ones(3, 8).int(),
        r"gelu takes a matrix of float32, bfloat16 or float16 .* got torch.int32 \[3, 8\]",
    ),
    ("swiglu", torch.ones(3, 8).double(), r"swiglu takes a matrix of float32, .* got torch.float64 \[3, 8\]"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "u", "message"), BAD, ids=lambda v: str(v)[:12])
def test_unknown_kinds_and_other_matrices_are_refused(kind, u, message, device):
    u = u.to(device)
    row, column = (torch.ones(s, device=device) for s in ((3, 1), (1, u.shape[-1])))
    with pytest.raises(ValueError, match=message):
        activation_quantize(u, kind, E4M3)
    with pytest.raises(ValueError, match=message):
        activation_backward(
            u, u, kind, E4M3, column_scale=column, row_scale=row, h_cast=E4M3, h_scale=row, biased=False
        )


BAD_BACKWARD = [
    *(("dh", torch.ones(s), rf"dh must be {FLOAT} \[3, 4\], got") for s in ((3, 8), (2, 4), (1, 4), (12,))),
    ("dh", torch.ones(3, 4).int(), rf"dh must be {FLOAT} \[3, 4\], got torch.int32 \[3, 4\]"),
    *(
        ("column_scale", t, r"column_scale must be torch.float32 \[1, 8\], got")
        for t in (torch.ones(8), torch.ones(1, 4), torch.ones(8, 1), torch.ones(1, 8).bfloat16())
    ),
    *(
        (name, t, rf"{name} must be torch.float32 \[3, 1\], got")
        for name in ("row_scale", "h_scale")
        for t in (torch.ones(3), torch.ones(1, 1), torch.ones(1, 3), torch.ones(3, 1).to(torch.float8_e8m0fnu))
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "tensor", "message"), BAD_BACKWARD, ids=lambda v: str(v)[:12])
def test_other_shapes_and_dtypes_are_refused_in_backward(name, tensor, message, device):
    shapes = {"dh": (3, 4), "u": (3, 8), "column_scale": (1, 8), "row_scale": (3, 1), "h_scale": (3, 1)}
    values = {key: torch.ones(shape, device=device) for key, shape in shapes.items()} | {name: tensor.to(device)}
    with pytest.raises(ValueError, match=message):
        activation_backward(**values, kind="swiglu", cast=E4M3, h_cast=E4M3, biased=False)
