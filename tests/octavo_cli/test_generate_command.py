"""octavo generate and evaluate: prompts, batches, runs, Hugging Face folders, and packed ones."""

import io
import json
import math
import re
import shutil
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from octavo.checkpoint.files import ArtifactError
from octavo.inference.kv_cache import LayerKVCache
from octavo.inference.opening import end_tokens
from octavo.packing import pack

GREEDY = ("--temperature", 0, "--count", 7, "--device", "cpu")
PROMPTS = ["It was", "the clerk", "a", "7 times 3 is 21"]


@pytest.fixture(scope="module")
def llama(made):
    return made("llama")


@pytest.fixture
def piped(monkeypatch):
    """piped(bytes): these are on standard input."""
    return lambda content: monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False)
    )


def greedy(folder, prompt: str) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.tensor([list(prompt.encode())])
    out = model.generate(ids, max_new_tokens=7, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, ids.shape[1] :].tolist()


def generated(octavo, *words):
    code, out, err = octavo("generate", *words, "--json")
    assert code == 0, err
    return json.loads(out)


IN_FILES = [(place, n) for place in ("lines", "json lines", "standard input", "-") for n in (1, 3, 99)]


@pytest.mark.parametrize(
    ("place", "batch"), [("options", 16), *(pytest.param(*each, marks=pytest.mark.slow) for each in IN_FILES)]
)
def test_each_prompt_of_a_batch_has_the_text_of_transformers(octavo, llama, tmp_path, piped, place, batch):
    lines = [json.dumps({"prompt": p, "id": 3}) for p in PROMPTS] if place == "json lines" else PROMPTS
    content = ("\n\n".join(lines) + "\r\n").encode()
    (file := tmp_path / "prompts").write_bytes(content)
    piped(content)
    options = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    words = {"options": options, "standard input": (), "-": ("--file", "-")}.get(place, ("--file", file))
    found = generated(octavo, llama, *words, *GREEDY, "--batch", batch)
    assert [text["prompt"] for text in found["texts"]] == PROMPTS
    for text in found["texts"]:
        assert text["text"] == bytes(greedy(llama, text["prompt"])).decode(errors="replace")
        assert (text["tokens"], text["finished"]) == (7, "length")
        assert text["first_token_seconds"] > 0
    assert found["tokens"] == 28
    assert found["tokens_per_second"] > 0
    assert found["source"] == str(llama)


def test_texts_are_printed_in_order_and_times_go_to_standard_error(octavo, llama):
    words = ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *GREEDY)
    texts = generated(octavo, llama, *words)["texts"]
    code, out, err = octavo("generate", llama, *words)
    assert code == 0
    shown = [text["prompt"] + re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text["text"]) for text in texts]
    assert out == f"--- 1 of 2\n{shown[0]}\n--- 2 of 2\n{shown[1]}\n"
    assert re.fullmatch(r"14 tokens, [\d,.]+ tokens/s, the first after \d+\.\d{3} s\n", err)
    code, alone, err = octavo("generate", llama, *words[:2], *GREEDY)
    assert alone == f"{shown[0]}\n"
    assert err.startswith("7 tokens, ")


@pytest.mark.parametrize("wrong", ["xxx", ["xxx"], [1, None], {"a": 1}, True, 1.0])
def test_a_stop_token_that_is_no_id_is_refused(tmp_path, wrong):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    said = "generation_config.json: eos_token_id must be a token id or a list of them"
    with pytest.raises(ArtifactError, match=said):
        end_tokens(tmp_path)


def test_a_text_ends_at_the_stop_token_of_the_folder(octavo, tmp_path, llama):
    text = greedy(llama, PROMPTS[0])
    config = {"eos_token_id": text[3]}
    folder = shutil.copytree(llama, tmp_path / "ending")
    (folder / "generation_config.json").write_text(json.dumps(config))
    [found] = generated(octavo, folder, "--prompt", PROMPTS[0], *GREEDY)["texts"]
    end = text.index(text[3])
    assert found["text"] == bytes(text[:end]).decode(errors="replace")
    assert (found["tokens"], found["finished"]) == (end, "stop")


def test_drawing_follows_its_settings_and_seed(octavo, llama):
    def tokens(*words):
        found = generated(octavo, llama, "--prompt", "It was", "--count", 12, "--device", "cpu", *words)
        return [text["text"] for text in found["texts"]]

    best = tokens("--temperature", 0)
    hot = ("--temperature", 9, "--seed", 1)
    assert tokens(*hot) == tokens(*hot) != tokens("--temperature", 9, "--seed", 2)
    assert tokens(*hot) != best
    assert tokens(*hot, "--top-k", 1) == tokens(*hot, "--top-p", 1e-9) == best
    assert tokens("--temperature", 0, "--repetition-penalty", 9) != best


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_the_cache_has_the_dtype_that_is_asked_for(octavo, llama, monkeypatch, name):
    made = []
    init = LayerKVCache.__init__
    monkeypatch.setattr(LayerKVCache, "__init__", lambda self, *a, **k: (init(self, *a, **k), made.append(self))[0])
    generated(octavo, llama, "--prompt", "It was", *GREEDY, "--kv-cache", name)
    assert {store.dtype for store in made} == {name}


def test_a_model_that_our_cache_does_not_serve_runs_on_transformers_own(octavo, made):
    """Gemma 2 has a softcap. The prompts have different lengths."""
    folder = made("gemma2")
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    for text in generated(octavo, folder, *words, *GREEDY)["texts"]:
        assert text["text"] == bytes(greedy(folder, text["prompt"])).decode(errors="replace")
    code, out, err = octavo("generate", folder, "--prompt", "a", *GREEDY, "--kv-cache", "fp8")
    assert (code, out) == (1, "")
    assert "error: QuantizedKVCache serves attention without a softcap" in err
    assert octavo("generate", made("rwkv"), "--prompt", "a", *GREEDY)[:2] == (1, "")  # and none of the prompt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no prompt: give one a line"),
        (b" \n\n", "holds no prompt: give one a line"),
        (b"good\nb\xffd\n", "must hold text in UTF-8, and byte 6 is not"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2 must be a JSON object such as {"prompt": "text"}'),
        (b'{"prompt": "a"}\n\nb\n', 'line 3 must be a JSON object such as {"prompt": "text"}'),
        (b'{"prompt": 3}', "line 1 must be a JSON object"),
    ],
)
def test_files_that_hold_no_prompts(refused, llama, tmp_path, piped, content, message):
    (tmp_path / "prompts").write_bytes(content)
    for place in ((), ("--file", tmp_path / "prompts")):
        piped(content)
        err = refused("generate", llama, *place)
        assert message in err
        assert err.startswith("error: " + ("standard input" if not place else str(place[1])))


def test_a_terminal_is_not_waited_for(refused, llama, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "no prompt: give --prompt TEXT, --file FILE, or prompts on standard input" in refused("generate", llama)


def test_a_chat_has_the_template_of_the_tokenizer(octavo, llama, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "chat")
    each = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(each + "{% if add_generation_prompt %}<bot>{% endif %}")
    plain, chat = (
        generated(octavo, folder, "--prompt", prompt, *words, *GREEDY)["texts"][0]
        for prompt, words in (("<user>It was<bot>", ()), ("It was", ("--chat",)))
    )
    assert (chat["prompt"], chat["text"]) == ("It was", plain["text"])
    assert octavo("generate", folder, "--chat", "--prompt", "It was", *GREEDY)[1] == f"It was\n{plain['text']}\n"
    (rows := tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "It was"}]}')
    (text := tmp_path / "text.txt").write_text("<user>It was")
    of_rows, of_text = (json.loads(octavo("evaluate", folder, "--data", data, "--json")[1]) for data in (rows, text))
    assert of_rows["loss"] == of_text["loss"]


# --- runs


def test_text_comes_from_a_run_and_follows_its_seed(octavo, trained):
    words = ("generate", trained / "fp8", "--prompt", "folio ", "--count", 12, "--device", "cpu", "--seed")
    code, out, err = octavo(*words, 1)
    assert code == 0
    assert err.startswith("12 tokens, ")
    assert out.startswith("folio ")
    assert out == octavo(*words, 1)[1] != octavo(*words, 2)[1]
    assert octavo(*words, 1, "--step", 2)[1] != out


def test_a_folder_is_verified_against_the_checkpoint_that_it_was_packed_from(printed, trained, tmp_path):
    """Also where the run went on after packing."""
    pack(trained / "fp8", tmp_path / "early", step=2)
    assert "the bytes are right" in printed("verify", tmp_path / "early", "--against", trained / "fp8")


@pytest.mark.parametrize(("name", "how"), [("bert", {}), ("bert", {"scheme": "channel"}), ("bert masked", {})])
def test_an_encoder_gives_no_next_token(refused, made, name, how):
    encoder = made(name, **how)
    err = refused("generate", encoder, "--prompt", "hi", "--device", "cpu")
    assert err.startswith(f"error: {encoder} holds a Bert")
    assert "which predicts no next token: a causal language model is required" in err


# --- evaluate


def evaluated(printed, *words):
    return json.loads(printed("evaluate", *words, "--device", "cpu", "--json"))


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_run_is_evaluated_as_its_training_did(printed, trained, records, name):
    losses = records(trained / name, "evaluation_loss")
    for words, step in (((), 4), (("--step", 2), 2)):
        found = evaluated(printed, trained / name, *words)
        assert found["loss"] == losses[step]
        assert found["perplexity"] == pytest.approx(math.exp(losses[step]))
        assert found["tokens"] == 3 * 2 * 16


def test_the_loss_is_printed_with_what_was_read(printed, trained, records, monkeypatch):
    done = []
    monkeypatch.setattr("octavo_cli.generate.progress", lambda doing: nullcontext(lambda *each: done.append(each)))
    out = printed("evaluate", trained / "fp8", "--device", "cpu")
    assert done == [(batch, 3, "evaluating") for batch in (1, 2, 3)]
    assert "read 1 file" in out
    assert "fp8, step 4, delayed" in out
    assert f"{records(trained / 'fp8', 'evaluation_loss')[4]:.4f} nats a token, on 96 tokens" in out


def test_a_packed_model_is_evaluated_on_what_its_run_holds_out(printed, trained, records):
    loss = evaluated(printed, trained / "packed", "--held-out", trained / "fp8")["loss"]
    before = records(trained / "fp8", "evaluation_loss")[4]
    assert loss != before
    assert loss == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("vocabulary", [256, 32768])  # of the larger one the logits are never whole
def test_given_text_is_evaluated_as_transformers_does(printed, tmp_path, monkeypatch, vocabulary):
    text = "It was a bright cold day in April, and the clocks were striking.\n" * 4
    (tmp_path / "text.txt").write_text(text)
    llama = make_model(tmp_path / "llama", "llama", vocab_size=vocabulary)
    with monkeypatch.context() as patched:
        if vocabulary > 256:
            patched.setattr("torch.nn.functional.cross_entropy", None)
        found = evaluated(printed, llama, "--data", tmp_path / "text.txt", "--context", 20, "--batch", 5)
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).eval()
    ids = torch.tensor(list(text.encode()))
    rows = (len(ids) - 1) // 20  # twelve: the last two fill no batch
    windows = ids[: rows * 20 + 1].unfold(0, 21, 20)
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits.double()
    want = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert found["tokens"] == rows * 20
    assert found["loss"] == pytest.approx(float(want), rel=1e-3)
