"""Modules whose attention runs over the tokens of several processes."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from attnkit.nn.attention import MultiHeadAttention
from attnkit.nn.context_parallel import SERVED, context_parallel
from attnkit.nn.context_parallel.shards import Mesh
from attnkit.nn.gated import GatedAttentionUnit
from attnkit.nn.soft2d import SoftAttention2d

_LOCAL = ("context", "cache", "mask", "bias", "return_weights", "return_statistics")


def parallelize(module: nn.Module, mesh: Mesh, *, lengths: Sequence[int] | None = None) -> None:
    """Make every `MultiHeadAttention` in a module attend over the tokens of all processes of a mesh, in place.

    Each process then gives the module its own contiguous part of the tokens, (B, own tokens, dim), with `key_mask` and
    `query_mask` for these. Everything else in the module must work token by token, and positions must be those in the
    whole sequence. A parameter's gradient is the contribution of the local tokens; the sum over all processes is that
    of a single process (`all_reduce` with SUM; DistributedDataParallel divides by the number of processes).

    Args:
        module: contains at least one MultiHeadAttention, without dropout of weights, its op one of `SERVED`.
        mesh, lengths: as in `context_parallel`.

    Raises:
        ValueError: no MultiHeadAttention in it, or one with dropout.
        NotImplementedError: an op or a module of attnkit that is not supported; in `forward`, a context, a cache, a
            mask of pairs, a bias, weights, statistics, or `capture`.
    """
    for inner in module.modules():
        if isinstance(inner, GatedAttentionUnit | SoftAttention2d):
            raise NotImplementedError(f"parallelize: {type(inner).__name__} is not served")
    layers = [inner for inner in module.modules() if isinstance(inner, MultiHeadAttention)]
    if not layers:
        raise ValueError(f"parallelize: no MultiHeadAttention in {type(module).__name__}")
    for layer in layers:
        if layer.op not in SERVED:
            names = ", ".join(op.__name__ for op in SERVED)
            raise NotImplementedError(f"parallelize: {layer.op.__name__} is not served; served are {names}")
        if layer.dropout:
            raise ValueError(f"parallelize: dropout of weights must be 0; got {layer.dropout}")
    for layer in layers:
        layer.attend = partial(context_parallel, layer.op, mesh=mesh, lengths=lengths)
        layer.register_forward_pre_hook(_refuse_what_is_local, with_kwargs=True)


def _refuse_what_is_local(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Refuse arguments for which `forward` would use the local tokens alone."""
    arguments = {"context": args[1] if len(args) > 1 else None, **kwargs}
    for name in _LOCAL:
        if arguments.get(name) is not None and arguments[name] is not False:
            raise NotImplementedError(f"MultiHeadAttention over several processes: {name} is not served")
    if isinstance(layer, MultiHeadAttention) and layer.observers:
        raise NotImplementedError("MultiHeadAttention over several processes: capture is not served")
