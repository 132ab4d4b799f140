"""Training runs with the demo's model and text, on the CPU."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from examples import demo
from octavo.train.config import Config
from octavo.train.start import start_run


def train(out: Path, *overrides: str) -> Config:
    """Train the demo in the folder `out`, with other settings as `--key value`."""
    config = Config.load(None, [*demo.SETTINGS, "--out", str(out), "--device", "cpu", *overrides])
    if signal := start_run(config, Console(quiet=True)).run().interrupted:
        raise SystemExit(f"{signal}: no result is written")
    return config
