"""octavo train: a language model from text, in BF16 or FP8."""

from pathlib import Path
from typing import Annotated

import typer

from octavo_cli.choices import MODEL_PRESETS
from octavo_cli.display import print_table

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def train_command(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help=f"A TOML file of settings, the config.json of a run, or a preset: {', '.join(MODEL_PRESETS)}.",
        ),
    ] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="The folder of a run to continue, at its newest checkpoint."),
    ] = None,
    or_resume: Annotated[
        bool,
        typer.Option("--or-resume", help="Continue the run in --out if it has a checkpoint and the same settings."),
    ] = False,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting and its default, and exit.")] = False,
) -> None:
    """Train or fine-tune a language model in BF16 or FP8.

    The model is a Llama, mixture or GPT-2 of Octavo, or a Hugging Face model from a local folder. torchrun divides the
    work among several GPUs.

    Every setting is a --key value on the command line or a line of the TOML file: octavo train --settings lists them. A
    setting that is not given may follow from others, as the warmup from the number of steps. The most used settings:
    --data PATH ..., --recipe rowwise|bf16|FILE.json, --steps N, --batch N, --context N, --width N, --layers N, --device
    auto|cpu|cuda, --out FOLDER.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) finish the step, write a checkpoint and exit. --resume
    FOLDER continues the run bit for bit. With --or-resume the same command begins a run and later continues it. A
    closed output pipe does not end a run.

    Examples:

      octavo train --steps 200 --out runs/first

      octavo train --data 'books/*.txt' --recipe bf16 --tokenizer bpe

      octavo train --resume runs/first --steps 400

      torchrun --nproc-per-node 8 -m octavo train llama-3-8b --data books --out runs/8b
    """
    from octavo.train.config import ConfigError, describe

    if settings:
        rows = [(f"--{name.replace('_', '-')}", kind, str(default), text) for name, kind, default, text in describe()]
        print_table(("setting", "type", "default", "meaning"), rows, prose=["meaning"])
        return
    overrides = list(context.args)
    if config is not None and str(config).startswith("--"):  # click takes the first unknown option for the argument
        overrides, config = [str(config), *overrides], None
    if resume_from and config:
        raise ConfigError(f"a resumed run has its settings: change some with --key value, and leave {config} out")
    if resume_from and or_resume:
        raise ConfigError(
            "--resume continues the run of a folder, and --or-resume that in --out: leave one of them out"
        )
    from octavo.train.processes import run_in_group  # imports torch.distributed, which takes a second

    run_in_group(lambda: _train(config, resume_from, or_resume, overrides))


def _train(path: Path | None, resume_from: Path | None, or_resume: bool, overrides: list[str]) -> None:
    from octavo.train.config import Config
    from octavo.train.log import print_line, training_console
    from octavo.train.ranks import same_outcome, world_size
    from octavo.train.restart import start_or_resume, was_restarted
    from octavo.train.start import resume_run, start_run

    console = training_console()
    if resume_from:
        trainer = resume_run(resume_from, overrides, console)
    else:
        with same_outcome():
            config = Config.load(path, overrides)
        start = start_or_resume if was_restarted() or or_resume else start_run
        trainer = start(config, console)
    result = trainer.run()
    run = trainer.run_folder.path
    if result.interrupted:
        command = _resume_command(run, world_size())
        message = f"{result.interrupted}: saved step {result.step}; continue with: {command}"
    else:
        message = f"done: {result.step} steps in {run}"
    print_line(console, message)


def _resume_command(run: Path, processes: int) -> str:
    """The command that continues a run; the dots stand for torchrun's options, which octavo does not know."""
    return f"{'octavo' if processes == 1 else 'torchrun ... -m octavo'} train --resume {run}"
