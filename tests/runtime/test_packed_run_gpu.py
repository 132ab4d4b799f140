"""A packed run's forward pass on a GPU is that of training, bit for bit: the same bytes, scales and GEMMs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_examples import write_run
from safetensors.torch import save_file
from torch import Tensor

from octavo import convert, update_scales
from octavo.artifact.run import RunFolder
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.nn.delayed import scale_state
from octavo.packing import pack
from octavo.runtime import load_packed

pytestmark = pytest.mark.gpu

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(256, layers=2, width=256, heads=4, kv_heads=4, mlp_width=512, context=48),
    "gpt2": GPT2Config(256, 2, 256, 4, 48),
}


def tokens(seed: int) -> Tensor:
    return torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("recipe", "scheme"), [("rowwise", "channel"), ("blockwise", "block"), ("delayed", "static")])
def test_a_packed_run_repeats_its_forward_pass(tmp_path: Path, recipe: str, scheme: str, name: str) -> None:
    config = CONFIGS[name]
    model: Any = Llama(config) if name == "llama" else GPT2(config)
    model = model.cuda().bfloat16().train()
    convert(model, recipe)
    for step in range(2):
        model(tokens(step)).float().square().mean().backward()
        update_scales(model)
    run = write_run(tmp_path / "run", model, config.to_hf(), recipe=recipe, model=name)
    state = {key: t.detach().cpu().clone() for key, t in scale_state(model).items()}
    save_file(state | {"random.cpu": torch.zeros(1)}, RunFolder(run).newest() / "state.safetensors")
    report = pack(run, tmp_path / "out")
    assert set(report.packed.values()) == {scheme}
    packed = load_packed(tmp_path / "out", "cuda").model
    with torch.no_grad():
        want, found = model.eval()(tokens(9)), packed(tokens(9))
    assert want.isfinite().all()
    assert want.std() > 0.01
    assert torch.equal(found, want)
