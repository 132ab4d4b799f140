"""Checkpoints of a model on a GPU: copied to pinned memory, and written while the weights change."""

import pytest
import torch
from hopper import ONLY_HOPPER
from safetensors.torch import load_file
from torch import nn

from octavo.artifact.run import RunFolder
from octavo.train.checkpoint import TrainState, load_checkpoint
from octavo.train.checkpoint_writer import CheckpointWriter

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]


def test_the_state_that_is_written_is_that_of_the_call(tmp_path):
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Linear(2048, 2048, device=device) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = TrainState(model, optimizer, torch.amp.GradScaler("cuda", enabled=False), device, "print")
    run, weights, drawn = RunFolder(tmp_path), {}, {}
    x = torch.randn(512, 2048, device=device)
    with CheckpointWriter(run, keep=9) as writer:
        for state.step in (1, 2, 3):  # the second and third use the memory of the first again
            model(x).square().mean().backward()
            optimizer.step()
            writer.save(state)
            weights[state.step] = {name: p.detach().clone() for name, p in model.named_parameters()}
            drawn[state.step] = torch.randn(3, device=device)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.5)
    for step, expected in weights.items():
        found = load_file(run.checkpoint(step) / "model.safetensors", "cuda")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        load_checkpoint(run.checkpoint(step), state)
        assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
        assert torch.equal(torch.randn(3, device=device), drawn[step])
        assert float(optimizer.state[model[0].weight]["step"]) == step
