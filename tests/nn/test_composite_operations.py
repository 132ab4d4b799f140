"""The operations that compiled code calls in place of the layers' autograd functions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_oracle import gelu, linears, swiglu, tokens
from torch import Tensor, nn

import octavo

OPERATIONS: Any = torch.ops.octavo


def graph_of(module: nn.Module, x: Tensor) -> list[torch.fx.Node]:
    """The calls of functions in the graph that Dynamo makes of `module`."""
    found: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compiler.reset()
    torch.compile(module, fullgraph=True, backend=backend)(x)
    return found


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_a_linear_layer_is_one_operation_to_dynamo(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False))
    octavo.convert(model, recipe)
    nodes = graph_of(model, torch.randn(32, 64))
    assert [node.target for node in nodes] == [OPERATIONS.linear.default, F.relu, OPERATIONS.linear.default]


@pytest.mark.parametrize("build", [linears, swiglu, gelu])
def test_a_fused_module_is_one_operation_to_dynamo(build: Any) -> None:
    block = build()
    octavo.convert(block)
    nodes = graph_of(block, tokens(33))
    assert [node.target for node in nodes if "octavo" in str(node.target)] == [OPERATIONS.fused.default]
    assert not [node for node in nodes if "autograd_function" in str(node.target)]


def test_a_recipe_of_another_name_gives_the_same_text() -> None:
    recipe = octavo.recipe.PRESETS["rowwise"]()
    renamed = octavo.Recipe("", recipe.y, recipe.dx, recipe.dw)
    assert renamed.text == recipe.text
    assert octavo.Recipe.from_json(renamed.text).fusable == recipe.fusable
