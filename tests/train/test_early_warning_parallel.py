"""The early warning of a run of two processes, of which one has the fault."""

import json
import math
import warnings

import pytest
from ranks import run_ranks
from rich.console import Console

from octavo.train.config import Config
from octavo.train.start import start_run

pytestmark = pytest.mark.slow

SETTINGS = {
    "layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32, "batch": 4, "steps": 40,
    "warmup": 2, "learning_rate": 1e-2, "min_learning_rate": 1e-3, "device": "cpu", "evaluate_batches": 1,
    "log_every": 1, "evaluate_every": 40, "save_every": 20, "watch": {"on_warning": "promote", "on_spike": "rollback"},
}  # fmt: skip


def train(rank, folder, text):
    """The norms of the steps; at step 7 a layer of rank 1 overflows in FP8, and after step 30 the loss rises."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    trainer = start_run(Config.from_dict(SETTINGS | {"data": [text], "out": f"{folder}/run"}), Console(quiet=True))
    step, norms, planted = trainer.step, [], []

    def overflow(module, args, y):
        return y * math.inf if rank == 1 and module.recipe.quantized and trainer.state.step == 6 else y

    def faulty():
        if trainer.state.step == 30 and not planted:
            planted.append(True)
            trainer.model.model.norm.weight.data.mul_(20)
        loss, norm = step()
        norms.append((trainer.state.step, float(norm)))
        return loss, norm

    trainer.model.model.layers[1].mlp.down_proj.register_forward_hook(overflow)
    trainer.step = faulty
    trainer.run()
    return norms


def test_all_ranks_act_alike(tmp_path, text):
    first, second = run_ranks(2, train, tmp_path, str(text))
    assert str(first) == str(second)  # nan is nan
    assert [step for step, _ in first] == [*range(1, 8), *range(7, 33), *range(21, 41)]
    assert [step for step, norm in first if not math.isfinite(norm)] == [7]
    actions = json.loads((tmp_path / "run" / "actions.json").read_text())
    assert [(each["layer"], each["to"]) for each in actions["promotions"]] == [("model.layers.1.mlp.down_proj", "bf16")]
    assert actions["rollbacks"] == [{"step": 32, "to": 20, "batch": 32}]
    assert (tmp_path / "run" / "step-00000040").is_dir()
