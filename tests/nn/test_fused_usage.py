"""The fused modules as a program uses them: compiled, checkpointed, copied, frozen, with hooks."""

import copy

import pytest
import torch
from fused_oracle import BUILDERS, check_equal, geglu, gelu, is_fused, linears, output_gradients, run, swiglu, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo


@pytest.mark.slow
@pytest.mark.parametrize(("build", "autocast"), [(linears, False), (swiglu, True), (gelu, False), (geglu, False)])
def test_compiled_equals_eager_in_one_graph_that_is_made_once(build, autocast: bool) -> None:
    torch.compiler.reset()
    block = build()
    octavo.convert(block)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for i in range(3):
        x, residual = tokens(33), tokens(33)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = run(block, compiled, x, residual, autocast=autocast)
        check_equal(run(block, block, x, residual, autocast=autocast), actual)


@BUILDERS
def test_checkpointed_activations_give_the_same_gradients(build) -> None:
    block, x, residual = build(), tokens(33), tokens(33)
    octavo.convert(block)
    again = run(block, lambda *inputs: checkpoint(block, *inputs, use_reentrant=False), x, residual)
    check_equal(run(block, block, x, residual), again)


@BUILDERS
def test_a_copy_has_its_own_norm_and_layers(build) -> None:
    block, x = build(), tokens(7)
    octavo.convert(block)
    before = block(x)[0]
    other = copy.deepcopy(block)
    assert torch.equal(other(x)[0], before)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    assert torch.equal(block(x)[0], before)
    assert not torch.equal(other(x)[0], before)
    assert is_fused(other, x)


@BUILDERS
def test_the_state_is_that_of_the_plain_model(build) -> None:
    block = build()
    before = {name: t.clone() for name, t in block.state_dict().items()}
    octavo.convert(block)
    block(tokens(7))[0].sum().backward()
    check_equal(before, block.state_dict())
    names = [name for name, _ in block.named_parameters()]
    assert len(names) == len(set(names)) == len(before)
    other = build()
    other.load_state_dict(block.state_dict())
    octavo.convert(other)
    assert torch.equal(other(tokens(7))[0].isfinite(), torch.ones_like(other(tokens(7))[0], dtype=torch.bool))


@BUILDERS
def test_frozen_parts_get_no_gradient_and_change_none(build) -> None:
    block, x = build(), tokens(33)
    octavo.convert(block)
    expected = run(block, block, x)
    for frozen in dict(block.named_parameters()):
        block.requires_grad_(True).zero_grad()
        block.get_parameter(frozen).requires_grad_(False)
        leaf = x.clone().requires_grad_()
        outputs = block(leaf)
        torch.autograd.backward(outputs, output_gradients(outputs))
        actual = {f"d {name}": p.grad for name, p in block.named_parameters()} | {"d x": leaf.grad}
        assert actual.pop(f"d {frozen}") is None
        for name, gradient in actual.items():
            assert torch.equal(gradient, expected[name]), (frozen, name)


@BUILDERS
def test_an_input_that_requires_no_gradient(build) -> None:
    block, x = build(), tokens(33)
    octavo.convert(block)
    expected = run(block, block, x)
    *ys, _ = block(x)
    torch.autograd.backward(ys, output_gradients(tuple(ys)))
    for name, p in block.named_parameters():
        assert torch.equal(p.grad, expected[f"d {name}"]), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@BUILDERS
def test_inference_and_training_give_the_same_outputs(build, mode) -> None:
    block, x, residual = build(), tokens(7), tokens(7)
    octavo.convert(block)
    expected = block(x, residual)
    with mode():
        actual = block(x, residual)
    for y, y_trained in zip(actual, expected, strict=True):
        assert not y.requires_grad
        assert torch.equal(y, y_trained)


def test_saved_for_backward_are_the_stream_and_the_output_of_the_inner_layers() -> None:
    """And the parameters, and scales: no bytes of n, h or w."""
    block, x, residual = swiglu(), tokens(33), tokens(33)
    octavo.convert(block)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(x, residual)
    parameters = {p.data_ptr() for p in block.parameters()}
    large = [t for t in saved if t.data_ptr() not in parameters and t.shape[-1] != 1]
    assert sorted((tuple(t.shape), t.element_size()) for t in large) == [((33, 64), 4), ((33, 192), 4)]


@BUILDERS
def test_a_layer_that_is_replaced_in_its_model_is_replaced_here(build) -> None:
    """As `octavo.runtime` puts packed layers, and adapters wrap theirs, in place of linear ones."""
    block, x = build(), tokens(7)
    name = next(name for name, m in block.named_modules() if isinstance(m, nn.Linear))
    parent, _, leaf = name.rpartition(".")
    setattr(block.get_submodule(parent), leaf, nn.Linear(64, block.get_submodule(name).out_features))
    check_equal(run(block, block.separate, x), run(block, block, x))


@BUILDERS
def test_hooks_of_the_layers_are_called(build) -> None:
    block = build()
    octavo.convert(block)
    layers = {name: m for name, m in block.named_modules() if isinstance(m, nn.Linear)}
    called: list[str] = []
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    block(tokens(7))
    assert called == list(layers)
