"""The engine: sessions that stay, and texts of models of ours."""

import pytest
import torch
from generation_examples import DTYPES, answers, batch, model_of, pair, sessions
from metrics import sqnr
from model_examples import BOTH, GPT, GQA, lively, tokens
from tiny_models import with_slow

from octavo import load
from octavo.inference import engine as engine_module
from octavo.inference.engine import Engine, decode, open_engine
from octavo.inference.kv_cache import UnservedError
from octavo.inference.sampling import Sampling
from octavo.inference.session import KeyShape, Prompts, capacity_for, check_memory, free_bytes, key_shape, pad_prompts


def greedy(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


@pytest.mark.parametrize(
    ("tokens", "context", "capacity"),
    [(1, 4096, 256), (256, 4096, 256), (257, 4096, 384), (385, 4096, 512), (3000, 4096, 3072), (1, 100, 100)],
)
def test_few_sizes_serve_all_lengths(tokens, context, capacity):
    assert capacity_for(tokens, context) == capacity


def test_a_session_serves_later_calls():
    _, fast = pair("llama")
    answers(fast, batch(length=11), do_sample=False)
    (session,) = fast.octavo_engine.sessions
    keys = session.cache.stores[0].keys
    answers(fast, batch(length=20, padding=(0, 3, 1)), do_sample=False)
    assert fast.octavo_engine.sessions == [session]
    assert session.cache.stores[0].keys is keys
    answers(fast, batch(rows=2), do_sample=False)
    assert [each.batch for each in fast.octavo_engine.sessions] == [3, 2]
    for rows in (4, 5, 6):
        answers(fast, batch(rows=rows), do_sample=False)
    assert [each.batch for each in fast.octavo_engine.sessions] == [2, 4, 5, 6]


def test_a_second_generation_in_the_same_thread_is_an_error():
    model = lively(GQA)
    engine = Engine(model, context=model.config.context)
    first = engine.run(Prompts(tokens(), (0, 0)), 5, greedy, None, watched=True)
    next(first)
    with pytest.raises(RuntimeError, match="finish that generation, or close its iterator"):
        next(engine.run(Prompts(tokens(), (0, 0)), 5, greedy, None, watched=False))
    first.close()
    next(engine.run(Prompts(tokens(), (0, 0)), 5, greedy, None, watched=False))


def test_warm_up_makes_the_session_of_the_next_call():
    _, fast = pair("llama")
    fast.octavo_engine.warm_up(batch=3, tokens=20)
    (session,) = fast.octavo_engine.sessions
    answers(fast, batch(), do_sample=False)
    assert fast.octavo_engine.sessions == [session]


def test_a_model_that_was_cast_gets_a_new_cache():
    model, fast = pair("llama")
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))
    model.float()
    fast.float()
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))
    assert [session.cache.stores[0].keys.dtype for session in sessions(fast)] == [torch.float32]
    for each in (model, fast):
        each.model.rotary_emb.inv_freq = each.model.rotary_emb.inv_freq / 8
    assert torch.equal(answers(fast, batch(), do_sample=False), answers(model, batch(), do_sample=False))


def test_prompts_may_be_a_tensor():
    model, _ = pair("llama")
    engine, ids = Engine(model, context=128), batch()["input_ids"]
    assert list(engine.generate(ids, 5, GREEDY)) == list(engine.generate(ids.tolist(), 5, GREEDY))


def test_another_default_device():
    model, fast = pair("llama")
    inputs, text = batch(), torch.arange(8, 97).repeat(4)[None, :120].expand(4, -1)
    required = [answers(model, each, do_sample=False, max_new_tokens=5) for each in (inputs, {"input_ids": text})]
    with torch.device("meta"):
        assert torch.equal(answers(fast, inputs, do_sample=False, max_new_tokens=5), required[0])
        assert torch.equal(answers(fast, {"input_ids": text}, do_sample=False, max_new_tokens=5), required[1])


# ---- The engine with our own models, against the same model without a cache


GREEDY = Sampling(temperature=0)
CPU = torch.device("cpu")


def lively_model(config):
    """Greedy text that does not repeat one token, and gaps that rounding cannot close."""
    return lively(config, 0.3).eval()


def prompt(length: int, seed: int = 5) -> list[int]:
    """Tokens that the vocabularies of all models here have."""
    return torch.randint(53, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def uncached(model, text: list[int], count: int, context: int = 16) -> list[int]:
    """Greedy tokens, each from one forward pass over the text, or over its last half once it exceeds the context."""
    new = []
    for _ in range(count):
        text = text[-(context // 2 or 1) :] if len(text) > context else text
        with torch.no_grad():
            new.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        text = [*text, new[-1]]
    return new


@BOTH
def test_greedy_tokens_of_each_prompt_are_those_without_a_cache(config) -> None:
    model, prompts = lively_model(config), [prompt(6), prompt(2, 6), prompt(3, 7)]
    found = list(Engine(model, context=16).generate(prompts, 10, GREEDY))
    for row, text in zip(zip(*found, strict=True), prompts, strict=True):
        assert list(row) == uncached(model, text, 10)
    assert len({token for row in found for token in row}) > 5


@BOTH
@pytest.mark.parametrize(("context", "begin"), [(10, 6), (1, 1)])
def test_a_text_goes_on_past_the_context_from_its_last_half(config, context, begin):
    model = lively_model(config)
    found = [token for [token] in Engine(model, context=context).generate([prompt(begin)], 40, GREEDY)]
    assert found == uncached(model, prompt(begin), 40, context)


def test_only_new_tokens_are_computed() -> None:
    model = lively_model(GQA)
    fed: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].shape[1]))
    list(Engine(model, context=8).generate([prompt(6)], 5, GREEDY))
    assert fed == [6, 1, 1, 4, 1]  # at 9 tokens the last 4 start anew


def test_a_stop_token_ends_the_text_of_its_prompt() -> None:
    model, prompts = lively_model(GQA), [prompt(6), prompt(4, 7)]
    texts = [uncached(model, text, 8) for text in prompts]
    stop = next(token for token in texts[0][2:] if token not in texts[1] and token not in texts[0][:2])
    at = texts[0].index(stop)
    found = list(Engine(model, context=16).generate(prompts, 8, GREEDY, stop={stop}))
    assert [row[0] for row in found] == texts[0][:at] + [None] * (8 - at)
    assert [row[1] for row in found] == texts[1]
    alone = list(Engine(model, context=16).generate(prompts[:1], 8, GREEDY, stop={stop}))
    assert [token for [token] in alone] == texts[0][:at]


def test_a_seed_repeats_the_text() -> None:
    engine, before = Engine(lively_model(GQA), context=16), torch.get_rng_state()

    def drawn(seed: int | None) -> list[list[int | None]]:
        return list(engine.generate([prompt(3), prompt(2)], 8, Sampling(temperature=3.0, seed=seed)))

    assert drawn(7) == drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cache_serves_in_inference_mode_and_outside_of_it() -> None:
    engine = Engine(lively_model(GQA), context=16)
    batch = pad_prompts([prompt(6)], torch.device("cpu"))
    for _ in range(2):
        found = [token for [token] in engine.generate([prompt(6)], 5, GREEDY)]
        *_, (ids, _) = engine.run(batch, 5, greedy, None, watched=False)
        assert ids[0, 6:].tolist() == found
        assert not ids.is_inference()
    assert len(engine.sessions) == 1


# ---- Prompts: the head reads the last row of each, once; padding on the right changes nothing


def served(name: str, made) -> torch.nn.Module:
    if name == "packed":
        return load(made("llama", scheme="channel"))
    return lively_model({"ours": GQA, "gpt2": GPT}[name]) if name in ("ours", "gpt2") else model_of(name)


@pytest.mark.parametrize(("name", "own"), [("ours", 0), ("gpt2", 0), ("llama", 0), ("packed", 0), ("llama", 1)])
def test_the_head_reads_contiguous_rows_once_for_all_pieces_of_a_prompt(name, own, made):
    model, seen = served(name, made), []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append((args[0].shape, args[0].is_contiguous())))
    engine, prompts = Engine(model, context=16, own_cache=bool(own)), pad_prompts([prompt(13), prompt(11)], CPU)
    for piece in (None, 5):
        list(engine.run(prompts, 2, greedy, None, watched=False, piece=piece))
    assert [(shape[:-1].numel(), whole) for shape, whole in seen if shape.numel()] == [(2, True)] * 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kv_cache", ["fp32", "fp8"])
@pytest.mark.parametrize("name", with_slow(["ours", "gpt2", "llama", "qwen3", "packed"], ("ours", "llama", "packed")))
def test_prompts_in_groups_and_in_pieces_are_those_of_one_pass(name, kv_cache, padded, made, monkeypatch):
    """The rounding of a CPU's GEMMs depends on the number of rows."""
    model, scale, found = served(name, made), torch.tensor([0.05]), []
    prompts = pad_prompts([prompt(9), prompt(4 if padded else 9, 3), prompt(9, 6)], CPU)
    session = Engine(model, context=16, kv_cache=kv_cache, kv_scales=[(scale, scale)] * 2)._session(3, 16)
    for piece in (27, 18, 9, 4):  # three prompts at once, two, one, and a part of one
        monkeypatch.setattr("octavo.inference.session.PIECE", piece)
        with torch.no_grad():
            logits = [session.prefill(prompts).clone(), session.step(torch.tensor([7, 8, 9])).clone()]
        assert session.cache.tokens == int(session.cache.length.tensor) == 10
        stored = [x.float()[:, :, :10] for store in session.cache.stores for x in (store.keys, store.values)]
        found.append([*logits, *(x[1:2, :, 5:] if padded else x for x in stored)])
    for each in found[1:]:
        assert all(
            sqnr(a, b) > (20 if name == "packed" or kv_cache == "fp8" else 100)
            for a, b in zip(found[0], each, strict=True)
        )


def test_the_last_layer_of_a_packed_model_goes_on_with_the_last_token_of_a_prompt(made, monkeypatch):
    from octavo.inference import packed_linear

    model, seen, product = load(made("llama", scheme="channel")), [], packed_linear.packed_product
    monkeypatch.setattr(
        packed_linear, "packed_product", lambda x, *rest: (seen.append(len(x.data)), product(x, *rest))[1]
    )
    prompts = pad_prompts([prompt(9), prompt(9, 6)], CPU)
    for piece in (None, 5):
        list(Engine(model, context=16).run(prompts, 1, greedy, None, watched=False, piece=piece))
    whole, first, last = ([rows] * 5 + [2] * 3 for rows in (18, 10, 8))  # two layers: q k v, o, gate and up, down
    assert seen == [*whole, *first, *last]


@pytest.mark.parametrize("kv_cache", with_slow(["bf16", "fp8 warm", "fp8", "int8 warm"], ("bf16", "fp8 warm")))
@pytest.mark.parametrize("name", with_slow(["ours", "gpt2", "llama", "qwen3", "packed"], ("ours", "llama", "packed")))
def test_tokens_that_pad_a_prompt_on_its_right_change_no_bit(name, kv_cache, made, monkeypatch):
    """A GPU replays such prompts as CUDA graphs. Here they run eagerly, and the text goes on behind each prompt. The
    GEMMs of a CPU round in another order for another number of rows, so the prompt alone has close logits."""
    monkeypatch.setattr("octavo.inference.session.FEWEST", 8)
    model, scale, found = served(name, made), torch.tensor([0.05]), []
    dtype, _, warm_up = kv_cache.partition(" ")
    scales = [(scale, scale)] * 2 if kv_cache == "fp8" else None
    for padding in (None, 0, 3):
        session = Engine(model, context=16, kv_cache=dtype, kv_scales=scales)._session(2, 16)
        session.pads = padding is not None
        for length in (9, 13, 5, 8, 9):
            prompts = pad_prompts([prompt(length), prompt(length, 6)], CPU)
            assert session._padded(prompts) == (0 if padding is None else {9: 12, 13: 16}.get(length, 8))
            session._pass(max(2, session._padded(prompts))).tokens.fill_(padding or 0)
            with torch.no_grad():
                logits = [session.prefill(prompts).clone()]
                logits += [session.step(torch.tensor([token, token + 1])).clone() for token in (7, 8, 9)]
            found.append(torch.stack(logits))
            assert session.cache.tokens == int(session.cache.length.tensor) == length + 3
    for alone, padded, otherwise in zip(found[:5], found[5:10], found[10:], strict=True):
        assert torch.equal(padded, otherwise)
        assert sqnr(alone[0], padded[0]) > (20 if name == "packed" or warm_up else 100)


@pytest.mark.parametrize("kv_cache", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["ours", "gpt2", "llama", "qwen3", "packed"])
def test_tokens_that_pad_a_prompt_on_its_left_change_no_scale(name, kv_cache, made):
    model, found = served(name, made), []
    for token, piece in ((0, None), (3, None), (3, 4)):
        session = Engine(model, context=16, kv_cache=kv_cache)._session(2, 16)
        with torch.no_grad():
            session.prefill(pad_prompts([prompt(9), prompt(5)], CPU, token), piece)
        found.append(torch.stack([scale for store in session.cache.stores for scale in (store.k_scale, store.v_scale)]))
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], found[2], rtol=0.1)  # attention over stored keys, rounded


def test_prompts_that_padding_would_change_are_not_padded():
    rotary = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    models = [model_of("llama"), model_of("llama"), model_of("llama", rope_parameters=rotary)]
    engines = [Engine(model, context=2048, kv_cache=dtype) for model, dtype in zip(models, DTYPES, strict=True)]
    plain, warming, dynamic = (engine._new_session(2, 1500) for engine in engines)
    plain.pads = warming.pads = True
    text = pad_prompts([prompt(70), prompt(70)], CPU)
    assert (plain._padded(text), warming._padded(text), dynamic.forward.row_by_row) == (96, 96, False)
    assert plain._padded(pad_prompts([prompt(70), prompt(60)], CPU)) == 0  # padding on the left needs a mask
    assert [plain._padded(pad_prompts([prompt(n)] * 2, CPU)) for n in (1, 1024, 1025)] == [64, 1024, 0]


@pytest.mark.parametrize(("rope", "hooked", "calls"), [("default", 0, 1), ("dynamic", 0, 4), ("default", 1, 4)])
def test_the_angles_of_all_positions_are_computed_once(rope, hooked, calls, monkeypatch):
    model = model_of("llama", rope_parameters={"rope_type": rope, "factor": 2.0, "rope_theta": 1e4})
    engine, rotary, seen = Engine(model, context=32), model.model.rotary_emb, []
    engine._session(1, 8)
    owner = rotary if hooked else type(rotary)  # a hook of accelerate is a `forward` of the module itself
    own = owner.forward
    monkeypatch.setattr(owner, "forward", lambda *args, **names: seen.append(args) or own(*args, **names))
    list(engine.generate([[5, 6, 7]], 4, GREEDY))
    assert (len(seen), "forward" in vars(rotary)) == (calls, hooked)


def test_engines_of_one_model_run_their_passes_one_at_a_time():
    model, held = model_of("llama"), []
    first, other = (Engine(model, context=32)._session(1, 8).forward for _ in range(2))
    model.register_forward_pre_hook(lambda *_: held.append(other.lock.locked()))
    with torch.no_grad():
        first(torch.tensor([[5]]))
    assert (held, other.lock.locked()) == ([True], False)


def test_complex_angles_and_those_of_other_arguments_have_no_tables(monkeypatch):
    forward, ids = Engine(model_of("llama"), context=32)._session(1, 8).forward, torch.tensor([[3]])
    monkeypatch.setattr(type(forward.rotary), "forward", lambda self, x, ids, kind=1j: ids * kind)
    assert [forward._rotate(ids, ids, **names).item() for names in ({"kind": 2}, {})] == [6, 3j]


# ---- Generation on transformers' own cache, against transformers' own loop


PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 5]]


def gemma2() -> torch.nn.Module:
    return model_of("gemma2", query_pre_attn_scalar=16)


def test_the_models_and_lengths_that_our_cache_serves_have_it():
    llama, mistral = model_of("llama"), model_of("mistral", sliding_window=20)
    assert not open_engine(llama, context=128, tokens=500).own_cache
    assert not open_engine(mistral, context=128, tokens=20).own_cache
    assert open_engine(mistral, context=128, tokens=21).own_cache
    assert open_engine(mistral, context=128, tokens=21, kv_cache="fp8").limit == 20
    assert open_engine(gemma2(), context=128, tokens=9).own_cache
    with pytest.raises(UnservedError, match=r"softcap.*: leave kv_cache \(--kv-cache\) out, for transformers' own"):
        open_engine(gemma2(), context=128, tokens=9, kv_cache="fp8")


@pytest.mark.parametrize("count", [1, 24])
@pytest.mark.parametrize("name", ["gemma2", "mistral", "recurrent gemma", "diffllama"])
def test_each_prompt_of_a_batch_has_the_tokens_of_transformers(name, count):
    model = model_of(name, query_pre_attn_scalar=16, sliding_window=20, num_hidden_layers=3)
    engine = open_engine(model, context=128, tokens=100)
    found = list(engine.generate(PROMPTS, count, GREEDY))
    assert engine.own_cache
    for row, prompt in zip(zip(*found, strict=True), PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        required = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert list(row) == required[0, len(prompt) :].tolist()


def test_a_text_goes_on_past_the_context_and_kernels_are_compiled(monkeypatch):
    engine = Engine(gemma2(), context=8, own_cache=True)
    assert len(list(engine.generate([[1, 2, 3]], 30, GREEDY))) == 30
    engine.warm_up(2, 5)
    monkeypatch.setattr("octavo.inference.engine.has_kernels", lambda device: True)
    open_engine(gemma2(), context=64, tokens=9).warm_up(2, 5)


# ---- The order of the loop: a step is queued before the tokens that it starts from are read


def counted(watched=True):
    """Two sequences, each of which counts on from its last token, modulo 5; the most likely first tokens are 0 and 1.

    Returns the ids, what was read, and the tokens of each step; a reading is the length of the text, its last tokens,
    and the number of steps that were queued before.
    """
    steps, found = [], []

    def choose(so_far, logits):
        assert so_far.shape[1] == len(steps) + 1
        return logits.argmax(1)

    def step(tokens):
        steps.append(tokens.tolist())
        return torch.eye(5)[(tokens + 1) % 5]

    for ids, last in decode(torch.tensor([[4], [0]]), 4, torch.eye(5)[:2], choose, step, None, watched):
        found.append((ids.shape[1], None if last is None else last.tolist(), len(steps)))
    return ids.tolist(), found, steps


def test_every_token_but_the_last_starts_a_step_before_it_is_read():
    ids, found, steps = counted()
    assert ids == [[4, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert found == [(2, [0, 1], 1), (3, [1, 2], 2), (4, [2, 3], 3), (5, [3, 4], 3)]
    assert steps == [[0, 1], [1, 2], [2, 3]]
    _, found, _ = counted(watched=False)  # nobody reads
    assert found == [(2, None, 1), (3, None, 2), (4, None, 3), (5, None, 3)]


# ---- The memory of a cache, and the error when it does not suffice


LLAMA_3_8B = KeyShape(32, 8, 128, torch.bfloat16)
IN_FP8 = LLAMA_3_8B._replace(dtype=torch.float8_e4m3fn)
GIB = 1 << 30


def test_the_bytes_of_a_token_are_those_of_the_cache():
    assert LLAMA_3_8B.nbytes(1) == 2 * 32 * 8 * 128 * 2
    assert IN_FP8.nbytes(4096) == GIB // 4
    _, fast = pair("qwen3")
    fast.generate(**batch(), max_new_tokens=2, do_sample=False)
    (session,) = fast.octavo_engine.sessions
    assert key_shape(fast, None).nbytes(3 * session.capacity) == session.cache.nbytes


@pytest.mark.parametrize(
    ("batch", "tokens", "shape", "fits"),
    [
        (8, 4096, LLAMA_3_8B, "2 sequences of 4096 tokens or 1024 tokens for 8 sequences. kv_cache='fp8'"),
        (2, 8192, LLAMA_3_8B, "one sequence of 8192 tokens or 4096 tokens for 2 sequences. kv_cache='fp8'"),
        (8, 4096, IN_FP8, r"4 sequences of 4096 tokens or 2048 tokens for 8 sequences\.$"),
        (10_000, 16_384, LLAMA_3_8B, "No sequence fits"),
    ],
)
def test_the_error_says_what_fits(batch, tokens, shape, fits):
    check_memory(shape, batch, tokens, free_bytes(torch.device("cpu")))
    with pytest.raises(MemoryError, match=f"{batch} sequences of {tokens} tokens need .* GiB in .* are free.* {fits}"):
        check_memory(shape, batch, tokens, GIB)


def test_nothing_runs_where_the_cache_does_not_fit(monkeypatch):
    _, fast = pair("llama")
    monkeypatch.setattr(engine_module, "free_bytes", lambda device: 10_000)
    seen: list[int] = []
    fast.model.register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(MemoryError, match="3 sequences of 34 tokens need"):
        fast.generate(**batch(), max_new_tokens=24, do_sample=False)
    assert seen == []


def test_unused_sessions_make_room(monkeypatch):
    """A cache of a former batch goes before a new one is refused; a tight one takes no more than it needs."""
    _, fast = pair("llama")
    token = key_shape(fast, None).nbytes(1)
    fast.generate(**batch(rows=2), max_new_tokens=24, do_sample=False)
    engine = fast.octavo_engine

    def free(device: torch.device) -> int:
        return 3 * 40 * token - sum(session.cache.nbytes for session in engine.sessions)

    monkeypatch.setattr(engine_module, "free_bytes", free)
    fast.generate(**batch(), max_new_tokens=24, do_sample=False)
    assert [(session.batch, session.capacity) for session in engine.sessions] == [(3, 34)]
