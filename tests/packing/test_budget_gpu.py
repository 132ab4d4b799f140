"""A budget measured on a GPU, by its FP8 GEMMs, against the same on the CPU."""

from pathlib import Path

import pytest
from calibration_examples import write_data, write_model

from octavo.evaluation import Budget, PromptOptions
from octavo.packing import PackOptions, pack_within

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}

PROMPTS = PromptOptions(32, 40)


@pytest.mark.parametrize("scheme", ["channel", "tensor"])
def test_a_gpu_measures_what_a_cpu_does(tmp_path: Path, scheme: str) -> None:
    source = write_model(tmp_path / "llama", "llama", **SIZES)
    data = write_data(tmp_path / "data.jsonl")
    options = PackOptions(scheme=scheme)
    _, free = pack_within(source, tmp_path / "free", [Budget("kl", 99)], data, options, prompts=PROMPTS)
    budget = Budget("kl", free.all_packed.kl.value / 2)
    found = {
        device: pack_within(source, tmp_path / device, [budget], data, options, prompts=PROMPTS, device=device)[1]
        for device in ("cpu", "cuda")
    }
    cpu, cuda = found["cpu"], found["cuda"]
    assert cuda.quality.kl.value <= budget.limit < cuda.all_packed.kl.value
    assert cuda.all_packed.kl.value == pytest.approx(cpu.all_packed.kl.value, rel=0.2)
    harms = {group.layers: group.harm for group in cpu.ranking}
    for group in cuda.ranking:
        assert group.harm == pytest.approx(harms[group.layers], rel=0.5)
    assert {g.layers for g in cuda.ranking[:2]} & {g.layers for g in cpu.ranking[:3]}
