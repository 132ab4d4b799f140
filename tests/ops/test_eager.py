"""A call runs the function itself in plain eager code, and the registered operation wherever PyTorch must see it."""

from collections.abc import Callable

import pytest
import torch
from bits import bits
from operation_counts import operations
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from octavo.numerics import Cast
from octavo.ops import append_kv, quantize
from octavo.ops.quantization.op import _quantize

CALL = (Cast().spec, None, None, None)


class Subclass(Tensor):
    pass


def dispatched(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether `call` reaches the registered operation."""
    reached = []
    overload = _quantize.overload

    def note(*args: object) -> object:
        reached.append(True)
        return overload(*args)

    monkeypatch.setattr(_quantize, "overload", note)
    call()
    monkeypatch.undo()
    return bool(reached)


def test_plain_calls_are_direct_and_equal(monkeypatch):
    x = torch.randn(3, 16)
    assert not dispatched(lambda: _quantize(x, *CALL), monkeypatch)
    assert not dispatched(lambda: _quantize(torch.nn.Parameter(x, requires_grad=False), *CALL), monkeypatch)
    with torch.no_grad():
        assert not dispatched(lambda: _quantize(x.requires_grad_(), *CALL), monkeypatch)
        for one, other in zip(_quantize(x, *CALL), _quantize.overload(x, *CALL), strict=True):
            assert torch.equal(bits(one), bits(other))


def test_what_must_be_seen_is_dispatched(monkeypatch):
    x = torch.randn(3, 16)
    assert dispatched(lambda: _quantize(x.as_subclass(Subclass), *CALL), monkeypatch)
    assert dispatched(lambda: _quantize(x.to("meta"), *CALL), monkeypatch)
    assert dispatched(lambda: _quantize(x.clone().requires_grad_(), *CALL), monkeypatch)
    assert dispatched(lambda: operations(lambda: _quantize(x, *CALL)), monkeypatch)
    with FakeTensorMode() as mode:
        assert dispatched(lambda: _quantize(mode.from_tensor(x), *CALL), monkeypatch)


def test_modes_and_tracers_see_the_operation():
    x = torch.randn(3, 16)
    assert operations(lambda: quantize(x, Cast()))["octavo::quantize"] == 1
    graph = make_fx(lambda x: quantize(x, Cast()).data)(x).graph
    assert torch.ops.octavo.quantize.default in {node.target for node in graph.nodes}


def test_compiled_code_holds_the_operation():
    graphs, cast = [], Cast()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    compiled = torch.compile(lambda x: quantize(x, cast).data, backend=backend, fullgraph=True)
    x = torch.randn(3, 16)
    assert torch.equal(bits(compiled(x)), bits(quantize(x, Cast()).data))
    assert any("octavo.quantize" in str(target) for target in graphs[0])


def test_a_gradient_is_refused():
    x = torch.randn(3, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no gradient"):
        quantize(x, Cast()).scale.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_written_tensors_have_a_new_version(mode):
    """Autograd refuses a backward pass that needs their former numbers."""
    keys, values = torch.zeros(2, 1, 1, 4, 8)
    k, length, clipped = torch.randn(1, 1, 2, 8), torch.tensor(2), torch.zeros(2, dtype=torch.int64)
    with mode():
        before = keys._version
        append_kv(k, k, keys, values, None, None, length, clipped)
    assert keys._version > before
    assert torch.equal(keys[:, :, :2], k)
    with torch.inference_mode():
        caches = [x.clone() for x in (keys, values)]
        append_kv(k, k, *caches, None, None, length, clipped)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    x = torch.randn(3, 256)
    for device in ("cuda:1", "cuda:0"):
        actual = quantize(x.to(device), Cast())
        assert actual.data.device == torch.device(device)
        assert torch.equal(bits(actual.data.cpu()), bits(quantize(x, Cast()).data))
