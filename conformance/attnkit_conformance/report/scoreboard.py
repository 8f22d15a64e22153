"""A page made from many files of verdicts: implementations and ops, what is right, wrong and not served."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import saved
from attnkit_conformance.report.shares import Count, count, percent

TEMPLATE = Path(__file__).parent / "scoreboard.html"
EXAMPLES = 3  # of failures
LONGEST = 220  # characters of a message
COLUMNS = ("right", "wrong", "refused", "served")

Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """An implementation of a file, by a name of its own, and its verdicts."""

    name: str
    about: str
    results: Results

    def of(self, op: str) -> Results:
        """The verdicts on an op."""
        return [result for result in self.results if result["op"] == op]


def page(paths: Sequence[Path]) -> str:
    """The page of some files; ValueError for what is none, or of other semantics than the first."""
    files = {path: saved.read(path) for path in paths}
    first, *others = files.items()
    for path, data in others:
        if data["semantics"] != first[1]["semantics"]:
            pair = f"{data['semantics']}; {first[0]} of {first[1]['semantics']}"
            raise ValueError(f"{path} is of semantics {pair}: their verdicts are not about the same definitions")
    entries = list(entries_of(files))
    if not entries:
        raise ValueError("the files hold no verdicts")
    ops = [name for name in BY_NAME if any(entry.of(name) for entry in entries)]
    counted = {entry.name: count(entry.results) for entry in entries}
    parts = {
        "lead": html.escape(conclusion(counted, ops)),
        "implementations": board((entry.name, entry.about, entry.results) for entry in entries),
        "links": "".join(f'<a href="#{op}">{html.escape(op)}</a>' for op in ops),
        "ops": "".join(section(op, entries) for op in ops),
        "footer": "".join(f"<p>{html.escape(line)}</p>" for line in origins(files)),
    }
    text = TEMPLATE.read_text()
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def entries_of(files: Mapping[Path, saved.Data]) -> Iterable[Entry]:
    """The implementations of all files; one that is in several has the name of its file behind its own."""
    homes: dict[str, list[Path]] = {}
    for path, data in files.items():
        for result in data["results"]:
            if path not in homes.setdefault(result["adapter"], []):
                homes[result["adapter"]].append(path)
    for name, places in homes.items():
        for path in places:
            data = files[path]
            label = name if len(places) == 1 else f"{name} ({path.stem})"
            about = f"{data['adapters'][name]['description']} · {data['profile']} profile".removeprefix(" · ")
            yield Entry(label, about, [result for result in data["results"] if result["adapter"] == name])


def conclusion(counted: Mapping[str, Count], ops: Sequence[str]) -> str:
    """What the page says, in two sentences."""
    wrong = [name for name, x in counted.items() if x.severe]
    mild = [name for name, x in counted.items() if x.mild and not x.severe]
    little = [name for name, x in counted.items() if not x.wrong and not x.enough]
    right = len(counted) - len(wrong) - len(mild) - len(little)
    total = sum(x.judged for x in counted.values())
    parts = [
        f"{right} {'is right in all that it serves' if right == 1 else 'are right in all that they serve'}"
        if right
        else "",
        f"{len(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong somewhere" if wrong else "",
        f"{len(mild)} in tails or by a policy alone" if mild else "",
        f"of {len(little)} too little is served to say" if little else "",
    ]
    one = len(counted) == 1
    said = ", ".join(part for part in parts if part)
    where = f"{ops[0]}" if len(ops) == 1 else f"{len(ops)} ops"
    worst = max(counted, key=lambda name: counted[name].severe / max(counted[name].judged, 1))
    text = f"{len(counted)} implementation{'' if one else 's'} on {where}, {total:,} verdicts on calls served: {said}."
    if wrong:
        text += f" Most often wrong: {worst}, in {counted[worst].severe:,} of {counted[worst].judged:,}."
    return text


def section(op: str, entries: Sequence[Entry]) -> str:
    """The implementations of an op, those that serve most first."""
    served = [(entry.name, "", entry.of(op)) for entry in entries if entry.of(op)]
    served.sort(key=lambda row: (-count(row[2]).share, count(row[2]).wrong))
    return (
        f'<h2 id="{op}">{html.escape(op)}</h2><p class="hint">{html.escape(BY_NAME[op].formula)}</p>'
        f'<div class="board">{board(served)}</div>'
    )


def board(rows: Iterable[tuple[str, str, Results]]) -> str:
    """Rows with a bar and numbers."""
    head = "".join(f"<span>{name}</span>" for name in COLUMNS)
    return f'<div class="row head"><b></b><i></i>{head}</div>' + "".join(row(*parts) for parts in rows)


def row(name: str, about: str, results: Results) -> str:
    """One implementation: its name, the bar, the numbers, and its first failures."""
    counted = count(results)
    total = max(counted.judged + counted.refused, 1)
    widths = {"right": counted.right, "mild": counted.mild, "wrong": counted.severe, "refused": counted.refused}
    bar = "".join(f'<i class="{kind}" style="width:{100 * n / total:.2f}%"></i>' for kind, n in widths.items() if n)
    tone = "is-wrong" if counted.severe else "is-mild" if counted.mild else ""
    numbers = (
        (f"{counted.right:,}", ""),
        (f"{counted.wrong:,}", tone),
        (f"{counted.refused:,}", ""),
        (percent(counted.share), "" if counted.enough else "is-none"),
    )
    cells = "".join(
        f'<span class="{tone}" data-of="{of}">{text}</span>' for of, (text, tone) in zip(COLUMNS, numbers, strict=True)
    )
    small = f"<small>{html.escape(about)}</small>" if about else ""
    details = "" if about else failures(results)
    return f'<div class="row"><b>{html.escape(name)}{small}</b><div class="bar">{bar}</div>{cells}{details}</div>'


def failures(results: Results) -> str:
    """The first failures, folded: their cases, and what was said of each."""
    failed = [result for result in results if result["status"] in ("fail", "xfail")]
    if not failed:
        return ""
    lines = "".join(f"<p><code>{html.escape(result['id'])}</code><br>{html.escape(said(result))}</p>"
                    for result in failed[:EXAMPLES])  # fmt: skip
    more = f"<p>and {len(failed) - EXAMPLES:,} more</p>" if len(failed) > EXAMPLES else ""
    return f"<details><summary>what is wrong</summary>{lines}{more}</details>"


def said(result: Mapping[str, Any]) -> str:
    """Why a verdict is a failure: its reason if it was expected, else its first message."""
    text = str(result["reason"] or result["failures"][0]["message"])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def origins(files: Mapping[Path, saved.Data]) -> Iterable[str]:
    """Where the verdicts are from."""
    for path, data in files.items():
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        yield f"{path.name}: {versions}, Python {data['python']}, {data['machine']}, semantics {data['semantics']}"
