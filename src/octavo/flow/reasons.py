"""Why an operation runs in its dtype, in a sentence."""

from collections.abc import Sequence

from octavo.tracing.gpu_autocast import Decision


def forward_reason(
    kind: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    computed: str,
    decision: Decision | None,
    *,
    reads_fp32: bool,
    autocast: bool,
) -> str:
    """The reason in a forward pass.

    Args:
        kind, inputs, outputs, computed: of the operation, as `Operation` has them.
        decision: of autocast about the operation, or about the one that it is part of.
        reads_fp32: whether a parameter in FP32 is among the inputs.
        autocast: whether the model runs under autocast.
    """
    if "FP8" in (*inputs, *outputs):
        return _by_recipe(kind)
    if decision is not None:
        return _by_autocast(kind, inputs, outputs, computed, decision)
    if kind == "cast":
        return "the model casts it"
    where = "autocast leaves it alone" if autocast else "no autocast"
    if len(inputs) > 1:
        return f"{where}: the widest dtype of the inputs, {'a parameter in FP32' if reads_fp32 else inputs[0]}"
    return f"{where}: the dtype of the inputs{', a parameter in FP32 among them' if reads_fp32 else ''}"


def _by_recipe(kind: str) -> str:
    moves = {"cast": "the recipe casts it to FP8", "copy": "the recipe moves FP8 bytes"}
    return moves.get(kind, "the recipe: operands in FP8")


def _by_autocast(kind: str, inputs: Sequence[str], outputs: Sequence[str], computed: str, decision: Decision) -> str:
    name = decision.operation
    if decision.casting or (kind == "cast" and inputs != outputs):
        return f"autocast casts an input of {name}"
    if decision.policy == "lower" and computed == "FP32":
        return f"part of {name} as a CPU computes it; a GPU has one kernel"
    if decision.policy == "lower":
        return f"autocast runs {name} in {computed}"
    if decision.policy == "promote":
        return f"autocast runs {name} in the widest dtype of its inputs"
    if computed != "FP32":
        return f"{name} is called with a dtype, which autocast leaves"
    return f"autocast runs {name} in FP32"


def backward_reason(kind: str, inputs: Sequence[str], outputs: Sequence[str], forward: str) -> str:
    """The reason in a backward pass, in which autocast is off: gradients have the dtypes of the forward pass.

    Args:
        kind, inputs, outputs: of the operation, as in `Operation`.
        forward: the name of the operation whose gradient it computes; "" if several ones, or none, are known.
    """
    if "FP8" in (*inputs, *outputs):
        return _by_recipe(kind)
    if kind == "cast" and inputs and outputs and inputs != outputs:
        return f"gradient of a cast to {inputs[0]}"
    return f"gradient of {forward}, in the dtype that it ran in" if forward else "adds up gradients, in their dtype"
