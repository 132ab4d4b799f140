"""The INT8 baseline against integers."""

import numpy as np
import torch

from octavo.evaluation.int8 import int8_linear, quantize_int8


def test_it_is_integer_arithmetic() -> None:
    x, w, b = torch.randn(2, 5, 4096) * 3, torch.randn(48, 4096), torch.randn(48)
    s_x, s_w = (t.abs().amax(-1, keepdim=True).numpy() / np.float32(127) for t in (x.view(10, -1), w))
    x_q, w_q = (np.rint(t.numpy() / s).astype(np.int64) for t, s in ((x.view(10, -1), s_x), (w, s_w)))
    assert abs(x_q).max() == abs(w_q).max() == 127
    want = (x_q @ w_q.T) * s_x.astype(float) * s_w.astype(float).T
    stored = quantize_int8(w)
    assert stored.data.dtype == torch.int8
    assert np.array_equal(stored.data.numpy(), w_q)
    assert np.array_equal(stored.scale.numpy(), s_w)
    y = int8_linear(x, stored, b)
    assert y.shape == (2, 5, 48)
    assert np.array_equal(y.view(10, -1).numpy(), want.astype(np.float32) + b.numpy())


def test_ties_go_to_even_and_zeros_stay() -> None:
    q = quantize_int8(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0]]))
    assert q.data.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert q.scale.flatten().tolist() == [1, 1]
    assert int8_linear(torch.zeros(3, 4), q).tolist() == [[0, 0]] * 3
