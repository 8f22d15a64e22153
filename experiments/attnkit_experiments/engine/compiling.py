"""Blocks compiled by torch.compile: each in one graph, in training and evaluation, in every cell; else an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.world import blocks_of

BACKEND: str | Callable[..., Any] = "inductor"
GRAPHS = 8
"""A block may have: in training and in evaluation one for the first sizes and one for any, and as many to spare."""


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a model when they are called for the first time.

    A block is one graph or an error (fullgraph): what runs between two graphs would run eagerly and nobody would know.
    """
    for block in blocks_of(model):
        block.compile(backend=BACKEND, fullgraph=True)


def uncompile(model: nn.Module) -> None:
    """Let the blocks of a model run eagerly again, for hooks, which no graph has."""
    for block in blocks_of(model):
        block._compiled_call_impl = None


@contextmanager
def compiler(label: str, model: nn.Module) -> Iterator[Callable[[], dict[str, int]]]:
    """A context for the training of `model`, whose blocks are compiled, with nothing compiled before it, or after it.

    torch counts the graphs of a code object, which all blocks of all trainings of a process share, and runs what
    exceeds `recompile_limit` eagerly: with its 8, the fifth variant of a study. Here they are counted anew, up to
    GRAPHS for each block.

    Yields a function that returns {"blocks": how many are compiled, "graphs": how many were made of them so far}.

    Raises:
        UserError: a block that is not one graph, or that needs more of them.
    """
    from torch._dynamo import config, utils  # take two seconds to import
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    blocks, before = len(blocks_of(model)), utils.counters["stats"]["unique_graphs"]
    limit = GRAPHS * blocks
    changes: dict[str, Any] = {
        "recompile_limit": limit, "accumulated_recompile_limit": limit, "fail_on_recompile_limit_hit": True,
        "suppress_errors": False,
        # DDP's optimiser would split the graph of a whole model, compiles without fullgraph, and refuses checkpointing
        "optimize_ddp": False,
    }  # fmt: skip
    torch.compiler.reset()
    try:
        with config.patch(changes):
            yield lambda: {"blocks": blocks, "graphs": utils.counters["stats"]["unique_graphs"] - before}
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        why = " ".join(str(error).split("\n\n")[0].split())
        raise UserError(
            f"{label}: compile=true needs every block in one graph, and at most {limit} graphs for {blocks} blocks, "
            f"got {type(error).__name__}: {why}; --set compile=false trains without"
        ) from error
    finally:
        torch.compiler.reset()


def require_graphs(compiled: dict[str, int], label: str) -> None:
    """UserError if nothing was compiled, as where the environment says TORCH_COMPILE_DISABLE=1."""
    if not compiled["graphs"]:
        raise UserError(
            f"{label}: compile=true, and torch compiled none of {compiled['blocks']} blocks, which its environment "
            "forbids; --set compile=false trains without"
        )
