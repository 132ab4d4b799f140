import torch

import octavo  # noqa: F401
from octavo.ops.inductor import OPERATIONS


def test_every_operation_is_listed():
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("octavo::")]
    assert sorted(OPERATIONS) == sorted({name.removeprefix("octavo::").partition(".")[0] for name in ours})
