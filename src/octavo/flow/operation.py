"""The record of one operation of a trace."""

from dataclasses import dataclass

PHASES = ("forward", "recomputation", "backward")


@dataclass(frozen=True)
class Operation:
    """One operation that ran in a forward or backward pass.

    Args:
        name: in PyTorch's dispatcher, such as "mm".
        module: that called it, or, in the backward pass, that called the operation whose gradient it computes; "" is
            the model itself and the loss.
        phase: "forward", "recomputation" (of activation checkpointing) or "backward".
        kind: "product", "convolution", "attention", "sum", "elementwise", "copy" or "cast".
        inputs, outputs: the dtypes of the floating tensors, the widest first: "FP32", "BF16", "FP16", "FP8".
        computes_in: the dtype of the operands of a product, else the widest of inputs and outputs.
        adds_in: the dtype of the partial sums on a GPU; "" for an operation that adds nothing up.
        flops: 2 for a multiplication and an addition; 0 unless a product, a convolution or attention.
        reason: why it runs in this dtype.
        parameters: the names of the parameters that it reads.
    """

    name: str
    module: str
    phase: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    computes_in: str
    adds_in: str
    flops: int
    reason: str
    parameters: tuple[str, ...] = ()
