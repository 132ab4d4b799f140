"""The fused functions on CUDA in BF16: their numbers, compiled, in CUDA graphs, their memory, and with adapters.

The sizes are no multiples of the kernels' tiles. What the kernels write is compared byte for byte in tests/ops; here a
byte may differ from the oracle's where the tensor core's sum moved a number of BF16 over the border of two codes.
"""

import gc

import fused_oracle as oracle
import pytest
import torch
from adapter_oracle import wrap
from gpus import NO_CONTEXT, ONLY_HOPPER, capture
from linear_examples import converted_model
from metrics import sqnr
from torch import Tensor, nn

import octavo

pytestmark = [pytest.mark.gpu, ONLY_HOPPER, NO_CONTEXT]

T, K, F = 1000, 528, 1104
LEAST = 45.0  # dB, between two runs on the same bytes
MLP_LEAST = 29  # dB, of an MLP against its oracle, for a byte of h moves many sums; 21 if h were quantized anew
FEW_TOKENS_DB = 20  # of a few tokens against the unquantized block
GRAPH_LEAST = 30  # dB, of a replayed graph; 15 with the weights of one step before


def on_gpu(build) -> oracle.Block:
    """Converted, in BF16."""
    return converted_model(build("rms", K, F, False).to("cuda", torch.bfloat16))


def inputs(t: int = T) -> tuple[Tensor, Tensor]:
    return oracle.tokens(t, K, torch.bfloat16, "cuda"), oracle.tokens(t, K, torch.bfloat16, "cuda")


@pytest.mark.parametrize(
    ("build", "kind", "bias"),
    [(oracle.linears, "rms", True), (oracle.linears, "layer", False), (oracle.swiglu, "rms", False),
     (oracle.swiglu, "none", True), (oracle.swiglu, "llama", True), (oracle.gelu, "layer", True),
     (oracle.gelu, "none", False), (oracle.gelu, "layer without bias", False), (oracle.geglu, "layer", True)],
)  # fmt: skip
def test_outputs_and_gradients_are_the_formulas_of_their_bytes(build, kind: str, bias: bool) -> None:
    block = build(kind, K, F, bias).to(torch.bfloat16)
    x, residual = inputs()
    x, residual = x.cpu(), None if kind == "none" else residual.cpu()
    octavo.convert(block)
    expected = oracle.exact(block, x, residual, torch.bfloat16)
    block.cuda()
    x, residual = x.cuda(), None if residual is None else residual.cuda()
    actual = oracle.run(block, block, x, residual)
    assert {t.device.type for t in actual.values()} == {"cuda"}
    if build is not oracle.linears:
        block.zero_grad()
        block.mlp.recompute = True
        oracle.check_equal(actual, oracle.run(block, block, x, residual))
    oracle.check(expected, actual, LEAST if build is oracle.linears else MLP_LEAST)


@pytest.mark.parametrize("t", [1, 33, T])
@oracle.BUILDERS
def test_near_the_exact_function(build, t: int) -> None:
    block, (x, residual) = build("rms", K, F, True).to("cuda", torch.bfloat16), inputs(t)
    expected = oracle.exact_unquantized(block, x, residual)
    octavo.convert(block)
    actual = oracle.run(block, block, x, residual)
    oracle.check(expected, actual, oracle.NEAR_UNQUANTIZED_DB if t == T else FEW_TOKENS_DB)
    assert sqnr(expected["output 0"], actual["output 0"]) < oracle.QUANTIZED_DB


@oracle.BUILDERS
def test_under_autocast(build) -> None:
    """Parameters and stream in float32, layers in BF16."""
    block = build("rms", K, F, True).cuda()
    x, residual = (oracle.tokens(T, K, device="cuda") for _ in range(2))
    expected = oracle.exact_unquantized(block, x, residual)
    octavo.convert(block)
    actual = oracle.run(block, block, x, residual, autocast=True)
    oracle.check(expected, actual, oracle.NEAR_UNQUANTIZED_DB)
    assert {t.dtype for name, t in actual.items() if name.startswith("d ")} == {torch.float32}


def test_a_root_mean_square_norm_without_eps_has_that_of_torch() -> None:
    block = oracle.linears("rms without eps", K, F).to("cuda", torch.bfloat16)
    x = inputs()[0] * 0.1
    plain = block.separate(x)
    octavo.convert(block)
    assert sqnr(plain[0], block(x)[0]) > oracle.NEAR_UNQUANTIZED_DB


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("autocast", [False, True])
@oracle.BUILDERS
def test_compiled_by_inductor_equals_eager_in_one_graph_that_is_made_once(build, autocast: bool) -> None:
    torch.compiler.reset()
    block = on_gpu(build).float() if autocast else on_gpu(build)
    compiled = torch.compile(block, fullgraph=True)
    for i in range(4):
        x, residual = (t.float() for t in inputs()) if autocast else inputs()
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = oracle.run(block, compiled, x, residual, autocast=autocast)
        oracle.check(oracle.run(block, block, x, residual, autocast=autocast), actual, LEAST)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_inside_cast_once_sees_the_new_bytes() -> None:
    torch.compiler.reset()
    block, (x, residual) = on_gpu(oracle.swiglu), inputs()
    compiled = torch.compile(block, fullgraph=True)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    with octavo.scales.cast_once(block):
        for i in range(3):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                actual = oracle.run(block, compiled, x, residual)
            oracle.check(fresh_run(block, oracle.swiglu, x, residual), actual, LEAST)
            random_step(block, optimizer)


# ---- CUDA graphs


def forward_backward(block: oracle.Block, x: Tensor, residual: Tensor, douts: list[Tensor]) -> oracle.Tensors:
    outputs = block(x, residual)
    names = ["x", "residual", *(name for name, _ in block.named_parameters())]
    gradients = torch.autograd.grad(outputs, [x, residual, *block.parameters()], douts)
    named = {f"output {i}": y for i, y in enumerate(outputs)}
    return named | {f"d {name}": g for name, g in zip(names, gradients, strict=True)}


def fresh_run(block: oracle.Block, build, x: Tensor, residual: Tensor) -> oracle.Tensors:
    """`run` of a new block with this one's parameters."""
    other = on_gpu(build)
    other.load_state_dict(block.state_dict())
    return oracle.run(other, other, x.detach(), residual.detach())


def random_step(block: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in block.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("cached", [False, True], ids=["", "cast once"])
@oracle.BUILDERS
def test_a_cuda_graph_replays_with_new_inputs_and_new_weights(build, cached: bool) -> None:
    block = on_gpu(build)
    x, residual = (t.requires_grad_() for t in inputs())
    douts = oracle.output_gradients(block(x, residual))
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    with octavo.scales.cast_once(block if cached else nn.Identity()):
        graph, captured = capture(lambda: forward_backward(block, x, residual, douts), warm_up=3)
        for _ in range(3):
            random_step(block, optimizer)
            with torch.no_grad():
                for static, new in zip((x, residual), inputs(), strict=True):
                    static.copy_(new)
            for t in captured.values():
                t.detach().fill_(torch.nan)
            graph.replay()
            oracle.check(fresh_run(block, build, x, residual), captured, GRAPH_LEAST)


# ---- memory


@pytest.fixture
def no_garbage():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held(block: oracle.Block, *given: Tensor) -> int:
    """Bytes asked for in the forward pass that live until the backward pass; the outputs are among them."""
    with torch.autograd.set_multithreading_enabled(False):  # another thread may still hold what the pass needed
        for _ in range(2):
            outputs = block(*given)
            torch.autograd.grad(outputs[0].sum(), given)
    del outputs
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    outputs = block(*given)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.autograd.grad(outputs[0].sum(), given)
    return after - before


SMALL = 4096  # bytes that do not grow with the tokens


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("build", [oracle.swiglu, oracle.gelu, oracle.geglu])
def test_an_mlp_keeps_the_stream_and_u(build) -> None:
    """Beside y: x + residual, u, and four float32 a token (mean, 1/rms, two scales); a float32 a row of the weights."""
    block, (x, residual) = on_gpu(build), inputs()
    columns = F if build is oracle.gelu else 2 * F
    bound = T * (2 * K + 2 * K + 2 * columns + 4 * 4) + 4 * (columns + K) + SMALL
    assert bound - T * K < held(block, x.requires_grad_(), residual.requires_grad_()) <= bound


@pytest.mark.usefixtures("no_garbage")
def test_a_norm_and_its_layers_keep_the_stream() -> None:
    block, (x, residual) = on_gpu(oracle.linears), inputs()
    columns = F + 17 + 1
    bound = T * (2 * columns + 2 * K + 3 * 4) + 4 * columns + SMALL
    assert bound - T * K < held(block, x.requires_grad_(), residual.requires_grad_()) <= bound


@pytest.mark.usefixtures("no_garbage")
def test_without_a_residual_the_stream_is_kept_but_not_again() -> None:
    block, (x, _) = on_gpu(oracle.swiglu), inputs()
    bound = T * (2 * K + 2 * 2 * F + 4 * 4) + 4 * (2 * F + K) + SMALL
    assert held(block, x.requires_grad_()) <= bound


# ---- Adapters around frozen layers: their numbers, compiled, and in place


BLOCKS = pytest.mark.parametrize(("build", "least"), [(oracle.linears, 30), (oracle.swiglu, 27)])  # dB


def adapted(build) -> tuple[nn.Module, Tensor, Tensor]:
    """A block on the CPU, x and residual."""
    torch.manual_seed(0)
    block = wrap(converted_model(build("rms", K, F, False).to(torch.bfloat16)))
    return block, oracle.tokens(T, K, torch.bfloat16), oracle.tokens(T, K, torch.bfloat16)


@BLOCKS
def test_adapters_are_the_formulas_of_their_bytes(build, least: float) -> None:
    block, x, residual = adapted(build)
    expected = oracle.exact(block, x, residual, torch.bfloat16)
    block.cuda()
    actual = oracle.run(block, block, x.cuda(), residual.cuda())
    oracle.check(expected, {name: t.cpu() for name, t in actual.items()}, least)


@BLOCKS
def test_compiled_adapters_are_near_eager_and_add_in_place(build, least: float) -> None:
    torch.compiler.reset()
    block, x, residual = adapted(build)
    block, x, residual = block.cuda(), x.cuda(), residual.cuda()
    eager = oracle.run(block, block, x, residual)
    block.compile(fullgraph=True)
    oracle.check(eager, oracle.run(block, block, x, residual), least)
    y = torch.ones(64, 48, device="cuda", dtype=torch.bfloat16)
    u, b = torch.ones(64, 16, device="cuda", dtype=torch.bfloat16), torch.ones(48, 16, device="cuda").bfloat16()
    torch.compile(octavo.ops.add_product, fullgraph=True)(y, u, b)
    assert torch.equal(y, torch.full_like(y, 17))
