"""What is computed once while a graph with many equal operations is lowered."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.utils import fresh_cache, run_and_get_code

from octavo.numerics.formats import E4M3
from octavo.numerics.granularity import ROW
from octavo.numerics.qtensor import QTensor
from octavo.ops import inductor, scaled_mm

FUNCTION = next(
    name
    for name in ("identify_mutated_tensors", "identify_accessed_tensors")  # torch 2.11, torch 2.13
    if hasattr(triton_kernel_wrap, name)
)


def test_a_kernel_is_analysed_once_for_all_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[dict[str, Any]] = []

    def analyse(kernel: object, args: dict[str, Any], descriptors: object) -> list[str]:
        analysed.append(args)
        return ["y"]

    monkeypatch.setattr(triton_kernel_wrap, FUNCTION, analyse)
    monkeypatch.setattr(inductor, "_accesses", {})
    parameters = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in ("x", "y", "M", "BLOCK")]
    kernel = SimpleNamespace(params=parameters)
    tuned = SimpleNamespace(fn=kernel)  # as a launch with options of the compiler arrives
    args = {"x": torch.ones(2), "y": torch.ones(2), "M": 2, "BLOCK": 16}
    with inductor._analyses_cached():
        launched: Callable[..., Any] = getattr(triton_kernel_wrap, FUNCTION)
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


def test_inductor_launches_our_kernels_itself_where_it_was_imported_before_octavo() -> None:
    name = inductor._STATIC_LAUNCH
    code = f"import torch._inductor.config as config, octavo.ops.inductor; print(config.{name})"
    environment = {variable: value for variable, value in os.environ.items() if name not in variable.lower()}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "True"


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
