"""What is computed once while a graph with many equal operations is lowered."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bits import bits
from operation_counts import operations
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.immutable_collections import immutable_list

import octavo
from octavo.numerics import ROW, Cast, QTensor
from octavo.numerics.formats import E4M3
from octavo.ops import append_kv, quantize, scaled_mm
from octavo.ops import registration as inductor
from octavo.ops.quantization import _quantize

NAMES = ("identify_mutated_tensors", "identify_accessed_tensors")  # torch 2.11, torch 2.13
FUNCTION = next(name for name in NAMES if hasattr(triton_kernel_wrap, name))


def test_a_kernel_is_analysed_once_for_all_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed = []

    def analyse(kernel: object, args: dict, descriptors: object) -> list[str]:
        analysed.append(args)
        return ["y"]

    monkeypatch.setattr(triton_kernel_wrap, FUNCTION, analyse)
    monkeypatch.setattr(inductor, "_accesses", {})
    parameters = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in ("x", "y", "M", "BLOCK")]
    kernel = SimpleNamespace(params=parameters)
    tuned = SimpleNamespace(fn=kernel)  # as a launch with options of the compiler arrives
    args = {"x": torch.ones(2), "y": torch.ones(2), "M": 2, "BLOCK": 16}
    with inductor._analyses_cached():
        launched = getattr(triton_kernel_wrap, FUNCTION)
        for each, changes in ((kernel, {}), (tuned, {"x": torch.ones(3), "M": 3}), (kernel, {"y": torch.zeros(9)})):
            assert launched(each, args | changes, {}) == ["y"]
        assert len(analysed) == 1
        for changes in ({"x": None}, {"x": torch.ones(2).half()}, {"BLOCK": 32}):
            assert launched(kernel, args | changes, {}) == ["y"]
    assert len(analysed) == 4
    assert getattr(triton_kernel_wrap, FUNCTION) is analyse


@pytest.mark.slow
def test_an_argument_of_several_operations_is_computed_once() -> None:
    def both(x: Tensor, w: Tensor) -> Tensor:
        ones = x.new_ones((16, 1), dtype=torch.float32)  # as a scale that was folded into the other operand
        scaled = [QTensor(t.to(torch.float8_e4m3fn), ones, E4M3, ROW) for t in (x, w, x + w)]
        return scaled_mm(scaled[0], scaled[1]) + scaled_mm(scaled[1], scaled[2])

    x, w = torch.randn(2, 16, 32).unbind()
    torch._dynamo.reset()
    with fresh_cache():
        y, code = run_and_get_code(torch.compile(both), x, w)
    assert torch.equal(y, both(x, w))
    assert "".join(code).count("empty_strided_cpu((16, 1)") == 1


def test_attention_draws_numbers_only_if_it_drops() -> None:
    aten = torch.ops.aten
    flash, efficient = aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention
    qkv = (torch.ones(1), torch.ones(1), torch.ones(1))
    state = {"rng_state": None}
    assert not inductor.draws_numbers(flash, qkv, state)
    assert not inductor.draws_numbers(flash, (*qkv, 0.0, True), {"scale": 0.5} | state)
    assert inductor.draws_numbers(flash, (*qkv, 0.1, True), state)
    assert not inductor.draws_numbers(efficient.default, (*qkv, None, True), {"is_causal": True})
    assert inductor.draws_numbers(efficient.default, (*qkv, None, True, 0.1), {})
    assert inductor.draws_numbers(efficient.default, (*qkv, None, True), {"dropout_p": 0.1})
    assert inductor.draws_numbers(aten.bernoulli.p, (torch.ones(1), 0.0), state)


# ---- The tag by which compiled code on disk is found again


def test_the_version_changes_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ops" / "kernel.py"
    file.parent.mkdir()
    file.touch()
    before = inductor.source_version(tmp_path)
    assert inductor.source_version(tmp_path) == before
    os.utime(file, ns=(0, 1))
    assert inductor.source_version(tmp_path) != before


def test_the_tag_of_compiled_graphs_has_the_version() -> None:
    assert inductor.source_version(Path(octavo.__file__).parent) in torch.compiler.config.cache_key_tag


@pytest.mark.slow  # a process
def test_what_the_import_sets_in_pytorch() -> None:
    """Inductor launches our kernels itself, also where it was imported before; a tag of the user is preserved."""
    name = inductor._STATIC_LAUNCH
    code = f"import torch, torch._inductor.config as config, octavo.ops.registration; print(config.{name})"
    code += "; print(torch.compiler.config.cache_key_tag)"
    environment = {variable: value for variable, value in os.environ.items() if name not in variable.lower()}
    environment |= {"TORCH_COMPILE_CACHE_KEY_TAG": "mine"}
    launches, tag = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).splitlines()
    assert (launches, tag.startswith("mine octavo ")) == ("True", True)


# ---- A call runs the function itself in plain eager code, and the registered operation wherever PyTorch must see it


CALL = (Cast().spec, None, None, None, 1)


def dispatched(call, monkeypatch: pytest.MonkeyPatch) -> bool:
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
    x, subclass = torch.randn(3, 16), type("Subclass", (Tensor,), {})
    assert dispatched(lambda: _quantize(x.as_subclass(subclass), *CALL), monkeypatch)
    assert dispatched(lambda: _quantize(x.to("meta"), *CALL), monkeypatch)
    assert dispatched(lambda: _quantize(x.clone().requires_grad_(), *CALL), monkeypatch)
    assert dispatched(lambda: operations(lambda: _quantize(x, *CALL)), monkeypatch)
    with FakeTensorMode() as mode:
        assert dispatched(lambda: _quantize(mode.from_tensor(x), *CALL), monkeypatch)


def test_traced_and_compiled_code_hold_the_operation():
    x, cast = torch.randn(3, 16), Cast()
    graphs = [make_fx(lambda x: quantize(x, cast).data)(x)]
    compiled = torch.compile(
        lambda x: quantize(x, cast).data, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True
    )
    assert torch.equal(bits(compiled(x)), bits(quantize(x, cast).data))
    assert ["octavo.quantize" in str(graph.graph) for graph in graphs] == [True, True]


@pytest.mark.parametrize("call", [append_kv, append_kv.overload], ids=["direct", "dispatched"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_written_tensors_have_a_new_version(mode, call, monkeypatch):
    """Autograd refuses a backward pass that needs their former numbers."""
    reference = append_kv.function

    def write(k, v, cache, clipped):  # as a kernel does, which PyTorch does not see
        reference(k, v, [t if t is None else t.data for t in cache], clipped)

    monkeypatch.setattr(append_kv, "function", write)
    keys, values = torch.zeros(2, 1, 1, 4, 8)
    k, length, clipped = torch.randn(1, 1, 2, 8), torch.tensor(2), torch.zeros(2, dtype=torch.int64)
    with mode():
        before = keys._version
        call(k, k, keys, values, None, None, length, clipped)
    assert keys._version > before
    assert torch.equal(keys[:, :, :2], k)
    with torch.inference_mode():
        call(k, k, *[x.clone() for x in (keys, values)], None, None, length, clipped)


def test_a_list_of_tensors_as_inductor_holds_it_is_a_list() -> None:
    """While Inductor lowers a graph, the lists of its arguments are of a class of torch.fx."""
    tensors = [torch.randn(3, 16), torch.randn(5, 16)]
    fill, _ = inductor.OPERATIONS["quantize_stack"]
    results = [fill(given, Cast().spec, True) for given in (immutable_list(tensors), tensors)]
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(bits(actual), bits(expected))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    x = torch.randn(3, 256)
    for device in ("cuda:1", "cuda:0"):
        actual = quantize(x.to(device), Cast())
        assert actual.data.device == torch.device(device)
        assert torch.equal(bits(actual.data.cpu()), bits(quantize(x, Cast()).data))
