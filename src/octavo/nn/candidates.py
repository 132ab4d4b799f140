"""The modules of a model that `convert` can change: found, listed in the report, and converted or restored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from octavo.nn.conv1d import Conv1D, shape_of
from octavo.nn.conversion_report import Row
from octavo.nn.expert_conversion import find_experts, restore_experts, stacks_of, to_fp8_experts
from octavo.nn.linear import convert_layer, restore_layer, to_fp8_linear
from octavo.nn.only_if_faster import skip_uncalled
from octavo.nn.product_conversion import (
    chosen_products,
    convert_products,
    find_products,
    follow_attention,
    product_rows,
)
from octavo.nn.selection import SelectedLayer, select_linears
from octavo.recipe import Recipe
from octavo.tracing.forward_pass import ForwardPass


@dataclass(frozen=True)
class Candidates:
    """The modules that can run in FP8.

    Attributes:
        linears: linear layers, each with the reason why it is skipped.
        products: attention, and convolutions that are matrix products, by name.
        experts: modules of stacked experts, by name.
    """

    linears: Sequence[SelectedLayer]
    products: Mapping[str, nn.Module]
    experts: Mapping[str, nn.Module]

    @property
    def weight(self) -> Tensor:
        """A weight of the first of them."""
        modules = [*(layer.module for layer in self.linears), *self.experts.values(), *self.products.values()]
        return next(modules[0].parameters())

    def rows(self, model: nn.Module, skip: Sequence[str], forward: ForwardPass | None) -> tuple[Row, ...]:
        """The rows of linear layers, then those of products. With a traced pass, uncalled layers are skipped."""
        rows = tuple(Row(layer.name, shape_of(layer.module), layer.reason) for layer in self.linears)
        if forward is not None:
            rows = skip_uncalled(model, rows, forward)
        return self.with_outputs((*rows, *product_rows(self.products, skip)))

    def with_outputs(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """`rows`, in which the output layer of attention is converted only where its attention is."""
        return follow_attention(rows, self.products, chosen_products(self.products, rows))

    def convert(self, recipe: Recipe, rows: Sequence[Row]) -> None:
        """Convert the modules whose rows give no reason to skip them, and restore the others.

        Args:
            rows: of linear layers, products and stacks of experts.
        """
        chosen = {row.name for row in rows if not row.reason}
        convert_products(self.products, recipe, chosen_products(self.products, rows))
        for name, module, _ in self.linears:
            if name not in chosen:
                restore_layer(module)
            elif isinstance(module, nn.Linear):
                to_fp8_linear(module, recipe, name)
            else:
                convert_layer(module, Conv1D, recipe, name)
        for name, module in self.experts.items():
            restore_experts(module)
            if not chosen.isdisjoint(stacks_of(name, module)):
                to_fp8_experts(module, recipe, name)


def find_candidates(model: nn.Module, skip: Sequence[str]) -> Candidates:
    """The candidates of `model`; raises the errors of `select_linears`."""
    experts, products = find_experts(model), find_products(model)
    return Candidates(select_linears(model, skip, [*experts, *products]), products, experts)
