"""A command hides what other packages log about themselves, and nothing else."""

import logging
import subprocess
import sys

import pytest
from environment import with_source


def test_only_the_known_messages_are_hidden(octavo, caplog):
    assert octavo("formats", "0.1")[0] == 0
    logging.getLogger("torchao").warning("Failed to load _C.so: no such symbol")
    logging.getLogger("torch.utils._pytree").warning("%s is an Enum subclass and is now natively supported by", int)
    assert caplog.messages == []
    for name in ("torchao", "torch.utils._pytree", "octavo", "torchao.optim"):
        logging.getLogger(name).warning("something else, by %s", name)
    assert len(caplog.messages) == 4


@pytest.mark.slow
def test_torchao_is_imported_in_silence():
    pytest.importorskip("torchao")
    code = "from octavo_cli.logs import hide_logs; hide_logs(); import torchao.optim"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=with_source())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
