"""Lightning's Trainer and Fabric on converted models, with the library itself: make test-integrations."""

import pytest
import torch
from operation_counts import operations
from torch import nn
from torch.utils.data import DataLoader

import octavo

lightning = pytest.importorskip("lightning")
from octavo.integrations.lightning import ScaleUpdates  # noqa: E402

# Of Lightning: a class of PyTorch that is deprecated, and advice on workers, logging and loaders of data.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*log_every_n_steps:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable:UserWarning"),
]
STEPS, MICRO_BATCHES = 3, 2
ROWS = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).repeat(STEPS * MICRO_BATCHES, 1, 1)


class Model(lightning.LightningModule):
    def __init__(self, recipe="rowwise"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        octavo.convert(self.net, recipe)
        self.losses = []

    def training_step(self, rows, _):
        loss = (self.net(rows) - rows).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(model, folder, steps=STEPS, checkpoint=None):
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", max_steps=steps, accumulate_grad_batches=MICRO_BATCHES,
        callbacks=[ScaleUpdates()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(ROWS, batch_size=2), ckpt_path=checkpoint)
    return trainer


def test_the_trainer_runs_in_fp8_and_its_checkpoint_is_that_of_the_plain_model(tmp_path):
    model = Model()
    trainers = []
    counts = operations(lambda: trainers.append(fit(model, tmp_path)))
    assert counts["octavo::scaled_mm"] == STEPS * MICRO_BATCHES * 5  # the first layer needs no dx
    assert model.losses[-1] < model.losses[0] - 0.1
    trainers[0].save_checkpoint(tmp_path / "last.ckpt")
    plain = Model("bf16")
    octavo.restore(plain)
    plain.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_scales_are_updated_after_each_step_and_resume(tmp_path):
    whole, first, resumed = Model("delayed"), Model("delayed"), Model("delayed")
    fit(whole, tmp_path)
    fit(first, tmp_path, steps=2).save_checkpoint(tmp_path / "two.ckpt")
    fit(resumed, tmp_path, checkpoint=str(tmp_path / "two.ckpt"))
    scales = octavo.scales.scale_state(whole)
    assert {int(t) for name, t in scales.items() if name.endswith(".steps")} == {STEPS}
    assert all(torch.equal(t, scales[name]) for name, t in octavo.scales.scale_state(resumed).items())
    assert whole.losses == first.losses + resumed.losses


def test_fabric_runs_in_fp8():
    fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
    module = Model()
    model, optimizer = fabric.setup(module.net, torch.optim.AdamW(module.net.parameters(), 1e-2))
    losses = []

    def train():
        for rows in ROWS.split(2):
            loss = (model(rows) - rows).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    assert operations(train)["octavo::scaled_mm"] == 5 * len(losses)
    assert losses[-1] < losses[0] - 0.1
