"""torchtitan's own Trainer on a model of FP8 layers, with the library itself: make test-integrations."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fsdp_examples import counted
from operation_counts import operations
from ranks import run_ranks
from torchtitan_examples import CompileConfig, LoRAConverter, ParallelismConfig, make_trainer, model_registry, train

import octavo
from octavo.integrations.torchtitan import FP8Converter, FP8Linear, SelectiveAC

pytestmark = pytest.mark.filterwarnings("ignore:DTensor .* may not have complete support:UserWarning")
LINEARS, STEPS = 6 * 5, 3


@pytest.fixture
def _leave_the_group() -> Iterator[None]:
    """Restores what torchtitan's start changes: the environment that names the group, and the group."""
    before = dict(os.environ)
    yield
    torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def fp8(**settings: Any) -> Any:
    return FP8Converter.Config(**settings)


@pytest.mark.usefixtures("_leave_the_group")
def test_the_trainer_runs_in_fp8() -> None:
    trainer = make_trainer(converters=[fp8()])
    (model,) = trainer.model_parts
    losses: list[float] = []
    counts = operations(lambda: losses.extend(train(trainer, STEPS)))
    assert counts["octavo::scaled_mm"] == STEPS * LINEARS * 4  # y, y again for its checkpoint, dx, dw
    assert losses[-1] < losses[0] - 0.2
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert [module for module in linears if not isinstance(module, FP8Linear)] == [model.lm_head]


@pytest.mark.usefixtures("_leave_the_group")
def test_selective_checkpointing_saves_the_gemms() -> None:
    trainer = make_trainer(converters=[fp8(skip=["*.w2"])], activation_checkpoint=SelectiveAC.Config())
    counts = operations(lambda: train(trainer, 1))
    assert counts["octavo::scaled_mm"] == (LINEARS - 6) * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
@pytest.mark.usefixtures("_leave_the_group")
def test_blocks_compile_as_one_graph_each() -> None:
    torch._dynamo.utils.counters.clear()
    trainer = make_trainer(converters=[fp8()], compile=CompileConfig(enable=True, backend="aot_eager"))
    losses = train(trainer, STEPS)
    assert losses[-1] < losses[0] - 0.2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("_leave_the_group")
def test_adapters_of_torchtitan_train_around_fp8_layers() -> None:
    lora = LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wqkv", "wo"])
    trainer = make_trainer(converters=[fp8(), lora])
    (model,) = trainer.model_parts
    trained = {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_a", "lora_b"}
    losses: list[float] = []
    counts = operations(lambda: losses.extend(train(trainer, STEPS)))
    assert losses[-1] < losses[0] - 0.01
    assert counts["octavo::scaled_mm"] == STEPS * (3 * LINEARS - 1)  # no dw; no dx of the first layer


@pytest.mark.usefixtures("_leave_the_group")
def test_delayed_scales_are_updated_after_each_step() -> None:
    trainer = make_trainer(converters=[fp8(recipe="delayed")])
    train(trainer, STEPS)
    scales = octavo.scales.scale_state(trainer.model_parts[0])
    assert len(scales) == LINEARS * 3 * 4
    assert {int(t) for name, t in scales.items() if name.endswith(".steps")} == {STEPS}


def serve_store(rank: int) -> torch.distributed.TCPStore | None:
    """Tell torchtitan, as torchrun does, that its store is there: rank 0 has it, on a port that the system chose."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports = [0 if store is None else store.port]
    torch.distributed.broadcast_object_list(ports)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(ports[0])}
    return store


def two_ranks(rank: int) -> list[tuple[list[float], int]]:
    """The losses, and the bytes that the all-gathers of the last step send, in BF16 and in FP8. Then a refusal."""
    warnings.filterwarnings("ignore", "DTensor .* may not have complete support")
    results, stores = [], []
    for converters in ([], [fp8()]):
        stores.append(serve_store(rank))
        torch.distributed.destroy_process_group()  # torchtitan makes a group of its own
        trainer = make_trainer(rank, 2, converters=converters)
        losses = train(trainer, STEPS - 1)
        with counted() as sent:
            losses += train(trainer, 1)
        results.append((losses, sum(sent["gather"])))
    stores.append(serve_store(rank))
    torch.distributed.destroy_process_group()
    divided = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=2)
    with pytest.raises(NotImplementedError, match="tensor_parallel_degree=1 and .*, got 2 and 'partial_dtensor'"):
        make_trainer(rank, 2, converters=[fp8()], parallelism=divided)
    return results


def test_sharded_weights_are_gathered_in_eight_bits_and_tensor_parallelism_is_refused() -> None:
    (bf16, wide), (losses, sent) = run_ranks(2, two_ranks)[0]
    assert losses == pytest.approx(bf16, abs=0.05)
    assert losses[-1] < losses[0] - 0.5
    converted = 6 * 256 * (768 + 256 + 3 * 768) * 2  # bytes of the weights in BF16: a rank sends half, twice a step
    assert sent - (wide - converted) < 0.51 * converted  # the rows are short: a scale is 0.8 % of a row


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'fp9'"):
        model_registry("debugmodel", converters=[fp8(recipe="fp9")])
    with pytest.raises(ValueError, match="matches no linear layer; the model has 31, named 'lm_head', 'layers.0"):
        model_registry("debugmodel", converters=[fp8(skip=["*.w4"])])
    with pytest.raises(ValueError, match="every linear layer of the model is skipped"):
        model_registry("debugmodel", converters=[fp8(skip=["*"])])
