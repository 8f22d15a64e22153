"""The command line: list recipes, run one, make the report of what was run."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

# spinning threads are many times slower when another process needs a core; torch reads this on import
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# cuBLAS reads this once at start; torch needs it for determinism
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import tyro

from attnkit_experiments.commands import classify, decoded, estimate, evaluate, export, profile, repeat, runner
from attnkit_experiments.data.images import throughput
from attnkit_experiments.data.prepare import IMAGES, PREPARE, TEXT
from attnkit_experiments.engine.errors import Diverged, UserError, unknown
from attnkit_experiments.engine.preemption import GRACE, SAVED, Preempted
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.terms import READING, Reading, Terms
from attnkit_experiments.engine.tracking import Tracking
from attnkit_experiments.engine.world import TIMEOUT, Sharding
from attnkit_experiments.recipes import MEASUREMENTS, RECIPES

OfData = Annotated[Reading, tyro.conf.arg(name="")]
"""A group of options, without a name of its own."""


@dataclass(frozen=True)
class List:
    """Show every recipe: id, what it shows, source, presets with their cost."""


@dataclass(frozen=True)
class Run:
    """Train the cells of a recipe; a killed run continues with --resume."""

    recipe: tyro.conf.Positional[str]
    """Recipe id, as printed by list."""
    out: Path
    """Directory for everything that is written."""
    preset: str = "smoke"
    """smoke, cpu, small, paper: what a recipe has is printed by list."""
    data: str | None = None
    """Images: digits, or an ImageFolder directory or zip, or with --set lazy=true also zips and tar shards; sentence
    pairs: a folder as `prepare` writes it, multi30k or documents/NAME; ListOps and copying: generated; text: a file, a
    folder, or what prepare text has written; other sequences: where the task's files are. Default: what
    ATTNKIT_DATA names, else digits for images."""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")
    ] = ()
    """Change a setting of the study, such as steps=100 or alphas=0,0.5,1 (repeatable)."""
    seeds: tuple[int, ...] | None = None
    """Seeds instead of the preset's, such as 0 1 2."""
    device: str = "auto"
    """auto, cpu or cuda[:N]."""
    threads: int | None = None
    """CPU threads; a resumed run keeps the number it was started with."""
    cache: Path | None = None
    """Where decoded images and subwords are kept (default: OUT/cache)."""
    resume: bool = False
    """Continue the study in --out."""
    overwrite: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[CELL ...]")] = None
    """Delete the study in --out and start anew; with names of cells delete and train only those."""
    workers: int = 0
    """Processes that decode images with --set lazy=true, for each process under torchrun; they change no result."""
    keep_going: bool = False
    """Record a diverged cell and train the others."""
    fast: bool = False
    """Allow operations whose results differ from run to run on a GPU; without it every operation is deterministic."""
    enqueue: bool = False
    """Write study.json and train nothing; any number of `work` processes train the cells."""
    reuse: tuple[Path, ...] = ()
    """Studies (the --out of other runs): a cell that one of them has trained with the same configuration, data, kind of
    device, threads and processes is copied instead of trained."""
    sharding: Sharding = "ddp"
    """Under torchrun: every process holds the whole model (ddp) or a part of it (fsdp)."""
    timeout: float = TIMEOUT
    """Under torchrun: the job ends if a process waits for another for this many minutes."""
    grace: float = GRACE
    """Seconds from SIGTERM or SIGUSR1 to the end: the step is finished and saved, and the exit status is 75; 76 if that
    took longer, and then --resume continues at the checkpoint before."""
    track: Tracking | None = None
    """Show the metrics in TensorBoard or Weights & Biases too, which must be installed."""
    reading: OfData = READING


@dataclass(frozen=True)
class Work:
    """Train cells of a study that was started with run and that nobody else trains, until all are trained.

    What the run allows to be left out of the data need not be allowed again.
    """

    folder: tyro.conf.Positional[Path]
    """The --out of a run, on any machine that sees it."""
    data: str | None = None
    """As of run."""
    device: str | None = None
    """auto, cpu or cuda[:N], of the kind that the run had (default: that kind)."""
    threads: int | None = None
    """CPU threads (default: as the run)."""
    cache: Path | None = None
    """As of run."""
    workers: int = 0
    """As of run."""
    keep_going: bool = False
    """As of run."""
    reuse: tuple[Path, ...] | None = None
    """As of run."""
    sharding: Sharding = "ddp"
    """As of run."""
    timeout: float = TIMEOUT
    """As of run."""
    grace: float = GRACE
    """As of run."""
    track: Tracking | None = None
    """As of run."""
    reading: OfData = READING


@dataclass(frozen=True)
class Report:
    """Write report.html, summary.md and CSVs for a study, trained in one folder or in several."""

    folder: tyro.conf.Positional[Path]
    """The --out of a run; the files are written there. Of a committed report the summary is made anew."""
    more: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Of runs of the same study with other seeds or other variants, such as other alphas: one report of all."""

    hide_samples: bool = False
    """Leave the images or sentences of the data, and attention to them, out of the page."""
    data: str | None = None
    """As of run: for cells that were trained but could not be inspected, which are inspected again."""
    device: str | None = None
    """Of this inspection: auto, cpu or cuda[:N] (default: as the run)."""
    cache: Path | None = None
    """As of run."""


@dataclass(frozen=True)
class Results:
    """Write the pages of docs/results: the papers' claims, and what the reports say about them."""

    reports: tyro.conf.Positional[Path] = Path("docs/reports")
    """A folder with a folder for each report."""
    out: tyro.conf.Positional[Path] = Path("docs/results")
    """Directory for the pages and their figures."""


@dataclass(frozen=True)
class Repeat:
    """Train one cell of a published report again, and compare every number with the published ones.

    Exit status: 0 if they are equal, or the headline lies within two standard deviations of the report's seeds.
    """

    report: tyro.conf.Positional[Path]
    """A folder with results.csv and cells.csv, such as docs/reports/000-lengths-cpu."""
    out: Path
    """Directory for the training; where one was interrupted it is continued."""
    cell: str = ""
    """VARIANT-seedN (default: the first of the report)."""
    data: str | None = None
    """As of run."""
    device: str = "auto"
    """As of run."""
    cache: Path | None = None
    """As of run."""
    record: Path | None = None
    """A CSV of such comparisons, which gets a line for this report."""
    reading: OfData = READING


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the finished cells of a study anew, on more test samples: with the weights that they kept, once these
    have given the study's numbers again. Nothing is trained; `report` reads what is written like any study.
    """

    folder: tyro.conf.Positional[Path]
    """The --out of a run, which stays as it is."""
    out: Path
    """A new directory; an evaluation that was interrupted there is continued."""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")
    ] = ()
    """What changes, such as test_pairs=1000: settings that training does not read (0: all samples)."""
    data: str | None = None
    """As of run."""
    device: str | None = None
    """As of work."""
    cache: Path | None = None
    """As of run."""


@dataclass(frozen=True)
class Prepare:
    """Write the sentence pairs of IWSLT14, WMT14 or Europarl7, ImageNet as tar shards, checked and counted, or any text
    as tokens.
    """

    name: tyro.conf.Positional[str]
    """iwslt14, wmt14, europarl7, imagenet-shards, imagenet21k or text."""
    archive: tyro.conf.Positional[Path]
    """The archive, or the folder that holds the archives, as they were downloaded; images: train/CLASS and val/CLASS,
    a directory or zips; text: a file, or a folder with .txt and .jsonl files, also as .gz."""
    out: tyro.conf.Positional[Path]
    """Directory for SPLIT.LANGUAGE.gz, SPLIT-NUMBER.tar and classes.txt, or SPLIT.bin, and manifest.json."""
    any_count: bool = False
    """Take archives whose counts differ from the known ones; the manifest records it."""
    allow_dropped: tuple[str, ...] = ()
    """As of run, for images and text."""
    tokenizer: Path | None = None
    """Text: a tokenizer.json of Hugging Face's tokenizers (default: tokens are bytes)."""
    end: str | None = None
    """Text: the tokenizer's token behind each document (default: <|endoftext|>, <|end_of_text|>, </s>, <eos> or [SEP],
    the first that it has)."""
    files: str | None = None
    """Text: a pattern of the names of files to read, such as "*.en.gz" (default: *.txt, *.jsonl, and these as .gz)."""
    mark: str | None = None
    """Text: a line that separates documents of a file that is not .jsonl (default: <d>)."""
    test_share: float | None = None
    """Text: the share of documents to test on (default: 0.1), chosen by a hash of their content."""


@dataclass(frozen=True)
class Cache:
    """Decode every image of a study once (--set decoded_side=256), or look at what is decoded and mend it."""

    recipe: tyro.conf.Positional[str]
    """Recipe id, as printed by list."""
    cache: Path
    """Where the pixels are kept; run and work find them by the same --cache."""
    preset: str = "smoke"
    """As of run."""
    data: str | None = None
    """As of run."""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")
    ] = ()
    """As of run."""
    workers: int = 0
    """Processes that decode."""
    reading: OfData = READING


@dataclass(frozen=True)
class Decode:
    """Measure images per second: decoding by number of processes, augmentation by operation."""

    data: str
    """Images: an ImageFolder directory, zips or tar shards."""
    workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of decoding processes; 0 decodes in this one."""
    size: int = 224
    """Side of the decoded images."""
    images: int = 512
    """Images of a round."""
    rounds: int = 3
    """Rounds of each measurement; the median is printed with the slowest and the fastest."""
    device: str = "auto"
    """Where images are augmented: auto, cpu or cuda[:N]."""
    cache: Path = Path("cache")
    """Where the index is kept."""
    reading: OfData = READING


@dataclass(frozen=True)
class Export:
    """Write a trained image model as a folder that stands by itself: model.safetensors and config.json."""

    cell: tyro.conf.Positional[Path]
    """RUN/CELL: the --out of a run and one of its cells, such as runs/fig2/softmax-seed0."""
    out: tyro.conf.Positional[Path]
    """A new directory."""
    average: bool = False
    """The moving average of its weights, where one was kept (--set ema=0.999)."""


@dataclass(frozen=True)
class Classify:
    """Print the top classes of images by an exported model, and draw what its attention looks at."""

    folder: tyro.conf.Positional[Path]
    """What export has written."""
    images: tyro.conf.Positional[tuple[Path, ...]]
    """Image files."""
    top: int = 5
    """How many classes."""
    maps: Path | None = None
    """A PNG for attention maps: weights of the class token, or their mean over queries, layer by layer."""
    device: str = "auto"
    """auto, cpu or cuda[:N]."""


@dataclass(frozen=True)
class Profile:
    """Measure what training a model costs: time, memory and parameters of each block, samples per second."""

    recipe: tyro.conf.Positional[str]
    """Recipe id, as printed by list."""
    preset: str = "smoke"
    """As of run."""
    variant: str = ""
    """One of the recipe's variants (default: its first)."""
    data: str | None = None
    """As of run."""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")
    ] = ()
    """As of run."""
    repeats: int = 5
    """Steps of each measurement; medians are printed."""
    device: str = "auto"
    """auto, cpu or cuda[:N]."""
    threads: int | None = None
    """CPU threads."""
    workers: int = 0
    """Processes that decode images with --set lazy=true."""
    fast: bool = False
    """As of run."""
    cache: Path = Path("cache")
    """Where decoded images and subwords are kept."""
    out: Path | None = None
    """A JSON file for the numbers."""
    reading: OfData = READING


@dataclass(frozen=True)
class Cost:
    """Count what training large presets costs, without their data: parameters, operations, memory of each model."""

    recipes: tyro.conf.Positional[tuple[str, ...]] = ()
    """Recipe ids (default: all)."""
    out: Path | None = None
    """A JSON file for the numbers, of which benchmarks/training_time.py makes hours."""


Command = (
    Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Work, tyro.conf.subcommand("work")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Results, tyro.conf.subcommand("results")]
    | Annotated[Repeat, tyro.conf.subcommand("repeat")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[Cache, tyro.conf.subcommand("cache")]
    | Annotated[Decode, tyro.conf.subcommand("decode")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Classify, tyro.conf.subcommand("classify")]
    | Annotated[Profile, tyro.conf.subcommand("profile")]
    | Annotated[Cost, tyro.conf.subcommand("cost")]
)


def show_list() -> None:
    for recipe in RECIPES.values():
        say(f"{recipe.id}  {recipe.title}")
        say(f"    shows   {recipe.shows}")
        say(f"    source  {recipe.source}")
        for name, preset in recipe.presets.items():
            cells = len(recipe.variants(preset.study)) * len(preset.study.seeds)
            say(f"    {name:<7} {cells} cells × {preset.study.steps} steps; {preset.cost}")
    for measurement in MEASUREMENTS.values():
        say(f"{measurement.id}  {measurement.title}")
        say(f"    shows   {measurement.shows}")
        say(f"    source  {measurement.source}")
        for name, preset in measurement.presets.items():
            say(f"    {name:<7} {len(measurement.items(preset.study))} measured, nothing trained; {preset.cost}")


def prepare(command: Prepare) -> None:
    if command.name not in PREPARE:
        raise unknown("data set", command.name, PREPARE)
    options: dict[str, Any] = {"expected": None} if command.any_count else {}
    if command.any_count and command.name == TEXT:
        raise UserError("prepare text: --any-count is for archives whose counts are known")
    if command.name in (*IMAGES, TEXT):
        options["terms"] = Terms(dropped=command.allow_dropped)
    elif command.allow_dropped:
        raise UserError(f"prepare {command.name}: --allow-dropped is for images and text")
    of_text = {name: getattr(command, name) for name in ("tokenizer", "end", "files", "mark", "test_share")}
    for name, value in of_text.items():
        if value is not None:
            if command.name != TEXT:
                raise UserError(f"prepare {command.name}: --{name.replace('_', '-')} is for text")
            options[name] = value
    manifest = PREPARE[command.name](command.archive, command.out, **options)
    for name, file in manifest["files"].items():
        say(f"{name}: {', '.join(f'{count:,} {unit}' for unit, count in file.items() if isinstance(count, int))}")
    say(f"written: {command.out}")


def repeat_cell(command: Repeat) -> int:
    where = {name: getattr(command, name) for name in ("out", "device", "cache")} | command.reading.said()
    comparison = repeat.repeat(command.report, command.cell, command.data, where)
    say(comparison.text())
    if command.record:
        repeat.add_record(command.record, comparison)
    return 0 if comparison.within is not False else 1


def source_of(recipe: str) -> str:
    """The default data of a recipe; "" for an unknown recipe, which is refused later."""
    return RECIPES[recipe].domain.source() if recipe in RECIPES else ""


def words(settings: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The KEY=VALUE of every --set."""
    return tuple(word for each in settings for word in each)


def request_of(command: Run | Profile | Cache) -> dict[str, Any]:
    """The fields of a `runner.Request`."""
    fields = {field.name for field in dataclasses.fields(runner.Request)}
    return {name: value for name, value in vars(command).items() if name in fields} | {
        "settings": words(command.settings),
        "data": command.data if command.data is not None else source_of(command.recipe),
        **command.reading.said(),
    }


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was asked for that is not there; torch says so on a CPU in the text alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def main(arguments: list[str] | None = None) -> int:
    command: Command = tyro.cli(
        Command,
        prog="python -m experiments",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes),
    )
    try:
        if isinstance(command, List):
            show_list()
        elif isinstance(command, Report):
            from attnkit_experiments.commands.report import write_report  # imports plotting

            page = write_report(
                command.folder, *command.more, show_images=not command.hide_samples, data=command.data,
                device=command.device, cache=command.cache,
            )  # fmt: skip
            say(f"report: {page}")
        elif isinstance(command, Results):
            from attnkit_experiments.evidence.site import write  # imports plotting

            say(f"results: {write(command.reports, command.out)}")
        elif isinstance(command, Work):
            where = {name: value for name, value in vars(command).items() if name not in ("folder", "reading")}
            folder = runner.work(command.folder, **where, **command.reading.asked())
            say(f"done; python -m experiments report {folder}")
        elif isinstance(command, Repeat):
            return repeat_cell(command)
        elif isinstance(command, Evaluate):
            where = {name: getattr(command, name) for name in ("data", "device", "cache")}
            out = evaluate.evaluate(command.folder, command.out, words(command.settings), **where)
            say(f"done; python -m experiments report {out}")
        elif isinstance(command, Prepare):
            prepare(command)
        elif isinstance(command, Cache):
            say(f"decoded: {decoded.make(runner.Request(**request_of(command) | {'out': command.cache}))}")
        elif isinstance(command, Decode):
            given = {name: value for name, value in vars(command).items() if name != "reading"}
            throughput.measure(**given, terms=command.reading.terms())
        elif isinstance(command, Export):
            say(f"written: {export.export(command.cell, command.out, average=command.average)}")
        elif isinstance(command, Classify):
            classify.classify(command.folder, command.images, top=command.top, maps=command.maps, device=command.device)
        elif isinstance(command, Cost):
            estimate.count(command.recipes, command.out)
        elif isinstance(command, Profile):
            request = request_of(command)
            profile.profile(
                runner.Request(**request | {"out": command.cache}), command.variant, command.repeats, command.out
            )
        else:
            out = runner.run(runner.Request(**request_of(command)))
            say(f"done; python -m experiments report {out}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Diverged as diagnosis:
        print(f"error: {diagnosis}", file=sys.stderr)
        return 1
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        print(f"error: {file}{error.strerror or error}; what was written stays whole", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"error: not enough memory ({one_line(error)}); what was written stays whole", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; --resume continues at the last checkpoint", file=sys.stderr)
        return 130
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return SAVED
    return 0


if __name__ == "__main__":
    sys.exit(main())
