"""Calls of attention over processes, and what the processes of tests/library/test_context_parallel.py do."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import attnkit
from attnkit.nn import MultiHeadAttention, Traffic, context_parallel, count_traffic, parallelize
from attnkit.nn.context_parallel import linear, pointwise, softmax

PROCESSES = 4
MEMBERS = {2: [1, 3], 3: [0, 2, 3], 4: [0, 1, 2, 3]}
LENGTHS = {2: (5, 8), 3: (6, 0, 7), 4: (3, 5, 1, 4)}
TOKENS = 13
PATIENCE = timedelta(minutes=10)  # of a process that waits for another
LAST_AXIS = ("mask", "query_mask")  # options whose last axis is cut like tokens


@dataclass(frozen=True)
class Case:
    """A call on a whole sequence of sum(lengths) tokens, cut for so many processes."""

    name: str
    op: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = LENGTHS[2]
    dtype: str = "float64"
    shape: tuple[int, int, int, int, int] = (2, 4, 4, 8, 6)  # batch, heads, heads of keys, features, those of values
    tell_lengths: bool = False
    plant: str | None = None

    def arrays(self) -> dict[str, Tensor]:
        """q, k, v and do of the whole sequence."""
        batch, heads, shared, d, e = self.shape
        generator = np.random.default_rng(5)
        n = sum(self.lengths)
        shapes = {"q": (heads, n, d), "k": (shared, n, d), "v": (shared, n, e), "do": (heads, n, e)}
        made = {name: generator.standard_normal((batch, *shape)) for name, shape in shapes.items()}
        return {name: torch.from_numpy(x.astype(self.dtype)) for name, x in made.items()}

    def whole_options(self) -> dict[str, Any]:
        return {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in self.options.items()}


def wholly(case: Case) -> dict[str, Tensor]:
    """o and the gradients in one process, in float64 on the same inputs."""
    arrays = {name: x.double().requires_grad_(name != "do") for name, x in case.arrays().items()}
    o = getattr(attnkit, case.op)(*(arrays[name] for name in "qkv"), **case.whole_options())
    o.backward(arrays["do"])
    return {"o": o.detach(), **{f"d{name}": arrays[name].grad for name in "qkv"}}  # type: ignore[dict-item]


def _of_traffic(traffic: Traffic) -> dict[str, Any]:
    return {"bytes": traffic.bytes_sent, **traffic.calls}


def partly(case: Case, rank: int, mesh: Any) -> dict[str, Any]:
    """The own part of o and of the gradients, and what was sent."""
    start = sum(case.lengths[:rank])
    own = slice(start, start + case.lengths[rank])
    arrays = {name: x[..., own, :].clone().requires_grad_(name != "do") for name, x in case.arrays().items()}
    options = {n: x[..., own] if n in LAST_AXIS else x for n, x in case.whole_options().items()}
    lengths = case.lengths if case.tell_lengths else None
    op = getattr(attnkit, case.op)
    with ExitStack() as stack:
        if case.plant is not None:
            module, name, bug = PLANTS[case.plant]
            stack.enter_context(mock.patch.object(module, name, bug))
        with count_traffic() as sent:
            o = context_parallel(op, *(arrays[n] for n in "qkv"), mesh=mesh, lengths=lengths, **options)
        with count_traffic() as sent_back:
            o.backward(arrays["do"])
    grads = {f"d{name}": arrays[name].grad for name in "qkv"}
    return {"o": o.detach(), **grads, "forward": _of_traffic(sent), "backward": _of_traffic(sent_back)}


# ---------------------------------------------------------------------------------------------- planted bugs


def _counts_of_own_keys(valid: Any, shards: Any, seen: Any, like: Any) -> int:
    return max(len(shards.own), 1)


def _every_block_on_the_diagonal(queries: range, keys: range, valid: Any, seen: Any, device: Any) -> dict[str, Any]:
    return {"causal": True} if seen.causal else {}


def _own_state_only(states: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    return tuple(part[0] for part in states)


def _equal_shares(part: Tensor, whole: Tensor) -> Tensor:
    return torch.full_like(part, 0.5)[..., None]


PLANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "local-length": (pointwise, "visible_counts", _counts_of_own_keys),
    "no-causal-offset": (softmax, "between", _every_block_on_the_diagonal),
    "no-causal-offset-of-queries": (pointwise, "between", _every_block_on_the_diagonal),
    "first-state-only": (linear, "merged", _own_state_only),
    "lse-ignored": (softmax, "_share", _equal_shares),
}


# ---------------------------------------------------------------------------------------------- a model


class Block(nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        heads = {"num_kv_heads": 2, "qk_norm": True, "causal": True}
        self.attention = MultiHeadAttention(16, 4, op=op, **heads)  # type: ignore[arg-type]
        self.norm, self.second_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), key_mask=key_mask, query_mask=key_mask)
        out: Tensor = x + self.mlp(self.second_norm(x))
        return out


def model(op: str) -> tuple[nn.ModuleList, dict[str, Tensor]]:
    """Two blocks, and their input, the tokens that are there, and the cotangent of the output."""
    torch.manual_seed(1)
    blocks = nn.ModuleList([Block(op), Block(op)]).double()
    x, do = torch.randn(2, 2, TOKENS, 16, dtype=torch.float64)
    present = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])
    return blocks, {"x": x, "present": present, "do": do}


def through(blocks: nn.ModuleList, x: Tensor, present: Tensor, do: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of the weights."""
    for block in blocks:
        x = block(x, present)
    x.backward(do)
    return {"out": x.detach(), **{name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}}


def model_partly(op: str, lengths: tuple[int, ...], rank: int, mesh: Any) -> dict[str, Tensor]:
    blocks, arrays = model(op)
    parallelize(blocks, mesh)
    start = sum(lengths[:rank])
    own = {name: x[:, start : start + lengths[rank]] for name, x in arrays.items()}
    found = through(blocks, own["x"], own["present"], own["do"])
    for name, grad in found.items():
        if name != "out":
            dist.all_reduce(grad, group=mesh.get_group())
    return found


# ---------------------------------------------------------------------------------------------- processes


def join(rank: int, folder: Path, processes: int) -> None:
    """What every process begins with; a warning is an error there as it is here."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=PATIENCE)


def work(rank: int, folder: Path, cases: list[Case], models: list[str]) -> None:
    """Serve every case that this process is a member of, and leave what was found in the folder."""
    join(rank, folder, PROCESSES)
    groups = {count: dist.new_group(members) for count, members in MEMBERS.items() if count < PROCESSES}
    meshes: dict[int, Any] = {**groups, PROCESSES: init_device_mesh("cpu", (PROCESSES,))}
    found: dict[str, Any] = {}
    for case in cases:
        members = MEMBERS[len(case.lengths)]
        if rank in members:
            found[case.name] = partly(case, members.index(rank), meshes[len(members)])
    for op in models:
        found[op] = model_partly(op, LENGTHS[PROCESSES], rank, meshes[PROCESSES])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def fail(rank: int, folder: Path) -> None:
    """One process raises while the other waits for it."""
    join(rank, folder, 2)
    if rank == 1:
        raise ValueError("this process has had enough")
    dist.barrier()
