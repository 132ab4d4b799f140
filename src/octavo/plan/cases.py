"""A question to `octavo plan`: a model, GPUs and settings; and the cases of a comparison, which differ in one of them.

Three defaults differ from those of `octavo train`: blocks are compiled, the context is the model's (at most 8,192
tokens), and the batch is one sequence for each GPU that works on its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.artifact.packed.scheme import CHANNEL, SCHEME_OF, Scheme
from octavo.artifact.run import RunFolder
from octavo.models import BUILT_IN_MODELS
from octavo.plan.architecture import Architecture
from octavo.plan.gemms import chosen_recipe
from octavo.plan.hardware import Gpu, find_gpu
from octavo.plan.models import find_architecture, model_presets
from octavo.plan.schemes import NAMES, find_scheme, refusal
from octavo.plan.server import Server
from octavo.plan.serving import ServingPlan, plan_serving
from octavo.plan.setup import make_setup
from octavo.plan.training import TrainingPlan
from octavo.train.config import Config
from octavo.train.mesh import find_degrees
from octavo.train.run_settings import read_settings
from octavo.train.settings import PRESETS

CONTEXT = 8192
_SIZES = (
    "--model", "--layers", "--width", "--heads", "--kv-heads", "--mlp-width", "--tied", "--bias", "--vocabulary",
    "--experts.count", "--experts.top-k", "--experts.shared-width",
)  # fmt: skip


_SERVING = {"scheme": "scheme", "kv-cache": "cache", "attention": "attention"}  # options, and fields of a case


@dataclass(frozen=True)
class Case:
    """A question to `octavo plan`.

    Attributes:
        model: a preset, a Hugging Face folder, a config.json, or a TOML file of settings or a run of octavo train,
            with their own model.
        settings: settings of training, as on a command line.
        gpu, gpus: the name and the number of GPUs.
        network: Gb/s of a GPU's network card.
        scheme: of the packed layers in serving, or bf16; "" takes that of the recipe, as `octavo pack` does.
        cache, attention: dtypes of keys and values, and of the attention of prompts, in serving.
    """

    model: str
    settings: tuple[str, ...] = ()
    gpu: str = "h200"
    gpus: int = 1
    network: float = 400.0
    scheme: str = ""
    cache: str = "bf16"
    attention: str = "bf16"

    def training(self) -> TrainingPlan:
        usual = Case(self.model)
        for name, field in _SERVING.items():
            if getattr(self, field) != getattr(usual, field):
                raise ValueError(f"--{name} belongs to serving: add --serve")
        if self.network <= 0:
            raise ValueError(f"--network must be above 0 Gb/s; got {self.network:g}")
        model, config = self._resolve()
        return TrainingPlan(make_setup(model, config, find_gpu(self.gpu), self.gpus), self.network / 8 * 1e9)

    def serving(self) -> ServingPlan:
        """The GPUs share each layer; the setting batch counts the sequences that are generated at once."""
        return plan_serving(self._server())

    def _server(self) -> Server:
        model, config = self._resolve()
        gpu = find_gpu(self.gpu)
        scheme = find_scheme(self.scheme) if self.scheme else _usual_scheme(config, gpu)
        batch = config.batch if "--batch" in _names(self.settings) else 1
        return Server(model, scheme, gpu, self.gpus, batch, config.context, self.cache, self.attention)

    def _resolve(self) -> tuple[Architecture, Config]:
        """The model's layers, and the settings with the defaults of a plan."""
        own = self._own_settings()
        if own is not None:
            return find_architecture("" if own.model in BUILT_IN_MODELS else own.model, own), own
        config = Config.load(None, self.settings)
        model, given = find_architecture(self.model, config), _names(self.settings)
        _check_fixed(model, config, given)
        values: dict[str, object] = {}
        if "--context" not in given:
            values["context"] = min(model.context, CONTEXT)
        if not {"--compile.blocks", "--no-compile.blocks", "--compile"} & given:
            values["compile.blocks"] = True
        if "--batch" not in given and self.gpus >= 1:
            values["batch"] = find_degrees(config.parallel, self.gpus).data
        return model, config.change(**values)

    def _own_settings(self) -> Config | None:
        """The settings of a run, a TOML file or a preset of octavo train; None for another model."""
        run = RunFolder(Path(self.model))
        if run.has_model:
            return read_settings(run).replace(self.settings)
        if self.model.endswith(".toml") or (self.model in PRESETS and self.model not in model_presets()):
            return Config.load(self.model, self.settings)
        return None


def make_cases(case: Case, compare: str) -> list[tuple[str, Case]]:
    """The cases of `compare`, NAME=VALUE,VALUE: each a label and a case that differs from `case` in that setting.

    NAME is a setting of training, or model, gpu, gpus, network, scheme, kv-cache or attention. An empty `compare` gives
    the case alone.

    Raises:
        ValueError: `compare` is of another form.
    """
    if not compare:
        return [(case.model, case)]
    name, _, values = compare.partition("=")
    if not name or not all(values.split(",")):
        raise ValueError(f"--compare must be NAME=VALUE,VALUE such as recipe=bf16,rowwise; got {compare!r}")
    return [(f"{name} {value}", _with(case, name, value)) for value in values.split(",")]


def plan_schemes(case: Case) -> list[ServingPlan]:
    """The plan of serving in BF16, and with each scheme that can pack the model and that the GPU has a kernel for."""
    servers = [replace(case, scheme=name)._server() for name in NAMES]
    return [plan_serving(each) for each in servers if not refusal(each.model, each.scheme, each.gpu)]


def _usual_scheme(config: Config, gpu: Gpu) -> Scheme | None:
    """The scheme of the recipe in `config`, as `octavo pack` chooses it for a run; None for bf16."""
    recipe = chosen_recipe(config.recipe, gpu)
    return find_scheme(SCHEME_OF.get(recipe.name, CHANNEL.name)) if recipe.quantized else None


def _with(case: Case, name: str, value: str) -> Case:
    changes: dict[str, Any] = {}
    if name in ("model", "gpu", *_SERVING):
        changes[_SERVING.get(name, name)] = value
    elif name in ("gpus", "network"):
        if not re.fullmatch(r"-?\d+", value):
            raise ValueError(f"--compare {name}= takes numbers such as 8,64; got {value!r}")
        changes[name] = int(value)
    else:
        option = f"--{name}"
        changes["settings"] = (*_without(case.settings, option), option, value)
    return replace(case, **changes)


def _without(settings: Sequence[str], option: str) -> list[str]:
    """The settings without an option and its value, so that a comparison can set it again."""
    kept: list[str] = []
    dropping = False
    for word in settings:
        if word.startswith("--"):
            dropping = word.partition("=")[0] == option
        if not dropping:
            kept.append(word)
    return kept


def _check_fixed(model: Architecture, config: Config, given: set[str]) -> None:
    """A ValueError if a setting is given that would change the sizes of a preset or a config.json."""
    fixed = [name for name in _SIZES if name in given or name.replace("--", "--no-") in given]
    if fixed:
        raise ValueError(f"{model.name} has sizes of its own: leave out {fixed[0]}, or plan a TOML file of settings")
    if not model.vocabulary and "--context" in given and config.context != model.context:
        raise ValueError(f"--context of the image model {model.name} is {model.context}; got {config.context}")


def _names(settings: Sequence[str]) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in settings if word.startswith("--")}


def parse_count(text: str) -> float | None:
    """A number such as 7B, 1.5T or 300M; None if `text` is no such number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", text, re.IGNORECASE)
    return float(found[1]) * {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()] if found else None
