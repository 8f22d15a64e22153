"""What the files of a study say: study.json, and config.json and result.json of its cells."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import fingerprint
from attnkit_experiments.engine.schema import In, conform, read_as

Count = Annotated[int, In("[1, inf)")]
Seconds = Annotated[float, In("[0, inf)")]


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


class StoredData(TypedDict):
    name: str
    text: str
    checksum: str


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


class Trained(Asked):
    data: StoredData
    variants: list[StoredVariant]
    cells: list[str]
    deviations: list[str]


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
    uninspected: NotRequired[str]


class Diverged(TypedDict):
    diverged: str
    config_hash: str
    variant: str
    seed: Annotated[int, In("[0, inf)")]


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


def read_result(folder: Path, measure: str = "") -> dict[str, Any]:
    """The result.json of a cell, whose headline is the key `measure`; UserError if it is none."""

    def whole(result: dict[str, Any]) -> None:
        conform(result, Diverged if "diverged" in result else Result)
        if measure and "diverged" not in result:
            if measure not in result:
                raise ValueError(f"{measure} is missing")
            conform(result[measure], float, measure)
        if folder.name != (name := f"{result['variant']}-seed{result['seed']}"):
            raise ValueError(f"is the result of {name}, in the folder of {folder.name}")

    return read_as(folder / "result.json", dict[str, Any], whole)


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
