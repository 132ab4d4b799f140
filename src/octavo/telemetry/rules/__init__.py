"""Early warning: rules that read the samples and the losses of a run, and find faults before the run is lost.

`docs/warnings.md` has a section on each rule: its meaning, how it is computed, its source, and what to do.
"""

from octavo.telemetry.rules.losses import LossRule
from octavo.telemetry.rules.rule import RULES
from octavo.telemetry.rules.samples import SampleRules

__all__ = ["RULES", "LossRule", "SampleRules"]
