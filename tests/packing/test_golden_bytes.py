"""`pack` writes the same bytes from one version to the next, and `verify` finds nothing in those of a Llama.

golden_bytes.json has, for every packing and model of `golden_models`, the digest of the folder that Octavo wrote at
commit 9702d1e. Its rows of the layout autofp8, which has gone, are not read. A difference means that a model packed
today is not the model packed before. If that is intended, state it in CHANGELOG.md and replace the digest by the one in
the failure's message.
"""

import json
from pathlib import Path

import golden_models
import pytest
from packed_examples import small_shards
from tiny_models import with_slow
from verify_examples import complaints

from octavo.checkpoint.files import SHARD_BYTES
from octavo.packing import pack

pytestmark = pytest.mark.usefixtures("no_readers")
GOLDEN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("golden_bytes.json").read_text())


@pytest.mark.parametrize("name", with_slow(golden_models.MODELS, ("llama", "gpt2")))
def test_a_hugging_face_folder(tmp_path, name):
    model = golden_models.write_model(tmp_path / "model", name)
    calibration = golden_models.write_calibration(tmp_path / "calibration", model, name)
    for i, (case, how) in enumerate(golden_models.model_cases(name).items()):
        options = {option: value for option, value in how.items() if option != "shard_bytes"}
        with small_shards(how.get("shard_bytes", SHARD_BYTES)):
            folder = pack(model, tmp_path / f"packed {i}", calibration=calibration, **options).folder
        assert (case, golden_models.digest_folder(folder)) == (case, GOLDEN[case][name])
        assert name != "llama" or not complaints(folder, model, calibration), case  # of others: test_families


@pytest.mark.parametrize("name", with_slow(["llama", "llama untied", "qwen2"], ("llama", "qwen2")))
def test_a_run(tmp_path, name):
    for i, (case, how) in enumerate(golden_models.run_cases(name).items()):
        run = golden_models.write_run(tmp_path / f"run {i}", name, how["recipe"])
        options = {option: value for option, value in how.items() if option != "recipe"}
        folder = pack(run, tmp_path / f"packed {i}", **options).folder
        clips = "although each byte is rounded as its scale says"  # the scales in the histories are by formula
        wrong = [each for each in complaints(folder, run) if how["recipe"] != "delayed" or clips not in each]
        assert (case, wrong, golden_models.digest_folder(folder)) == (case, [], GOLDEN[case][name])
