"""`octavo train` on several ranks, of which rank 1 is killed in its first attempt: in step 7, while the checkpoint of
step 6 is being written."""

import os
import signal
import sys
import threading

from patience import HANG

from octavo.checkpoint.dcp_writer import SafetensorsWriter
from octavo.train.trainer import Trainer
from octavo_cli import main

writing = threading.Event()
write_data, step = SafetensorsWriter.write_data, Trainer.step


def write_forever(writer, plan, planner):
    if writer.target.name == "step-00000006":
        writing.set()
        threading.Event().wait(HANG)
    return write_data(writer, plan, planner)


def step_and_die(trainer):
    result = step(trainer)
    if trainer.state.step == 7 and writing.wait(HANG):
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def train(*words):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        SafetensorsWriter.write_data, Trainer.step = write_forever, step_and_die
    sys.argv = ["octavo", "train", *words]
    main()
