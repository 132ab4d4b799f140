"""Compiled code launches our kernels instead of calling our operations; with dynamic sizes it calls them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from bits import bits
from linear_examples import converted_model
from operation_counts import calls
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import octavo
from octavo.nn import NormLinear, SwiGLU
from octavo.ops import registration as inductor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(256, eps=1e-5), nn.LayerNorm(256)
        self.q, self.k = nn.Linear(256, 128, bias=False), nn.Linear(256, 64, bias=False)
        self.o = nn.Linear(192, 256)
        self.both, self.mlp = NormLinear(self, "norm1", "q", "k"), SwiGLU(256, 384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (q, k), x = self.both(x)
        y, x = self.mlp(x, self.norm2, self.o(torch.cat((q, k), -1)))
        return x + y


def gradients(model: nn.Module, call, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view_as(y))
    actual = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return actual


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed", "blockwise", "rowwise_dw_bf16"])
def test_compiled_code_launches_the_kernels(recipe: str) -> None:
    torch.compiler.reset()
    model = converted_model(Block().to("cuda", torch.bfloat16), recipe)
    x = torch.randn(4, 96, 256, device="cuda", dtype=torch.bfloat16)
    if recipe == "delayed":
        gradients(model, model, x)
        octavo.scales.update_scales(model)
    expected = gradients(model, model, x)
    actual, codes = run_and_get_code(gradients, model, torch.compile(model, fullgraph=True), x)
    assert len(codes) == 2
    assert calls(codes) == ({"scaled_mm"} if recipe == "blockwise" else set())  # `ops.gemm._inlines` says why
    assert all("_kernel" in code for code in codes)
    for exact, here in zip(expected, actual, strict=True):
        noise = (exact.double() - here.double()).square().sum()
        # A value that is not rounded to BF16 between the kernels may quantize to the next code: noise as of FP8 itself.
        assert noise <= exact.double().square().sum() * 10**-2


@pytest.mark.parametrize("change", ["rounding", "rotation"])
def test_compiled_code_rounds_stochastically_and_rotates_in_kernels(change: str) -> None:
    torch.compiler.reset()
    recipe = octavo.recipe.rowwise()
    if change == "rounding":
        dy = replace(recipe.dy, rounding="stochastic")
        recipe = replace(recipe, name="stochastic", dx=replace(recipe.dx, a=dy), dw=replace(recipe.dw, a=dy))
    else:
        recipe = replace(recipe, name="rotated", rotate=("y", "dx", "dw"))
    model = converted_model(nn.Linear(256, 128, bias=False).to("cuda", torch.bfloat16), recipe)
    x = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    expected = gradients(model, model, x)
    actual, codes = run_and_get_code(gradients, model, torch.compile(model, fullgraph=True), x)
    assert calls(codes) == set()
    assert "_rotation_kernel" in codes[0] or change == "rounding"
    for exact, here in zip(expected, actual, strict=True):  # other random numbers, or one more rounding to BF16
        assert (exact.double() - here.double()).square().sum() <= exact.double().square().sum() * 10**-2


@pytest.mark.parametrize("spec", ["e2m1 group:16 e4m3 0.0", "e2m1 group:32 e8m0_floor 0.0", "e2m1 group:32 e8m0 0.0"])
def test_four_bits_are_compiled_to_the_bytes_of_eager_code(spec: str) -> None:
    x, drawn = torch.randn(96, 256, device="cuda", dtype=torch.bfloat16), torch.tensor(7, device="cuda")
    for seed in (None, drawn):
        arguments = x, spec, None, None, seed, 1
        actual, codes = run_and_get_code(torch.compile(torch.ops.octavo.quantize, fullgraph=True), *arguments)
        assert calls(codes) == set()
        assert all(map(torch.equal, map(bits, actual), map(bits, torch.ops.octavo.quantize(*arguments))))


def test_equal_blocks_share_the_trace_of_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, traced = inductor._trace, []
    monkeypatch.setattr(inductor, "_trace", lambda *args: traced.append(args) or trace(*args))
    counts = []
    for blocks in (2, 4):
        torch.compiler.reset()
        model = converted_model(nn.Sequential(*(Block() for _ in range(blocks))).to("cuda", torch.bfloat16))
        traced.clear()
        gradients(model, torch.compile(model), torch.randn(4, 96, 256, device="cuda", dtype=torch.bfloat16))
        counts.append(len(traced))
    assert counts[0] == counts[1] > 0


def test_dynamic_sizes_call_the_operations() -> None:
    torch.compiler.reset()
    model = converted_model(Block().to("cuda", torch.bfloat16))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    x = torch.randn(4, 96, 256, device="cuda", dtype=torch.bfloat16)
    actual, codes = run_and_get_code(gradients, model, compiled, x)
    assert calls(codes) >= {"quantize", "scaled_mm"}
    for exact, here in zip(gradients(model, model, x), actual, strict=True):
        assert (exact.double() - here.double()).square().sum() <= exact.double().square().sum() * 10**-3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_is_computed_again_restores_a_random_state_only_if_it_drops(dropout: float) -> None:
    torch.compiler.reset()
    inductor.register_lowerings()

    def attend(t: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(2 * t, t, t, is_causal=True, dropout_p=dropout).sin()

    def contexts():
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)

    def attend_again(t: Tensor) -> Tensor:
        return checkpoint(attend, t, use_reentrant=False, context_fn=contexts)

    def run(call) -> Tensor:
        torch.manual_seed(0)
        t = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        call(t).float().square().sum().backward()
        return t.grad

    found, codes = run_and_get_code(run, torch.compile(attend_again, fullgraph=True))
    assert all("_scaled_dot_product" in code for code in codes)
    assert len(codes) == 2
    assert all(("graphsafe_run_with_rng_state(" in code) == (dropout > 0) for code in codes)
    if dropout == 0:
        exact = run(attend).double()
        assert (exact - found.double()).square().sum() <= exact.square().sum() * 10**-3
