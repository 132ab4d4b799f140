"""The names that help texts list are the library's."""

from octavo import FORMATS, PRESETS
from octavo.artifact.packed.layouts import LAYOUTS
from octavo.artifact.packed.scheme import SCHEMES
from octavo.generation.engine import AUTO
from octavo.generation.prompt_attention import ATTENTIONS
from octavo.gguf.export import WEIGHTS
from octavo.kv_cache.layer import DTYPES
from octavo.plan.hardware import known_gpus
from octavo.plan.server import CACHE_BYTES
from octavo.train.config import describe
from octavo.train.settings import PRESETS as MODEL_PRESETS
from octavo.train.tables import FORMER
from octavo_cli import choices


def test_help_lists_what_the_library_takes():
    assert tuple(FORMATS) == choices.FORMATS
    assert ATTENTIONS == choices.ATTENTIONS
    assert tuple(CACHE_BYTES) == choices.CACHES
    assert tuple(known_gpus()) == choices.GPUS
    assert tuple(WEIGHTS) == choices.GGUF_WEIGHTS
    assert {AUTO, *DTYPES} - {"fp32", "fp16"} == set(choices.KV_CACHES)
    assert tuple(LAYOUTS) == choices.LAYOUTS
    assert tuple(MODEL_PRESETS) == choices.MODEL_PRESETS
    assert tuple(PRESETS) == choices.RECIPES
    assert tuple(SCHEMES) == choices.SCHEMES
    kinds = {name.replace("_", "-"): kind for name, kind, *_ in describe()}
    assert tuple(kinds) == choices.SETTINGS
    assert tuple(name for name, kind in kinds.items() if kind == "true or false") == choices.FLAGS
    assert {name.replace("_", "-") for name in FORMER} == set(choices.FORMER_SETTINGS)
