"""torchtitan's own Trainer on a model of FP8 layers, with the library itself: make test-integrations."""

import os
import warnings

import pytest
import torch
import torchtitan_examples as titan
from operation_counts import Traffic, operations
from ranks import run_ranks

import octavo
from octavo.integrations.torchtitan import FP8Converter, FP8Linear, SelectiveAC
from octavo.nn.only_if_faster import Speedups

pytestmark = pytest.mark.filterwarnings("ignore:DTensor .* may not have complete support:UserWarning")
LINEARS, STEPS = 6 * 5, 3


@pytest.fixture(autouse=True)
def _leave_the_group():
    """Restores what torchtitan's start changes: the environment that names the group, and the group."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def fp8(**settings):
    return FP8Converter.Config(**settings)


def test_the_trainer_runs_in_fp8():
    trainer = titan.make_trainer(converters=[fp8()])
    (model,) = trainer.model_parts
    losses = []
    counts = operations(lambda: losses.extend(titan.train(trainer, STEPS)))
    assert counts["octavo::scaled_mm"] == STEPS * LINEARS * 4  # y, y again for its checkpoint, dx, dw
    assert losses[-1] < losses[0] - 0.2
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert [module for module in linears if not isinstance(module, FP8Linear)] == [model.lm_head]


def test_selective_checkpointing_saves_the_gemms():
    trainer = titan.make_trainer(converters=[fp8(skip=["*.w2"])], activation_checkpoint=SelectiveAC.Config())
    assert operations(lambda: titan.train(trainer, 1))["octavo::scaled_mm"] == (LINEARS - 6) * 3


def test_blocks_compile_as_one_graph_each():
    torch._dynamo.utils.counters.clear()
    trainer = titan.make_trainer(converters=[fp8()], compile=titan.CompileConfig(enable=True, backend="aot_eager"))
    losses = titan.train(trainer, STEPS)
    assert losses[-1] < losses[0] - 0.2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_adapters_of_torchtitan_train_around_fp8_layers():
    lora = titan.LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wqkv", "wo"])
    trainer = titan.make_trainer(converters=[fp8(), lora])
    (model,) = trainer.model_parts
    trained = {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_a", "lora_b"}
    losses = []
    counts = operations(lambda: losses.extend(titan.train(trainer, STEPS)))
    assert losses[-1] < losses[0] - 0.01
    assert counts["octavo::scaled_mm"] == STEPS * (3 * LINEARS - 1)  # no dw; no dx of the first layer


def test_delayed_scales_are_updated_after_each_step():
    trainer = titan.make_trainer(converters=[fp8(recipe="delayed")])
    titan.train(trainer, STEPS)
    scales = octavo.scales.scale_state(trainer.model_parts[0])
    assert len(scales) == LINEARS * 3 * 4
    assert {int(t) for name, t in scales.items() if name.endswith(".steps")} == {STEPS}


def serve_store(rank):
    """Tell torchtitan, as torchrun does, that its store is there: rank 0 has it, on a port that the system chose."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    ports = [0 if store is None else store.port]
    torch.distributed.broadcast_object_list(ports)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(ports[0])}
    return store


def two_ranks(rank):
    """The losses, and the bytes that the all-gathers of the last step send, in BF16 and in FP8."""
    warnings.filterwarnings("ignore", "DTensor .* may not have complete support")
    results, stores = [], []
    for converters in ([], [fp8()]):
        stores.append(serve_store(rank))
        torch.distributed.destroy_process_group()  # torchtitan makes a group of its own
        trainer = titan.make_trainer(rank, 2, converters=converters)
        losses = titan.train(trainer, STEPS - 1)
        with Traffic() as sent:
            losses += titan.train(trainer, 1)
        results.append((losses, sum(sent.of("allgather"))))
    return results


def test_sharded_weights_are_gathered_in_eight_bits():
    (bf16, wide), (losses, sent) = run_ranks(2, two_ranks)[0]
    assert losses == pytest.approx(bf16, abs=0.05)
    assert losses[-1] < losses[0] - 0.5
    converted = 6 * 256 * (768 + 256 + 3 * 768) * 2  # bytes of the weights in BF16: a rank sends half, twice a step
    assert sent - (wide - converted) < 0.51 * converted  # the rows are short: a scale is 0.8 % of a row


def divided(rank):
    """Two ranks that share layers get the losses and gradients of BF16, and send each gradient where it belongs."""
    warnings.filterwarnings("ignore", "DTensor .* may not have complete support")
    by_tp = titan.ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=2)
    stores, found = [], []
    for converters in ([], [fp8()], [fp8(recipe="tensorwise")]):
        stores.append(serve_store(rank))
        torch.distributed.destroy_process_group()
        trainer = titan.make_trainer(rank, 2, converters=converters, parallelism=by_tp)
        losses = []
        counts = operations(lambda losses=losses, trainer=trainer: losses.extend(titan.train(trainer, 1)))
        assert counts["octavo::scaled_mm"] == (LINEARS * 4 if converters else 0)
        gradients = {n: p.grad.full_tensor() for n, p in trainer.model_parts[0].named_parameters()}
        found.append((losses + titan.train(trainer, STEPS - 1), gradients))
    (expected, exact), *others = found
    for losses, gradients in others:
        assert losses == pytest.approx(expected, abs=0.05)
        errors = {n: float((g - exact[n]).norm() / exact[n].norm()) for n, g in gradients.items()}
        assert max(errors.values()) < 0.2, errors
    stores.append(serve_store(rank))
    torch.distributed.destroy_process_group()
    wrong = titan.ParallelismConfig(spmd_backend="spmd_types", tensor_parallel_degree=2)
    with pytest.raises(NotImplementedError, match="spmd_backend='partial_dtensor', or FSDP2 alone, got 'spmd_types'"):
        titan.make_trainer(rank, 2, converters=[fp8()], parallelism=wrong)


def test_two_ranks_share_layers():
    run_ranks(2, divided)


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # torchtitan's router asks for float32
def test_experts_run_in_fp8():
    mixture = titan.qwen3.model_registry("debugmodel_moe", converters=[fp8()])
    trainer = titan.make_trainer(converters=[], model_spec=mixture)
    losses = []
    assert operations(lambda: losses.extend(titan.train(trainer, STEPS)))["octavo::grouped_mm"] > 0
    assert losses[-1] < losses[0] - 0.2


def test_layers_that_gain_nothing_stay_as_they_are(monkeypatch):
    asked = set()

    def speedups(recipe, backends, device, shapes):
        asked.update(shapes)
        return Speedups({shape: 1.5 if shape[2] > 256 else 1.0 for shape in shapes}, "given by the test")

    monkeypatch.setattr("octavo.integrations.torchtitan.find_speedups", speedups)
    spec = titan.model_registry("debugmodel", converters=[fp8(only_if_faster=True, tokens=2**20)])
    names = {name.split(".", 3)[3] for name, *_ in spec.traverse(FP8Linear.Config)}
    assert names == {"attention.qkv_linear.wqkv", "feed_forward.w1", "feed_forward.w3"}
    assert asked == {(2**20, 256, 768), (2**20, 256, 256), (2**20, 768, 256)}
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cpu emulates FP8, which is never faster"):
        titan.model_registry("debugmodel", converters=[fp8(only_if_faster=True)])


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="unknown recipe 'fp9'"):
        titan.model_registry("debugmodel", converters=[fp8(recipe="fp9")])
    with pytest.raises(ValueError, match="matches no linear layer; the model has 31, named 'lm_head', 'layers.0"):
        titan.model_registry("debugmodel", converters=[fp8(skip=["*.w4"])])
    with pytest.raises(ValueError, match="every linear layer of the model is skipped"):
        titan.model_registry("debugmodel", converters=[fp8(skip=["*"])])
