"""What kernels may cost for a unit of work on compute capability 9.0, and what they cost when the budgets were set."""

from typing import Any, NamedTuple

Record = dict[str, Any]  # of a kernel, as `benchmarks.sass.report` writes it


class Budget(NamedTuple):
    """A limit on the sum over the kernels of a call, in clocks of a unit of the multiprocessor or `predicted`."""

    call: str
    unit: str
    before: int
    aim: int
    missed: str = ""  # why the aim is not met


BUDGETS = (
    Budget("relu", "issue", 318, 300, "the first generation"),
    Budget("relu", "l2", 410, 300, "the first generation"),
    Budget("sigmoid", "issue", 1604, 600, "the first generation"),
    Budget("sigmoid", "mufu", 1024, 640, "the first generation"),
    Budget("gelu", "issue", 2944, 1250, "the first generation"),
    Budget("gaussian", "issue", 1496, 500, "the first generation"),
    Budget("softmax", "issue", 1238, 560, "the first generation"),
    Budget("entmax, a pass", "issue", 872, 400, "the first generation"),
    Budget("statistics: sums, maximum", "issue", 1352, 430, "the first generation"),
    Budget("statistics: with entropy", "issue", 3816, 680, "the first generation"),
    Budget("statistics: all", "issue", 3876, 680, "the first generation"),
    Budget("linear, causal", "predicted", 5497, 1950, "the first generation"),
    Budget("relu, gradients", "predicted", 3415, 2600, "the first generation"),
)


def cost(kernels: dict[str, Record], unit: str) -> int:
    """Clocks of a unit, or predicted ones, of all kernels of a call."""
    return sum(kernel["predicted"] if unit == "predicted" else kernel["clocks"][unit] for kernel in kernels.values())
