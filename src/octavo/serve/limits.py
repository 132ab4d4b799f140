"""The limits of a budget, as a person types them."""

from __future__ import annotations

import math

_ASKED = {
    "kl": "nats a token above 0, such as 0.01",
    "ppl": "a percentage above 0% and up to 100%, such as 0.5%, or a fraction below 1, such as 0.005",
    "cosine": "above 0 and below 1, such as 0.999",
}
MEASURES = tuple(_ASKED)


def read_limit(measure: str, text: str, name: str) -> float:
    """The limit that `text` states for the measure kl, ppl or cosine; 0.005 for ppl and "0.5%".

    Raises:
        ValueError: it is no number, or one that no model exceeds or none holds. The message calls it `name`.
    """
    percent = measure == "ppl" and text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / 100 if percent else float(text)
    except ValueError:
        value = math.nan
    below = math.inf if measure == "kl" else 1
    if not (0 < value < below or (percent and value == 1)):
        raise ValueError(f"{name} must be {_ASKED[measure]}; got {text!r}")
    return value
