"""The planned peak against the tensors that are alive in a training step of Octavo's own models on the CPU."""

import pytest
import torch
from support.live_memory import LiveMemory

import octavo
from octavo.models import GPT2Config, LlamaConfig, build
from octavo.plan.cases import Case
from octavo.plan.families import describe_architecture
from octavo.plan.hardware import find_gpu
from octavo.plan.memory import Memory, buffer_bytes, plan_memory
from octavo.plan.setup import make_setup
from octavo.train.blocks import prepare_blocks
from octavo.train.config import Config
from octavo.train.loss import make_loss

COMMON = {"vocabulary": 1024, "layers": 4, "width": 128, "heads": 4, "context": 512}
SIZES = {"llama": LlamaConfig(**COMMON, kv_heads=2, mlp_width=512), "gpt2": GPT2Config(**COMMON)}


def settings(recipe: str, mode: str, logits: str) -> Config:
    chunks = {"loss.logits": logits, "loss.chunk": 128}
    return Config(recipe=recipe).change(**{"context": 512, "batch": 1, "activation_checkpointing.mode": mode, **chunks})


def measured_peak(kind: str, config: Config) -> int:
    """Bytes of a forward and backward pass, without the weights."""
    torch.manual_seed(0)
    model = build(SIZES[kind])
    loss = make_loss(config, model)
    octavo.convert(model, config.recipe)
    prepare_blocks(model, config)
    tokens = torch.randint(1024, (1, 512))
    with LiveMemory(model.parameters()) as memory:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, tokens, tokens)
        value.backward()
    return memory.peak


@pytest.mark.parametrize("logits", ["whole", "chunked"])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(("kind", "recipe"), [("gpt2", "bf16"), ("gpt2", "rowwise"), ("llama", "rowwise")])
def test_the_peak_of_a_step(kind, recipe, mode, logits):
    config = settings(recipe, mode, logits)
    model = describe_architecture(kind, SIZES[kind].to_hf())
    plan = plan_memory(make_setup(model, config, find_gpu("h200"), 1))
    states = plan.weights + plan.optimizer
    expected = measured_peak(kind, config) + states
    assert plan.peak - plan.fp8_copies == pytest.approx(expected, rel=0.05)


def planned(*settings: str, gpus: int = 1, model: str = "llama-3-8b") -> Memory:
    return Case(model, settings, gpus=gpus).training().memory


def test_states_are_sixteen_bytes_a_parameter():
    memory = planned("--recipe", "bf16", "--accumulate", "2")
    assert memory.weights + memory.gradients + memory.optimizer == pytest.approx(16 * 8030261248)


def test_gpus_share_the_states():
    one, eight = planned(), planned(gpus=8)
    assert one.weights == 8 * eight.weights
    assert one.optimizer == 8 * eight.optimizer
    assert one.buffers == 0
    assert eight.buffers > 0
    assert one.activations == eight.activations  # one sequence a GPU


def test_one_block_is_reduced_while_the_next_one_computes():
    """At the end of the backward pass: two gathered blocks, the gathered root, and one reduction in FP32."""
    setup = Case("llama-3-8b", gpus=8).training().setup
    block = setup.model.blocks[0]
    outside = 4 * (setup.model.parameters - 32 * block.parameters)
    narrow = block.weights + 4 * (block.parameters - block.weights)
    at_start, at_end = (buffer_bytes(setup, block, start=start) for start in (True, False))
    assert at_start == 2 * narrow + outside
    assert at_end - at_start == 4 * block.parameters


def test_two_small_blocks_are_gathered_and_reduced_together():
    setup = Case("gpt2", gpus=8).training().setup
    block = setup.model.blocks[0]
    outside = 4 * (setup.model.parameters - setup.model.depth * block.parameters)
    narrow = block.weights + 4 * (block.parameters - block.weights)
    at_start, at_end = (buffer_bytes(setup, block, start=start) for start in (True, False))
    assert at_start == 2 * 2 * narrow + outside
    assert at_end - at_start == 2 * 4 * block.parameters


def test_replicas_share_nothing():
    memory = planned("--parallel.dp-replicate", "8", "--parallel.dp-shard", "1", gpus=8)
    assert memory.weights == planned().weights


def test_tensor_parallelism_divides_weights_and_activations():
    one, four = planned(), planned("--parallel.tp", "4", gpus=4)
    assert (one.weights, one.activations) == (4 * four.weights, 4 * four.activations)


def test_checkpointing_and_eight_bits_need_less():
    modes = [planned("--activation-checkpointing.mode", mode).peak for mode in ("full", "selective", "none")]
    assert modes == sorted(modes)
    assert planned("--recipe", "rowwise").activations < 0.65 * planned("--recipe", "bf16").activations


def test_offloaded_states_are_in_the_memory_of_the_cpu():
    memory = planned("--optimizer.offload")
    assert memory.weights == memory.gradients == memory.optimizer == 0
    assert memory.offloaded == 16 * 8030261248


def test_fewer_bytes_are_gathered_in_eight_bits():
    gathered = planned("--parallel.gather-dtype", "bf16", gpus=8).buffers
    assert gathered < planned("--no-parallel.fp8-all-gather", "--parallel.gather-dtype", "bf16", gpus=8).buffers


def test_whole_logits_are_the_peak_of_a_large_vocabulary():
    whole, chunked = (planned("--loss.logits", logits, model="llama-3.2-1b") for logits in ("whole", "chunked"))
    assert whole.peak - chunked.peak > 8 * 128256 * 8192  # two of the FP32 tensors of all logits at least
    assert whole.moment == "start of backward"
