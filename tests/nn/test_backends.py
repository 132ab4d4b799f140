"""What is reported is what the door decides."""

import torch

import octavo
from octavo.nn.backends import gemm_backends


def test_every_recipe_runs_on_a_cpu_by_emulation() -> None:
    for name, preset in octavo.PRESETS.items():
        backends = gemm_backends(preset(), torch.device("cpu"))
        assert list(backends) == ["y", "dx", "dw"]
        for gemm, backend in backends.items():
            quantized = name != "bf16" and (name, gemm) != ("rowwise_dw_bf16", "dw")
            assert backend.name == ("emulated" if quantized else "bf16"), (name, gemm)
