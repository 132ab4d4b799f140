"""A run of several processes, against the run of one process on the same sequences."""

import warnings
from unittest import mock

import numpy as np
import pytest
from ranks import run_ranks
from rich.console import Console
from tiny_models import make_model
from torch import distributed

from octavo.artifact.files import model_tensors
from octavo.train.config import Config
from octavo.train.processes import mean_of_ranks, whole
from octavo.train.start import start_run

TINY = {
    "layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32, "batch": 2, "steps": 3,
    "warmup": 1, "learning_rate": 1e-2, "min_learning_rate": 1e-3, "device": "cpu", "evaluate_batches": 2, "clip": 0,
}  # fmt: skip


def train(rank, folder, text, settings):
    """The losses and the weights after three steps, and the evaluation loss."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it
    trainer = start_run(
        Config.from_dict(TINY | {"data": [text], "out": f"{folder}/run"} | settings), Console(quiet=True)
    )
    initial = {name: whole(t).detach().clone().numpy() for name, t in model_tensors(trainer.model).items()}
    losses = [float(mean_of_ranks(trainer.step()[0])) for _ in range(3)]
    weights = {name: whole(t).detach().clone().numpy() for name, t in model_tensors(trainer.model).items()}
    result = initial, losses, weights, trainer.evaluate()
    trainer.lock.close()
    return result


TWO = {"batch": 4, "evaluate_batches": 1}  # a batch of two ranks holds two of one process


def same(actual, expected):
    """The losses and weights are equal bit for bit, and the mean over other batches is within rounding."""
    assert actual[1] == expected[1]
    for index in (0, 2):
        for name, weight in expected[index].items():
            np.testing.assert_array_equal(actual[index][name], weight, name)
    np.testing.assert_allclose(actual[3], expected[3], rtol=1e-6)


def test_two_ranks_train_as_one(tmp_path, text):
    one = train(0, tmp_path / "one", str(text), {"accumulate": 2})
    for rank in run_ranks(2, train, tmp_path / "two", str(text), TWO):
        same(rank, one)


def gathered_in_bf16(rank, folder, text):
    """The losses, the dtypes of the norm that the last block computes with and of the masters, and exchanges a step."""
    config = TINY | TWO | {"data": [text], "out": f"{folder}/run", "parallel": {"gather_dtype": "bf16"}}
    trainer = start_run(Config.from_dict(config), Console(quiet=True))
    dtypes = []
    trainer.model.model.norm.register_forward_pre_hook(lambda module, args: dtypes.append(module.weight.dtype))
    with mock.patch("torch.distributed.all_to_all_single", wraps=distributed.all_to_all_single) as exchange:
        losses = [float(mean_of_ranks(trainer.step()[0])) for _ in range(3)]
    masters = {str(p.dtype) for p in trainer.model.parameters()}
    return losses, str(dtypes[-1]), masters, exchange.call_count / 3


def test_other_weights_are_gathered_in_bf16_on_request(tmp_path, text):
    losses = train(0, tmp_path / "one", str(text), {"accumulate": 2})[1]
    found, dtype, masters, exchanges = run_ranks(2, gathered_in_bf16, tmp_path / "two", str(text))[0]
    assert (dtype, masters) == ("torch.bfloat16", {"torch.float32"})
    assert exchanges == 2  # of BF16 gradients: those of two blocks, which are one unit, and of the model
    assert found != losses
    np.testing.assert_allclose(found, losses, rtol=1e-2)


@pytest.mark.slow
def test_two_ranks_run_compiled_blocks_that_recompute(tmp_path, text):
    settings = {"activation_checkpointing": {"mode": "selective"}, "layers": 1, "recipe": "delayed"}
    compiled = settings | {"compile": {"blocks": True, "backend": "aot_eager"}}
    one = train(0, tmp_path / "one", str(text), settings | {"accumulate": 2})
    same(run_ranks(2, train, tmp_path / "two", str(text), compiled | TWO)[0], one)


def refusals(rank, folder, text):
    """The messages of runs that must not start."""
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    wrong = {
        "degrees": {"parallel": {"tp": 3}},
        "async": {"parallel": {"tp": 2, "async_tp": True}, "kv_heads": 2},
        "batch": {"batch": 3},
        "settings": {"learning_rate": 1e-2 + rank * 1e-3},
        "folder": {"out": str(folder / "taken")},
        "data": {"data": [str(folder / "absent.txt")]},
        "recipe": {"recipe": "rowwise" if rank == 0 else "rowwize"},
    }
    messages = {}
    for name, settings in wrong.items():
        config = Config.from_dict(TINY | {"data": [text], "out": f"{folder}/run"} | settings)
        try:
            start_run(config, Console(quiet=True))
        except (ValueError, OSError) as error:
            messages[name] = (type(error).__name__, str(error))
    return messages


def test_a_run_that_cannot_start_is_refused_on_every_rank_with_one_message(tmp_path, text):
    first, second = run_ranks(2, refusals, tmp_path, str(text))
    assert first == second
    assert "number of processes, 2" in first["degrees"][1]
    assert "parallel.async_tp needs GPUs" in first["async"][1]
    assert "got 3" in first["batch"][1]
    assert "learning_rate is 0.01 on rank 0 and 0.011 on rank 1" in first["settings"][1]
    assert first["folder"][0] == "FileExistsError"
    assert "absent.txt" in first["data"][1]
    assert "recipe is 'rowwise' on rank 0 and 'rowwize' on rank 1" in first["recipe"][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_share_layers_and_replicas_train_as_one_within_rounding(tmp_path, text):
    settings = {"kv_heads": 2, "clip": 1}
    mesh = {"parallel": {"tp": 2, "dp_replicate": 2, "dp_shard": 1}}
    initial, losses, weights, evaluation = train(0, tmp_path / "one", str(text), settings)
    four = run_ranks(4, train, tmp_path / "four", str(text), settings | mesh)
    assert all(rank[1] == four[0][1] for rank in four)
    for name, expected in initial.items():
        np.testing.assert_array_equal(four[0][0][name], expected, name)
    np.testing.assert_allclose(four[0][1], losses, rtol=1e-3)
    np.testing.assert_allclose(four[0][3], evaluation, rtol=1e-3)


def test_two_ranks_fine_tune_a_hugging_face_model_as_one(tmp_path, text):
    make_model(tmp_path / "model", "llama", tie_word_embeddings=True, num_hidden_layers=1)
    settings = {"model": str(tmp_path / "model"), "tokenizer": "bytes"}
    one = train(0, tmp_path / "one", str(text), settings | {"accumulate": 2})
    same(run_ranks(2, train, tmp_path / "two", str(text), settings | TWO)[0], one)
