"""A self-contained page of the results of `run`: ratios at a glance, a plot per op, every number."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnkit_conformance.report.pages import Markup, render
from benchmarks import plot
from benchmarks.cells import BOTH, FORWARD, OPS

Record = dict[str, Any]
TEMPLATE = Path(__file__).parent / "page.html"
AGAINST = "the fastest backend of torch's scaled_dot_product_attention (softmax beside every op)"
HEADINGS = {FORWARD: "forward", BOTH: "forward and backward"}
NAIVE = ("naive torch", "naive NumPy", "naive jnp", "entmax")


class Group(NamedTuple):
    """The records of one op and form, with what distinguishes it from other forms of the op."""

    op: str
    form: str
    records: list[Record]

    @property
    def title(self) -> str:
        return OPS[self.op].title

    def at(self, mode: str, n: int) -> Record | None:
        return next((r for r in self.records if (r["mode"], r["cell"]["n"]) == (mode, n)), None)

    @property
    def lengths(self) -> list[int]:
        return sorted({record["cell"]["n"] for record in self.records})

    def figure(self) -> Markup:
        """All modes side by side."""
        modes = {heading: [r for r in self.records if r["mode"] == mode] for mode, heading in HEADINGS.items()}
        present = {heading: records for heading, records in modes.items() if records}
        return Markup(plot.draw(f"{self.title}, {self.form}: ratio against n", present))


def write(path: Path) -> Path:
    """The page of a JSON file, beside it."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or not {"environment", "records"} <= data.keys():
        raise ValueError(f"{path}: not a file of `python -m benchmarks run`")
    target = path.with_suffix(".html")
    target.write_text(html(data["environment"], data["records"]))
    return target


def html(environment: dict[str, Any], records: Sequence[Record]) -> str:
    lengths = {mode: sorted({r["cell"]["n"] for r in records if r["mode"] == mode}) for mode in HEADINGS}
    return render(
        TEMPLATE,
        device=environment["device"],
        facts=facts(environment),
        against=environment.get("against", AGAINST),
        ceilings=ceilings(records),
        headings=HEADINGS,
        lengths={mode: ns for mode, ns in lengths.items() if ns},
        groups=groups(records),
        naive=NAIVE,
        ratio=ratio_text,
        verdict=verdict,
        duration=duration,
    )


def groups(records: Iterable[Record]) -> list[Group]:
    """Records by op and form, in order."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        cell = record["cell"]
        form = f"{'causal' if cell['causal'] else 'full'}, d = {cell['d']}, {cell['dtype']}"
        found.setdefault((cell["op"], form), []).append(record)
    return [Group(op, form, of) for (op, form), of in found.items()]


def facts(environment: dict[str, Any]) -> dict[str, object]:
    """Versions, threads and load."""
    return {
        name.replace("_", " "): " ".join(f"{x:.2f}" for x in value) if name.startswith("load_") else value
        for name, value in environment.items()
        if name not in ("device", "against")
    }


def ceilings(records: Iterable[Record]) -> dict[str, str]:
    """The measured rates: medians over the tables."""
    measured = [record for record in records if record["ceiling"]]
    rates = {}
    for dtype in dict.fromkeys(record["cell"]["dtype"] for record in measured):
        found = [r["ceiling"]["flops_per_second"] for r in measured if r["cell"]["dtype"] == dtype]
        rates[f"{dtype} products"] = f"{statistics.median(found) / 1e9:,.0f} GFLOP/s"
    if measured:
        copied = statistics.median(record["ceiling"]["bytes_per_second"] for record in measured)
        rates["copies"] = f"{copied / 1e9:,.1f} GB/s"
    return rates


def ratio_text(ratio: dict[str, float]) -> str:
    """Two digits after the point, fewer for large numbers and more for small ones."""
    x = ratio["median"]
    return f"{x:.0f}×" if x >= 100 else f"{x:.1f}×" if x >= 10 else f"{x:.2f}×" if x >= 0.1 else f"{x:.2g}×"


def verdict(ratio: dict[str, float]) -> str:
    """Say "faster" or "slower" only if both quartiles agree."""
    return "faster" if ratio["lower"] > 1 else "slower" if ratio["upper"] < 1 else "equal"


def duration(seconds: float) -> str:
    """With a unit that fits."""
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * factor:.3g} {unit}"
