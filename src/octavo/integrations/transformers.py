"""Delayed scaling in the Trainer of Hugging Face transformers; other recipes need nothing but `octavo.convert`.

trainer = Trainer(model, args, callbacks=[ScaleUpdates()])
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState, TrainingArguments

from octavo.scales import load_scale_state, scale_state, update_scales

FILE_NAME = "octavo_scales.safetensors"


class ScaleUpdates(TrainerCallback):  # type: ignore[misc]
    """Updates the scales of delayed scaling after each optimizer step, and saves them with each checkpoint.

    A checkpoint's folder gets the file octavo_scales.safetensors. Training that resumes reads it from the folder
    `args.resume_from_checkpoint`, or from checkpoint-STEP in `args.output_dir`. Without the file a warning says that
    the histories begin anew.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, model: Any, **__: Any) -> None:
        if state.global_step == 0 or not scale_state(model):
            return
        named = args.resume_from_checkpoint
        path = (Path(named) if isinstance(named, str) else _folder(args, state)) / FILE_NAME
        if path.is_file():
            load_scale_state(model, load_file(path))
        else:
            warnings.warn(f"{path} is missing: the scale histories of the run begin anew", stacklevel=2)

    def on_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        update_scales(model, group=dist.group.WORLD)  # None in one process; each rank has a copy, and DDP around it

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, model: Any, **__: Any) -> None:
        if state.is_world_process_zero and (scales := scale_state(model)):
            save_file(scales, _folder(args, state) / FILE_NAME)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
