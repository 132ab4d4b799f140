"""Delayed scaling in the Trainer of Lightning; other recipes need nothing but `octavo.convert`.

trainer = Trainer(precision="bf16-mixed", callbacks=[ScaleUpdates()])
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from octavo.scales import load_scale_state, scale_state, update_scales

KEY = "octavo_scales"


class ScaleUpdates(Callback):  # type: ignore[misc]
    """Updates the scales of delayed scaling after each optimizer step, and saves them in each checkpoint."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.updated = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step != self.updated:  # not so after a micro-batch that only accumulates gradients
            self.updated = trainer.global_step
            update_scales(trainer.model)  # with DDP's module around it

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = scale_state(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if KEY in checkpoint:
            load_scale_state(pl_module, checkpoint[KEY])
