"""A question to `octavo plan`: a model, GPUs and settings; and the cases of a comparison, which differ in one of them.

Three defaults differ from those of `octavo train`: blocks are compiled, the context is the model's (at most 8,192
tokens), and the batch is one sequence for each GPU that works on its own.
"""

import difflib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import combinations, islice, product
from operator import attrgetter
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import read_json
from octavo.checkpoint.folder import BUILT_IN_MODELS, RUN_OR_MODEL, RunFolder, check_config
from octavo.checkpoint.scheme import CHANNEL, SCHEME_OF
from octavo.ops.dispatch import Backend
from octavo.plan.memory import Memory, plan_memory
from octavo.plan.model_shape import Architecture, describe_architecture, positive_sizes
from octavo.plan.serving import BF16, NAMES, Server, ServingPlan, find_scheme, plan_serving, refusal
from octavo.plan.setup import Setup, chosen_recipe, find_gemms, find_origins, make_setup
from octavo.plan.step_time import Product, StepTime, block_products, plan_step
from octavo.rates.measured import HOST_CORES, find_gpu, fp8_speed, layer_speedup
from octavo.train.config import PRESETS, AttentionSettings, Config
from octavo.train.processes import find_degrees
from octavo.train.settings import known_vocabulary, parse, read_file, read_settings
from octavo.util import hub_hint

# ---- The plan of a training run: memory, time, speed, and which layers gain from the recipe.


MODE = "activation_checkpointing.mode"
CHECKPOINTING = ("none", "selective", "full")  # the modes, from the fastest to the smallest
RECIPES = ("bf16", "rowwise")  # that a search compares
# Numbers of GPUs that a search tries, and how many that are enough it finds for each recipe.
SIZES, ENOUGH = (1, 2, 4, *range(8, 128, 8), *(size for n in range(7, 15) for size in (1 << n, 3 << n - 1))), 4
LARGEST = 1 << 20  # sequences of a micro-batch on one GPU
WORTHWHILE = 1.02  # times the tokens a second, for which another setting is worth naming


@dataclass(frozen=True)
class TrainingPlan:
    """Memory and time of a training run; `network`: bytes a second of a GPU's network card."""

    setup: Setup
    network: float = 50e9

    @cached_property
    def memory(self) -> Memory:
        return plan_memory(self.setup)

    @cached_property
    def time(self) -> StepTime:
        return plan_step(self.setup, self.network)

    @property
    def gemms(self) -> dict[str, Backend]:
        """The backends of y, dx and dw."""
        return find_gemms(self.setup.recipe, self.setup.gpu)

    @property
    def gpus(self) -> int:
        return self.setup.degrees.processes

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.setup.gpu.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one GPU trains on in a second."""
        return self.setup.config.step_tokens / self.time.total / self.gpus

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization against the BF16 peak of the data sheet. Every query counts with every key, although
        a causal attention computes half of these pairs."""
        model = self.setup.model
        heads = sum(block.count * (block.attention.queries + block.attention.output) for block in model.blocks)
        flops = 6.0 * (model.active_parameters + heads * self.setup.config.context)
        return flops * self.tokens_per_second / self.setup.gpu.bf16

    def days(self, tokens: float) -> float:
        """Days to train on so many tokens."""
        return tokens / (self.tokens_per_second * self.gpus) / 86400

    def cost(self, tokens: float, price: float) -> float:
        """The cost of training on `tokens` tokens, at `price` for an hour of one GPU."""
        return self.days(tokens) * 24 * self.gpus * price

    @property
    def products(self) -> list[Product]:
        """The GEMMs of each kind of block."""
        return [each for block in self.setup.model.blocks for each in block_products(self.setup, block)]

    @property
    def gains(self) -> dict[Product, float]:
        """The quantized GEMMs, with the speed of their forward and backward pass as a multiple of that in BF16."""
        gpu, recipe = self.setup.gpu, self.setup.recipe
        return {each: layer_speedup(gpu, recipe, each.shape, each.count) for each in self.products if each.quantized}

    @property
    def fp8_attention_speed(self) -> float | None:
        """The speed of attention in FP8, forward and backward, as a multiple of that in BF16. None where attention does
        not run in FP8, or texts are shorter than those that it is meant for."""
        asked = replace(self.setup, config=replace(self.setup.config, attention=AttentionSettings("fp8")))
        return fp8_speed("forward and backward", asked.config.context) if asked.fp8_attention else None

    @property
    def largest_batch(self) -> int:
        """The most sequences of a micro-batch, of all GPUs, that fit; 0 if none do."""
        step = self.setup.degrees.data

        def exceeds(sequences: int) -> bool:
            setup = replace(self.setup, config=replace(self.setup.config, batch=sequences * step))
            return plan_memory(setup).peak > setup.gpu.memory

        return bisect_left(range(1, LARGEST), True, key=exceeds) * step

    def changed(self, gpus: int = 0, sequences: int = 0, **settings: Any) -> "TrainingPlan | None":
        """The same run on other GPUs, with so many sequences of a micro-batch on each, and with other settings; None
        where that is not possible. The tokens of a step stay the same where the micro-batches allow it."""
        setup, gpus = self.setup, gpus or self.gpus
        try:
            data = find_degrees(setup.config.parallel, gpus).data
            config = _shared(setup.config, sequences or max(setup.config.batch // setup.degrees.data, 1), data)
            return replace(self, setup=make_setup(setup.model, config.change(**settings), setup.gpu, gpus))
        except ValueError:
            return None

    @property
    def faster_settings(self) -> dict[str, float]:
        """Where the GPU waits for the host: options of `octavo train` that give it more work for the same launches,
        share the update, or launch less. Each has its tokens/s as a multiple."""
        config, found = self.setup.config, {}
        changes: dict[str, dict[str, Any]] = {
            f"--batch {2 * config.batch}": {"batch": 2 * config.batch},
            f"--accumulate {4 * config.accumulate}": {"accumulate": 4 * config.accumulate},
            "--activation-checkpointing.mode none": {MODE: "none"},
            "--compile.blocks": {"compile.blocks": True},
            "--no-parallel.fp8-all-gather": {"parallel.fp8_all_gather": False},
            "--recipe bf16": {"recipe": "bf16"},
        }
        for option, change in changes.items() if self.time.parts["waiting"] else ():
            other = self.changed(**change)
            if other and other.fits and other.tokens_per_second >= WORTHWHILE * self.tokens_per_second:
                found[option] = other.tokens_per_second / self.tokens_per_second
        return found

    @cached_property
    def fitting(self) -> dict[str, "TrainingPlan"]:
        """Where the plan does not fit: the options with which it does, and their plans; as few changes as possible. In
        each kind of change the fewest GPUs count, then the most tokens a second."""
        sequences, mode = self.setup.config.batch // self.setup.degrees.data, attrgetter(MODE)(self.setup.config)
        kinds: dict[str, list[Any]] = {
            "sequences": [sequences >> n for n in range(1, sequences.bit_length())],
            MODE: list(CHECKPOINTING[CHECKPOINTING.index(mode) + 1 :]),
            "recipe": [name for name in RECIPES if name != self.setup.recipe.name],
            "optimizer.state": ["8bit"],
            "optimizer.weights": ["bf16"],
            "optimizer.offload": [True],
            "gpus": [self.gpus << n for n in range(1, 8)],
        }
        for count in range(1, 4) if not self.fits else ():
            found: dict[str, TrainingPlan] = {}
            for names in combinations(kinds, count):
                values = product(*(kinds[name] for name in names))
                others = [self.changed(**dict(zip(names, each, strict=True))) for each in values]
                if fit := [each for each in others if each and each.fits]:
                    best = min(fit, key=lambda plan: (plan.gpus, -plan.tokens_per_second))
                    found[" ".join(best._options(names))] = best
            if found:
                return found
        return {}

    def _options(self, names: Sequence[str]) -> Iterator[str]:
        """Settings of this plan as on a command line; the batch counts the sequences of all GPUs."""
        for name in names:
            if name == "gpus":
                yield f"--gpus {self.gpus}"
            elif name != "sequences":
                value = attrgetter(name)(self.setup.config)
                yield f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        if {"gpus", "sequences"} & {*names}:
            yield f"--batch {self.setup.config.batch} --accumulate {self.setup.config.accumulate}"

    @property
    def origins(self) -> dict[str, str]:
        """For each kind of figure, whether it rests on measurements of such a model or on the data sheet."""
        setup, products = self.setup, [(each.shape, each.count) for each in self.products]
        found = find_origins(setup.model, setup.gpu, setup.recipe, products, setup.attention_limit)
        found["host"] = "measured with compiled blocks of a Llama on hosts of H200s, which differ by 15 %"
        if setup.states.offloaded:
            found["AdamW on the host"] = f"measured with masters on the host of an H200, {HOST_CORES} cores"
        return found

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-compatible values: bytes and seconds."""
        setup, memory, time = self.setup, self.memory, self.time
        return {
            "model": setup.model.name,
            "parameters": setup.model.parameters,
            "recipe": setup.recipe.name,
            "gemms": {name: backend.name for name, backend in self.gemms.items()},
            "gpu": setup.gpu.name,
            "gpus": self.gpus,
            "tokens_per_step": self.setup.config.step_tokens,
            "memory": {**memory.parts, "peak": memory.peak, "offloaded": memory.offloaded, "moment": memory.moment},
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "seconds": {**time.parts, "total": time.total},
            "host_seconds": time.host,
            "tokens_per_second_a_gpu": self.tokens_per_second,
            "utilization": self.utilization if self.fits else None,
            "fitting": {
                options: {"peak": plan.memory.peak, "tokens_per_second_a_gpu": plan.tokens_per_second}
                for options, plan in self.fitting.items()
            },
            "gains": [{"layer": p.layer, "shape": [*p.shape], "speedup": speed} for p, speed in self.gains.items()],
            "fp8_attention_speed": self.fp8_attention_speed,
            "faster_settings": self.faster_settings,
            "origins": self.origins,
        }


def _shared(config: Config, sequences: int, data: int) -> Config:
    """The settings with so many sequences of a micro-batch for each of `data` GPUs, and as many tokens a step."""
    batch = sequences * data
    return config.change(batch=batch, accumulate=max(round(config.batch * config.accumulate / batch), 1))


# ---- The model that a person names: a preset, a Hugging Face folder or config.json, or the settings of a training run.


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """The fields of each preset, by its name, as in a config.json; "source" is where they come from."""
    return json.loads((files("octavo.plan") / "models.json").read_text())


def find_architecture(model: str) -> Architecture:
    """The architecture of `model`: a preset, a Hugging Face folder, or a config.json."""
    if model.lower() in model_presets():
        return describe_architecture(model.lower(), model_presets()[model.lower()])
    path = Path(model)
    if path.is_dir():
        check_config(path, RUN_OR_MODEL)
        path = path / "config.json"
    if not path.is_file():
        presets = sorted(model_presets().keys() | PRESETS.keys())
        near = difflib.get_close_matches(model.lower(), presets, n=3, cutoff=0.5)
        advice = f"the nearest presets are {', '.join(near)}; " if near else ""
        if model in BUILT_IN_MODELS:
            advice = f'for a {model} of octavo train give a .toml file with model = "{model}" and its sizes; '
        raise ValueError(
            f"MODEL must be a preset, a run or a .toml file of octavo train, a Hugging Face folder, a config.json or a "
            f"number of parameters such as 7B; got {model!r}: {advice}all presets: {', '.join(presets)}"
            f"{hub_hint(model)}"
        )
    return positive_sizes(describe_architecture(str(path), read_json(path)))


def built_in_architecture(config: Config) -> Architecture:
    """Octavo's own model of the sizes in `config`. The settings of its tokenizer say how many tokens that has."""
    vocabulary = known_vocabulary(config)
    if vocabulary is None:
        raise ValueError(
            f"the settings do not say how many tokens the tokenizer {config.tokenizer} has: plan with --tokenizer bpe "
            "--vocabulary NUMBER"
        )
    sizes = {
        "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "vocab_size": vocabulary, "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied, "enable_bias": config.bias,
    }  # fmt: skip
    if config.model == "gpt2":
        return describe_architecture("gpt2", sizes | {"model_type": "opt", "ffn_dim": 4 * config.width})
    if config.model == "mixture":
        experts = {
            "model_type": "qwen2_moe", "intermediate_size": config.mlp_width, "num_experts": config.experts.count,
            "moe_intermediate_size": config.mlp_width, "num_experts_per_tok": config.experts.top_k,
            "shared_expert_intermediate_size": config.experts.shared_width, "qkv_bias": False,
        }  # fmt: skip
        return describe_architecture("mixture", sizes | experts)
    return describe_architecture("llama", sizes | {"model_type": "llama", "intermediate_size": config.mlp_width})


# ---- A question to `octavo plan`, the cases of a comparison, and the search for GPUs.


CONTEXT = 8192
_SIZES = (
    "model", "layers", "width", "heads", "kv_heads", "mlp_width", "tied", "bias", "vocabulary", "experts.count",
    "experts.top_k", "experts.shared_width",
)  # fmt: skip
_SERVING = {"scheme": "scheme", "kv-cache": "cache", "attention": "attention"}  # options, and fields of a case


@dataclass(frozen=True)
class Case:
    """A question to `octavo plan`: a model, settings by name, GPUs, and Gb/s of a GPU's network card. The model is one
    of `find_architecture`, a file of settings, a preset, or a run of octavo train. In serving: the `scheme` of the
    packed layers ("" for that of the recipe), and the dtypes of the `cache` of keys and values and of the `attention`
    of prompts."""

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    gpu: str = "h200"
    gpus: int = 1
    network: float = 400.0
    scheme: str = ""
    cache: str = "bf16"
    attention: str = "bf16"

    def training(self) -> TrainingPlan:
        """The plan of a training run. A preset of `octavo train` has its own settings, as a run and a file do."""
        for name, own in _SERVING.items():
            if getattr(self, own) != getattr(Case, own):
                raise ValueError(f"--{name} belongs to serving: add --serve")
        given = dict(self.settings)
        lora = given.pop("lora", 0)
        model, config = replace(self, settings=given)._resolve(self.model in PRESETS)
        if lora := lora or config.lora:
            raise ValueError(f"the training of all weights can be planned, not that of adapters: leave out lora {lora}")
        return TrainingPlan(make_setup(model, config, find_gpu(self.gpu), self.gpus), self._network())

    def serving(self) -> ServingPlan:
        """The GPUs share each layer; the setting batch counts the sequences that are generated at once."""
        return plan_serving(self._server())

    def _network(self) -> float:
        """Bytes a second of a GPU's network card."""
        if self.network <= 0:
            raise ValueError(f"--network must be above 0 Gb/s; got {self.network:g}")
        return self.network / 8 * 1e9

    def _server(self) -> Server:
        model, config = self._resolve(self.model in PRESETS.keys() - model_presets().keys())
        gpu = find_gpu(self.gpu)
        recipe = chosen_recipe(config.recipe, gpu)  # whose scheme is the usual one, as `octavo pack` chooses it
        usual = SCHEME_OF.get(recipe.name, CHANNEL.name) if recipe.quantized else BF16
        scheme = find_scheme(self.scheme or usual)
        batch = config.batch if "batch" in self.settings else 1
        sizes = self.gpus, batch, config.context
        return Server(model, scheme, gpu, *sizes, self.cache, self.attention, self._network())

    def _resolve(self, preset: bool) -> tuple[Architecture, Config]:
        """The model's layers, and its own settings, or those given with the defaults of a plan."""
        if (own := self._own_settings(preset)) is not None:
            if own.model not in BUILT_IN_MODELS:
                return find_architecture(own.model), own
            return replace(built_in_architecture(own), name=self.model), own
        config = Config().change(**self.settings)
        model = find_architecture(self.model)
        if size := next((f"--{name.replace('_', '-')}" for name in _SIZES if name in self.settings), ""):
            raise ValueError(f"{model.name} has sizes of its own: leave out {size}, or plan a TOML file of settings")
        if not model.vocabulary and "context" in self.settings and config.context != model.context:
            raise ValueError(f"--context of the image model {model.name} is {model.context}; got {config.context}")
        usual: dict[str, Any] = {"context": min(model.context, CONTEXT), "compile.blocks": True}
        usual["parallel.gather_dtype"] = "bf16"  # as the presets of training: FP32 would slow BF16 more than FP8
        if "batch" not in self.settings and self.gpus >= 1:
            usual["batch"] = find_degrees(config.parallel, self.gpus).data
        return model, config.change(**{**usual, **self.settings})

    def _own_settings(self, preset: bool) -> Config | None:
        """The settings of a run, a TOML file or, if it is one, a `preset` of octavo train; None for another model. A
        preset gets more sequences and fewer micro-batches where it has fewer sequences than GPUs."""
        run = RunFolder(Path(self.model))
        if run.has_model and not preset:
            return read_settings(run).change(**self.settings)
        if not preset and not self.model.endswith(".toml"):
            return None
        config = Config.from_dict(read_file(Path(self.model)), self.model, self.settings)
        data = find_degrees(config.parallel, self.gpus).data if preset and self.gpus >= 1 else 1
        fits = "batch" in self.settings or config.batch % data == 0
        return config if fits else _shared(config, max(config.batch // data, 1), data)


def make_cases(case: Case, compare: Sequence[str]) -> list[tuple[str, Case]]:
    """The cases of a comparison with their labels. Each of `compare` is NAME=VALUE,VALUE; several give every
    combination, and none the case alone. NAME is a setting of training, or model, gpu, gpus, network, scheme, kv-cache
    or attention."""
    cases = [("", case)]
    names = [each.partition("=")[0] for each in compare]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"--compare {twice} stands twice: give all its values once, as {twice}=VALUE,VALUE")
    for each in compare:
        name, _, values = each.partition("=")
        if not name or not all(values.split(",")):
            raise ValueError(f"--compare must be NAME=VALUE,VALUE such as recipe=bf16,rowwise; got {each!r}")
        cases = [
            (f"{label}, {name} {value}".removeprefix(", "), _with(before, name, value))
            for label, before in cases
            for value in values.split(",")
        ]
    return [(label or case.model, each) for label, each in cases]


def find_runs(case: Case, tokens: float, days: float) -> list[TrainingPlan]:
    """The runs that train on so many tokens in so many days, the cheapest first: of each recipe with the fewest GPUs.
    The recipe, checkpointing and the sequences of each GPU are searched unless the settings give them."""

    def choices(setting: str, values: Sequence[str]) -> list[dict[str, Any]]:
        """The values of a setting that the search tries; none but its own if it is given."""
        return [{}] if setting in case.settings else [{setting: value} for value in values]

    def fitting(recipe: dict[str, Any]) -> Iterator[TrainingPlan]:
        """The fastest run of each number of GPUs on which one fits; `fitted` keeps it."""
        for first in firsts:
            runs = [first.changed(sequences=n, **(recipe | mode)) for mode in modes for n in shares]
            if fit := [plan for plan in runs if plan and plan.fits]:
                fitted.append(max(fit, key=lambda plan: plan.tokens_per_second))
                yield fitted[-1]

    recipes = choices("recipe", RECIPES if find_gpu(case.gpu).fp8 else ["bf16"])
    modes, shares = choices(MODE, CHECKPOINTING), [0] if "batch" in case.settings else [1, 2, 4, 8]
    firsts, fitted, fault = list[TrainingPlan](), list[TrainingPlan](), None
    for gpus in SIZES:
        try:
            firsts.append(replace(case, gpus=gpus).training())
        except ValueError as error:  # degrees that this number does not have
            fault = error
    in_time = ((plan for plan in fitting(recipe) if plan.days(tokens) <= days) for recipe in recipes)
    if found := [plan for each in in_time for plan in islice(each, ENOUGH)]:
        return sorted(found, key=lambda plan: -plan.tokens_per_second)
    fastest = min(fitted, key=lambda plan: plan.days(tokens), default=None)  # nothing stopped the search above
    if fastest is None:
        advice = "give --optimizer.state 8bit, or a GPU with more memory"
        raise fault or ValueError(f"{case.model} fits on no number of GPUs up to {SIZES[-1]:,}: {advice}")
    raise ValueError(
        f"no number of GPUs up to {SIZES[-1]:,} trains on {tokens:g} tokens in {days:g} days: {fastest.gpus} take "
        f"{fastest.days(tokens):,.1f} days. Give more days, or a GPU that is faster"
    )


def plan_schemes(case: Case) -> list[ServingPlan]:
    """The plan of serving in BF16, and with each scheme that can pack the model and that the GPU has a kernel for."""
    servers = [replace(case, scheme=name)._server() for name in NAMES]
    return [plan_serving(each) for each in servers if not refusal(each.model, each.scheme, each.gpu)]


def _with(case: Case, name: str, value: str) -> Case:
    changed: dict[str, Any] = {_SERVING.get(name, name): value}
    if name in ("gpus", "network"):
        if not re.fullmatch(r"-?\d+", value):
            raise ValueError(f"--compare {name}= takes numbers such as 8,64; got {value!r}")
        changed = {name: int(value)}
    elif name not in ("model", "gpu", *_SERVING):
        changed = {"settings": {**case.settings, **parse([f"--{name}", value])}}
    return replace(case, **changed)


def parse_count(text: str) -> float | None:
    """A number such as 7B, 1.5T, 300M, 1e12 or 50000, at least 1; None if `text` is no such number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])|\d+(?:\.\d+)?e\+?\d\d?|\d{4,15}", text, re.IGNORECASE)
    if found is None:
        return None
    count = float(found[1]) * {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()] if found[1] else float(text)
    if count < 1:
        raise ValueError(f"a number of parameters or tokens must be at least 1; got {text}")
    return count
