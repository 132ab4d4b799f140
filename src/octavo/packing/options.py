"""The options of packing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from octavo.calibration.statistics import SCALE_RULES

CACHES = ("fp8",)
WEIGHT_RULES = ("amax", "mse")


@dataclass(frozen=True)
class PackOptions:
    """The options of `pack`.

    Attributes:
        scheme: of the packed layers: channel, tensor, static, block, mx, group32, group64, group128, weight or
            int8. None takes the scheme of a run's recipe (`octavo.artifact.packed.scheme.SCHEME_OF`), and channel for a
            model folder.
        layers: glob of layer names -> another scheme for these layers. The first glob that matches counts.
        layout: compressed-tensors, or one that holds fewer schemes: fp8 (block), modelopt (static, channel or block),
            autofp8 (static or tensor).
        skip: globs of layers that stay in BF16, beside output heads, routers and the layers that the run skipped. Of
            layers that readers run as one GEMM (`octavo.hf.fused_groups`) `skip` takes all or none, and `layers` gives
            them one scheme.
        calibration: the folder that `octavo calibrate` wrote for this model. `kv_cache` and the scheme static need it.
            A run that was trained with the recipe `delayed` has scales of its own for static, which it keeps unless
            both `scheme` and `calibration` are given.
        rule: of the scales from the calibration: amax (also None), percentile (99.99) or mse.
        weights: the rule of the scales of weights: amax or mse (`octavo.packing.mse_search`).
        pow2: round the scales of weights up to powers of two.
        share: one scale for layers that readers fuse, where a scale is of a whole tensor. None shares unless the source
            is a run that was trained with its own scales, because sharing would change its bytes.
        kv_cache: "fp8" stores scales for a cache of keys and values in E4M3, one for each attention layer's keys and
            one for its values. None stores none.
        experts: pack the experts of a mixture too, each projection of each expert with scales of its own.
        tensor_parallel: numbers of devices that the packed layers must divide over.
        input_scales: the scale of each layer's input, float32 [1], by the layer's name (`octavo.freeze_scales`). The
            scheme is then static unless another is given, and `calibration` gives the scales of keys and values alone.

    Raises:
        TypeError: `skip` is a string.
        ValueError: an unknown rule or cache, a rule without a calibration, or a scale that is not one positive number.
    """

    scheme: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    layout: str = "compressed-tensors"
    skip: Sequence[str] = ()
    calibration: Path | None = None
    rule: str | None = None
    weights: str = "amax"
    pow2: bool = False
    share: bool | None = None
    kv_cache: str | None = None
    experts: bool = False
    tensor_parallel: Sequence[int] = ()
    input_scales: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.skip, str):
            raise TypeError(f"skip takes a list of globs, got the string {self.skip!r}: give [{self.skip!r}]")
        if self.rule is not None and self.rule not in SCALE_RULES:
            raise ValueError(f"unknown rule {self.rule!r} for a scale: choose one of {', '.join(SCALE_RULES)}")
        if self.rule is not None and self.calibration is None:
            raise ValueError(
                f"the rule {self.rule} chooses scales from a calibration, and none is given: give --calibration, made "
                "by octavo calibrate, or leave --rule out (--weights is the rule for the scales of weights)"
            )
        if self.weights not in WEIGHT_RULES:
            raise ValueError(f"unknown rule {self.weights!r} for weights: choose one of {', '.join(WEIGHT_RULES)}")
        if self.kv_cache not in (None, *CACHES):
            raise ValueError(f"unknown cache {self.kv_cache!r} of keys and values: choose {CACHES[0]}, or none")
        for name, scale in (self.input_scales or {}).items():
            if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
                raise ValueError(
                    f"input_scales: the scale of {name} must be one positive number, got {scale.flatten()[:4].tolist()}"
                )
