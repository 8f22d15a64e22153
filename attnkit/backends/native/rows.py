"""Statistics of rows as the library takes them: further outputs of the op that is measured."""

from typing import cast

from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS, base_op, measured
from attnkit._core.typing import Array, FullName
from attnkit.backends.native.served import Arguments, Served
from attnkit.ops import statistics
from attnkit.ops.statistics import RowStatistics
from attnkit.ops.stick_breaking import STICK_BREAKING
from attnkit.ops.vjps import VJPS

COUNTS = ("nonzero", "visible")
"""Fields without a gradient."""


def _measured(op: str, arrays: tuple[Array, ...], options: Arguments) -> tuple[str, Arguments]:
    """The op that serves, and its arguments."""
    base, exact = measured(op, options)
    return base, {**dict(zip("qkv", arrays, strict=False)), **_options_of(base, options), "exact_zeros": exact}


def _options_of(op: str, options: Arguments) -> Arguments:
    """The options without those that the record of the op adds: the library knows what the op hides by itself."""
    if RECORDS[op].family.seeing is None:
        return options
    return {name: x for name, x in options.items() if name not in ("causal", "kept")}


def formula(op: str, options: Arguments, cotangents: Arguments) -> Arguments:
    """Gradients by the generic formula, which can be differentiated, for cotangents of outputs and of statistics."""
    options = {name: x for name, x in options.items() if name != "exact_zeros"}
    dstats = {name: cotangents[f"d{name}"] for name in RowStatistics._fields if f"d{name}" in cotangents}
    if "v" in options and not dstats:
        return VJPS[op](**options, **({"do": None} | cotangents), impl="generic")
    extra: Arguments = {"dstats": RowStatistics(**dstats), "fields": tuple(dstats), "impl": "generic"}
    if "v" not in options:
        return statistics.row_statistics_vjp(cast(FullName, op), **options, **extra)
    return statistics.attention_with_statistics_vjp(cast(FullName, op), **options, do=cotangents.get("do"), **extra)


class Rows(Served):
    """The tables of statistics."""

    def measure(
        self, *arrays: Array, op: str, fields: tuple[str, ...], **options: object
    ) -> RowStatistics | tuple[Array, RowStatistics]:
        """row_statistics of (q, k), attention_with_statistics of (q, k, v)."""
        outputs = (*(("o",) if len(arrays) == 3 else ()), *fields)
        answers = self.evaluate(*_measured(op, arrays, options), outputs) if outputs else ()
        results = dict(zip(outputs, answers, strict=True))
        rows = RowStatistics(**{name: results[name] for name in fields})
        return (results["o"], rows) if len(arrays) == 3 else rows

    def pull_measured(
        self, *arrays: Array, op: str, fields: object, dstats: RowStatistics, do: Array | None = None, **options: object
    ) -> Arguments:
        """Their explicit gradients."""
        cotangents = {f"d{name}": x for name, x in dstats._asdict().items() if name not in COUNTS}
        return self.pulled(*_measured(op, arrays, options), {"do": do} | cotangents)

    def refuse(
        self, *arrays: Array, op: str, fields: object, dstats: object = None, do: Array | None = None, **options: object
    ) -> str | None:
        """Why the library does not serve them."""
        if base_op(op) not in VJPS or base_op(op) == STICK_BREAKING.name:
            return f"statistics of {op} are served by the generic implementation"
        return self.unsupported(base_op(op), *arrays, **_options_of(base_op(op), options))

    def kernels(self, replaces: tuple[str, ...] = ()) -> dict[str, Kernel]:
        """By function and its gradients."""
        rows = Kernel("native", self.measure, self.refuse, replaces=replaces, learned=("sink",))
        pulled = rows._replace(call=self.pull_measured)
        return statistics.kernels(rows, rows, pulled, pulled)
