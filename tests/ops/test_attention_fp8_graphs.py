"""The graphs that cuDNN gets for FP8 attention, on a CPU: a fake one computes the reference at its addresses."""

import ctypes
from types import SimpleNamespace

import attention_fp8_oracle as oracle
import pytest
import torch
from metrics import sqnr

from octavo.nn.attention_layers import GradientScales, attend_fp8
from octavo.ops import attention_fp8 as op
from octavo.ops.launching import Heads

pytest.importorskip("triton")
pytestmark = pytest.mark.triton


class Slot(SimpleNamespace):
    """A tensor of a graph: `dim`, `stride`, `data_type` and `uid`."""

    def __getattr__(self, name: str):
        def assign(value):
            setattr(self, name.removeprefix("set_"), value)
            return self

        return assign

    def at(self, pointers: dict[int, int]) -> torch.Tensor:
        last = sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_uint8 * ((last + 1) * self.data_type.itemsize)).from_address(pointers[self.uid])
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.data_type).as_strided(self.dim, self.stride)


class Graph:
    def __init__(self, **_) -> None:
        self.tensor = Slot

    def sdpa_fp8(self, **given) -> list[Slot]:
        self.given, self.results = given, [Slot() for _ in range(7 if "dO" in given else 4)]
        return self.results

    sdpa_fp8_backward = sdpa_fp8

    def build(self, _) -> None:
        assert self.given["right_bound"] == self.given["k"].dim[2] - self.given["q"].dim[2]

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pointers: dict[int, int], workspace: int, handle: None) -> None:
        x = {name: slot.at(pointers) for name, slot in self.given.items() if isinstance(slot, Slot)}
        scales = {name.removeprefix("descale_"): t.view(1) for name, t in x.items() if name.startswith("descale")}
        scales |= {name.removeprefix("scale_"): 1 / t.view(1) for name, t in x.items() if name.startswith("scale")}
        heads, rest = Heads(x["q"], x["k"], x["v"]), (self.given["attn_scale"], torch.float32)
        assert scales["s"] == op.P_SCALE
        if "dO" not in x:
            _, o, stats = op.attend_reference(heads, scales, *rest)
            results = [o.transpose(1, 2), stats.unsqueeze(3)]
        else:
            assert x["dO"].shape[3] == 128  # the only heads whose gradient cuDNN has
            dy, o = (x[name].transpose(1, 2) for name in ("dO", "o"))
            *made, amax = op.attend_backward_reference(dy, heads, o, x["stats"].squeeze(3), scales, *rest)
            results = [*((g / scales[n]).transpose(1, 2) for g, n in zip(made, ("dQ", "dK", "dV"), strict=True)), *amax]
        for slot, result in zip(self.results, results, strict=False):
            slot.at(pointers).copy_(result)


@pytest.fixture
def use(monkeypatch):
    """A function that turns the fake cuDNN on, and returns the cached graphs."""
    from octavo.ops.kernels import attention_fp8 as kernel

    types = SimpleNamespace(FP8_E4M3=torch.float8_e4m3fn, FLOAT=torch.float32)
    chosen = SimpleNamespace(A=0, FALLBACK=1, TOP_LEFT="top left")
    cudnn = SimpleNamespace(pygraph=Graph, data_type=types, heur_mode=chosen, diagonal_alignment=chosen)
    cudnn.set_stream, cudnn.cudnnGraphNotSupportedError = lambda **_: None, OSError
    local = SimpleNamespace(graphs={})

    def turn_on() -> dict:
        monkeypatch.setattr(op, "_runs_cudnn", lambda q: True)
        monkeypatch.setattr(kernel, "_handle", lambda device: (cudnn, None))
        monkeypatch.setattr(kernel, "_local", local)
        monkeypatch.setattr(kernel, "widen", lambda data, scale, dtype: (data.float() * scale).to(dtype))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        return local.graphs

    return turn_on


@pytest.mark.parametrize("shape", [(2, 4, 2, 128, 128), (1, 1, 1, 128, 128), (2, 4, 2, 128, 64), (1, 2, 1, 256, 64)])
def test_both_passes_eager_and_compiled(use, shape):
    batch, heads, kv_heads, tokens, dim = shape
    x = oracle.given(batch, heads, kv_heads, tokens, tokens, dim)
    expected = oracle.gradients(x, GradientScales())  # by the reference
    graphs = use()
    found = oracle.gradients(x, GradientScales())
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if dim == 128 else sqnr(one, other) > 40  # sums of padded rows
        assert other.transpose(1, 2).is_contiguous()
    run = torch.compile(lambda *x: attend_fp8(*x) * 1, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, found, oracle.gradients(x, GradientScales(), run)))
    assert [key[0] for key in graphs] == ["forward", "backward"]


def test_operands_of_any_strides(use):
    """By tokens, by heads, in a cache with more room, and with a batch of any stride."""
    q, k, v, dy = map(oracle.quantized, oracle.given(1, 4, 2, 128, 128))
    scales, graphs, found = (q.scale, k.scale, v.scale), use(), []
    for place in (
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: torch.cat([x.float()] * 2, 2).to(x.dtype)[:, :, :128],
        lambda x: x.as_strided(x.shape, (1, *x.stride()[1:])),
    ):
        heads = [place(t.data) for t in (q, k, v)]
        y, o, stats = op.fp8_attention(*heads, *scales)
        saved = place(o.transpose(1, 2)).transpose(1, 2), place(stats.unsqueeze(3)).squeeze(3)
        operands = place(dy.data).transpose(1, 2), *heads, *saved
        found.append([y, *op.fp8_attention_backward(*operands, dy.scale, *scales, torch.full((3,), 1e-5))])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert [key[0] for key in graphs] == ["forward", "backward", "forward", "forward"]
    for name, values in (("", (*heads, *scales)), ("_backward", (*operands, torch.rand(7)))):
        operation = getattr(torch.ops.octavo, f"fp8_attention{name}").default
        torch.library.opcheck(operation, (*values, 0.1, torch.bfloat16), test_utils="test_faketensor")
