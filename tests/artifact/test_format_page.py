"""The examples of docs/format.md are the configurations that packing writes."""

import json
import re
from pathlib import Path

from octavo.artifact.packed import compressed_tensors, fp8, modelopt
from octavo.artifact.packed.scheme import CHANNEL, STATIC

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


def test_the_examples_are_written_as_the_page_says():
    heads = ["lm_head"]
    modelopt_config = modelopt.describe({"q_proj": STATIC}, heads, False)
    written = [
        compressed_tensors.describe({"q_proj": CHANNEL}, heads, False),
        fp8.describe_blocks(heads),
        modelopt_config,
        modelopt.side_file(modelopt_config),
        fp8.describe_tensors({"q_proj": STATIC}, heads, False),
    ]
    examples = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [json.loads(example) for example in examples] == written
