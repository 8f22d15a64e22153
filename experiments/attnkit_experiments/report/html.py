"""HTML fragments of reports."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnkit_experiments.report.results import command
from attnkit_experiments.study.recipe import Section

STYLE = """
:root { color-scheme: light dark; --paper: #fbfbf9; --card: #ffffff; --ink: #1d2430; --soft: #5b6675; --line: #dfe3e8;
  --accent: #2f6fc4; --alarm: #c2382d; --alarm-paper: #fdecea; --good: #257a4d; }
@media (prefers-color-scheme: dark) { :root { --paper: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #98a3b3;
  --line: #303946; --accent: #7fb0f2; --alarm: #ff8a7d; --alarm-paper: #3a1d1b; --good: #6cc795; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 44px 0 10px; padding-top: 14px; border-top: 1px solid var(--line); }
p { max-width: 76ch; margin: 8px 0; } .soft { color: var(--soft); } small { color: var(--soft); }
.badge { display: inline-block; max-width: 100%; font-size: 13px; font-weight: 600; padding: 2px 10px;
  border-radius: 99px; border: 1px solid var(--accent); color: var(--accent); }
.badge.smoke { border-color: var(--alarm); color: var(--alarm); }
.alarm { background: var(--alarm-paper); border-left: 5px solid var(--alarm); padding: 14px 18px; border-radius: 6px;
  margin: 18px 0; } .alarm b { color: var(--alarm); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 14px 0;
  overflow-x: auto; }
svg { display: block; max-width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14.5px; }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 13px; vertical-align: bottom; }
th, td { padding: 6px 8px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 2px;
  white-space: normal; min-width: 9em; } tr:last-child td { border-bottom: 0; }
td.wide { white-space: normal; text-align: left; } .big { font-weight: 650; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 4px 18px; margin: 0; font-size: 14.5px; }
dt { color: var(--soft); } dd { margin: 0; } dd, code, .badge { overflow-wrap: anywhere; }
@media (max-width: 600px) { main { padding: 24px 16px 60px; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: 8px; } .card svg { width: 560px; max-width: none; } }
code { font: 13.5px/1.5 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px;
  overflow-x: auto; }
li { max-width: 76ch; margin: 4px 0; }
"""


def safe(value: Any) -> str:
    """Text with HTML's special characters escaped."""
    return html.escape(str(value))


def document(title: str, parts: Iterable[str]) -> str:
    """The whole, self-contained page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)} · attnkit experiments</title><style>{STYLE}</style></head><body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def badge(label: str, smoke: bool) -> str:
    """The label of every number: the preset and its changes, or that it is not a result."""
    return f'<span class="badge{" smoke" * smoke}">{"SMOKE · not a result" if smoke else safe(label)}</span>'


def section(part: Section) -> str:
    """A part of the page: its title, if any, a text, and the figure."""
    head = f"<h2>{safe(part.title)}</h2>" if part.title else ""
    return f'{head}<p class="soft">{part.text}</p>{part.body}'


def card(figure: str) -> str:
    """A figure in its frame."""
    return f'<div class="card">{figure}</div>'


def bullets(title: str, texts: Iterable[str]) -> str:
    return f"<h2>{title}</h2><ul>" + "".join(f"<li>{safe(text)}</li>" for text in texts) + "</ul>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    cells = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{value}</td>" for value in row) + "</tr>" for row in rows)
    return card(f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>")


def library_text(environment: Mapping[str, Any]) -> str:
    """The level of attnkit's library for CPUs, where it is recorded."""
    native = environment.get("native")
    return f", CPU library {native}" if native else ""


def changes_text(environment: Mapping[str, Any]) -> str:
    """A sentence for a study from a tree that no commit has, "" for others."""
    commit, _, changed = environment["commit"].partition(" + ")
    return f"Not from a commit: made by {commit} with changes that were not committed." if changed else ""


def origin_section(about: Mapping[str, Any], device: str, more: Mapping[str, str]) -> str:
    """The origin of a study, from its study.json: versions, `device` with its machine, `more` facts, the commands."""
    environment = about["environment"]
    facts = {
        "versions": f"attnkit {environment['attnkit']}, torch {environment['torch']}, numpy {environment['numpy']}, "
        f"Python {environment['python']}" + library_text(environment),
        "commit": environment["commit"] or "unknown (no git)",
        "device": f"{device}, {environment['system']}",
        **more,
    }
    listed = "".join(f"<dt>{safe(key)}</dt><dd>{safe(value)}</dd>" for key, value in facts.items())
    return (
        f"<h2>How it was made</h2>{card(f'<dl>{listed}</dl>')}"
        f"<pre><code>{safe(command(about))}\npython -m experiments report DIR</code></pre>"
    )
