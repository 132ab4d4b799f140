"""A trace predicts the dtypes that autocast gives on a real GPU."""

import pytest
import torch
from dtype_examples import DOCUMENTED, Calls
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.tracing.arithmetic import compute_dtype, floating, kind_of, names_of

pytestmark = pytest.mark.gpu


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        kind = kind_of(name, func.namespace)
        self.dtypes[name] = compute_dtype(kind, names_of(floating(args)), names_of(floating(out)))
        return out


@pytest.mark.parametrize(("function", "operation", "dtype"), DOCUMENTED)
def test_an_operation_runs_on_the_gpu_as_in_the_trace(function, operation, dtype):
    model, x = Calls(function), torch.randn(8, 8).bfloat16()
    traced = {each.name: each.computes_in for each in octavo.dtype_flow(model, x).operations if each.phase == "forward"}
    with torch.device("cuda"), torch.autocast("cuda", torch.bfloat16), Seen() as seen:
        model.cuda()(x.cuda())
    assert seen.dtypes[operation] == traced[operation] == dtype
