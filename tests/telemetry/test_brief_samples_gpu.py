"""Brief samples on a GPU: the numbers of a CPU, and those of full samples."""

import numpy as np
import pytest
import torch
from torch import nn
from watch_oracle import matrix

import octavo
from octavo.observation.brief_samples import Operand, statistics

pytestmark = pytest.mark.gpu


def operands(device):
    """Those of many sizes and dtypes: unquantized, quantized, with a known amax, folded."""
    for rows, columns in ((16, 64), (5, 14336), (16, 100)):
        for dtype in (torch.float32, torch.bfloat16):
            x = matrix(rows, columns).to(device, dtype)
            numbers, scale = (x.float() / 4).to(torch.float8_e4m3fn).to(dtype), torch.tensor(4.0, device=device)
            yield Operand(x)
            yield Operand(x, numbers, scale, 448.0, scaled_by_amax=True)
            yield Operand(x, numbers, scale, 448.0, known=x.float().abs().amax())
            yield Operand(x, numbers, scale, 448.0, shifted=numbers.float() * 3)


def test_a_gpu_finds_the_numbers_of_a_cpu():
    expected, found = (statistics(list(operands(device))).cpu() for device in ("cpu", "cuda"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_the_numbers_are_those_of_a_full_sample():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64, bias=False)).cuda()
    octavo.convert(model)
    x = matrix(16, 128).cuda()
    with octavo.watch(model) as watch:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        watch.read_gradients()
        watch.step()
        full, [(brief, _)] = watch.latest().operands, watch.take()
    rows = full["operand"] != 1  # of w, a brief sample has a quarter of the rows
    for name in ("amax", "rms", "flushed", "shift_lost", "nonfinite"):
        np.testing.assert_allclose(brief[name][rows], full[name][rows], rtol=1e-2, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(brief["scale"][:2], full["scale"][:2], rtol=1e-6)
