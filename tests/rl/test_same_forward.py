"""The mode of the same bits: log-probabilities of the trained model equal those of the served one, bit for bit."""

import pytest
import torch
from bits import bits
from same_bits_examples import NEW, answer, forward, pair, prompts
from tiny_models import folder_maker, open_theirs, with_slow

import octavo
from octavo.inference.transformers_cache import CACHE
from octavo.rl import log_probabilities, parity, push, same_bits

RECIPES = ["rowwise", "rowwise_forward"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folder_maker(tmp_path_factory.mktemp("models"), num_key_value_heads=2)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", with_slow(["llama", "qwen3", "qwen2"]))
def test_training_prompts_and_decoding_give_the_same_bits(folders, name, recipe):
    trained, served = pair(folders, name, recipe)
    with same_bits(trained, served):
        cases = [(1, False, None), (2, True, 1), (7, True, None), (7, False, 3), (3, True, 16)]
        largest = [(64, True, 3)] if (name, recipe) == ("qwen3", "rowwise") else []
        for count, padded, piece in cases + largest:
            given = prompts(count, padded)
            texts, steps = answer(served, given, piece)
            logits = forward(trained, texts, given["attention_mask"])
            assert logits.requires_grad
            new = texts[:, -NEW:]
            assert torch.equal(log_probabilities(logits, new), log_probabilities(steps.bfloat16(), new))
            assert torch.equal(logits.float(), steps)
        assert served.octavo_notices == set()


def test_a_text_has_the_same_bits_in_every_batch_and_between_padding(folders):
    trained, _ = pair(folders, "qwen3")
    ids = torch.randint(1, 256, (5, 40))
    with same_bits(trained), torch.no_grad():
        alone = [trained(row[None, 3:37]).logits[0] for row in ids]
        mask = torch.ones_like(ids)
        mask[:, :3] = mask[:, 37:] = 0
        padded = trained(ids, attention_mask=mask).logits[:, 3:37]
        whole = trained(ids[:, 3:37]).logits
    for row in range(5):
        assert torch.equal(padded[row], alone[row])
        assert torch.equal(whole[row], alone[row])


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_in_float32(folders, autocast):
    trained, served = pair(folders, "qwen2", dtype=torch.float32)
    given = prompts(3, padded=True)
    with same_bits(trained, served):
        texts, steps = answer(served, given)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = forward(trained, texts, given["attention_mask"])
        assert torch.equal(logits.float(), steps)
        assert {kl for _, kl, _ in parity(trained, served, texts).sources} == {0.0}
        logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.parameters())


def test_transformers_own_loop_and_cache(folders):
    trained, served = pair(folders, "qwen3")
    given = prompts(3, padded=True)
    with same_bits(trained, served):
        texts, steps = answer(served, given)
        again, theirs = answer(trained.eval(), given)
        assert torch.equal(texts, again)
        assert torch.equal(steps, theirs)
        cache = trained(**given, use_cache=True)[CACHE]
        with pytest.raises(RuntimeError, match="whole texts"):
            trained(texts[:, -NEW:-1], **{CACHE: cache})


def gradients(model, ids):
    model.zero_grad()
    log_probabilities(model(ids).logits[:, :-1], ids[:, 1:]).mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_is_within_the_error_of_training_in_fp8(folders, recipe):
    trained, _ = pair(folders, "qwen3", recipe)
    ids = torch.randint(1, 256, (4, 32))
    ordinary = gradients(trained, ids)
    exact = gradients(open_theirs(folders("qwen3"), torch.float32), ids)
    with same_bits(trained):
        found = gradients(trained, ids)
    assert found.keys() == exact.keys()
    errors = {name: ((found[name] - g).norm(), (ordinary[name] - g).norm()) for name, g in exact.items()}
    for name, (here, there) in errors.items():
        assert here <= 1.5 * there, name
    here, there = torch.tensor(list(errors.values())).square().sum(0)
    assert here <= 1.1 * there


def test_the_mode_ends_and_leaves_the_models_as_they_were(folders):
    trained, served = pair(folders, "llama")
    given, ids = prompts(2, padded=True), torch.randint(1, 256, (2, 12))
    before, steps = bits(trained(ids).logits), answer(served, given)[1]
    classes = [type(module) for model in (trained, served) for module in model.modules()]
    mode = same_bits(trained, served)
    loss = trained(ids).logits.float().sum()
    assert not torch.equal(answer(served, given)[1], steps)
    with pytest.raises(ValueError, match="in the mode already"):
        same_bits(served)
    mode.close()
    assert [type(module) for model in (trained, served) for module in model.modules()] == classes
    loss.backward()  # of a forward pass in the mode
    assert torch.equal(bits(trained(ids).logits), before)
    assert torch.equal(answer(served, given)[1], steps)


def test_steps_and_pushes_within_the_mode(folders):
    trained, served = pair(folders, "qwen3", "rowwise_forward")
    optimizer, given = torch.optim.SGD(trained.parameters(), 0.1), prompts(3, padded=True)
    with same_bits(trained, served):
        for _ in range(3):
            texts, steps = answer(served, given)
            logits = forward(trained, texts, given["attention_mask"])
            assert torch.equal(logits.float(), steps)
            log_probabilities(logits, texts[:, -NEW:]).mean().neg().backward()
            optimizer.step()
            push(trained, served)
        assert not torch.equal(answer(served, given)[1], steps)
        with pytest.raises(ValueError, match="leave no gaps"):
            trained(torch.ones(1, 4, dtype=torch.int64), attention_mask=torch.tensor([[1, 0, 1, 1]]))


REFUSED = {
    "sliding window": lambda make: octavo.load(make("mistral", scheme="channel")),
    "does not multiply E4M3": lambda make: open_theirs(make("llama")),
    "kv_cache='bf16'": lambda make: octavo.load(make("llama", scheme="channel"), kv_cache="fp8"),
    "head='bf16'": lambda make: octavo.load(make("llama", scheme="channel"), head="rowwise"),
    "without fuse_loss": lambda make: converted(make, fuse_loss=True),
    "attention_dropout": lambda make: converted(make, attention_dropout=0.1),
    "not by model.bfloat16": lambda make: converted(make).bfloat16(),
    "cast it to bfloat16": lambda make: converted(make).to(torch.float16),
    "before torch.compile": lambda make: compiled(converted(make)),
    "it takes transformers' Llama": lambda make: torch.nn.Linear(2, 2),
    "layer 1.mlp.down_proj": lambda make: converted(make, skip=["*1.mlp.down_proj"]),
    "rope_type": lambda make: converted(make, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
}


def converted(make, fuse_loss=False, skip=None, **config):
    model = open_theirs(make("llama"))
    for name, value in config.items():
        setattr(model.config, name, value)
    octavo.convert(model, "rowwise", fuse_loss=fuse_loss, skip=skip or [])
    return model


def compiled(model):
    model.model.layers[0].compile()
    return model


@pytest.mark.parametrize("message", REFUSED)
def test_what_the_mode_does_not_cover_is_refused(folders, message):
    model = REFUSED[message](folders)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        same_bits(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_probabilities_of_a_row_by_itself(dtype):
    logits = (4 * torch.randn(2, 5, 333)).to(dtype)
    tokens = torch.randint(333, (2, 5))
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = log_probabilities(leaf, tokens)
    required = exact.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert torch.equal(found, required.float())
    assert torch.equal(found[1, 3:4], log_probabilities(logits[1, 3:4], tokens[1, 3:4]))
    for y in (found, required):
        (y * torch.arange(10).view(2, 5)).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2**-7, atol=1e-5)
    masked = log_probabilities(leaf, tokens.index_fill(1, torch.tensor([1, 4]), -100))
    assert torch.equal(masked, required.float().index_fill(1, torch.tensor([1, 4]), 0))
    (gradient,) = torch.autograd.grad(masked.sum(), leaf)
    assert gradient.any(2).tolist() == [[True, False, True, True, False]] * 2
    assert torch.equal(leaf, logits)  # the backward pass writes to memory of its own
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        log_probabilities(torch.zeros(2, 5), torch.tensor([1, -1]))
