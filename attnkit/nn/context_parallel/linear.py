"""Linear attention over processes: states are exchanged, not tokens.

Each process sums its keys into the state of the op, (S, z) or with levels (S, z, c), and one all-gather exchanges all
states. Without causality the local queries use the sum of all states; with it, the sum of the states of earlier
processes is the initial state of the local part. Backward is one reduce-scatter of the states' gradients.

A state has B·Hkv·(f·(e + 1) + l) numbers of c bytes, f features (d for linear, d + 1 for cosine, m for performer, d for
efficient) and l levels (0; 1 for performer with the softmax kernel; d for efficient). With W processes a process sends
W - 1 times that forward and as much backward, however long the sequence is.
"""

import math

import torch
from torch import Tensor

from attnkit._core.typing import AnyFunction, Keywords
from attnkit.nn.context_parallel.collectives import Gather, tied
from attnkit.nn.context_parallel.shards import Shards, Visibility, own_keys

State = tuple[Tensor, ...]


def attend(
    op: AnyFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    visibility: Visibility,
    options: Keywords,
) -> Tensor:
    """The local part of o."""
    valid = own_keys(visibility, shards, q.device)
    masked = options if valid is None else {**options, "mask": valid[..., None, :]}
    _, state = op(q[..., :0, :], k, v, return_state=True, **masked)
    states = _states_of_all(state, shards)
    if visibility.causal:
        before = merged(states, shards.rank)
        o: Tensor = op(q, k, v, causal=True, initial_state=before, **masked)
    else:
        o = op(q, k[..., :0, :], v[..., :0, :], initial_state=merged(states, shards.processes), **options)
    return o if shards.own else tied(o, q, k, v, *states)


def _states_of_all(state: State, shards: Shards) -> State:
    """Each part of a state of all processes, (W, ...), in one all-gather."""
    flat = Gather.apply(torch.cat([part.reshape(-1) for part in state]), shards.group)
    parts = flat.split([part.numel() for part in state], dim=1)
    return tuple(x.reshape(-1, *part.shape) for x, part in zip(parts, state, strict=True))


def merged(states: State, count: int) -> State:
    """The sum of the first `count` states. Levels are brought to the largest of them, which is a constant: it cancels.

    With count = 0 the result still depends on `states`: every process has to take part in the gradient's
    reduce-scatter.
    """
    if len(states) == 2:
        return tuple(part[:count].sum(0) for part in states)
    level = states[2]
    level = torch.cat([level[:count], torch.full_like(level[count:], -math.inf)])
    top = level.detach().amax(0)
    fade = torch.exp(level - torch.where(top == -math.inf, 0.0, top))
    S, z = ((part * fade.reshape(*fade.shape, *[1] * (part.ndim - fade.ndim))).sum(0) for part in states[:2])
    return S, z, top
