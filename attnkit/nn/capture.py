"""Analyses of a running model: statistics of its attention weights, outputs and residuals on the data it processes."""

import fnmatch
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

import attnkit
from attnkit._core.special import needs_values
from attnkit._core.typing import AnyFunction, Bindings
from attnkit.analysis import Anisotropy, Concentration, VarianceRatio, weight_blocks
from attnkit.analysis.rows import served

PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_COLUMNS = ("rows", "null", "dead", "total", "entropy", "zeros", "variance_ratio", "anisotropy", "slot_anisotropy")


@dataclass(frozen=True)
class LayerAnalysis:
    """The analysis of one module. nan, or {}, for what could not be measured: `left_out` says why, also of single calls
    (decoding from a state leaves the rows out).

    `rows` counts queries of all heads, `null` those that saw no key (padding among them), `dead` those whose weights
    are all 0; the rest is valid. `means` holds the means over valid rows of the fields of `attnkit.RowStatistics`,
    `zeros` the share of exact zeros among visible pairs, `concentration` {percent: share of the row sum}.
    `variance_ratio` and `variance_ratio_per_token` compare the module's output with its residual; `anisotropy` is the
    mean cosine between rows of its output, `slot_anisotropy` between the value slots of a memory.
    """

    name: str
    kind: str
    calls: int
    rows: int
    null: int
    dead: int
    means: dict[str, float]
    zeros: float
    concentration: dict[float, float]
    variance_ratio: float
    variance_ratio_per_token: float
    anisotropy: float
    slot_anisotropy: float
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """Plain Python, ready for JSON except for nan."""
        return asdict(self)


@dataclass
class _Rows:
    """Sums over rows of attention weights, of one module."""

    curve: Concentration
    rows: int = 0
    null: int = 0
    dead: int = 0
    pairs: float = 0.0
    zeros: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def update(self, op: AnyFunction, q: Tensor, k: Tensor, options: Bindings) -> None:
        needs_values("capture", q)
        fields, options, why = served(op, options)
        if not fields:
            self.left_out["rows"] = why
            return
        statistics: dict[str, Tensor] = attnkit.row_statistics(op, q, k, fields=fields, **options)._asdict()
        valid, null = statistics["nonzero"] > 0, statistics["visible"] == 0
        dead = ~valid & ~null
        self.rows += valid.numel()
        self.null += int(null.sum())
        self.dead += int(dead.sum())
        self.pairs += float(statistics["visible"].sum())
        self.zeros += float((statistics["visible"] - statistics["nonzero"]).sum())
        for name in fields:
            total = float(torch.where(valid, statistics[name], 0.0).sum())
            self.sums[name] = self.sums.get(name, 0.0) + total
        if "entropy" not in fields:
            self.left_out |= {"entropy": why, "concentration": why}
        elif self.curve.percents:
            for weights, visible in weight_blocks(op, q, k, **options):
                self.curve.update(weights, visible)

    def means(self) -> dict[str, float]:
        valid = self.rows - self.null - self.dead
        return {name: total / max(valid, 1) for name, total in self.sums.items()}


class _Layer:
    """The accumulators of one module."""

    def __init__(self, name: str, module: nn.Module, percents: Sequence[float]) -> None:
        self.name, self.module, self.calls = name, module, 0
        self.attention = _Rows(Concentration(percents))
        self.ratio, self.outputs, self.slots = VarianceRatio(), Anisotropy(), Anisotropy()
        self.lock = threading.Lock()  # replicas of DataParallel run at the same time

    def saw_output(self, output: Tensor, tokens: Tensor | None, needs_residual: bool) -> None:
        self.calls += 1
        self.outputs.update(output, tokens)
        if not needs_residual:
            return
        waiting = dict(_RESIDUALS.get())
        residual = waiting.pop(self, None)
        if residual is None:
            raise RuntimeError(f"capture: {self.name!r} ran before the module whose input is its residual")
        _RESIDUALS.set(waiting)
        wide = torch.promote_types(output.dtype, residual.dtype)  # autocast rounds only the output of a branch
        self.ratio.update(output.to(wide), residual.to(wide), tokens)

    def result(self) -> LayerAnalysis:
        rows, curve = self.attention, self.attention.curve
        return LayerAnalysis(
            name=self.name,
            kind=type(self.module).__name__,
            calls=self.calls,
            rows=rows.rows,
            null=rows.null,
            dead=rows.dead,
            means=rows.means(),
            zeros=rows.zeros / rows.pairs if rows.pairs else math.nan,
            concentration=dict(zip(curve.percents, curve.value, strict=True)) if curve.rows else {},
            variance_ratio=self.ratio.value,
            variance_ratio_per_token=self.ratio.per_token,
            anisotropy=self.outputs.value,
            slot_anisotropy=self.slots.value,
            left_out=dict(rows.left_out),
        )


_RESIDUALS: ContextVar[Mapping[_Layer, Tensor]] = ContextVar("residuals", default=MappingProxyType({}))
"""Residuals whose branch has not run yet; tasks and threads that run one model have their own."""


class _Scope:
    """Whose calls a block of `capture` records: those of its context, and those of threads that are in no such block.

    Other tasks of its thread are not among them; replicas of DataParallel are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.thread, self.entered = model, threading.get_ident(), True
        _SCOPES.set((*[scope for scope in _SCOPES.get() if scope.entered], self))

    def holds(self) -> bool:
        own = [scope for scope in _SCOPES.get() if scope.entered and scope.model is self.model]
        return self in own or (not own and threading.get_ident() != self.thread)


_SCOPES: ContextVar[tuple[_Scope, ...]] = ContextVar("scopes", default=())


class Record:
    """The results of `capture` so far; complete after the `with` block.

    `token_masks` {pattern of module names: boolean (B, L), True = a token} marks padding; set it before each batch. A
    module uses the mask of the first pattern (`encoder.*`, as for file names) that matches its name.
    """

    def __init__(self) -> None:
        self.token_masks: Mapping[str, Tensor] = {}
        self._layers: dict[str, _Layer] = {}

    @property
    def layers(self) -> tuple[LayerAnalysis, ...]:
        """One entry per observed module, in the order of the model."""
        return tuple(layer.result() for layer in self._layers.values())

    def __getitem__(self, name: str) -> LayerAnalysis:
        return self._layers[name].result()

    def to_dict(self) -> dict[str, dict[str, object]]:
        """{name of the module: its analysis as plain Python}."""
        return {layer.name: layer.to_dict() for layer in self.layers}

    def table(self) -> str:
        """One line of text per module; shares of null and dead rows, means over valid rows, top shares in percent."""
        percents = sorted({percent for layer in self.layers for percent in layer.concentration})
        rows = [self._cells(layer, percents) for layer in self.layers]
        header = ["module", *_COLUMNS, *(f"top {percent:g}%" for percent in percents)]
        used = [c for c in range(len(header)) if c == 0 or any(cells[c] != "-" for cells in rows)]
        lines = [[cells[c] for c in used] for cells in (header, *rows)]
        widths = [max(len(line[c]) for line in lines) for c in range(len(used))]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)

    def _cells(self, layer: LayerAnalysis, percents: Sequence[float]) -> list[str]:
        share = 1.0 / layer.rows if layer.rows else math.nan
        values = {"null": layer.null * share, "dead": layer.dead * share, **layer.means}
        numbers = [values.get(name, getattr(layer, name, math.nan)) for name in _COLUMNS[1:]]
        numbers += [100.0 * layer.concentration.get(percent, math.nan) for percent in percents]
        rows = str(layer.rows) if layer.rows else "-"
        return [layer.name, rows, *("-" if math.isnan(x) else f"{x:.4g}" for x in numbers)]

    def __str__(self) -> str:
        return self.table()

    def _tokens(self, name: str, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> Tensor | None:
        """Which tokens of a module's input are padding: from `token_masks`, or from its own call."""
        for pattern, mask in self.token_masks.items():
            if fnmatch.fnmatchcase(name, pattern):
                return mask
        if kwargs.get("query_mask") is not None:
            return kwargs["query_mask"]
        to_itself = len(args) < 2 and kwargs.get("context") is None and kwargs.get("cache") is None
        return kwargs.get("key_mask") if to_itself else None


def _resolved(model: nn.Module, residuals: Mapping[str, str]) -> dict[str, str]:
    """{branch: module whose input is its residual} with every `*` written out; ValueError for unknown names."""
    names, sources = dict(model.named_modules()), {}
    for branch, source in residuals.items():
        pattern = re.compile("([^.]+)".join(map(re.escape, branch.split("*"))))
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        if not matches or source.count("*") not in (0, branch.count("*")):
            raise ValueError(f"capture: residuals must name modules of the model; got {branch!r}: {source!r}")
        for match in matches:
            parts = iter(match.groups())
            sources[match[0]] = "".join(next(parts) if piece == "*" else piece for piece in re.split(r"(\*)", source))
    for source in sources.values():
        if source not in names:
            raise ValueError(f"capture: residuals must name modules of the model; it has no {source!r}")
    return sources


def _is_memory(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in ("keys", "values"))


def _attach(record: Record, layer: _Layer, sources: Mapping[str, str], scope: _Scope) -> Iterator[Callable[[], object]]:
    """Hook one module; yields a function that removes each hook."""
    name, module = layer.name, layer.module

    def observe(op: AnyFunction, q: Tensor, k: Tensor, options: Bindings) -> None:
        if not scope.holds():
            return
        mask = next((m for pattern, m in record.token_masks.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if mask is not None:
            own = options.get("query_mask")
            options = {**options, "query_mask": mask[:, None, :] if own is None else mask[:, None, :] & own}
        with torch.no_grad(), layer.lock:
            layer.attention.update(op, q.detach(), k.detach(), options)

    def remember(source: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        if scope.holds():
            _RESIDUALS.set({**_RESIDUALS.get(), layer: (args[0] if args else next(iter(kwargs.values()))).detach()})

    def look(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor | tuple[Tensor, ...]
    ) -> None:
        if not scope.holds():
            return
        out = output[0] if isinstance(output, tuple) else output
        with torch.no_grad(), layer.lock:
            layer.saw_output(out.detach(), record._tokens(name, args, kwargs), name in sources)

    observers = getattr(module, "observers", None)
    if observers is not None:
        observers.append(observe)
        yield lambda: observers.remove(observe)
    if name in sources:
        source = scope.model.get_submodule(sources[name])
        yield source.register_forward_pre_hook(remember, with_kwargs=True).remove
    yield module.register_forward_hook(look, with_kwargs=True).remove


@contextmanager
def capture(
    model: nn.Module, *, residuals: Mapping[str, str] | None = None, percents: Sequence[float] = PERCENTS
) -> Iterator[Record]:
    """Observe a model while it runs, and analyse each of its layers on all of its inputs (Shen et al. 2023 §3-4).

    >>> from attnkit.nn import MultiHeadAttention, capture
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), MultiHeadAttention(8, 2))
    >>> with torch.no_grad(), capture(model, residuals={"1": "0"}) as record:
    ...     out = model(torch.randn(4, 10, 8))
    >>> record["1"].rows, 0 < record["1"].means["entropy"] < 2.303
    (80, True)

    Observed are every `MultiHeadAttention` (every module with a list `observers`, which it calls with (op, q, k,
    options)), every branch named in `residuals`, and the value slots of every memory (a module with parameters `keys`
    and `values`, analysed when the block ends). The results of the model do not change: statistics are computed
    separately from the same q and k, without gradients or random numbers; scores are recomputed once for the rows and
    once for the concentration. Works in training mode, without gradients, and under autocast. Hooks are removed when
    the block ends, also after an exception. What other tasks of asyncio run meanwhile, and threads in such a block of
    their own, is not recorded; calls in threads without one are. Run the model uncompiled and without checkpointing:
    torch.compile may skip hooks, and checkpointing runs them twice.

    Args:
        model: any module.
        residuals: {branch: module whose *input* is the residual that the branch's output is added to}, by names in the
            model: in x + attention(norm(x)) {"attention": "norm"}, and {"attention": "attention"} where the branch
            itself gets the residual. `*` matches one part of a name, the same on both sides:
            {"blocks.*.mlp": "blocks.*.mlp_norm"}.
        percents: of the concentration; () leaves it out, and with it the sorting.

    Yields:
        A `Record`: `layers`, `record[name]`, `to_dict()`, `table()`; `token_masks` for padded batches.

    Raises:
        ValueError: names that the model does not have. RuntimeError, from the model's call: a branch that runs before
            its residual.
    """
    sources, record = _resolved(model, residuals or {}), Record()
    scope = _Scope(model)
    undo: list[Callable[[], object]] = []
    try:
        for name, module in model.named_modules():
            if hasattr(module, "observers") or name in sources or _is_memory(module):
                record._layers[name] = layer = _Layer(name, module, percents)
                undo.extend(_attach(record, layer, sources, scope))
        yield record
    finally:
        scope.entered = False
        for remove in undo:
            remove()
        _RESIDUALS.set(
            {layer: x for layer, x in _RESIDUALS.get().items() if record._layers.get(layer.name) is not layer}
        )
    for layer in record._layers.values():
        if _is_memory(layer.module):
            layer.slots.update(layer.module.get_parameter("values").detach())
