"""Build the model that the settings describe, ready for training: built-in, or of a Hugging Face folder.

    build -> loss -> convert -> activation checkpointing -> compile each block

Where several processes divide the layers, weights and optimizer state:

    build on the meta device -> loss -> convert -> tensor parallel -> activation checkpointing -> compile each block
    -> FSDP2: each block a unit, or two small ones, and all else the unit of the model
    -> gather FP8 weights in eight bits -> memory -> weights

FSDP2 (`fully_shard`) shards the FP32 master weights. The forward pass runs under autocast, as in one process. The
numbers differ in the order of sums alone. With `optimizer.offload` the shards are in the CPU's memory, where AdamW
runs; a single process is then a mesh of one.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo.checkpoint.files import ArtifactError, ShardReader, read_json
from octavo.checkpoint.folder import BUILT_IN_MODELS
from octavo.checkpoint.layouts import SIDE_FILE
from octavo.data import Reading, read_text
from octavo.distributed import GatherReport, fp8_all_gather, send_bf16_gradients, tensor_parallel
from octavo.hf import meta_model
from octavo.hf.meta_model import DESCRIPTION, quiet_transformers
from octavo.inference.opening import open_transformers
from octavo.inference.packed_linear import PackedLinear
from octavo.models import Config as ModelConfig
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build, tokenizer
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import BpeTokenizer, ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from octavo.nn import Conversion, convert, use_fp8_attention
from octavo.nn.conversion import recompute_hidden
from octavo.nn.fused_loss import find_head
from octavo.nn.module_tools import spare_search
from octavo.ops.dispatch import GRADIENT_TILE, choose_recipe
from octavo.ops.registration import register_lowerings
from octavo.recipe import Recipe
from octavo.train.config import Config, ConfigError, refuse
from octavo.train.loss import Loss, chunked_loss, whole_loss
from octavo.train.processes import Degrees, make_mesh, rank, same_outcome, total_memory, unit_size
from octavo.util import hub_hint, import_extra, open_config, open_local, reading

CPU, META = torch.device("cpu"), torch.device("meta")


def make_model(config: Config, vocabulary: int, saved: Path, device: torch.device = CPU) -> nn.Module:
    """The model of `config`, its weights drawn in FP32 from torch's seed or read from the Hugging Face folder. A
    resumed run, whose `saved` folder exists, gets the architecture only: the checkpoint has the weights. A packed model
    is on `device`, where its GEMMs will run; another one is on the CPU, or on the meta device with shapes alone.
    Buffers, such as rotary frequencies, stay in FP32."""
    if config.model in BUILT_IN_MODELS:
        with META if device == META else nullcontext():
            model: nn.Module = build(_built_in(config, vocabulary))
    else:
        model = open_language_model(config, saved, device)
    if config.optimizer.weights == "bf16":
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16)
    return model


def convert_model(
    model: nn.Module, config: Config, device: torch.device | None = None, shares: int = 1
) -> Conversion | None:
    """Convert linear layers and attention as `config` says, where `shares` processes divide a micro-batch, and add the
    adapters. The layers of a packed model stay as they are: then there is no report."""
    place = next(model.parameters()).device if device is None else device
    report = None
    if not any(isinstance(module, PackedLinear) for module in model.modules()):
        report = convert(
            model,
            chosen_recipe(config, place),
            skip=config.skip,
            device=device,
            emulate=config.emulate,
            only_if_faster=config.only_if_faster,
            tokens=config.batch // shares * config.context,
        )
    add_adapters(model, config)
    if config.attention.precision == "fp8":
        name, shortest, context = "attention.precision", config.attention.shortest, config.context
        refuse(
            config,
            (name, context < shortest, f"a context of attention.shortest, {shortest} tokens, and more", context,
             "lower attention.shortest, or leave attention in bf16"),
            (name, place.type == "cuda" and context % GRADIENT_TILE, f"a context that is a multiple of {GRADIENT_TILE}",
             context, "round it, or leave attention in bf16"),
            (name, config.dropout, "no dropout", f"dropout {config.dropout}", "set one of the two back"),
        )  # fmt: skip
        use_fp8_attention(model, shortest=config.attention.shortest, device=device)
    return report


def chosen_recipe(config: Config, device: torch.device) -> Recipe:
    """The recipe that `config` runs on `device`."""
    return choose_recipe(config.recipe, device).in_bf16(*config.bf16_gemms)


def make_loss(config: Config, model: nn.Module) -> Loss:
    """The loss that the settings choose. Call it before the model is sharded, compiled, or converted with its head."""
    widest = max((m.out_features for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    if config.loss.is_chunked(widest) and (head := find_head(model)) is not None:
        return partial(chunked_loss, head, config.loss.chunk)
    required = "a model whose logits are the outputs of a linear layer without bias, scaled or capped"
    chunked = config.loss.logits == "chunked"
    refuse(config, ("loss.logits", chunked, required, type(model).__name__, "choose auto or whole"))
    return whole_loss


def check_memory(config: Config, vocabulary: int, device: torch.device, parts: int = 1) -> None:
    """The error of `check_count` for a built-in model, of which nothing is made yet."""
    if config.model not in BUILT_IN_MODELS:
        return
    sizes, count = _built_in(config, vocabulary), None
    with suppress(RuntimeError, TypeError), torch.device("meta"):  # more elements than PyTorch can count
        models = [build(dataclasses.replace(sizes, layers=layers)) for layers in (1, 2)]
        one, two = (sum(p.numel() for p in model.parameters()) for model in models)
        count = one + (sizes.layers - 1) * (two - one)
    check_count(count, config, device, parts)


def check_count(count: int | None, config: Config, device: torch.device, parts: int = 1) -> None:
    """Raise a ConfigError if one of `parts` of what so many trained parameters need exceeds the memory of `device`.
    Checkpoints are written from a copy in the CPU's memory."""
    total, weight, moments = total_memory(device), config.optimizer.weight_bytes, config.optimizer.moment_bytes
    copy = weight + moments if device.type == "cpu" else 0
    each = round(weight + (weight if config.accumulate == 1 else 4) + moments + copy)
    needed = None if count is None else count * each / parts
    if needed is None or needed > total:
        known = "too many to count" if count is None else f"{count:.3g}"
        size = "" if needed is None else f", {needed / 1e9:,.0f} GB before activations"
        divided = f", divided among {parts} processes" if parts > 1 else ""
        copied = ", and a copy for checkpoints" if copy else ""
        advice = "Lower width, mlp_width or layers" if config.model in BUILT_IN_MODELS else "Choose a smaller model"
        raise ConfigError(
            f"the model of these settings has too many parameters ({known}) for this device: training takes {each} "
            f"bytes for each (weight, gradient and two moments{copied}){divided}{size}; {device} has "
            f"{total / 1e9:,.0f} GB. {advice}"
            + (", or train on more GPUs: torchrun --nproc-per-node N" if device.type == "cuda" else "")
        )


def check_vocabulary(model: Any, highest: int) -> None:
    """Raise a ConfigError unless the model has an embedding for the token `highest`."""
    embedding = model.embedding if isinstance(model, Decoder) else model.get_input_embeddings()
    if highest >= embedding.num_embeddings:
        raise ConfigError(
            f"the model's embedding has {embedding.num_embeddings} rows, but its tokenizer makes token {highest}: "
            "give the folder the tokenizer that belongs to the model"
        )


def open_data(config: Config, saved: Path) -> tuple[Tokenizer, Reading]:
    """The tokenizer of a new run, or the one that a resumed run has `saved`, and the texts that `config` names."""
    opened: Tokenizer | None = None
    if config.tokenizer.startswith("hf:") and not saved.exists():
        opened = HuggingFaceTokenizer.from_hub(config.tokenizer.removeprefix("hf:"))
    elif config.tokenizer.startswith("hf:") or config.model not in BUILT_IN_MODELS:
        opened = HuggingFaceTokenizer.load(saved if saved.exists() else config.model)
    elif saved.exists():
        opened = tokenizer.load_tokenizer(saved)
    reading = read_text(config.data, opened.chat if opened else None)
    if opened is None and config.tokenizer == "bpe":
        opened = BpeTokenizer.train(reading.texts, config.vocabulary)
    elif opened is None:
        opened = CharacterTokenizer.train(reading.texts) if config.tokenizer == "characters" else ByteTokenizer()
    return opened, reading


def _built_in(config: Config, vocabulary: int) -> ModelConfig:
    """The sizes of a built-in model: the settings that have the names of its fields."""
    kinds: dict[str, type[ModelConfig]] = {"gpt2": GPT2Config, "llama": LlamaConfig, "mixture": MixtureConfig}
    kind = kinds[config.model]
    sizes = {each.name: getattr(config, each.name) for each in dataclasses.fields(kind) if hasattr(config, each.name)}
    if config.model == "mixture":
        table = config.experts
        sizes |= {"experts": table.count} | {key: getattr(table, key) for key in ("top_k", "shared_width", "balance")}
    return kind(**sizes | {"vocabulary": vocabulary})


# ---- A causal language model of transformers, from a local folder, for fine-tuning: all weights, or adapters alone.
#
# With `lora` the weights of the folder are frozen, in BF16 beneath autocast to it, or in the eight bits of a packed
# folder. Adapters of PEFT (`octavo.integrations.peft`) are trained around its linear layers.


def open_language_model(config: Config, saved: Path, device: torch.device = CPU) -> nn.Module:
    """The model of the folder `config.model` with its weights, in FP32; of a resumed run with random ones. Where they
    are frozen (`lora`), they are always those of the folder, in BF16 or packed. A packed model is on `device`. On the
    meta device a model has its parameters there, and its buffers on the CPU."""
    auto, meta = _transformers(config.model).AutoModelForCausalLM, device == META
    source = saved if saved.exists() and (meta or not config.lora) else Path(config.model)
    check_folder(source, config)
    if meta or source == saved:
        described = open_config(source)
        with quiet_transformers(), reading(source, DESCRIPTION, ArtifactError), META if meta else nullcontext():
            model: Any = auto.from_config(described, dtype=torch.float32)
        if meta:
            meta_model.compute_buffers(model, "cpu")
        return _prepared(model, config)
    if is_packed(source):
        if (config.recipe, config.skip, config.bf16_gemms, config.only_if_faster) != ("rowwise", (), (), False):
            raise ConfigError(
                f"{source} is packed, and its layers compute by its schemes: leave recipe, skip, bf16_gemms and "
                "only_if_faster out"
            )
        return _prepared(open_transformers(source, device), config)
    reader = ShardReader(source)
    meta_model.check_unpacked(reader)
    if reader.strays:
        raise ArtifactError(
            f"{source} has {reader.strays[0]} in a second file, which its index takes from another file, and "
            f"transformers would take the last ({len(reader.strays)} such tensors): save the model again"
        )
    dtype = torch.bfloat16 if config.lora and config.precision == "bf16" else torch.float32
    with quiet_transformers(), reading(source, DESCRIPTION, ArtifactError):
        model, found = open_local(auto, source, config=open_config(source), dtype=dtype, output_loading_info=True)
        _check_opened(model, sorted(found["missing_keys"]), source)
    return _prepared(model, config)


def _transformers(name: str) -> Any:
    return import_extra("transformers", "hf", f"model {name!r} is a Hugging Face folder, which transformers opens")


def positions_of(folder: Path) -> int:
    """The longest context of the model that `folder`/config.json describes; sys.maxsize if the file states none."""
    described = read_json(folder / "config.json")
    found = (described.get(key) for key in (*meta_model.POSITIONS, "n_positions"))
    return next((number for number in found if isinstance(number, int) and number > 0), sys.maxsize)


def _prepared(model: Any, config: Config) -> nn.Module:
    if config.context > (limit := meta_model.stated_positions(model)):
        raise ConfigError(f"context must be at most the model's {limit} positions, got {config.context}")
    model.config.use_cache = False
    return model


PACKED = ("quantization_config", "compression_config")  # the entries of config.json that state a quantization


def is_packed(folder: Path) -> bool:
    """True if a model folder states a quantization."""
    stated = read_json(folder / "config.json")
    return any(key in stated for key in PACKED) or (folder / SIDE_FILE).is_file()


def check_folder(folder: Path, config: Config) -> None:
    """A ConfigError unless transformers has the causal language model of the folder, and its weights can train: those
    of a packed folder cannot, and are for adapters alone."""
    name = config.model
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model must be {', '.join(BUILT_IN_MODELS)} or a local folder with a config.json, got {name!r}"
            + hub_hint(name)
        )
    described = read_json(folder / "config.json")
    if is_packed(folder) and not config.lora:
        raise ConfigError(
            f"{name} is quantized already: train adapters around its weights with --lora 16, or the BF16 model that it "
            f"was made from, or widen it first with octavo unpack {name} OUT"
        )
    meta_model.check_counts(described, folder)
    transformers, kind = _transformers(name), described.get("model_type")
    known = transformers.CONFIG_MAPPING
    if kind not in known and "auto_map" not in described:
        raise ConfigError(
            f"{folder / 'config.json'} has the model_type {kind!r}, which transformers {transformers.__version__} does "
            "not implement: upgrade transformers, or choose another model"
        )
    if kind in known and known[kind] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{folder / 'config.json'} has the model_type {kind!r}, of which transformers has no causal language "
            "model: octavo train needs one (Llama, Qwen, Mistral, GPT-2, ...). octavo.convert takes any model, for a "
            "training loop of your own, and octavo.dtype_flow(model, inputs) shows its dtypes"
        )


def _check_opened(model: Any, missing: list[str], source: Path) -> None:
    """Raise an error unless the model is causal, and all of its weights were in the folder, and finite."""
    if not meta_model.is_causal(model, model.get_input_embeddings().num_embeddings):
        if damaged := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
            raise ArtifactError(f"{source}: {damaged[0]} holds inf or NaN: take a model that has not diverged")
        raise ConfigError(
            f"{source} is a {type(model).__name__} that is not causal: changing the last token of a sequence changes "
            "the logits of earlier tokens, so its attention sees the token that it is to predict. octavo train "
            "minimizes the loss of the next token, for which a causal language model is required (Llama, Qwen, "
            "Mistral, GPT-2, ...): choose such a model"
        )
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(other):
            raise ConfigError(meta_model.untied(source, other, name))
    if missing:
        raise ConfigError(
            f"{source} lacks weights of the {type(model).__name__} that its config.json describes: {missing[0]} "
            f"({len(missing)} in all). transformers would draw them at random: complete the folder"
        )


def add_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Put the adapters of the settings around the layers of `model`, converted or packed, and freeze all else."""
    if config.lora:
        import_extra("peft", "peft", "lora trains adapters of PEFT")
        from octavo.integrations.peft import inject

        dtype = torch.bfloat16 if config.optimizer.weights == "bf16" else torch.float32
        try:
            inject(model, config.lora, config.alpha or 2 * config.lora, config.targets, dtype, config.model)
        except ValueError as error:
            raise ConfigError(f"{config.model}: {error}") from error
    return model


# ---- The blocks of a model, and what is done to each of them: activation checkpointing and compilation.
#
# Activation checkpointing (Chen et al., arXiv:1604.06174) is inside of the compiled code, so the compiler sees what the
# backward pass computes again. MLPs and experts that run fused compute their hidden inputs again by themselves.


# Selective checkpointing saves the outputs of the first, and of every second of the others. Both are slow to compute:
# the first because their cost grows with the square of the sequence.
_ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}").default
    for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
] + [torch.ops.octavo.fp8_attention.default]
_GEMMS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.octavo.scaled_mm.default]


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The repeated blocks of a model, in order: the list of one class with the most parameters, or a ConfigError."""
    found = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    lists = [module for module in found if len({type(entry) for entry in module}) == 1]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} must have a list of equal blocks for compile.blocks, activation_checkpointing, "
            "optimizer.masters and parallel, and has none: leave these settings out"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def blocks_gathered_together(model: nn.Module) -> list[list[nn.Module]]:
    """The blocks of a model, in order, in lists that FSDP2 gathers and reduces together (`unit_size`)."""
    blocks = list(find_blocks(model))
    size = unit_size(max(sum(p.numel() for p in block.parameters()) for block in blocks))
    return [blocks[i : i + size] for i in range(0, len(blocks), size)]


def prepare_blocks(model: nn.Module, config: Config) -> None:
    """Apply the tables `activation_checkpointing` and `compile` to the blocks of a converted model, in place."""
    mode = config.activation_checkpointing.mode
    blocks: list[Any] = [] if mode == "none" else list(find_blocks(model))
    if mode == "selective" and not (config.lora and config.precision == "fp16"):  # adapters in float16 run one by one
        blocks = [block for block in blocks if not recompute_hidden(block)]
    if blocks:
        # PyTorch's autograd_function_apply saves the tensors of an autograd.Function, and every converted layer is one,
        # past the hooks of checkpointing. The other backends plan both passes in one graph.
        saves = config.compile.blocks and config.compile.backend == "eager"
        required = "a compile.backend that computes converted layers again, and does not save their tensors"
        remedy = "give --compile.backend aot_eager or inductor, --no-compile.blocks, or mode none"
        refuse(config, ("activation_checkpointing.mode", saves, required, "compile.backend eager", remedy))
        contexts: dict[str, Any] = {"context_fn": _selective} if mode == "selective" else {}
        if mode == "full" and config.compile.blocks:
            contexts = {"context_fn": _nothing}
        for block in blocks:
            block.forward = _checkpointed(block.forward, contexts)
            block.activation_checkpointing = mode  # read by octavo.watch
    if config.compile.blocks:
        if config.compile.backend not in (known := torch.compiler.list_backends(exclude_tags=())):
            raise ConfigError(f"compile.backend must be one of {', '.join(known)}; got {config.compile.backend!r}")
        if config.compile.backend == "inductor":
            register_lowerings()  # of a model in BF16 too, which has none of our operations
        for block in find_blocks(model):
            block.compile(backend=config.compile.backend)


def eager() -> AbstractContextManager[Any]:
    """Run compiled blocks as they were before, for passes that would compile them anew: with a cache, or with hooks."""
    return torch.compiler.set_stance("force_eager")


def _checkpointed(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # not a functools.partial, of which Dynamo would compile nothing
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return run


def _nothing() -> Any:
    """Compiled code needs a policy to save nothing. Without one, PyTorch 2.11 recomputes no operation inside an
    autograd.Function that Dynamo traces. Layers that are observed or that have histories are traced
    (`octavo.nn.linear_function`): their tensors would be saved, and no memory gained."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)  # type: ignore[no-untyped-call]


def _selective() -> Any:
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _GEMMS:
            counts[context.is_recompute] += 1
        saved = operation in _ATTENTION or (operation in _GEMMS and counts[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


# ---- A model whose layers, weights and optimizer state are divided among the processes of a run.


class TrainedModel(NamedTuple):
    """A converted model that is ready for training, its loss, and the reports of its preparation."""

    model: nn.Module
    loss: Loss
    report: Conversion | None
    gathered: GatherReport | None = None


def make_trained_model(
    config: Config, vocabulary: int, saved: Path, device: torch.device, degrees: Degrees
) -> TrainedModel:
    """The model of `make_model`, divided among the processes of a mesh if there are several, or offloading. Its weights
    are the same for any number of processes. Every rank must call this."""
    divided = degrees.processes > 1 or config.optimizer.offload
    mesh = make_mesh(degrees, device, config.parallel.timeout) if divided else None
    with same_outcome():
        resumed = saved.exists()  # asked here, since rank 0 writes the folder of a new run when it is ready
        weights: dict[str, Any] = {}
        if mesh is None:
            model = make_model(config, vocabulary, saved, device).to(CPU if config.optimizer.on_host else device)
        elif config.model in BUILT_IN_MODELS:
            with OneProcessDraws():  # type: ignore[no-untyped-call]
                model = make_model(config, vocabulary, saved, META)
        else:
            if rank() == 0 and not resumed:
                weights = open_language_model(config, saved).state_dict()
            model = make_model(config, vocabulary, saved, META)
        loss = make_loss(config, model)
        report = convert_model(model, config, device if divided or config.optimizer.on_host else None, degrees.data)
        spare_search(model)
    if mesh is None:
        prepare_blocks(model, config)
        return TrainedModel(model, loss, report)
    fp8 = report is not None and bool(report.converted) and report.recipe.quantized
    gathered = parallelize(model, config, mesh, fp8=fp8)
    _materialize(model, device, CPU if config.optimizer.offload else device)
    if not resumed:  # the checkpoint of a resumed run has the weights
        _fill(model, weights)
    torch.manual_seed(config.seed + 1 + degrees.share(rank())[0])  # dropout differs where the sequences do
    return TrainedModel(model, loss, report, gathered)


def parallelize(model: nn.Module, config: Config, mesh: DeviceMesh, *, fp8: bool) -> GatherReport | None:
    """Divide a model, which may be on the meta device, among the processes of `mesh`. `fp8`: it has FP8 layers."""
    if mesh["tp"].size() > 1:
        try:
            tensor_parallel(model, mesh["tp"], asynchronous=config.parallel.async_tp)
        except ValueError as error:
            raise ConfigError(f"set parallel.tp back to 1, or to another degree that can run: {error}") from error
    prepare_blocks(model, config)
    data = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
    on_cpu = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    options: dict[str, Any] = {
        "mesh": data,
        # The sums of gradients are FP32 for BF16 weights too. The residual stream has the dtype of the embedding.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.parallel.gather_dtype == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": on_cpu if config.optimizer.offload else OffloadPolicy(),
    }
    for unit in blocks_gathered_together(model):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    send_bf16_gradients(model)
    return fp8_all_gather(model) if fp8 and config.parallel.fp8_all_gather else None


def _materialize(model: Any, device: torch.device, storage: torch.device) -> None:
    """Give memory to tensors on the meta device, and move the rest: parameters to `storage`, buffers to `device`."""

    def place(t: Tensor) -> Tensor:
        where = storage if isinstance(t, DTensor) else device
        return torch.empty_like(t, device=where) if t.is_meta else t.to(where)

    model._apply(place)
    model.tie_weights()  # a parameter that leaves the meta device is a new one for each module that shares it


def _fill(model: Any, weights: dict[str, Any]) -> None:
    """Give the parameters their values: drawn ones, or the `weights` of rank 0."""
    if isinstance(model, Decoder):
        with OneProcessDraws():  # type: ignore[no-untyped-call]
            model.init_weights()
    else:
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=whole)


class OneProcessDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, random numbers for parameters are those that one process draws for whole tensors on the CPU.
    Every process draws the whole tensor from torch's global generator, and a DTensor takes its own part of it. The
    numbers for a tensor on the meta device are drawn and dropped, so that the generator is where one process has it. So
    the largest parameter, and not the model, must fit in the memory of the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        if func not in draws or not (isinstance(args[0], DTensor) or args[0].is_meta):
            return func(*args, **(kwargs or {}))
        tensor, *numbers = args
        whole = func(torch.empty(tensor.shape, device="cpu"), *numbers, **(kwargs or {}))  # FP32, as one process draws
        if isinstance(tensor, DTensor):
            part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(part.to_local())
        return tensor
