"""torchtitan's Trainer on the CPU: it is written for GPUs, so what it asks of one is replaced before it is imported."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("torchtitan")
torch._utils._get_available_device_type = lambda: "cpu"
from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.lora import LoRAConverter  # noqa: E402, F401
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402, F401
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.models import qwen3  # noqa: E402, F401
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402


class NoMemory:
    device_name = "cpu"

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMemory
fsdp.disable_fsdp_gradient_division = lambda model: None  # gloo cannot reduce with a factor


class Batches(BaseDataLoader):
    """The same batch of random tokens again and again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_) -> None:
        self.ids = torch.randint(256, (local_batch_size, seq_len + 1), generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.ids.shape[1] - 1).expand(len(self.ids), -1)
        while True:
            yield {"input": self.ids[:, :-1], "positions": positions}, self.ids[:, 1:]

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_) -> None:
        self.eos_id = 0

    def encode(self, *args, **kwargs) -> list[int]:
        return []

    def decode(self, *args, **kwargs) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def make_trainer(rank=0, world=1, *, converters, model_spec=None, **changes):
    """torchtitan's Trainer of its small Llama, in one of `world` processes; `changes` are of its config."""
    place = {"LOCAL_RANK": rank, "RANK": rank, "WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in place.items()}
    os.environ.setdefault("MASTER_PORT", "0")  # any that is free
    config = llama3_debugmodel()
    config.model_spec = model_spec or model_registry("debugmodel", converters=converters)
    for _, _, parent, name in config.model_spec.traverse(FlexAttention.Config):
        setattr(parent, name, ScaledDotProductAttention.Config())
    config.training = TrainingConfig(local_batch_size=2, seq_len=32, steps=3, disable_cuda_graphs=True)
    config.dataloader, config.tokenizer = Batches.Config(), NoTokenizer.Config()
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")  # the default needs a newer PyTorch
    config.checkpoint.enable, config.debug.seed = False, 0
    config.optimizer.implementation = "for-loop"
    for name, value in changes.items():
        setattr(config, name, value)
    return config.build()


def train(trainer, steps: int) -> list[float]:
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(batches)
    return losses
