"""Causal models with a fused loss: the loss and the gradients of transformers, whose logits they never have whole."""

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from linear_examples import converted_model
from operation_counts import LiveMemory, operations
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.distributed import tensor_parallel
from octavo.models import GPT2Config, LlamaConfig, build
from octavo.nn.fused_loss import Head, find_head

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

VOCABULARY, TOKENS = 300, 24
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {  # a class of transformers, more of its configuration, and its head
    "llama": ("Llama", {}, Head("lm_head")),
    "tied": ("Llama", {"tie_word_embeddings": True}, Head("lm_head")),
    "gemma2": ("Gemma2", {}, Head("lm_head", pytest.approx(1 / 30), 30.0)),
    "granite": ("Granite", {"logits_scaling": 8.0, "tie_word_embeddings": False}, Head("lm_head", 0.125)),
    "cohere": ("Cohere", {"logit_scale": 0.5}, Head("lm_head", 0.5)),
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, Head("lm_head")),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "output_router_logits": True}, Head("lm_head")),
}


def make(name):
    kind, more, _ = MODELS[name]
    cls = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    torch.manual_seed(0)
    return cls(getattr(transformers, f"{kind}Config")(**SIZES | more)).train()


def batch():
    """ids [2, T], and labels that leave out a prompt."""
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model, **inputs):
    """The loss and the gradients by name, and the output."""
    output = model(**batch() | inputs)
    output.loss.backward()
    found = {"loss": output.loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found, output


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in MODELS), *((name, "meta") for name in ("llama", "gemma2", "mixtral"))],
)
def test_the_head_is_found_with_what_is_done_to_its_outputs(name, device):
    model = make(name).to(device)
    # 8 ranks, of which each has a part of the sequence, could run it
    model.get_input_embeddings().register_forward_pre_hook(lambda _, x: setattr(model, "parts", x[0].view(8, -1)))
    model.config.use_cache = False  # as `octavo train` sets it: transformers then looks for packed texts
    modes = [module.training for module in (model, next(model.children()).eval())]
    assert find_head(model) == MODELS[name][2]
    assert [model.training, next(model.children()).training] == modes == [True, False]


def changed(**attributes):
    model = make("llama")
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("make", [
    lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)),  # its head has a bias
    lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    lambda: transformers.BartForCausalLM(transformers.BartConfig(d_model=32, decoder_layers=1)),  # shifts no labels
    lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9, bias=False), nn.ReLU()),
    lambda: nn.Bilinear(8, 8, 8),  # it takes two inputs
    lambda: changed(forward=lambda input_ids: input_ids),
    lambda: changed(loss_function=lambda logits, labels: logits.sum()),
], ids=["bias", "masked", "own loss", "relu", "fails", "forward", "loss"])  # fmt: skip
def test_other_models_are_refused_and_stay_as_they_are(make):
    model = make()
    kind, words = type(model), "change it, or" if {"forward", "_loss_function"} & vars(model).keys() else "way:|fails"
    with pytest.raises(ValueError, match=f"({words}).* leave fuse_loss out"):
        octavo.convert(model, "bf16", fuse_loss=True)
    assert type(model) is kind


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": torch.tensor(70)}, {"num_items_in_batch": 70}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_the_gradients_are_those_of_transformers(name, more):
    model = make(name)
    expected, whole = gradients(model, **more)
    octavo.convert(model, "bf16", fuse_loss=True)
    found, output = gradients(model, **more)
    check(found, expected)
    assert output.logits is None
    assert list(output) == [key for key in whole if key != "logits"]


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_gradients_of_tokens_are_added_to_that_of_a_tied_head(name):
    """Repeated tokens and padding among them. No second gradient of the weight's size is made."""
    ids = batch()["input_ids"]
    ids[:, 5:9], ids[1, -6:] = 7, 0

    def made(loss_of):
        """The gradients, and how many are made of an embedding alone."""
        model.zero_grad()
        loss = loss_of(model(ids, labels=ids, output_hidden_states=True))
        count = operations(loss.backward)["aten::embedding_dense_backward"]
        return count, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def without_head(output):
        return output.hidden_states[-1].square().sum()

    model = make(name)
    (more, expected), (most, others) = made(lambda output: output.loss), made(without_head)
    octavo.convert(model, "bf16", fuse_loss=True)
    (fewer, found), (same, found_others) = made(lambda output: output.loss), made(without_head)
    check(found, expected)
    check(found_others, others)
    assert (fewer, same) == (more - 1, most)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert made(lambda output: output.loss)[0] == more


def test_shifted_labels_and_another_number_for_ignored_ones():
    model = make("llama")
    ids, labels = batch().values()
    shifted = F.pad(labels.masked_fill(labels == -100, -1), (0, 1), value=-1)[..., 1:]
    expected, _ = gradients(model)
    octavo.convert(model, "bf16", fuse_loss=True)
    check(gradients(model, shift_labels=shifted, ignore_index=-1)[0], expected)
    check(gradients(model, labels=torch.where(labels == -100, -1, ids), ignore_index=-1)[0], expected)


class ReadsTheShape(transformers.LlamaForCausalLM):
    """A model that takes a slice of its logits and reads their number, as Inkling's does."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)[..., :VOCABULARY]
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_code_that_reads_the_shape_of_the_logits_runs():
    model = make("llama")
    model.__class__ = ReadsTheShape
    expected, _ = gradients(model)
    octavo.convert(model, "bf16", fuse_loss=True)
    check(gradients(model)[0], expected)


def test_what_needs_logits_gets_them():
    model, inputs = make("gemma2"), batch()
    plain = copy.deepcopy(model)
    octavo.convert(model, "bf16", fuse_loss=True)
    assert torch.equal(model(inputs["input_ids"]).logits, plain(inputs["input_ids"]).logits)
    evaluated, expected = model.eval()(**inputs), plain.eval()(**inputs)
    assert torch.equal(evaluated.logits, expected.logits)
    assert torch.equal(evaluated.loss, expected.loss)
    assert torch.equal(*(m.generate(inputs["input_ids"][:, :4], max_new_tokens=4) for m in (model, plain)))
    loss, *rest = model.train()(**inputs, return_dict=False)
    assert loss.ndim == 0
    assert len(rest) == len(plain.train()(**inputs, return_dict=False)) - 2


def test_no_tensor_has_the_size_of_the_logits():
    model, inputs = make("llama"), batch()
    model.resize_token_embeddings(4000)
    octavo.convert(model, "bf16", fuse_loss=True)
    model.lm_head.options = (model.lm_head.options[0], 8, "bf16")
    with LiveMemory(known=[*model.parameters(), *inputs.values()]) as memory:
        model(**inputs).loss.backward()
    embeddings = 2 * model.lm_head.weight.numel()  # their gradients
    assert memory.peak < 4 * (embeddings + 2 * 8 * 4000 + 40 * 2 * TOKENS * SIZES["hidden_size"])


def test_fp8_layers_and_a_head_in_fp8():
    model = converted_model(make("llama"))
    exact, _ = gradients(model)
    assert octavo.convert(model, fuse_loss=True, head="rowwise").fused["lm_head"] == "head + loss, rowwise"
    found, _ = gradients(model)
    assert abs(found["loss"] - exact["loss"]) < 1e-2
    for name, tensor in found.items():
        assert float((tensor - exact[name]).norm()) < 0.1 * float(exact[name].norm()), name


@pytest.mark.parametrize(("options", "words"), [
    ({"head": "rowwise"}, "with fuse_loss=True 'rowwise'"),
    ({"head": "fp8", "fuse_loss": True}, "got 'fp8'"),
    ({"recipe": "tensorwise", "recompute": True}, "run fused, .* got tensorwise, LlamaForCausalLM and skip=.*: leave"),
    ({"skip": ["*up_proj"], "recompute": True}, r"got rowwise, LlamaForCausalLM and skip=\['\*up_proj'\]"),
])  # fmt: skip
def test_options_that_belong_to_others(options, words):
    """A refusal leaves the model as it is, and as an earlier call has converted it."""
    for model in (make("llama"), converted_model(make("llama"), fuse_loss=True, recompute=True)):
        before = [(type(module), vars(module) | {"_modules": {**module._modules}}) for module in model.modules()]
        with pytest.raises(ValueError, match=words):
            octavo.convert(model, **options)
        assert [(type(module), vars(module)) for module in model.modules()] == before


def test_the_model_is_copied_pickled_restored_and_called_as_before():
    model = make("gpt2")
    expected, _ = gradients(model)
    before, names = type(model), list(model.state_dict())
    arguments = inspect.signature(model.forward)
    octavo.convert(model, fuse_loss=True)
    assert inspect.signature(model.forward) == arguments
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(gradients(other)[0]["loss"], gradients(model)[0]["loss"])
        assert gradients(other)[1].logits is None
    octavo.restore(model)
    assert type(model) is before
    assert type(model.lm_head) is nn.Linear
    check(gradients(model)[0], expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_transformers_looks_for_packed_sequences_where_positions_are_given_alone(name, monkeypatch):
    """It waits for the GPU then."""
    seen, find = [], masking_utils.find_packed_sequence_indices
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda p: seen.append(p) or find(p))
    model = make(name)
    expected, whole = gradients(model, use_cache=False)
    assert seen
    octavo.convert(model, fuse_loss=True)
    seen.clear()
    with monkeypatch.context() as patch:  # no layer stores its keys
        patch.delattr(transformers.Cache, "update")
        found, output = gradients(model, use_cache=False)
    assert list(output) == [key for key in whole if key != "logits"]
    assert len(model(**batch(), use_cache=False, return_dict=False)) == len(output)
    assert not seen
    assert abs(found["loss"] - expected["loss"]) < 1e-2
    packed = torch.arange(TOKENS).expand(2, -1) % 12
    loss = model(**batch(), use_cache=False, position_ids=packed).loss
    assert seen
    assert loss != found["loss"]
    masked = model(**batch(), attention_mask=torch.ones(2, TOKENS), use_cache=False).loss
    assert torch.equal(masked, found["loss"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(gradients(model, use_cache=False)[0]["loss"], found["loss"])


def test_a_forward_that_others_keep_is_that_of_the_class_after_a_restore():
    """Accelerate binds the function of the class to the model, around which it casts."""
    model = make("llama")
    expected, _ = gradients(model)
    octavo.convert(model, "bf16", fuse_loss=True)
    model.forward = type(model).forward.__get__(model)
    octavo.restore(model)
    found, output = gradients(model)
    check(found, expected)
    assert output.logits is not None


def test_a_loss_of_the_user_gets_the_logits():
    model = converted_model(make("llama"), "bf16", fuse_loss=True)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert torch.equal(model(**batch()).loss, model(**batch()).logits.square().mean())


def test_a_head_that_was_replaced_is_an_error():
    model = converted_model(make("llama"), "bf16", fuse_loss=True)
    model.lm_head = nn.Linear(SIZES["hidden_size"], VOCABULARY)
    with pytest.raises(RuntimeError, match="lm_head was replaced by a Linear after octavo.convert"):
        model(**batch())


def test_a_call_during_a_call_is_an_error():
    """As by two threads, which would mix up their labels."""
    model = converted_model(make("llama"), "bf16", fuse_loss=True)
    with ThreadPoolExecutor() as pool:
        hook = model.get_decoder().register_forward_hook(lambda *_: pool.submit(model, **batch()).result() and None)
        with pytest.raises(RuntimeError, match="allows one thread at a time"):
            model(**batch())
        hook.remove()
    assert gradients(model)[1].logits is None


def test_a_model_inside_another_is_found_and_a_later_conversion_undoes_it():
    outer = nn.ModuleDict({"teacher": nn.Linear(4, 4), "student": make("llama")})
    for fuse_loss in (True, False):
        octavo.convert(outer, fuse_loss=fuse_loss)
        assert (gradients(outer["student"])[1].logits is None) == fuse_loss


OURS = [LlamaConfig(VOCABULARY, 1, 32, 2, 2, 64, TOKENS), GPT2Config(VOCABULARY, 1, 32, 2, TOKENS)]


@pytest.mark.parametrize("config", OURS, ids=["llama", "gpt2"])
def test_a_model_of_ours_returns_the_loss_of_labels(config):
    model, (ids, labels) = build(config), batch().values()
    logits = model(ids)
    octavo.convert(model, "bf16", fuse_loss=True)
    assert torch.equal(model(ids), logits)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=labels), expected)
    shifted = F.pad(labels.masked_fill(labels == -100, -1), (0, 1), value=-1)[..., 1:]
    options = {"shift_labels": shifted, "ignore_index": -1, "num_items_in_batch": 2 * int((shifted != -1).sum())}
    torch.testing.assert_close(2 * model(ids, labels=labels, **options), expected)
    assert torch.equal(model(ids, **options), logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_it_compiles_as_a_whole_and_layer_by_layer(name):
    model = make(name)
    expected, _ = gradients(model)
    octavo.convert(model, "bf16", fuse_loss=True)
    check(gradients(torch.compile(model, backend="aot_eager", fullgraph=True))[0], {
        name if name == "loss" else f"_orig_mod.{name}": tensor for name, tensor in expected.items()
    })  # fmt: skip
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    check(gradients(model)[0], expected)


def sharded_gradients(rank, name):
    found = []
    for way in ("blocks", "head" if name == "granite" else "layers cut"):
        model = converted_model(make(name), "bf16", fuse_loss=True)
        if way == "layers cut":  # PyTorch's style of the head reads what takes the place of the logits
            tensor_parallel(model, init_device_mesh("cpu", (2,)))
        else:
            for unit in (*model.model.layers, *[model.lm_head] * (way == "head"), model):
                fully_shard(unit)
        by_name, _ = gradients(model)
        found.append({n: (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy() for n, t in by_name.items()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["granite", "tied"])
def test_ranks_share_the_weight_where_the_loss_is_computed(name):
    expected, _ = gradients(make(name))
    for found in run_ranks(2, sharded_gradients, name):
        for by_name in found:
            check({name: torch.from_numpy(array) for name, array in by_name.items()}, expected)


def test_trainer_divides_by_the_labels_of_all_micro_batches(tmp_path):
    """As it does without octavo. The first micro-batch has fewer labels than the second."""
    ids, labels = batch().values()
    rows = [{"input_ids": i, "labels": each} for i, each in zip(ids, labels, strict=True)]
    losses = []
    for fuse_loss in (False, True):
        model = converted_model(make("llama"), "bf16", fuse_loss=fuse_loss)
        args = transformers.TrainingArguments(
            tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=3, logging_steps=1,
            report_to=[], use_cpu=True, learning_rate=1e-2, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][0] != losses[0][-1]
