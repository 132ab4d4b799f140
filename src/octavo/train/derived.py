"""Settings whose default value follows from other settings.

| setting           | follows from                               | value                                               |
|-------------------|--------------------------------------------|-----------------------------------------------------|
| learning_rate     | model                                      | 1e-3, to fine-tune 2e-5                             |
| min_learning_rate | learning_rate                              | a tenth                                             |
| decay_steps       | steps                                      | all of them                                         |
| warmup            | decay_steps, schedule, decay               | a tenth, at most 20, and room for the decay of wsd  |
| kv_heads          | heads                                      | 2, of an odd number of heads 1                      |
| context           | model                                      | 512, at most the positions of a model's folder      |
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.models import BUILT_IN_MODELS

CONTEXT = 512


@dataclass(frozen=True)
class Rule:
    """The rule of a derived setting: the settings it follows from, the function of all settings, and its words."""

    sources: tuple[str, ...]
    value: Callable[[Mapping[str, Any]], Any]
    words: str


def _warmup(values: Mapping[str, Any]) -> int:
    steps = int(values["decay_steps"])
    room = int(steps * (1 - values["decay"])) if values["schedule"] == "wsd" else steps
    return min(20, steps // 10, room)


# In the order of derivation: what follows from a derived setting stands after it.
RULES: dict[str, Rule] = {
    "learning_rate": Rule(
        ("model",), lambda v: 1e-3 if v["model"] in BUILT_IN_MODELS else 2e-5, "1e-3; to fine-tune 2e-5"
    ),
    "min_learning_rate": Rule(("learning_rate",), lambda v: v["learning_rate"] / 10, "learning_rate / 10"),
    "decay_steps": Rule(("steps",), lambda v: v["steps"], "steps"),
    "warmup": Rule(("decay_steps", "schedule", "decay"), _warmup, "decay_steps / 10, at most 20"),
    "kv_heads": Rule(("heads",), lambda v: 2 - v["heads"] % 2, "2; 1 if heads is odd"),
    "context": Rule(("model",), lambda v: CONTEXT, "512, at most a model folder's positions"),
}


def outdated(derived: Collection[str], changed: Collection[str]) -> set[str]:
    """The `derived` settings that follow, directly or not, from settings that are `changed`."""
    stale: set[str] = set()
    for name, rule in RULES.items():
        if name in derived and name not in changed and ({*changed} | stale) & {*rule.sources}:
            stale.add(name)
    return stale
