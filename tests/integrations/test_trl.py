"""TRL's GRPOTrainer with answers from a served model, with the library itself."""

import copy
from types import SimpleNamespace

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import octavo
from octavo.packing import pack
from octavo.rl import push

trl = pytest.importorskip("trl")
from octavo.integrations.trl import Rollouts, sample  # noqa: E402

WORDS = ["<pad>", "<end>", "user", "assistant", *(f"w{i}" for i in range(60))]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE, padding_side="left"
    )


@pytest.fixture
def model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=1)).bfloat16()


def serve(model, folder):
    model.save_pretrained(folder / "bf16")
    pack(folder / "bf16", folder / "packed", scheme="channel")
    return octavo.load(folder / "packed")


CONVERSATION = [{"role": "user", "content": "w3 w4"}]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("prompts", [["w1 w2 w3", "w4"], [CONVERSATION, CONVERSATION * 2]], ids=["texts", "chats"])
def test_a_trainer_of_trl_gets_answers_of_the_weights_that_it_trains(model, tokenizer, prompts, tmp_path):
    served = serve(model, tmp_path)
    octavo.convert(model, "rowwise_forward")
    rollouts, checksums, seen = Rollouts(served), [], []

    def reward(completions, completion_ids, **_):
        checksums.append((rollouts.pushed.checksum, push(trainer.model, copy.deepcopy(served)).checksum))
        seen.extend(completion_ids)
        return [float(sum(ids)) for ids in completion_ids]

    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, num_generations=2, max_completion_length=6,
        learning_rate=1e-2, max_steps=3, report_to=[], use_cpu=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, reward, args, train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
        rollout_func=rollouts,
    )  # fmt: skip
    trainer.train()
    assert all(a == b for a, b in checksums)
    assert len({a for a, _ in checksums}) == 3  # the weights change with each step
    assert all(1 <= len(ids) <= 6 for ids in seen)


def test_answers_are_those_of_each_prompt_alone(model, tokenizer, tmp_path):
    served = serve(model, tmp_path)
    config = copy.deepcopy(served.generation_config)
    prompts = [[5, 6, 7], [8]]
    for padding, end in ((0, [1]), (None, [1]), (None, 1)):
        config.update(do_sample=False, max_new_tokens=5, pad_token_id=padding, eos_token_id=end)
        assert sample(served, prompts, config) == [sample(served, [prompt], config)[0] for prompt in prompts]


def test_vllm_beside_it_is_refused():
    with pytest.raises(ValueError, match="leave use_vllm"):
        Rollouts(None)(["w1"], SimpleNamespace(use_vllm=True))
