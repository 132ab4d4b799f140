"""The lists of autocast: compared with PyTorch's header and with its registered kernels."""

import re
from pathlib import Path

import pytest
import torch

from octavo.tracing.autocast_lists import POLICIES

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": "lower",
    "AT_FORALL_FP32": "fp32",
    "AT_FORALL_FP32_SET_OPT_DTYPE": "result",
    "AT_FORALL_PROMOTE": "promote",
}


@pytest.mark.parametrize("macro", LISTS)
def test_lists_are_those_of_the_header(macro):
    found = re.search(rf"#define {macro}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)
    if found is None:
        pytest.skip(f"this version of PyTorch has no {macro}")
    names = [".".join(re.findall(r"\w+", entry)) for entry in re.findall(r"_\(([^()]*)\)", found[1])]
    assert len(names) > 5
    assert {name: POLICIES.get(name) for name in names} == dict.fromkeys(names, LISTS[macro])


def test_every_operation_that_autocast_handles_on_a_gpu_is_listed():
    handled = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    assert len(handled) > 100
    assert handled - POLICIES.keys() <= {"binary_cross_entropy"}  # an error under autocast
