"""A run in a page of Markdown, as a repository keeps it: verdicts by adapter, and the worst error of every op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attnkit_conformance.core import CaseResult
from attnkit_conformance.judge.verdicts import counts, percent, worst
from attnkit_conformance.report.files import Header, conclusion


def as_markdown(results: list[CaseResult], head: Header) -> str:
    """The conclusion, the machine, the tables, and every failure with its message."""
    by_adapter: dict[str, list[CaseResult]] = {}
    by_op: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        by_adapter.setdefault(result.adapter, []).append(result)
        by_op.setdefault((result.op, result.adapter), []).append(result)
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    adapters = []
    for name, own in by_adapter.items():
        about, count = head["adapters"][name], counts(own)
        adapters.append(
            [f"`{name}`", about["description"], ", ".join(about["dtypes"])]
            + [f"{count[status]:,}" for status in ("pass", "fail", "xfail", "unsupported")]
        )
    ops = [
        [f"`{op}`", *(cell(by_op.get((op, name), [])) for name in by_adapter)]
        for op in dict.fromkeys(result.op for result in results)
    ]
    failures = [f"- `{r.id}` on `{r.adapter}`: {' '.join(r.message.split())}" for r in results if r.status == "fail"]
    reasons = Counter(r.reason for r in results if r.status == "unsupported")
    parts = [
        "# Conformance",
        conclusion(results),
        f"Profile {head['profile']}; {head['device']}, {head['machine']}, Python {head['python']}; {versions}.",
        "## Verdicts",
        table(["adapter", "how", "dtypes", "pass", "fail", "expected to fail", "unsupported"], adapters),
        "## Errors",
        "The worst error of each op as a share of its bound, and how many verdicts passed; a dot where there is none.",
        table(["op", *(f"`{name}`" for name in by_adapter)], ops),
        *(["## Unsupported", "\n".join(f"- {text} ({n})" for text, n in reasons.most_common())] if reasons else []),
        *(["## Failures", "\n".join(failures)] if failures else []),
    ]
    return "\n\n".join(parts) + "\n"


def cell(own: Sequence[CaseResult]) -> str:
    count = counts(own)
    failed = f"{count['fail']} failed, " if count["fail"] else ""
    return failed + (f"{percent(worst(own))} ({count['pass']})" if worst(own) is not None else "·")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([text.replace("|", "\\|") for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
