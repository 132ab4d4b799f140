"""Pushing a model that is trained into a live one, held against a folder that is packed and loaded afresh."""

import hashlib
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import peft
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_models import IDS, built, same_bits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import octavo
from octavo.integrations.peft import support
from octavo.ops.rows import word_sums
from octavo.packing import pack
from octavo.rl import checksum, push, served_weights

TARGETS = ["q_proj", "v_proj", "down_proj"]


def tokens(model):
    ids = IDS[:, :8]
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)


def pointers(model):
    return [t.data_ptr() for t in (*model.parameters(), *model.buffers())]


def packed_afresh(model, folder, head="bf16", **how):
    model.save_pretrained(folder / "model")
    pack(folder / "model", folder / "packed", **how)
    return octavo.load(folder / "packed", head=head)


def trained(name, recipe="rowwise", dtype=torch.float32, **convert):
    model = built(name, seed=1).to(dtype)
    if recipe is not None:
        octavo.convert(model, recipe, **convert)
    return model


@pytest.mark.parametrize(
    ("name", "recipe", "how"),
    [
        ("llama", "rowwise", {}),
        ("llama", "rowwise", {"scheme": "weight"}),
        ("llama", None, {"scheme": "int8"}),
        pytest.param("llama", None, {"scheme": "block"}, marks=pytest.mark.slow),
        ("llama", "blockwise", {"scheme": "block"}),
        ("llama", "mxfp8", {"scheme": "mx"}),
        ("llama", "tensorwise", {"scheme": "tensor"}),
        ("llama", None, {"scheme": "tensor"}),  # q, k and v have one scale, and so have gate and up
        pytest.param("llama", None, {"scheme": "tensor", "share": False}, marks=pytest.mark.slow),
        ("llama", None, {"pow2": True}),
        ("qwen2", "rowwise", {}),  # biases, and a tied head
        pytest.param("qwen3", "rowwise", {}, marks=pytest.mark.slow),
        ("opt", "rowwise", {}),
        ("mixtral", "rowwise", {"experts": True}),
        ("mixtral", None, {"skip": ("*.o_proj",)}),  # layers that are not packed
    ],
)
def test_the_engine_is_that_of_a_folder_packed_afresh(made, tmp_path, name, recipe, how):
    served = octavo.load(made(name, **{"scheme": "channel"} | how))
    before, at = tokens(served), pointers(served)
    model = trained(name, recipe)
    pushed = push(model, served)
    unshared = {"share": False} if recipe == "tensorwise" else {}  # as a run of it is packed
    afresh = packed_afresh(model, tmp_path, **how, **unshared)
    assert pointers(served) == at
    assert pushed.checksum == checksum(served) == checksum(afresh)
    assert torch.equal(tokens(served), tokens(afresh))
    assert not torch.equal(tokens(served), before)
    assert pushed.bytes == sum({id(t): t.nbytes for t in served.state_dict(keep_vars=True).values()}.values())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_head_in_eight_bits_follows(made, tmp_path, name):
    served = octavo.load(made(name, scheme="channel"), head="rowwise")
    model = trained(name)
    assert push(model, served).checksum == checksum(packed_afresh(model, tmp_path, head="rowwise"))


# --- Copies of weights


@pytest.mark.parametrize("of", ["data", "scale"])
def test_a_copy_that_would_stay_as_it_was_is_noticed(made, of):
    served = octavo.load(made("llama", scheme="channel"))
    before = checksum(served)
    fused = next(m for m in served.modules() if hasattr(m, "stacked"))
    weight = fused.stacked.weight
    fused.stacked.weight = replace(weight, **{of: getattr(weight, of).clone()})
    for act in (checksum, partial(push, trained("llama"))):
        with pytest.raises(ValueError, match=r"a copy of weight.* in .*, with memory of its own: load the folder"):
            act(served)
    fused.stacked.weight = weight
    assert checksum(served) == before


def test_a_buffer_that_was_replaced_is_stacked_again(made):
    served, other = (octavo.load(made("llama", scheme="channel")) for _ in range(2))
    layer = served.model.layers[0].self_attn.k_proj
    layer.weight = layer.weight.clone()
    assert push(model := trained("llama"), served).checksum == push(model, other).checksum
    assert torch.equal(tokens(served), tokens(other))


def test_the_checksum_is_of_names_shapes_and_sums(made):
    served = octavo.load(made("qwen2", scheme="channel"))
    tensors = {name: t.detach() for name, t in served.state_dict().items() if name != "lm_head.weight"}  # tied
    described = "".join(f"{name} {t.dtype} {list(t.shape)} " for name, t in tensors.items())
    text = f"{described}{word_sums(list(tensors.values())).tolist()}"
    assert checksum(served) == hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# --- Adapters


def adapted(model, seed=0):
    torch.manual_seed(seed)
    wrapped: Any = peft.get_peft_model(model, support(peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return wrapped.eval()


@pytest.mark.parametrize("recipe", ["rowwise", None])
def test_adapters_are_merged(made, tmp_path, recipe):
    served, model = octavo.load(made("llama", scheme="channel")), adapted(trained("llama", recipe))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    pushed = push(model, served)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
    afresh = packed_afresh(model.merge_and_unload(), tmp_path)
    assert pushed.checksum == checksum(afresh)
    assert torch.equal(tokens(served), tokens(afresh))


def test_adapters_that_are_merged_or_off_are_not_added_again(made):
    served, model = octavo.load(made("llama", scheme="channel")), adapted(trained("llama"))
    with model.disable_adapter():
        alone = push(model, served).checksum
    assert alone == push(trained("llama"), served).checksum
    first = push(model, served).checksum
    model.merge_adapter()
    assert push(model, served).checksum == first != alone


def test_of_modules_saved_beside_adapters_the_active_one_is_written(made):
    config = support(peft.LoraConfig(target_modules=TARGETS, modules_to_save=["lm_head"]))
    served, model = octavo.load(made("llama", scheme="channel")), peft.get_peft_model(trained("llama"), config)
    model.add_adapter("other", config)
    head: Any = model.base_model.model.lm_head
    for number, copy in enumerate((head.original_module, *head.modules_to_save.values())):
        nn.init.constant_(copy.weight, number)
    for name, number in (("default", 1), ("other", 2)):
        model.set_adapter(name)
        push(model, served)
        assert served.lm_head.weight.unique().tolist() == [number]
    with model.disable_adapter():
        push(model, served)
    assert served.lm_head.weight.unique().tolist() == [0]


def test_adapters_stay_adapters(made):
    base, model = octavo.load(made("llama", scheme="channel")), adapted(trained("llama"))
    served = adapted(base, seed=1)
    at = pointers(served)
    push(model, served)
    assert pointers(served) == at
    theirs = dict(served.named_parameters())
    for name, p in model.named_parameters():
        if "lora_" in name:
            assert torch.equal(p, theirs[name])


# --- Ranks


def on_ranks(rank, folder):
    served, model = octavo.load(folder), trained("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    gathered: list[str] = []
    full = DTensor.full_tensor
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(IDS)  # leaves the weights of the root gathered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", lambda t: gathered.append(str(t.shape)) or full(t))
        pushed = push(model, served)
    with torch.no_grad():
        model.model.norm.weight.to_local()[:1] = torch.nan if rank else 1.0  # which the other rank does not see
    with pytest.raises(ValueError, match=r"norm\.weight holds inf or NaN"):
        push(model, served)
    return pushed.checksum, tokens(served).tolist(), gathered


@pytest.mark.slow
def test_two_ranks_push_what_one_does(made):
    folder = made("llama", scheme="channel")
    (first, found, gathered), (second, others, _) = run_ranks(2, on_ranks, folder)
    model, served = trained("llama"), octavo.load(folder)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert first == second == push(model, served).checksum
    assert found == others == tokens(served).tolist()
    assert len(gathered) == len(list(model.parameters()))  # each once


# --- The tensors of a folder


def packed_files(model, folder, **how):
    packed_afresh(model, folder, **how)
    return load_file(folder / "packed" / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "recipe", "how"),
    [
        ("llama", "rowwise", {}),
        ("llama", None, {"scheme": "tensor"}),
        ("llama", "blockwise", {"scheme": "block"}),
        ("qwen2", "rowwise_forward", {}),
        ("qwen3", None, {"skip": ("*.o_proj",)}),
        ("mixtral", "rowwise", {"experts": True}),
        ("phimoe", "rowwise", {"experts": True}),  # whose routers have other names in files
        ("vit", "rowwise", {}),
    ],
)
def test_served_weights_are_the_tensors_that_pack_writes(tmp_path, name, recipe, how):
    model = trained(name, recipe)
    found = dict(served_weights(model, **({} if recipe else how)))
    assert same_bits(found, packed_files(model, tmp_path, **how))
    layers = [name.split(".layers.")[1].split(".")[0] for name in found if ".layers." in name]
    assert layers == sorted(layers, key=int)  # one layer after the other


def test_served_weights_have_adapters_merged(tmp_path):
    model = adapted(trained("llama"))
    assert same_bits(dict(served_weights(model)), packed_files(model.merge_and_unload(), tmp_path))


def test_what_served_weights_refuse():
    with pytest.raises(TypeError, match=r"takes a model of transformers, got a Linear"):
        next(served_weights(nn.Linear(2, 2)))
    model = trained("llama", "rowwise", skip=("*.o_proj",))
    octavo.convert(nn.Sequential(model.model.layers[0].self_attn.o_proj), "blockwise")
    with pytest.raises(ValueError, match="a model of one recipe, got blockwise, rowwise"):
        next(served_weights(model))
    with pytest.raises(ValueError, match=r"q_proj.weight has adapters that are no plain LoRA: merge them"):
        next(served_weights(of_dora()))


# --- What is refused

LLAMA = partial(trained, "llama")
CHANNEL = {"scheme": "channel"}


def untied():
    model = trained("qwen2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    return model


def last_as(**how):
    model = LLAMA()
    model.model.layers[1].mlp.down_proj.to(**how)
    return model


def diverged(number):
    model = LLAMA()
    nn.init.constant_(model.model.layers[1].mlp.down_proj.weight.data[3, 5], number)
    return model


def of_dora():
    return peft.get_peft_model(LLAMA(), peft.LoraConfig(target_modules=TARGETS, use_dora=True))


@pytest.mark.parametrize(
    ("name", "how", "model", "message"),
    [
        ("llama", CHANNEL, partial(LLAMA, "blockwise"), "channel does not hold: pack the folder by block"),
        ("llama", {"scheme": "block"}, LLAMA, "rowwise.*scheme block does not hold: pack the folder by channel"),
        ("llama", CHANNEL, partial(LLAMA, "delayed"), "delayed.*does not hold: train by rowwise"),
        ("llama", {"scheme": "static"}, LLAMA, "scheme static does not hold: pack the folder by channel"),
        ("llama", {"scheme": "tensor"}, partial(LLAMA, "delayed"), "does not hold: train by tensorwise"),
        ("llama", CHANNEL | {"skip": ("*.o_proj",)}, LLAMA, "o_proj.weight is trained by rowwise and served"),
        ("mixtral", CHANNEL, partial(trained, "mixtral"), r"served in BF16: pack it \(experts: --experts\), or leave"),
        ("llama", {"scheme": "channel", "weights": "mse"}, LLAMA, "weights=mse, and it searches"),
        ("llama", {"scheme": "channel", "pow2": True}, LLAMA, "pack the folder without --pow2"),
        ("mixtral of 128", {"scheme": "group64", "experts": True}, partial(trained, "mixtral of 128", None), "channel"),
        ("llama", CHANNEL, partial(trained, "qwen3"), "the served model has no .*q_norm.weight: load the folder of"),
        ("qwen3", CHANNEL, LLAMA, "the trained model has no .*q_norm.weight: load the folder of"),
        ("llama", CHANNEL, partial(built, "llama", intermediate_size=512), r"is \[512, 128\] in the.*\[256, 128\]"),
        ("qwen2", CHANNEL, untied, "lm_head.weight are one tensor in the served model, and two in the trained"),
        ("llama", CHANNEL, partial(last_as, dtype=torch.float64), "down_proj.weight is torch.float64 on cpu: load it"),
        ("llama", CHANNEL, partial(last_as, device="meta"), "down_proj.weight is torch.float32 on meta: load it in"),
        ("llama", CHANNEL, of_dora, "q_proj.weight has adapters that are no plain LoRA: merge them"),
        ("llama", CHANNEL, partial(diverged, torch.nan), "down_proj.weight holds inf or NaN: the model diverged"),
        ("llama", CHANNEL, partial(diverged, -torch.inf), "down_proj.weight holds inf or NaN: the model diverged"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_changes(made, name, how, model, message):
    served = octavo.load(made(name, **how))
    before = checksum(served)
    with pytest.raises(ValueError, match=f"^push: .*{message}"):
        push(model(), served)
    assert checksum(served) == before


def test_other_refusals(made):
    served = octavo.load(made("llama", scheme="channel"))
    with pytest.raises(TypeError, match=r"push takes a torch\.nn\.Module"):
        push(made("llama"), served)
    served.octavo_record["folded"] = {"smooth": {"alpha": 0.5}, "rotate": None}
    with pytest.raises(ValueError, match="packed with smooth, and the folder has the range of its factors"):
        push(LLAMA(), served)
    both = adapted(octavo.load(made("llama", scheme="channel")))
    config = support(peft.LoraConfig(r=4, lora_alpha=16, target_modules=TARGETS))
    with pytest.raises(ValueError, match=r"q_proj\.weight has adapters of another scaling in the served model"):
        push(peft.get_peft_model(LLAMA(), config), both)


def test_a_generation_is_waited_for(made):
    served, model = octavo.load(made("llama", scheme="channel")), LLAMA()
    done = threading.Event()
    with served.octavo_engine.alone():
        thread = threading.Thread(target=lambda: (push(model, served), done.set()))
        thread.start()
        assert not done.is_set()
        with pytest.raises(RuntimeError, match="this model is generating"):
            push(model, served)
    thread.join()
    assert done.is_set()


def test_scales_of_a_cache_are_remarked(made):
    (remark,) = push(LLAMA(), octavo.load(made("llama", scheme="channel", kv_cache="fp8"))).remarks
    assert "scales of keys and values are those of the calibration" in remark


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_static_scales_of_inputs_stay_those_of_the_calibration(made, tmp_path, recipe):
    served, model = octavo.load(made("llama", scheme="static")), trained("llama", recipe)
    before = {name: t.clone() for name, t in served.state_dict().items() if name.endswith("input_scale")}
    (remark,) = push(model, served).remarks
    assert "the scales of inputs are those of the calibration" in remark
    afresh = packed_afresh(model, tmp_path, scheme="tensor", share=recipe is None).state_dict()
    assert len(before) == 14
    assert same_bits(served.state_dict(), {**afresh, **before})
    assert tokens(served).shape == (2, 12)
