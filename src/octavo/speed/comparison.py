"""Comparing the speed of generating text from a packed folder with that of the model that it was packed from."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import torch

from octavo.artifact.packed.layouts import read_config
from octavo.artifact.run import RunFolder, check_config
from octavo.device import choose_device
from octavo.hf.quiet import quiet_transformers
from octavo.progress import Progress, no_progress
from octavo.speed.grid import Grid, ModelSizes, Prompts
from octavo.speed.machine import facts
from octavo.speed.measurement import Advance, Way, check_tokens, measure_cell, open_program
from octavo.speed.memory import Meter, release
from octavo.speed.own_engine import engine_program
from octavo.speed.programs import Program, octavo_program, transformers_program, vllm_program
from octavo.speed.result import Row, SpeedReport
from octavo.train.memory import peak_memory

_ROOM = 0.8  # the share of the free memory that models and caches may take, so that all stay loaded


def compare_speed(
    folder: Path,
    against: Path | None,
    grid: Grid,
    device: str | torch.device,
    progress: Progress = no_progress,
) -> SpeedReport:
    """Measure a folder in Octavo, and the model in BF16 that it was made from in transformers. vLLM runs both.

    Args:
        folder: a folder that `octavo pack` wrote, a run of `octavo train`, or a Hugging Face model folder. vLLM runs
            only the first.
        against: a Hugging Face folder in BF16; None measures `folder` alone.
        grid: the sizes.
        device: as `octavo.device.choose_device` takes it.
        progress: called when a piece of work begins.

    Returns:
        The report. Octavo's greedy tokens are compared with those of a slower way before anything is timed. A size that
        does not fit in memory has a row that says so.

    Raises:
        FileNotFoundError, ArtifactError: a folder is incomplete.
        ValueError: a folder of the wrong kind, a prompt that is longer than the model can see with its new tokens, two
            folders with different vocabularies, or a device that is not there.
        ImportError: transformers is not installed.
    """
    place = choose_device(device)
    has_vllm = find_spec("vllm") is not None
    programs = list(_programs(folder, against, grid, place, has_vllm))
    report = measure_programs(programs, grid, place, progress)
    if not has_vllm:
        report.remarks.append("vLLM is not installed, so it was not measured")
    return report


def _programs(folder: Path, against: Path | None, grid: Grid, device: torch.device, vllm: bool) -> Iterator[Program]:
    packed = _is_packed(folder)
    yield octavo_program(folder, device) if packed else engine_program(folder, grid, device)
    if vllm and packed:
        yield vllm_program(folder, grid)
    if against is None:
        return
    is_run = RunFolder(against).has_model
    if is_run or _is_packed(against):
        found = "a run of octavo train" if is_run else "quantized"
        raise ValueError(f"{against} is {found}: --against takes a Hugging Face model folder in BF16")
    yield transformers_program(against, device)
    if vllm:
        yield vllm_program(against, grid, baseline=True)


def _is_packed(folder: Path) -> bool:
    check_config(folder, "a run of octavo train, a folder of octavo pack, or a Hugging Face model folder")
    return not RunFolder(folder).has_model and bool(read_config(folder).get("quantization_config"))


def measure_programs(
    programs: Sequence[Program], grid: Grid, device: torch.device, progress: Progress = no_progress
) -> SpeedReport:
    """Measure programs at every size of a grid.

    Those that run in this process are loaded together and take turns, if their weights and caches fit in memory.
    Otherwise they are measured one after the other. A program that runs apart, as vLLM does, is always alone.
    """
    sizes = [ModelSizes.read(program.folder) for program in programs]
    for program, size in zip(programs, sizes, strict=True):
        size.check(grid, program.folder, sizes[0].vocabulary)
    report = SpeedReport(facts(), grid, str(device))
    prompts = Prompts(grid, sizes[0].vocabulary, device)
    advance = _counted(programs, grid, progress)
    together = report.interleaved = _fit_together(programs, sizes, prompts)
    shared = [program for program in programs if not program.apart]
    apart = [[program] for program in programs if program.apart]
    with quiet_transformers():
        for group in [*([shared] if together else [[program] for program in shared]), *apart]:
            _measure_group(group, prompts, report, advance)
            release(device)
    report.rows.sort(key=lambda row: row.cell)
    report.process_peak_bytes = peak_memory(device) if device.type == "cpu" else None
    return report


def _measure_group(programs: Sequence[Program], prompts: Prompts, report: SpeedReport, advance: Advance) -> None:
    """Open programs, check their tokens and measure all sizes. Nothing refers to the models afterwards."""
    with ExitStack() as stack:
        ways = list(_open_ways(programs, prompts, report, advance, stack))
        for cell in prompts.grid.cells:
            report.rows += measure_cell(ways, cell, prompts, advance)


def _open_ways(
    programs: Sequence[Program], prompts: Prompts, report: SpeedReport, advance: Advance, stack: ExitStack
) -> Iterator[Way]:
    """The ways of all programs that fit in memory. The stack closes the programs."""
    for program in programs:
        advance(f"loading: {program.name}")
        opened, start = open_program(program, prompts)
        report.starts.append(start)
        if opened is None:
            cells = [(way, cell) for cell in prompts.grid.cells for way in program.ways]
            report.rows += [Row(way, program.baseline, *cell, problem=start.problem) for way, cell in cells]
            continue
        stack.callback(opened.close)
        report.check = report.check or check_tokens(opened, prompts)
        for name, generate in opened.ways.items():
            meter = Meter(prompts.device, start.weight_bytes or 0, apart=program.apart)
            yield Way(name, generate, program.baseline, meter, opened.forget)


def _fit_together(programs: Sequence[Program], sizes: Sequence[ModelSizes], prompts: Prompts) -> bool:
    """Whether the weights of all programs in this process fit on the GPU, with the largest cache of each way."""
    if prompts.device.type != "cuda":
        return True
    grid = prompts.grid
    tokens = max(grid.batches) * (max(grid.prompts) + grid.tokens)
    needed = sum(
        size.weight_bytes + len(program.ways) * tokens * size.cache_bytes
        for program, size in zip(programs, sizes, strict=True)
        if not program.apart
    )
    return needed < _ROOM * torch.cuda.mem_get_info(prompts.device)[0]


def _counted(programs: Sequence[Program], grid: Grid, progress: Progress) -> Advance:
    """A function that reports the pieces of work in order: the loads, and each call of each way at each size."""
    total = sum(1 + len(grid.cells) * len(program.ways) * (1 + grid.rounds) for program in programs)
    done = count()
    return lambda doing: progress(next(done), total, doing)
