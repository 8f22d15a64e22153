"""What the files of a study say: study.json, and config.json and result.json of its cells."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint
from attnkit_experiments.engine.schema import In, conform, keys_of, read_as
from attnkit_experiments.engine.terms import Counted

if typing.TYPE_CHECKING:
    from attnkit_experiments.study.recipe import Domain

TRANSLATIONS_FILE, REFERENCES_FILE = "translations.txt", "references.txt"  # of a cell: the test split, line by line
MAPS_FILE = "maps.safetensors"  # of a cell: arrays that its inspection leaves for figures
Count = Annotated[int, In("[1, inf)")]
Seconds = Annotated[float, In("[0, inf)")]
Rate = Annotated[float, In("(0, inf)")]
Share = Annotated[float, In("[0, 1]")]


class StoredEnvironment(TypedDict):
    cores: Count | None
    threads: Count
    processes: Count
    torch: str
    device: str
    commit: str


class StoredVariant(TypedDict):
    name: str
    label: str
    series: str
    baseline: str
    point: str
    alpha: float | None


class Probed(TypedDict):
    name: str


class StoredData(TypedDict):
    name: str
    text: str
    checksum: str
    train: Count
    test: Count
    classes: NotRequired[list[str]]
    size: NotRequired[Count]
    channels: NotRequired[Count]
    probed: NotRequired[list[Probed]]
    census: NotRequired[Counted]
    terms: NotRequired[StoredTerms]


class StoredTerms(TypedDict):
    """The options of a run that say what may be left out of its data, by their names."""

    skip_unreadable: bool
    allow_dropped: list[str]
    allow_one_class: bool
    max_pixels: Count
    max_bytes: Count
    max_header: Count


class Asked(TypedDict):
    """study.json of what is measured, and of what is trained."""

    recipe: str
    preset: str
    label: str
    settings: list[str]
    study: dict[str, Any]
    device: str
    deterministic: bool
    environment: StoredEnvironment


class Evaluated(TypedDict):
    """What has evaluated cells anew; `training` are the settings that their training had otherwise."""

    commit: str
    torch: str
    device: str
    native: str
    training: dict[str, Any]


class Trained(Asked):
    data: StoredData
    variants: list[StoredVariant]
    cells: list[str]
    deviations: list[str]
    evaluated: NotRequired[Evaluated]


class Compiled(TypedDict):
    """Of compile=true: the blocks of the model, all compiled, and the graphs that they share, of the last process."""

    blocks: Count
    graphs: Annotated[int, In("[0, inf)")]


class Result(TypedDict):
    """result.json of a cell that was trained to its end; one that diverged has the first three keys alone."""

    config_hash: str
    variant: str
    seed: Annotated[int, In("[0, inf)")]
    steps: Count
    parameters: Count
    first_loss: float
    last_loss: float
    seconds: Seconds
    step_ms: Seconds
    steady_seconds: Seconds
    load: Seconds
    implementations: NotRequired[dict[str, list[str]]]
    compiled: NotRequired[Compiled]
    input_share: NotRequired[Share]
    tflops_per_s: NotRequired[Rate]
    mfu: NotRequired[Rate]
    peak_bytes: NotRequired[Count]
    uninspected: NotRequired[str]
    reused: NotRequired[str]


class Diverged(TypedDict):
    diverged: str
    config_hash: str
    variant: str
    seed: Annotated[int, In("[0, inf)")]


class RowMeans(TypedDict):
    """Of the rows of one attention layer."""

    total: float
    nonzero: float
    dead: float
    entropy: float | None
    entropy_share: NotRequired[float | None]
    name: NotRequired[str]


class Layers(TypedDict):
    """What inspections measure of every attention layer."""

    layers: list[RowMeans]
    initial_layers: list[RowMeans]


Curve = dict[str, float]  # the share that the largest p % hold, by p


class LayerCurve(TypedDict):
    concentration: Curve


class LayerAnalysis(TypedDict):
    layers: dict[str, LayerCurve]
    slots: dict[str, Curve]


class Analysis(TypedDict):
    """analysis.json of a translation model."""

    trained: LayerAnalysis


class Seeds(TypedDict):
    seeds: list[Annotated[int, In("[0, inf)")]]


def read_asked(folder: Path) -> dict[str, Any]:
    """The study.json of a folder, of what is trained or measured; UserError if there is none, or it is none."""
    if not (folder / "study.json").exists():
        raise UserError(f"{folder}: holds no study; give the --out of python -m experiments run")
    about: Any = read_as(folder / "study.json", Asked)
    return typing.cast(dict[str, Any], about)


def read_trained(folder: Path, settings: type | None = None) -> dict[str, Any]:
    """The study.json of what is trained, whose study has the types of the dataclass `settings`; as `read_asked`."""

    def relate(about: Trained) -> None:
        _cells_are_variants_by_seeds(about)
        for name, kind in typing.get_type_hints(settings).items() if settings else ():
            if name in about["study"]:
                conform(about["study"][name], kind, f"study.{name}")

    read_asked(folder)
    about: Any = read_as(folder / "study.json", Trained, relate)
    return typing.cast(dict[str, Any], about)


def _cells_are_variants_by_seeds(about: Trained) -> None:
    conform(about["study"], Seeds, "study")
    expected = [f"{variant['name']}-seed{seed}" for seed in about["study"]["seeds"] for variant in about["variants"]]
    for name in about["cells"]:
        if Path(name).name != name:
            raise ValueError(f"cells must be names of folders, got {name!r}")
    if about["cells"] != expected:
        raise ValueError(f"cells must be those of its variants and seeds, {expected[:2]} …, got {about['cells'][:2]} …")


def read_result(folder: Path, domain: Domain | None = None) -> dict[str, Any]:
    """The result.json of a cell, with the numbers of its domain; UserError if it is none."""

    def whole(result: dict[str, Any]) -> None:
        kinds: list[type] = [Diverged] if "diverged" in result else [Result]
        if domain and "diverged" not in result:
            kinds += [domain.result] if "uninspected" in result else [domain.result, domain.inspected]
        for kind in kinds:
            conform(result, kind)
        if domain:
            known = keys_of(Result, Diverged, domain.result, domain.inspected)
            for name in result.keys() - known:
                conform(result[name], float, name)
            for name in result.keys() & {f"initial_{each}" for each in result}:
                before, after = result[name], result[name.removeprefix("initial_")]
                if isinstance(before, list) and len(before) != len(after):
                    raise ValueError(f"{name} must have {len(after)} entries, as after training, got {len(before)}")
        if folder.name != (name := f"{result['variant']}-seed{result['seed']}"):
            raise ValueError(f"is the result of {name}, in the folder of {folder.name}")

    return read_as(folder / "result.json", dict[str, Any], whole)


def read_analysis(folder: Path) -> LayerAnalysis:
    """What analysis.json of a translation model says of its trained layers; UserError if it is none."""

    def alike(analysis: Analysis) -> None:
        trained = analysis["trained"]
        for kind, curves in (
            ("layers", {name: layer["concentration"] for name, layer in trained["layers"].items()}),
            ("slots", trained["slots"]),
        ):
            percents = {name: sorted(curve) for name, curve in curves.items() if curve}
            for name, found in percents.items():
                if found != (expected := next(iter(percents.values()))):
                    raise ValueError(f"trained.{kind}.{name} has shares of {found}, others of {expected}")
                if not all(each.replace(".", "", 1).isdecimal() for each in found):
                    raise ValueError(f"trained.{kind}.{name} must have shares by percent, got {found}")

    return read_as(folder / "analysis.json", Analysis, alike)["trained"]


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a cell; UserError unless its hash is that of what it says."""

    def unchanged(config: dict[str, Any]) -> None:
        rest = {key: value for key, value in config.items() if key != "config_hash"}
        if config.get("config_hash") != fingerprint(rest):
            raise ValueError("was changed: its config_hash is not that of what it says")

    return read_as(folder / "config.json", dict[str, Any], unchanged)


def require_result_of(result: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """UserError unless a cell's result is that of its configuration."""
    if result["config_hash"] != config["config_hash"]:
        raise UserError(f"{folder / 'result.json'}: belongs to another configuration than config.json beside it")
