"""A page made from many files of verdicts: implementations and ops, what is right, wrong and not served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.report import saved
from attnkit_conformance.report.pages import render
from attnkit_conformance.report.shares import Count, count, percent

TEMPLATE = Path(__file__).parent / "scoreboard.html"
EXAMPLES = 3  # of failures
LONGEST = 220  # characters of a message

Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """An implementation of a file, by a name of its own, and its verdicts."""

    name: str
    about: str
    results: Results

    def of(self, op: str) -> Entry:
        """The same with the verdicts on an op alone."""
        return Entry(self.name, "", [result for result in self.results if result["op"] == op])

    @cached_property
    def count(self) -> Count:
        """What is right, wrong and refused."""
        return count(self.results)

    @property
    def failures(self) -> Results:
        """The verdicts that failed, expected or not."""
        return [result for result in self.results if result["status"] in ("fail", "xfail")]


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
    ops = [op for name, op in BY_NAME.items() if any(entry.of(name).results for entry in entries)]
    return render(
        TEMPLATE,
        lead=conclusion({entry.name: entry.count for entry in entries}, [op.name for op in ops]),
        entries=entries,
        ops=[(op, entries_on(op.name, entries)) for op in ops],
        origins=origins(files),
        percent=percent,
        message=message,
        examples=EXAMPLES,
    )


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


def entries_on(op: str, entries: Iterable[Entry]) -> list[Entry]:
    """The implementations of an op, those that serve most first."""
    own = [entry.of(op) for entry in entries]
    return sorted((x for x in own if x.results), key=lambda x: (-x.count.share, x.count.wrong))


def message(result: Mapping[str, Any]) -> str:
    """Why a verdict is a failure: its reason if it was expected, else its first message."""
    text = str(result["reason"] or result["failures"][0]["message"])
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def origins(files: Mapping[Path, saved.Data]) -> Iterable[str]:
    """Where the verdicts are from."""
    for path, data in files.items():
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        yield f"{path.name}: {versions}, Python {data['python']}, {data['machine']}, semantics {data['semantics']}"
