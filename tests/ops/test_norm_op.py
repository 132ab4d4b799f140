"""The operations of the norms: when the kernels run, and refused inputs."""

import pytest
import torch
from bits import bits
from fused_op_examples import FLOAT, REFUSED, kernels_on_the_cpu
from norm_oracle import EPS, EPS32
from torch import Tensor

from octavo.numerics import Cast
from octavo.ops import norm, norm_backward, norm_quantize, requantize_norm
from octavo.ops.norm.reference import norm_backward_reference, norm_quantize_reference
from octavo.ops.triton_support import LONGEST_ROW

REFERENCES = {"norm_quantize": norm_quantize_reference, "norm_backward": norm_backward_reference}


@pytest.mark.parametrize(
    ("shape", "fmt", "ran"),
    [
        ((5, 70), "e4m3", True), ((5, 70), "e5m2", True), ((5, 70), "e4m3fnuz", False), ((5, 70), "e5m2fnuz", False),
        ((1, LONGEST_ROW), "e4m3", True), ((1, LONGEST_ROW + 1), "e4m3", False), ((0, 7), "e4m3", False),
        ((5, 0), "e4m3", False),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_run_for_their_formats_and_lengths(shape, fmt, ran, monkeypatch):
    x, weight, row = torch.randn(shape), torch.randn(shape[1]), torch.ones(shape[0], 1)
    expected = norm_quantize(x, x, weight, weight, EPS, Cast(fmt), center=True)
    calls = kernels_on_the_cpu(monkeypatch, norm, **REFERENCES)
    actual = norm_quantize(x, x, weight, weight, EPS, Cast(fmt), center=True)
    assert len(calls) == ran
    assert torch.equal(bits(actual.output.data), bits(expected.output.data))
    calls.clear()
    norm_backward(x, x, weight, row, row, None, center=True)
    assert len(calls) == (ran or "fnuz" in fmt)


def test_kernels_get_contiguous_tensors_and_a_float32_eps(monkeypatch):
    calls = kernels_on_the_cpu(monkeypatch, norm, **REFERENCES)
    x, k, row = torch.randn(70, 5).t(), torch.randn(70, 2)[:, 0], torch.ones(1, 1).expand(5, 1)
    norm_quantize(x, x, k, k, EPS, Cast(), center=True)
    norm_backward(x, x, k, row, row, x, center=True)
    tensors = [value for values in calls for value in values if isinstance(value, Tensor)]
    assert len(tensors) == 4 + 6
    assert all(t.is_contiguous() for t in tensors)
    assert calls[0][4] == EPS32


# ---- what is refused


@pytest.mark.parametrize("cast", REFUSED, ids=str)
def test_casts_that_the_kernels_do_not_do_are_refused(cast):
    x, k, row = torch.ones(3, 6), torch.ones(6), torch.ones(3, 1)
    message = r"takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', .*got Cast\(.*: change the cast"
    with pytest.raises(ValueError, match="norm_quantize " + message):
        norm_quantize(x, None, k, None, EPS, cast, center=False)
    with pytest.raises(ValueError, match="requantize_norm " + message):
        requantize_norm(x, row, row, k, None, row, cast)


def tensors(device: str, **changed: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors for the two operations, some of them changed."""
    x, k, row = (torch.ones(shape, device=device) for shape in ((3, 6), (6,), (3, 1)))
    forward = {"x": x, "residual": x, "weight": k, "bias": k}
    backward = {"dn": x, "x": x, "weight": k, "mean": row, "rstd": row, "residual": x}
    changed = {name: t.to(device) for name, t in changed.items()}
    return tuple({name: changed.get(name, t) for name, t in values.items()} for values in (forward, backward))


BAD = [
    ("x", torch.ones(6), r"a norm takes a matrix of float32, bfloat16 or float16, got torch.float32 \[6\]"),
    ("x", torch.ones(2, 3, 6), r"a norm takes a matrix .*, got torch.float32 \[2, 3, 6\]"),
    ("x", torch.ones(3, 6, dtype=torch.int32), r"a norm takes a matrix .*, got torch.int32 \[3, 6\]"),
    ("x", torch.ones(3, 6).double(), r"a norm takes a matrix .*, got torch.float64 \[3, 6\]"),
    *(("residual", torch.ones(s), rf"residual must be {FLOAT} \[3, 6\], got") for s in ((1, 6), (3, 1), (6,), (4, 6))),
    ("residual", torch.ones(3, 6).long(), rf"residual must be {FLOAT} \[3, 6\], got torch.int64 \[3, 6\]"),
    *(("weight", torch.ones(s), rf"weight must be {FLOAT} \[6\], got") for s in ((5,), (3, 6), (1,), (1, 6))),
    ("weight", torch.ones(6).int(), rf"weight must be {FLOAT} \[6\], got torch.int32 \[6\]"),
    *(("bias", torch.ones(s), rf"bias must be {FLOAT} \[6\], got") for s in ((5,), (1,), (1, 6), (3, 6))),
    ("bias", torch.ones(6).double(), rf"bias must be {FLOAT} \[6\], got torch.float64 \[6\]"),
    *(("dn", torch.ones(s), rf"dn must be {FLOAT} \[3, 6\], got") for s in ((1, 6), (3, 5), (18,))),
    ("dn", torch.ones(3, 6).int(), rf"dn must be {FLOAT} \[3, 6\], got torch.int32 \[3, 6\]"),
    *(
        (name, t, rf"{name} must be torch.float32 \[3, 1\], got")
        for name in ("mean", "rstd")
        for t in (torch.ones(3), torch.ones(1, 1), torch.ones(1, 3), torch.ones(3, 1).bfloat16())
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "tensor", "message"), BAD, ids=lambda v: str(v)[:8])
def test_other_shapes_and_dtypes_are_refused(name, tensor, message, device):
    forward, backward = tensors(device, **{name: tensor})
    if name in forward:
        with pytest.raises(ValueError, match=message):
            norm_quantize(**forward, eps=EPS, cast=Cast(), center=True)
    if name in backward:
        with pytest.raises(ValueError, match=message):
            norm_backward(**backward, center=True)
