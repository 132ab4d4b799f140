"""The tables of settings: `[attention]`, `[experts]`, `[loss]`, `[optimizer]`, `[compile]`,
`[activation_checkpointing]`, `[parallel]` and `[watch]`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.train.declaration import DEGREE, NAMED, NOT_NEGATIVE, POSITIVE, setting
from octavo.train.settings import ConfigError


@dataclass(frozen=True)
class Parallel:
    """How the processes that `torchrun` starts share the model and the data. The degrees multiply to their number."""

    dp_shard: int = setting(-1, "processes that share the weights of a replica (FSDP2); -1: those left", DEGREE)
    dp_replicate: int = setting(1, "replicas of the weights, each on other data (HSDP); -1: those left", DEGREE)
    tp: int = setting(1, "processes that share each layer (tensor parallel); -1: those left", DEGREE)
    fp8_all_gather: bool = setting(True, "gather the weights of FP8 layers in eight bits")
    gather_dtype: str = setting(
        "fp32",
        "fp32, or bf16: dtype of other weights in the forward pass; bf16 halves the traffic of these and of gradients, "
        "and rounds norms",
        choices=("fp32", "bf16"),
    )
    async_tp: bool = setting(False, "multiply while activations travel between the processes of tp")
    timeout: int = setting(600, "seconds that a process waits for the others before it fails", POSITIVE)


@dataclass(frozen=True)
class AttentionSettings:
    """The precision of the causal attention, forward and backward (`octavo.nn.use_fp8_attention`)."""

    precision: str = setting("bf16", "bf16, or fp8: long texts attend in E4M3 (extra cudnn)", choices=("bf16", "fp8"))
    shortest: int = setting(8192, "tokens of the shortest text whose attention runs in FP8", POSITIVE)


@dataclass(frozen=True)
class ExpertSettings:
    """The experts of a `mixture`: MLPs of `mlp_width`, of which each token runs through a few."""

    count: int = setting(8, "experts of a block (mixture)", POSITIVE)
    top_k: int = setting(2, "experts that a token runs through (mixture)", POSITIVE)
    shared_width: int = setting(0, "hidden features of an MLP that every token runs through (mixture)", NOT_NEGATIVE)
    balance: float = setting(0.01, "factor of the loss that spreads tokens over experts (mixture)", NOT_NEGATIVE)

    def check(self, model: str) -> None:
        """Raise a ConfigError for more experts of a token than there are, and for settings that `model` ignores."""
        if model == "mixture" and self.top_k > self.count:
            counts = f"got experts.top_k {self.top_k} and experts.count {self.count}"
            raise ConfigError(f"experts.top_k must be at most experts.count; {counts}")
        changed = [name for name, value in vars(self).items() if value != getattr(ExpertSettings, name)]
        if changed and model != "mixture":
            raise ConfigError(
                f"experts.{changed[0]} is a setting of the model mixture, and the model {model} has no experts that it "
                f"could change; got {getattr(self, changed[0])!r}: give --model mixture, or leave it out"
            )


@dataclass(frozen=True)
class LossSettings:
    """How the loss is computed from the inputs of the model's head (`octavo.train.loss`)."""

    logits: str = setting(
        "auto",
        "chunked: the logits of `chunk` tokens are in memory at a time; whole: all; auto: chunked if the vocabulary is "
        "32,768 or more",
        choices=("auto", "chunked", "whole"),
    )
    chunk: int = setting(1024, "tokens whose logits are in memory at a time (chunked)", POSITIVE)


@dataclass(frozen=True)
class OptimizerSettings:
    """The dtypes and the place of weights and moments. A dtype other than fp32 needs torchao: the extra `optim`."""

    weights: str = setting(
        "fp32", "dtype of the weights; bf16: a step rounds them stochastically", choices=("fp32", "bf16")
    )
    state: str = setting(
        "fp32", "dtype of AdamW's two moments; 8bit and fp8: a byte each, in blocks", choices=("fp32", "8bit", "fp8")
    )
    offload: bool = setting(
        False, "hold weights and moments in the CPU's memory, and update them there; the GPU has the weights of a block"
    )


@dataclass(frozen=True)
class ActivationCheckpointing:
    """What the backward pass of a block computes again instead of reading it from memory."""

    mode: str = setting(
        "none",
        "none; full: a block saves its input only; selective: also its attention and every second GEMM",
        choices=("none", "full", "selective"),
    )


@dataclass(frozen=True)
class Compile:
    """How `torch.compile` compiles the model."""

    blocks: bool = setting(False, "compile each block of the model with torch.compile")
    backend: str = setting("inductor", "backend of torch.compile", NAMED)


@dataclass(frozen=True)
class WatchSettings:
    """How a run watches its layers (docs/watch.md), and what it does about faults that it finds (docs/warnings.md)."""

    interval: int = setting(100, "steps between samples of the layers; 0 does not watch them", NOT_NEGATIVE)
    rows: int = setting(64, "rows of each operand that a sample reads", POSITIVE)
    on_warning: str = setting(
        "log",
        "log; promote: the layer moves to BF16, or its gradients to e5m2; stop: save and end",
        choices=("log", "promote", "stop"),
    )
    on_spike: str = setting(
        "log", "log; rollback: return to the last checkpoint, and skip the batches since", choices=("log", "rollback")
    )
    rollbacks: int = setting(3, "the most rollbacks of a run", NOT_NEGATIVE)


# Settings that became tables: the setting that replaces each, and its value in place of false and true.
FORMER: dict[str, tuple[str, tuple[Any, Any]]] = {
    "checkpoint_activations": ("activation_checkpointing.mode", ("none", "full")),
    "compile": ("compile.blocks", (False, True)),
}


def replace_former(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by name, with the settings in place of former ones, which files and command lines may still hold."""
    current = {name: value for name, value in values.items() if name not in FORMER}
    for former, (name, by_flag) in FORMER.items():
        if former in values:
            if name in current:
                raise ConfigError(f"{former} is the former name of {name}: give one of the two")
            current[name] = by_flag[values[former]]
    return current
