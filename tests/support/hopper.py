"""A mark for tests whose GEMMs only Hopper GPUs run."""

import pytest
import torch

ONLY_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="these are Hopper's GEMMs"
)
