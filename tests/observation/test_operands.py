"""The numbers of an operand that a kernel quantizes and does not store are computed again from its source."""

import pytest
import torch
from activation_oracle import KINDS, given, gradient64, gradient_magnitude, h64, h_magnitude

from octavo.observation.operands import numbers_of_rows


@pytest.mark.parametrize("kind", KINDS)
def test_activations_and_their_gradients(kind: str) -> None:
    u, dh, _, _ = given(kind, (17, 130), torch.float32)
    activation = numbers_of_rows(kind, [u]), h64(u.double(), kind), h_magnitude(u, kind)
    gradient = numbers_of_rows(f"{kind}_gradient", [dh, u]), gradient64(dh, u, kind), gradient_magnitude(dh, u, kind)
    for found, exact, magnitude in (activation, gradient):
        assert found.dtype == torch.float32
        assert ((found - exact).abs() <= 1e-6 * magnitude + 1e-30).all()
