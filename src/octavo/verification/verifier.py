"""Check a packed folder, and measure what packing cost.

The steps, in this order, each with its modules. No model runs on bytes that are wrong.

    stored_files, layer_spec, checks    the files, the settings and the tensors by themselves, then against those of the
                                        model that was packed, MODEL
    here                                the scales of inputs, keys and values against those that a calibration gives
    readers                             every reader installed here against a reference that is built from the bytes
    here                                on prompts, the error of each layer and of the model, beside INT8's
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from octavo.calibration.calibrator import Calibration, load_calibration
from octavo.calibration.site_statistics import Statistics
from octavo.checkpoint.files import ArtifactError, model_tensors
from octavo.checkpoint.folder import RunFolder, has_tokenizer, refuse_run
from octavo.checkpoint.scheme import reciprocal_warning, suspected
from octavo.comparison import LayerError
from octavo.evaluation.metrics import Budget, EmbeddingSums, LogitSums, check_budgets
from octavo.evaluation.prompts import OnRead, PromptOptions, open_prompts
from octavo.hf.meta_model import MetaModel, is_language_model, predicts_tokens, random_inputs, transformers_meta_model
from octavo.hf.source import Source, open_source
from octavo.nn.conversion_report import find_coverage
from octavo.util import Progress, choose_device, no_progress
from octavo.verification import layer_spec
from octavo.verification.checks import Required, check_folder, check_weights, judge_alone
from octavo.verification.findings import LayerReport, Report, measure_sizes
from octavo.verification.layer_spec import LayerSpec, PackedLayers, RoundInput, round_input, scale_values
from octavo.verification.layer_spec import round_input_by_compressed_tensors as by_compressed_tensors
from octavo.verification.readers import Probe, StreamedModel, expert_outputs, required_by, try_readers
from octavo.verification.stored_files import CheckpointFiles, Finding, check_description, read_files


def verify(
    packed: str | Path,
    against: str | Path | None = None,
    data: Sequence[str] = (),
    *,
    calibration: str | Path | None = None,
    budgets: Sequence[Budget] = (),
    prompts: PromptOptions = PromptOptions(),
    device: str = "cpu",
    folded: bool = False,
    progress: Progress = no_progress,
    on_read: OnRead | None = None,
) -> Report:
    """Check a packed folder against its model and its readers, and measure what packing cost.

    Args:
        packed: the folder. Its errors become findings of the report.
        against: the model that it was packed from (MODEL), a Hugging Face folder or a run of `octavo train`. Of a run,
            the checkpoint is read that octavo.json names, or the newest if the run has removed that one. Without it the
            folder is judged by itself: its settings, its checksums and its readers.
        data: sources of text, see `octavo.data.read_text`. Without it the quality is not measured.
        calibration: the folder of `octavo calibrate` of MODEL that gave the scales of inputs, keys and values.
        budgets: limits on the quality; an exceeded one is a finding.
        prompts: which prompts are taken from `data`.
        device: for the reference and for Octavo's runtime. transformers runs on the CPU.
        folded: smoothing or a rotation was folded into the weights, which are then not compared with MODEL's.
            octavo.json states it too.
        progress: see `octavo.util`.
        on_read: called with the report of the text, before anything runs.

    Raises:
        FileNotFoundError, ArtifactError, ImportError: there is no packed folder, or MODEL cannot be read.
        DataError: the text cannot be read, or makes no prompts.
        ValueError: the device is not there, a budget lacks text or is not for this kind of model, or something is to be
            compared with MODEL, which is not given.
    """
    packed = Path(packed)
    if not packed.is_dir():
        raise FileNotFoundError(f"there is no folder {packed}: give a packed folder (GGUF files are not checked)")
    refuse_run(packed)
    device = str(choose_device(device))
    if budgets and not data:
        raise ValueError("a budget is measured on text: give --data")
    if against is None and (data or calibration is not None):
        raise ValueError("--data and --calibration compare it with the model that it was packed from: give --against")
    report = Report(packed, None if against is None else Path(against))
    verification = Verification(read_files(packed), device, progress, report)
    if report.against is not None:
        files = verification.files
        run = RunFolder(report.against)  # of which the checkpoint counts that octavo.json names, if it is still there
        paths = run.checkpoints() if run.has_model else []
        packed_from = (run.step_of(path) for path in paths if path.name == files.record.get("source"))
        source = open_source(report.against, next(packed_from, None))
        check_budgets(budgets, language_model=predicts_tokens(source.meta_model.model))
        if data:
            read_prompts = open_prompts(data, source.description, prompts, source.meta_model, on_read)
            report.data, verification.batches = read_prompts.report, read_prompts.batches(prompts.batch, shortest=2)
        verification.source, record = source, files.record.get("folded")
        files.folded = folded or (bool(record) and record != source.folded().get("folded"))
        if calibration is not None:
            verification.calibration = load_calibration(calibration, source.origin, source.description)
    verification.check_bytes()
    if report.findings:
        report.not_run = "nothing was run on this folder, since its bytes are wrong"
        return report
    verification.try_readers()
    if verification.batches and not report.not_run:
        verification.measure_quality(budgets)
    report.sizes = measure_sizes(verification.files, verification.layers)
    return report


@dataclass
class Verification:
    """The steps of `verify`, which add their results to `report`."""

    files: CheckpointFiles
    device: str
    progress: Progress
    report: Report
    source: Source | None = None  # MODEL
    calibration: Calibration | None = None
    batches: list[Tensor] = field(default_factory=list)
    layers: dict[str, LayerSpec] = field(default_factory=dict)

    def check_bytes(self) -> None:
        """The files, the settings and the tensors, by themselves and against MODEL."""
        files, report = self.files, self.report
        report.architecture = ", ".join(map(str, files.config.get("architectures") or ()))
        report.findings, report.remarks = files.findings, files.remarks
        if files.config and files.shapes and (required := self._find_required()) is not None:
            self.layers = check_folder(files, required, self.progress)
        if files.findings:
            return
        if not self.layers:
            files.add_finding("config", "config.json", "no layer is packed")
        # The layers that octavo pack cast, in files that no other program has written since, with their schemes.
        recorded = files.recorded("layers").items()
        packed = {name: str(scheme) for name, scheme in recorded if f"{name}.weight" in files.by_octavo}
        if others := [name for name, spec in self.layers.items() if packed.get(name, str(spec)) != str(spec)]:
            files.remarks.append(
                f"{others[0]} ({len(others)} such layers) was packed by {packed[others[0]]}, and config.json says "
                f"{self.layers[others[0]]}: a legal scheme, by which inputs are cast in another way"
            )
        ratios: dict[str, float] = {}
        if (source := self.source) is not None:
            built: list[Any] = [self.meta_model, transformers_meta_model(source.config, source.description)]
            ours, theirs = (each.model.config.to_dict() for each in built)  # with the defaults of transformers
            check_description(files, ours, theirs, source.description)
        if source is None or files.folded:
            _check_plausible(files, self.layers, packed)
        else:
            read = source.get_from_file
            ratios = check_weights(files, self.layers, _tensors(source), read, packed, self.progress)
        if files.folded:
            report.remarks.append(
                "something was folded into the weights: they are not compared with MODEL's. To compare them, give the "
                "folder that octavo pack --smooth or --rotate wrote"
            )
        kept = scale_names(files, self.layers)
        if kept and self.calibration is not None:
            in_model = {self.meta_model.file_name(name): name for name, _ in self.meta_model.model.named_modules()}
            check_scales(files, {name: in_model.get(of, of) for name, of in kept.items()}, self.calibration)
        elif kept:
            files.remarks.append(f"{next(iter(kept))} ({len(kept)} stored scales) was not judged: give --calibration")
        for name, spec in self.layers.items():
            report.layers.append(LayerReport(name, str(spec), files.shapes[f"{name}.weight"], ratios.get(name)))

    def _find_required(self) -> Required | None:
        try:
            self.files.shapes, left = self.meta_model.leave_out(self.files.shapes)
            self.files.remarks += [left] if left else []
            return required_by(self.meta_model)
        except ImportError:
            raise
        except Exception as error:  # a damaged config.json may raise anything
            message = f"transformers cannot build the model ({type(error).__name__}: {error})"
            self.files.add_finding("config", "config.json", message)
            return None

    def try_readers(self) -> None:
        """Open the folder with every reader installed here."""
        meta_model = self.meta_model
        if meta_model.takes_text and not has_tokenizer(self.files.folder):
            self.report.remarks.append("the folder has no tokenizer: programs that generate text from it need one")
        self.progress(0, 4, "opening with every reader")
        try:
            given = self.batches[0][:4, :64] if self.batches else random_inputs(meta_model.model, meta_model.positions)
        except ArtifactError as error:
            self.report.remarks.append(f"no reader was tried: {error}")
            return

        # Of each module of experts: tokens of the first run, and what each run gives for them.
        experts: dict[str, list[Tensor]] = {}

        def run(dtype: torch.dtype, *roundings: RoundInput | None) -> Iterator[Tensor]:
            """The outputs of one model, with inputs that are rounded in each of these ways."""
            model = self._packed_model(dtype)
            for rounding in roundings:
                self._round(model, rounding)
                yield model(given).cpu()
                for name, module in model.experts.items() if rounding is not by_compressed_tensors else ():
                    if module.tokens is not None:
                        tokens, *_ = each = experts.setdefault(name, [module.tokens])
                        each.append(expert_outputs(model.model, name, tokens, len(module.matrices)))

        try:
            reference, emulated, unrounded = run(torch.float32, round_input, by_compressed_tensors, None)
            (bf16,) = run(torch.bfloat16, round_input)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # settings that a model is built from, and cannot run with, raise anything
            message = f"transformers cannot run the model ({type(error).__name__}: {error})"
            self.files.add_finding("config", "config.json", message)
            self.report.not_run = "no reader was tried, since the model cannot run"
            return
        model, files = meta_model.model, self.files
        cache = bool(layer_spec.cache_names(files))
        mixture = any(each.kind == "expert stack" for each in find_coverage(model, ()).left)
        kind = is_language_model(model), predicts_tokens(model), cache, mixture
        outputs = reference, emulated, unrounded, bf16
        probe = Probe(files.folder, self.layers, files.settings, *kind, given, *outputs, experts)
        for done, reader in enumerate(try_readers(probe, self.device), start=1):
            self.progress(done, 4, "opening with every reader")
            self.report.readers.append(reader)
            if reader.outcome in ("disagrees", "failed"):
                self.report.findings.append(Finding("reader", reader.name, reader.describe_error()))

    def measure_quality(self, budgets: Sequence[Budget]) -> None:
        """Measure the quality on the prompts, and compare it with the budgets."""
        if layer_spec.cache_names(self.files):
            self.report.remarks.append("keys and values are rounded by the folder's scales, as its cache does")
        assert self.source is not None  # `verify` takes prompts with MODEL alone
        metas, read = _tensors(self.source), self.source.get_from_file

        def get(name: str) -> Tensor:
            """A tensor of MODEL, in the dtype in which it is served: BF16 for all weights of linear layers."""
            return read(name).to(metas[name].dtype)

        layers = BaselineLayers(get, PackedLayers(self.files, self.layers, self.device))
        packed = self._packed_model()
        served = transformers_meta_model(self.source.config, self.source.description)
        reference = StreamedModel(served, get, metas, self.device)
        packed_sums, int8_sums = (LogitSums() if reference.logits else EmbeddingSums() for _ in range(2))
        for done, ids in enumerate(self.batches):
            self.progress(done, len(self.batches), "running prompts")
            reference.compute = layers
            expected = reference(ids)
            packed_sums.add(ids, expected, packed(ids))
            reference.compute = layers.in_int8
            int8_sums.add(ids, expected, reference(ids))
        report, errors = self.report, layers.errors
        report.quality, report.int8 = packed_sums.quality(), int8_sums.quality()
        report.layers = [errors[each.name].added_to(each) if each.name in errors else each for each in report.layers]
        for budget in budgets:
            if not budget.holds(report.quality):
                measured = budget.show(budget.estimate(report.quality).value)
                message = f"{measured}, the limit is {budget.show(budget.limit)}"
                report.findings.append(Finding("budget", budget.measure, message))

    def _packed_model(self, dtype: torch.dtype = torch.float32) -> StreamedModel:
        """The reference. Its modules are changed, so they are not those of `meta_model`."""
        meta_model = transformers_meta_model(self.files.config, self.files.folder)
        layers = PackedLayers(self.files, self.layers, self.device)
        model = StreamedModel(meta_model, layers.get, self.files.shapes, self.device, dtype)
        self._round(model, round_input)
        return model

    def _round(self, model: StreamedModel, rounding: RoundInput | None) -> None:
        """Let the reference round its inputs so. None leaves inputs, keys and values as they are, for a reader that
        only widens weights."""
        unrounded: Collection[str] = self.layers if rounding is None else ()
        if rounding is by_compressed_tensors:  # transformers widens experts
            unrounded = self.meta_model.experts.experts
        model.compute = PackedLayers(self.files, self.layers, self.device, rounding or round_input, unrounded)
        scales = {} if rounding is None else layer_spec.cache_scales(self.files)
        model.rounds = [partial(layer_spec.round_keys_and_values, pair) for pair in scales.values()]

    @cached_property
    def meta_model(self) -> MetaModel:
        return transformers_meta_model(self.files.config, self.files.folder)


def _tensors(source: Source) -> dict[str, Tensor]:
    """A tensor on the meta device for each of MODEL, by its name in files, in the dtype in which it is served."""
    return source.meta_model.experts.split(model_tensors(source.meta_model.model))


def _check_plausible(files: CheckpointFiles, layers: dict[str, LayerSpec], packed: Collection[str]) -> None:
    """Check without MODEL: weights for scales that look reciprocal, those that Octavo `packed` for scales that fit."""
    floats = ((name, f"{name}.{spec.scale}", spec) for name, spec in layers.items() if not spec.integers)
    values = ((name, scale_values(files.get(scale), spec)) for name, scale, spec in floats)
    if suspects := suspected(values, PackedLayers(files, layers, "cpu").weight):
        scale = f"{suspects[0]}.{layers[suspects[0]].scale}"
        files.add_finding("scale", scale, reciprocal_warning(suspects, len(layers)))
        return
    if rule := files.recorded("weight_scales"):  # of `octavo pack` alone
        exact = (rule.get("rule"), rule.get("pow2")) == ("amax", False)
        for name, spec in layers.items():
            data, scales = f"{name}.weight", f"{name}.{spec.scale}"
            if name in packed and (error := judge_alone(files.get(data), files.get(scales), spec, exact)):
                files.add_finding("weights", data, error)


# ---- The scales that a folder stores for inputs, keys and values, against those that a calibration gives.
#
#     amax          s = amax / 448
#     percentile    s = p / 448, where 99.99 % of the elements have a magnitude of at most p
#     mse           s = amax / 448 * 2^(-i/8), i = 0..40, of the least squared error
#
# The statistics of the calibration are exact counts (docs/format.md), and the rules are computed here a second time.


_E4M3 = LayerSpec(inputs="static")
_PERCENT = 99.99
_SAME = 1e-4  # relative: the rounding of the rules, far below the steps of a scale that is wrong
_FACTOR = 4.0  # between calibrations on other text, by other rules


def scale_names(files: CheckpointFiles, layers: Mapping[str, LayerSpec]) -> dict[str, str]:
    """The names of the stored scales, each with that of its linear layer in files, or of keys and values."""
    inputs = {f"{name}.{spec.input_scale}": name for name, spec in layers.items() if spec.inputs == "static"}
    pairs = layer_spec.cache_names(files)
    cached = {name: f"{of}.{kind}" for of, pair in pairs.items() for name, kind in zip(pair, "kv", strict=True)}
    return inputs | cached


def check_scales(files: CheckpointFiles, names: Mapping[str, str], calibration: Calibration) -> None:
    """Add the stored scales `names` (of `scale_names`) that do not follow from the calibration of MODEL to
    `files.findings`. Where octavo.json names no rule, those that are off by more than a factor of 4 are remarks."""
    record = files.recorded("calibration")
    if record.get("model_hash", calibration.model_hash) != calibration.model_hash:
        message = "the scales of inputs, keys and values come from a calibration of another model"
        files.add_finding("scale", "octavo.json", message)
    unknown, known = list[str](), dict[tuple[str, str], list[float]]()
    for name, of in names.items():
        if of not in calibration.sites and of not in calibration.layers:
            files.add_finding("scale", name, f"the calibration has no statistics of {of}: calibrate the model again")
            continue
        of_input = of in calibration.layers
        rule = str(record.get("rule") if of_input else record.get("calibration_rule", record.get("rule")))
        stored = float(files.get(name).float().reshape(-1)[0])
        expected = _expected(calibration, of, rule if rule in _RULES else "amax", known)
        if rule not in _RULES:
            if not 1 / _FACTOR < stored / expected[0] < _FACTOR:
                amax = f"the calibration's largest value / 448 is {expected[0]:.4g}"
                unknown.append(f"{name} is {stored:.4g}, and {amax}")
        elif not any(abs(stored / scale - 1) < _SAME for scale in expected):
            hint, pair = "", f"{of[:-1]}{'k' if of.endswith('v') else 'v'}"  # the values for keys, the keys for values
            swapped = _expected(calibration, pair, rule, known) if of in calibration.sites else []
            if any(abs(stored / scale - 1) < _SAME for scale in swapped):
                hint = f", and this one to {pair}: keys and values are swapped"
            message = f"is {stored:.4g}, and by the rule {rule} the calibration gives {expected[0]:.4g}{hint}"
            files.add_finding("scale", name, message)
    if unknown:
        files.remarks.append(f"{unknown[0]} ({len(unknown)} such scales)")


def _expected(calibration: Calibration, of: str, rule: str, known: dict[tuple[str, str], list[float]]) -> list[float]:
    """The scales that the rule may give, usually one. An expert without a token has the largest of its block's. Those
    in `known`, by site and rule, are not computed again."""
    keys = [(site, rule) for site in calibration.stand_ins(calibration.layers.get(of, of))]
    known |= {key: _RULES[rule](calibration.sites[key[0]]) for key in keys if key not in known}
    return max((known[key] for key in keys), key=lambda scales: scales[0])


def _by_amax(seen: Statistics) -> list[float]:
    return [max(float(seen.channel_amax.max()) / 448, 2.0**-126)]


def _by_percentile(seen: Statistics) -> list[float]:
    magnitudes, counts = seen.in_use()
    ends = counts.cumsum(0)
    rank = _PERCENT / 100 * (float(ends[-1]) - 1)
    low, high = (float(magnitudes[int((ends <= at).sum())]) for at in (rank // 1, -(-rank // 1)))
    return [max((low + (high - low) * (rank % 1)) / 448, 2.0**-126)]


def _by_error(seen: Statistics) -> list[float]:
    """The scales of least squared error: often several, as half a scale gives an e4m3 number the same error."""
    x, counts = seen.in_use()
    grid = torch.tensor([max(_by_amax(seen)[0] * 2 ** (-i / 8), 2.0**-126) for i in range(41)])
    errors = torch.stack([(counts * (x - layer_spec.nearest(x / s, _E4M3) * s).double().square()).sum() for s in grid])
    return grid[errors <= errors.min() * (1 + 1e-6)].tolist()


_RULES: dict[Any, Any] = {"amax": _by_amax, "percentile": _by_percentile, "mse": _by_error}


# ---- The cost of packing on prompts: the error of each layer and of the model, beside those of INT8.
#
# Three models run in float32, so that only the rounding of packing differs: MODEL with its weights rounded to BF16, the
# packed folder, and MODEL with the packed layers in INT8 instead.


_INT8 = LayerSpec(rows=1, inputs="token", integers=True)  # a scale for each row of the weight and for each token


@dataclass
class PackedError(LayerError):
    """The error of y of a packed layer, and its inputs beside the range of their stored scale, if there is one."""

    elements: int = 0
    clipped: int = 0
    amax: float = 0.0
    range: float | None = None

    def added_to(self, layer: LayerReport) -> LayerReport:
        """The report with the SQNR of y in dB, the share of inputs beyond the range, and range over the largest."""
        if self.range is None:
            return replace(layer, output_sqnr=self.sqnr)
        headroom = self.range / self.amax if self.amax else None
        return replace(layer, output_sqnr=self.sqnr, clip_rate=self.clipped / max(self.elements, 1), headroom=headroom)


@dataclass
class BaselineLayers:
    """The linear layers of MODEL, y = x @ w^T. Each packed layer is given the same input, and compared."""

    get: Callable[[str], Tensor]
    packed: PackedLayers
    errors: dict[str, PackedError] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        y = linear(x.float(), self._weight(name).float())  # [T,K] @ [N,K]^T
        if name in self.packed.specs and not self.packed.files.folded:  # folded weights expect other inputs
            error = self.errors.setdefault(name, PackedError())
            error.add(y, self.packed(name, x))
            if (scale := self.packed.input_scale(name)) is not None:
                error.range = float(scale) * self.packed.specs[name].largest
                error.clipped += int((x.abs() > error.range).sum())
                error.elements += x.numel()
                error.amax = max(error.amax, float(x.abs().max()))
        return y

    def in_int8(self, name: str, x: Tensor) -> Tensor:
        """The same with INT8 for the layers that are packed, and no error summed."""
        weight = self._weight(name)
        if name not in self.packed.specs:
            return linear(x.float(), weight.float())
        return linear(round_input(x, _INT8), round_input(weight, _INT8))  # [T,K] @ [N,K]^T

    def _weight(self, name: str) -> Tensor:
        return self.get(f"{name}.weight").to(self.packed.device)
