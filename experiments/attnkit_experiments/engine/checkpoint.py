"""Checkpoints without pickles: a folder of safetensors files, then a JSON file, which seals it.

    step-00000100-1f2e3d4c/shard-00001-model-00001-of-00001.safetensors …    written by torch.distributed.checkpoint
    step-00000100.json                                                       their SHA-256, and all that is no tensor

Every process writes its parts of sharded tensors, and a share of the others, while training goes on; when all have
written, the main process seals them. A process killed at any moment leaves the previous checkpoint sealed. The last two
at least are kept: where the newest is damaged, the run continues from the one before it, and says so. One of another
configuration is refused with its name and the reason; nothing is ever unpickled, which is why the storage is
safetensors: the metadata of torch's own is a pickle.

Each process reads what it needs of whichever files have it, so a run can continue with another number of processes.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import sha256, write_json, written_aside
from attnkit_experiments.engine.progress import say
from attnkit_experiments.engine.schema import In, read_as
from attnkit_experiments.engine.world import ALONE, World

FORMAT = "attnkit-experiments-checkpoint-2"
MODEL = "model."  # before the names of the model's tensors

# which is what is meant where there is one process
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _torchs() -> Any:
    """torch.distributed.checkpoint, which takes two seconds to import: only where something is saved or loaded."""
    import torch.distributed.checkpoint as torchs

    return torchs


class Damaged(UserError):
    """A checkpoint that cannot be loaded."""


class Checkpoints:
    """The checkpoints of a training in `folder`: of a model, its optimiser, and the moving `average` of the weights if
    there is one. The last `keep` of steps that are `due` are kept, and a later one, which an end before its time has
    left: it takes the place of none. A context, after which all that was saved is written.

    All methods are collective.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config_hash: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World = ALONE,
        average: nn.Module | None = None,
        keep: int = 2,
        due: Callable[[int], bool] = lambda step: True,
        steps: int | None = None,
    ) -> None:
        self.folder, self.config_hash, self.keep, self.due, self.world = folder, config_hash, keep, due, world
        self.model, self.optimizer, self.average = model, optimizer, average
        self.steps = steps
        self._sealing = ThreadPoolExecutor(1)
        self._pending: Future[Any] | None = None
        self.longest = 0.0
        """The seconds from a call of `save` to the seal, in the main process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:  # else it is that one which ends the run
                raise
        finally:
            self._sealing.shutdown()

    def save(self, *, step: int, seconds: float) -> None:
        """Write the state after `step` steps, which may be trained on at once. The error of the save before, if it
        failed.
        """
        self.wait()
        begun = time.perf_counter()
        name = self.world.broadcast(f"step-{step:08d}-{secrets.token_hex(4)}")
        writer = _torchs().HuggingFaceStorageWriter(str(self.folder / name), save_distributed=True)
        written = _torchs().async_save(
            _flat(*self._state()), storage_writer=writer, process_group=self.world.background, no_dist=self._alone
        )
        assert isinstance(written, Future)
        about = {"format": FORMAT, "config": self.config_hash, "step": step, "seconds": seconds, "folder": name}
        self._pending = self._sealing.submit(self._seal, written, about, begun) if self.world.main else written

    def wait(self) -> None:
        """Wait until what was saved is written; the error of a process that could not, as on a full disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except _torchs().CheckpointException as error:
            (reason, _), *_ = error.failures.values()
            raise reason from None

    def restore(self) -> tuple[int, float]:
        """Load the newest intact checkpoint; returns (steps done, seconds spent).

        Errors: UserError, in every process, naming the newest file and what is wrong with it if all are damaged, or if
        it is of another configuration. There must be one.
        """
        weights, moments, averaged = self._state()
        tensors = _flat(weights, moments, averaged)
        about = self.world.agreed(lambda: self._newest(tensors))
        reader = _torchs().HuggingFaceStorageReader(str(self.folder / about["folder"]))
        _torchs().load(tensors, storage_reader=reader, process_group=self.world.background, no_dist=self._alone)
        from torch.distributed.checkpoint import state_dict as states

        states.set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        if self.average:
            states.set_model_state_dict(self.average, averaged)
        return int(about["step"]), float(about["seconds"])

    @property
    def _alone(self) -> bool:
        return self.world.size == 1

    def _state(self) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        # statistics of batch normalisation are those of each process's samples, and any process may write them
        models = [self.model, *([self.average] if self.average else [])]
        self.world.same(x for model in models for x in model.buffers())
        from torch.distributed.checkpoint import state_dict as states

        weights, moments = states.get_state_dict(self.model, self.optimizer)
        return weights, moments, states.get_model_state_dict(self.average) if self.average else {}

    def _seal(self, written: Future[Any], about: dict[str, Any], begun: float) -> None:
        """Seal what all processes have written, and remove what is no longer needed up to this step."""
        written.result()
        files = {file.name: sha256(file) for file in sorted((self.folder / about["folder"]).iterdir())}
        new = self.folder / f"step-{about['step']:08d}.json"
        write_json(new, about | {"files": files})
        self.longest = max(self.longest, time.perf_counter() - begun)
        for seal in {*seals(self.folder)} - {*seals(self.folder, self.due)[-self.keep :], new}:
            seal.unlink()
        kept = set()
        for seal in seals(self.folder):
            with suppress(UserError):  # a damaged one
                kept.add(read_seal(seal)["folder"])
        for folder in self.folder.glob("step-*/"):
            if folder.name not in kept and folder.name[: len(new.stem)] <= new.stem:
                shutil.rmtree(folder)

    def _newest(self, wanted: dict[str, Tensor]) -> Seal:
        """The seal of the newest intact checkpoint; UserError as in `restore`."""
        reasons: list[UserError] = []
        for seal in reversed(seals(self.folder)):
            try:
                about = intact(seal, wanted, self.steps)
            except Damaged as damage:
                reasons.append(damage)
                continue
            if about["config"] != self.config_hash:
                reason = f"another configuration ({about['config'][:12]}, wanted {self.config_hash[:12]})"
                raise UserError(_refusal(seal, f"it belongs to {reason}"))
            for reason_before in reasons:
                say(f"{reason_before}; going on from step {about['step']}")
            return about
        raise UserError(f"{reasons[0]}; --overwrite {self.folder.parent.name} starts the cell anew")


def seals(folder: Path, due: Callable[[int], bool] = lambda step: True) -> list[Path]:
    """The seals of the checkpoints in a folder, of steps that are `due`, the oldest first."""
    steps = {path: path.stem.removeprefix("step-") for path in folder.glob("step-*.json")}
    ours = {path: int(step) for path, step in steps.items() if step.isdecimal() and due(int(step))}
    return sorted(ours, key=lambda path: ours[path])


class Seal(TypedDict):
    """The JSON file of a checkpoint."""

    format: Literal["attnkit-experiments-checkpoint-2"]
    config: str
    step: Annotated[int, In("[0, inf)")]
    seconds: Annotated[float, In("[0, inf)")]
    folder: str
    files: dict[str, str]


def read_seal(path: Path, steps: int | None = None) -> Seal:
    """What a seal says; Damaged if it is none, or one of a step that its name does not say or after `steps`."""

    def relate(seal: Seal) -> None:
        if path.name != f"step-{seal['step']:08d}.json":
            raise ValueError(f"step must be the one in its name, got {seal['step']}")
        if steps is not None and seal["step"] > steps:
            raise ValueError(f"step must be at most {steps}, which are all steps, got {seal['step']}")
        if not seal["folder"].startswith(f"{path.stem}-"):
            raise ValueError(f"folder must begin with {path.stem}, got {seal['folder']!r}")
        for name in (seal["folder"], *seal["files"]):
            if Path(name).name != name:
                raise ValueError(f"its files must be beside it, got {name!r}")

    try:
        return read_as(path, Seal, relate)
    except UserError as error:
        raise Damaged(_refusal(path, str(error).removeprefix(f"{path}: "))) from None


def intact(seal: Path, wanted: dict[str, Tensor], steps: int | None = None) -> Seal:
    """What a seal says; Damaged with a name and the reason if the files are not what was sealed, or lack a tensor, or
    have it in another shape or dtype.
    """
    about = read_seal(seal, steps)
    folder = seal.with_name(about["folder"])
    for name, digest in about["files"].items():
        if not (folder / name).is_file():
            raise Damaged(_refusal(folder / name, f"{seal.name} seals it, but it is not there"))
        if sha256(folder / name) != digest:
            raise Damaged(_refusal(folder / name, f"it is damaged: its SHA-256 differs from the one in {seal.name}"))
    try:
        stored = _torchs().HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise Damaged(_refusal(folder, f"it is no checkpoint ({error})")) from None
    if lacking := sorted(wanted.keys() - stored.keys()):
        raise Damaged(_refusal(folder, f"it has no tensor {lacking[0]}"))
    for name, x in wanted.items():
        size, dtype = tuple(stored[name].size), stored[name].properties.dtype
        if (size, dtype) != (tuple(x.shape), x.dtype):
            expected = f"{tuple(x.shape)} of {x.dtype}"
            raise Damaged(_refusal(folder, f"{name} must have shape {expected}, got {size} of {dtype}"))
    return about


def stored_weights(seal: Path) -> dict[str, Tensor]:
    """The whole weights of the model in a sealed checkpoint, on the CPU of this process."""
    reader = _torchs().HuggingFaceStorageReader(str(seal.with_name(intact(seal, {})["folder"])))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if name.startswith(MODEL)
    }
    _torchs().load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MODEL): x for name, x in tensors.items()}


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The whole weights of a possibly sharded model. Collective."""
    from torch.distributed.checkpoint import state_dict as states

    weights: dict[str, Any] = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
    return weights


def write_weights(path: Path, weights: dict[str, Any], about: dict[str, Any]) -> None:
    """Write the final weights alone, readable with safetensors. UserError if they cannot be written."""
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    try:
        with written_aside(path) as aside:
            save_file(tensors, aside, metadata={"attnkit": json.dumps(about)})
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written ({error})") from None


def read_weights(path: Path, wanted: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of `write_weights`, on the CPU; UserError for another file, and for other names or shapes than those
    of a model's `wanted`.
    """
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as weights ({error})") from None
    for name in weights.keys() | wanted.keys() if wanted is not None else ():
        found, expected = (tuple(x[name].shape) if name in x else None for x in (weights, wanted or {}))
        if found != expected:
            raise UserError(f"{path}: the model has {name} of shape {expected}, the file {found}")
    return weights


def _flat(weights: dict[str, Any], moments: Any, averaged: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors by one name; they share their memory with what they came from."""
    tensors = {f"{MODEL}{name}": x for name, x in weights.items()}
    tensors |= {f"average.{name}": x for name, x in averaged.items()}
    for owner, values in moments["state"].items():
        tensors |= {f"optimizer.{owner}.{key}": x for key, x in values.items()}
    return tensors


def _refusal(path: Path, reason: str) -> str:
    return f"{path}: refused: {reason}"
