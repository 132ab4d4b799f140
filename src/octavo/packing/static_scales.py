"""Scales that are stored because no forward pass computes them.

They are the scales of inputs for the scheme `static`, and of a cache of keys and values in e4m3. They come from a
calibration. A run that was trained with the recipe `delayed` needs none for its layers: its checkpoint holds, for each
operand of each layer, the scale of the next forward pass. Packed with these scales, the model computes what training
computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from octavo.artifact.files import ArtifactError, load_tensors
from octavo.artifact.packed.kv_scales import K_SCALE, V_SCALE, attentions
from octavo.calibration.folder import Calibration, load_calibration
from octavo.hf.source import Source
from octavo.packing.options import PackOptions

# The rules in octavo.json for scales from a checkpoint, and for scales that are given.
HISTORY, FROZEN = "history", "frozen"


@dataclass(frozen=True)
class StaticScales:
    """Stored scales, and their origin.

    Attributes:
        inputs: the scale of the input of each layer, float32 [1].
        keys_and_values: <attention>.k_scale (of keys after the rotation) and <attention>.v_scale, float32 [1], for
            every attention layer; empty without a cache.
        record: the entry "calibration" of octavo.json.
        weights: the scale of the weight of each layer, float32 [1, 1], if a run's checkpoint holds it.
    """

    inputs: Mapping[str, Tensor]
    keys_and_values: Mapping[str, Tensor]
    record: Mapping[str, object]
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def calibrated_scales(options: PackOptions, source: Source, layers: Sequence[str]) -> StaticScales:
    """The scales that a calibration gives: of the inputs of `layers`, and with `options.kv_cache` of keys and values.

    Raises:
        FileNotFoundError, ArtifactError: the calibration is not whole.
        ValueError: no calibration is given, it is of another model, or it lacks a layer.
    """
    folder, rule = options.calibration, options.rule or "amax"
    if folder is None:
        source.meta_model.require_text()
        stored = (
            "the scheme static stores scales of inputs" if layers else "--kv-cache stores scales of keys and values"
        )
        freeze = ", or find them with --freeze 64 --data TEXT" if layers else ""
        raise ValueError(f"{stored}: give --calibration, made by octavo calibrate{freeze}")
    calibration = load_calibration(folder, source.origin, source.description)
    if missing := [name for name in layers if name not in calibration.layers]:
        raise ValueError(f"{folder} has no statistics of {missing[0]}: calibrate the model with this version")
    inputs = {name: calibration.scale(name, rule).reshape(1) for name in layers}
    keys_and_values = {} if options.kv_cache is None else _keys_and_values(calibration, rule, source)
    return StaticScales(inputs, keys_and_values, {"rule": rule, **calibration.record, "kv_cache": options.kv_cache})


def given_scales(options: PackOptions, source: Source, layers: Sequence[str]) -> StaticScales:
    """The scales of `options.input_scales`; with `options.kv_cache` those of keys and values from a calibration, and of
    a run that was trained with the recipe `delayed` the scales of its weights.

    Raises:
        ValueError: a layer has no scale; and the errors of `calibrated_scales` and `trained_scales`.
    """
    given = options.input_scales or {}
    if missing := [name for name in layers if name not in given]:
        raise ValueError(f"input_scales has no scale of {missing[0]} ({len(missing)} missing)")
    inputs = {name: given[name].float().reshape(1).cpu() for name in layers}
    cached = StaticScales({}, {}, {}) if options.kv_cache is None else calibrated_scales(options, source, [])
    weights = _histories(source, layers)[1] if source.recipe == "delayed" else {}
    return StaticScales(inputs, cached.keys_and_values, _with_rule(FROZEN, cached), weights)


def trained_scales(options: PackOptions, source: Source, layers: Sequence[str], experts: Sequence[str]) -> StaticScales:
    """The scales in the checkpoint of a run, for those of `layers` that were trained with the recipe `delayed`; from a
    calibration those of the inputs of `experts`, and with `options.kv_cache` of keys and values.

    Raises:
        FileNotFoundError, ArtifactError: the checkpoint has no scales at all, a damaged one, or one of a layer that no
            step has used; and the errors of `calibrated_scales`.
        ValueError: those of `calibrated_scales`.
    """
    inputs, weights = _histories(source, layers)
    if options.kv_cache is None and not experts:
        return StaticScales(inputs, {}, {"rule": HISTORY}, weights)
    found = calibrated_scales(options, source, experts)
    return StaticScales({**found.inputs, **inputs}, found.keys_and_values, _with_rule(HISTORY, found), weights)


def _with_rule(rule: str, calibrated: StaticScales) -> dict[str, object]:
    """The record of scales by `rule`, beside those that a calibration gave by a rule of its own."""
    others = {"calibration_rule": calibrated.record["rule"]} if calibrated.record else {}
    return {**calibrated.record, "rule": rule, **others}


def _histories(source: Source, layers: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The scales of inputs, float32 [1], and of weights, [1, 1], that the checkpoint holds for some of `layers`."""
    path = source.origin / "state.safetensors"
    state = load_tensors(path)
    inputs, weights = {}, {}
    for name in layers:
        trained = source.trained_as.get(name, name)
        scales = {operand: _scale(state, f"{trained}.histories.{operand}", path) for operand in ("x", "w")}
        if (x := scales["x"]) is not None and (w := scales["w"]) is not None:
            inputs[name], weights[name] = x.reshape(1), w.reshape(1, 1)
    if not inputs:
        raise ArtifactError(f"{path} has no scales of {layers[0]}: it is not of a run that was trained with delayed")
    return inputs, weights


def _keys_and_values(calibration: Calibration, rule: str, source: Source) -> dict[str, Tensor]:
    names = attentions(source.meta_model.linears())
    if not names:
        raise ValueError(
            f"{source.origin} has no attention layers with k_proj, which the scales of a KV cache are named after: "
            "pack it without --kv-cache"
        )
    sites = {f"{name}.{leaf}": f"{name}.{leaf[0]}" for name in names for leaf in (K_SCALE, V_SCALE)}
    if missing := [site for site in sites.values() if site not in calibration.sites]:
        raise ValueError(
            f"the calibration has no statistics of {missing[0]}, which a KV cache needs: "
            "calibrate the model with this version"
        )
    return {name: calibration.scale(site, rule).reshape(1) for name, site in sites.items()}


def _scale(state: Mapping[str, Tensor], history: str, path: Path) -> Tensor | None:
    """The current scale of a history. None for a layer that training left in BF16."""
    scale, steps = state.get(f"{history}.scale"), state.get(f"{history}.steps")
    if scale is None or steps is None:
        return None
    if int(steps) == 0:
        raise ArtifactError(
            f"{path}: {history} has no entry yet, the layer was in no step of training: pack a later step, pack by "
            "--scheme channel, or leave the layer in BF16 (--skip)"
        )
    if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
        raise ArtifactError(f"{path}: {history}.scale must be one positive number, got {scale.flatten()[:4].tolist()}")
    return scale.float()
