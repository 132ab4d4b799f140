"""A cuDNN whose graphs compute FP8 attention by the reference, at the addresses and strides that they were given.

It has what `octavo.ops.kernels.attention_fp8` calls, for memory of the CPU.
"""

import ctypes
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from octavo.ops import attention_fp8 as op
from octavo.ops.launching import Heads

E4M3, FLOAT = torch.float8_e4m3fn, torch.float32


class Slot(SimpleNamespace):
    """A tensor of a graph: its layout, dtype and number."""

    def __getattr__(self, name: str) -> Any:
        def assign(value: Any) -> Self:
            setattr(self, {"set_data_type": "data_type"}.get(name, name.removeprefix("set_")), value)
            return self

        return assign

    def at(self, address: int) -> Tensor:
        last = sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_uint8 * ((last + 1) * self.data_type.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.data_type).as_strided(self.dim, self.stride)


class Graph:
    def __init__(self, **_: Any) -> None:
        self.given: dict[str, Any] = {}
        self.results: list[Slot] = []

    def tensor(self, **facts: Any) -> Slot:
        return Slot(**facts)

    def sdpa_fp8(self, **given: Any) -> list[Slot]:
        return self._record(given, 4)

    def sdpa_fp8_backward(self, **given: Any) -> list[Slot]:
        return self._record(given, 7)

    def _record(self, given: dict[str, Any], count: int) -> list[Slot]:
        self.given, self.results = given, [Slot() for _ in range(count)]
        return self.results

    def build(self, _: Any) -> None:
        keys = self.given["k"].dim[2] - self.given["q"].dim[2]
        assert (self.given["diagonal_alignment"], self.given["right_bound"]) == ("top left", keys)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pointers: dict[int, int], workspace: int, handle: None) -> None:
        x = {name: slot.at(pointers[slot.uid]) for name, slot in self.given.items() if isinstance(slot, Slot)}
        scales = {name.removeprefix("descale_"): t.view(1) for name, t in x.items() if name.startswith("descale")}
        scales |= {name.removeprefix("scale_"): 1 / t.view(1) for name, t in x.items() if name.startswith("scale")}
        heads, rest = Heads(x["q"], x["k"], x["v"]), (float(scales["s"]), self.given["attn_scale"], FLOAT)
        if "dO" not in x:
            _, o, stats = op.attend_reference(heads, scales, *rest)
            self._write(pointers, [o.transpose(1, 2), stats.unsqueeze(3)])
            return
        assert x["dO"].shape[3] == 128  # the only heads whose gradient cuDNN has
        dy, o = (x[name].transpose(1, 2) for name in ("dO", "o"))
        *gradients, amax = op.attend_backward_reference(dy, heads, o, x["stats"].squeeze(3), scales, *rest)
        named = zip(gradients, ("dQ", "dK", "dV"), strict=True)
        self._write(pointers, [*((g / scales[name]).transpose(1, 2) for g, name in named), *amax])

    def _write(self, pointers: dict[int, int], results: list[Tensor]) -> None:
        for slot, result in zip(self.results, results, strict=False):
            slot.at(pointers[slot.uid]).copy_(result)


CUDNN = SimpleNamespace(
    pygraph=Graph, data_type=SimpleNamespace(FP8_E4M3=E4M3, FLOAT=FLOAT), set_stream=lambda **_: None,
    heur_mode=SimpleNamespace(A=0, FALLBACK=1), diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"),
    cudnnGraphNotSupportedError=RuntimeError,
)  # fmt: skip


def use(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Compute FP8 attention on a CPU by the code for cuDNN, and return the cached graphs."""
    from octavo.ops.kernels import attention_fp8 as kernel

    graphs: dict[Any, Any] = {}
    monkeypatch.setattr(op, "_runs_cudnn", lambda q: True)
    monkeypatch.setattr(kernel, "_handle", lambda device: (CUDNN, None))
    monkeypatch.setattr(kernel, "_local", SimpleNamespace(graphs=graphs))
    monkeypatch.setattr(kernel, "widen", lambda data, scale, dtype: (data.float() * scale).to(dtype))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    return graphs
