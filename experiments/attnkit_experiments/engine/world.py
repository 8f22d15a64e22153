"""The processes that train together: one, or those started by torchrun.

`torchrun --nproc-per-node N -m experiments run ...` is the same run on N processes: every process takes its share of
the samples of a step and of an evaluation, gradients are summed, and only the main process writes. With a context of C
they are a mesh (N/C, C): the C processes of a row have the same samples, and each a part of every sequence. Gradients
are summed over both, and FSDP2 shards over both.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.preemption import Stop

if TYPE_CHECKING:  # takes two seconds to import
    from torch.distributed.fsdp import MixedPrecisionPolicy

T = TypeVar("T")
Sharding = Literal["ddp", "fsdp"]
TIMEOUT = 30.0
"""Minutes that processes wait for one another; the main one may be inspecting a model meanwhile, or indexing images."""


@dataclass(frozen=True)
class Context:
    """This process among the `size` that have the same samples, each a part of every sequence, and their group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class World:
    """This process among `size`; `sharding` says whether each holds the whole model (DDP) or its part (FSDP2)."""

    rank: int = 0
    size: int = 1
    sharding: Sharding = "ddp"
    background: dist.ProcessGroup | None = None
    """The group of threads that write while these processes train."""
    stop: Stop = field(default_factory=Stop, compare=False)
    """Whether this process was told to stop."""
    context: Context = field(default_factory=Context, compare=False)

    def with_context(self, size: int, device: torch.device) -> World:
        """The same processes, of which `size` have parts of the same sequences. Collective.

        Errors: UserError for a number of processes that is no multiple of it.
        """
        if size == 1:
            return self
        if self.size % size:
            raise UserError(f"context={size} needs a number of processes that is a multiple of {size}, got {self.size}")
        mesh = init_device_mesh(device.type, (self.size // size, size), mesh_dim_names=("data", "context"))
        row = mesh["context"]
        return replace(self, context=Context(row.get_local_rank(), size, row.get_group()))

    def splitting(self, make: Callable[[], T]) -> Callable[[], T]:
        """`make`, whose task then has its part of every sequence."""
        if self.context.size == 1:
            return make

        def divide() -> T:
            task: Any = make()
            task.divide(self.context)
            return task

        return divide

    @property
    def shares(self) -> int:
        """The number of shares of the samples of a step."""
        return self.size // self.context.size

    @property
    def share(self) -> int:
        """Which of them this process has."""
        return self.rank // self.context.size

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def parts(self, samples: int, accumulate: int) -> list[slice]:
        """The samples of a step for this process, in `accumulate` parts; together the processes cover all.

        A part is empty where there are fewer samples than parts, and only then. The last part of a process is there all
        the same, since all call the model together; with FSDP every part is, since every call gathers weights.
        """
        pieces = self.shares * accumulate
        edges = [-(-samples * n // pieces) for n in range(pieces + 1)]
        own = range(self.share * accumulate, (self.share + 1) * accumulate)
        parts = [slice(edges[n], edges[n + 1]) for n in own]
        if self.size > 1 and self.sharding == "fsdp":
            return parts
        return [part for part in parts if part.start < part.stop] or parts[:1]

    def wrap(self, model: nn.Module, device: torch.device, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
        """The module to call in training: `model` itself, or a wrapper that sums its gradients over processes.

        `policy` says in which dtypes weights are gathered and gradients summed, None in their own. UserError for one
        where no weights are sharded.
        """
        if policy and (self.size == 1 or self.sharding != "fsdp"):
            raise UserError(
                "fsdp_parameters and fsdp_gradients need --sharding fsdp on several processes, "
                f"got --sharding {self.sharding} on {self.size}"
            )
        if self.size == 1:
            return model
        if self.sharding == "fsdp":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = policy or MixedPrecisionPolicy()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):  # as precise as its statistics
                    fully_shard(module)
            for block in blocks_of(model):
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
            return model
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    def part(self, module: Any, *, last: bool) -> AbstractContextManager[Any]:
        """A context for the two passes of a part; with the last part gradients are summed over processes."""
        if self.size > 1 and self.sharding == "fsdp":
            module.set_requires_gradient_sync(last)
        if isinstance(module, DistributedDataParallel) and not last:
            return module.no_sync()
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a part of the loss.

        Both wrappers average over processes, but shares of a loss must be summed: hence the factor.
        """
        (loss * self.size).backward()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sum_and_told(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of a scalar over processes, and how many of them were told to stop, in one message."""
        told = x.new_full((), float(self.stop.told.is_set()))
        if self.size == 1:
            return x, told
        x, told = self.sum(torch.stack([x, told])).unbind()
        return x, told

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Every item whose number is this share's, modulo their number; processes of one context have the same."""
        return items[self.share :: self.shares]

    def gathered(self, results: list[T]) -> list[T]:
        """The results of all processes for their `own` items, in the order of the items, in every process; of an item
        those of all processes that have it.
        """
        if self.size == 1:
            return results
        parts: list[list[T]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, results)
        return [part[n] for n in range(len(parts[0])) for part in parts if n < len(part)]

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the main process."""
        if self.size > 1:
            for x in tensors:
                dist.broadcast(x, src=0)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def agreed(self, find: Callable[[], T]) -> T:
        """The main process's result of `find`, in every process; its UserError is raised in all of them."""
        value, refusal = None, None
        if self.main:
            try:
                value = find()
            except UserError as error:
                refusal = str(error)
        value, refusal = self.broadcast((value, refusal))
        if refusal is not None:
            raise UserError(refusal)
        return value  # type: ignore[return-value]

    def in_turn(self, read: Callable[[], T]) -> T:
        """`read` in every process, first in the main one, so that the others use its cache."""
        value = read() if self.main else None
        self.wait()
        return value if self.main else read()  # type: ignore[return-value]

    def shared(self, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """The main process's tensors, in every process."""
        if self.size == 1:
            return tensors
        kinds = self.broadcast({name: (x.shape, x.dtype) for name, x in tensors.items()})
        result = {}
        for name, (shape, dtype) in kinds.items():
            x = tensors[name].to(device) if self.main else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(x, src=0)
            result[name] = x.cpu()
        return result

    def broadcast(self, value: T | None) -> T:
        """The main process's value, in every process."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]


ALONE = World()
"""One process."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the elements of its lists, which are compiled and sharded one by one."""
    return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]


@contextmanager
def joined(
    device: torch.device, sharding: Sharding, timeout: float = TIMEOUT, stop: Stop | None = None
) -> Iterator[World]:
    """The processes started by torchrun, which end if one waits for another longer than `timeout` minutes, or this
    one alone. `stop` says whether this one was told to stop.
    """
    stop = stop or Stop()
    if timeout <= 0:
        raise UserError(f"--timeout {timeout:g}: expected minutes above 0")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(sharding=sharding, stop=stop)
        return
    patience = datetime.timedelta(minutes=timeout)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    try:
        yield World(dist.get_rank(), size, sharding, dist.new_group(backend="gloo", timeout=patience), stop)
    finally:
        dist.destroy_process_group()
