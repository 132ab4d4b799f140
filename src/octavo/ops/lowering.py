"""A way round a slowness of torch 2.11 and 2.12: Inductor describes each custom operation that is new to it in a text.

The text (for a log that nobody reads) holds the operation's arguments, and theirs, down to the graph's inputs. An
operation that first appears deep in a model takes hours to describe. Operations that Inductor has been told of are not
described (PyTorch's scaled GEMM is as new to it as ours are); torch 2.13 makes the text only when the log is on
(compare pytorch's graph.py, "Creating implicit fallback").
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

OPERATIONS = (
    "activation_backward",
    "activation_quantize",
    "norm_backward",
    "norm_quantize",
    "quantize",
    "quantize_scaled",
    "quantize_stack",
    "quantize_transposed",
    "recast_norm",
    "recast_transposed",
    "scaled_mm",
    "transpose",
)


@cache
def tell_inductor() -> None:
    """Declare our operations as calls that Inductor makes as they stand, with the strides that eager would pass."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        return
    lowering = import_module("torch._inductor.lowering")
    ours = [getattr(torch.ops.octavo, name).default for name in OPERATIONS]
    for op in (*ours, torch.ops.aten._scaled_mm_v2.default):
        if op not in lowering.lowerings:
            tag = lowering.get_layout_constraint_tag(op, with_default=True)
            lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag), warn=False)
