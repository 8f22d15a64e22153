"""The report as one HTML file that loads nothing: tables, inline figures, and what they do not show."""

from __future__ import annotations

from typing import Any

from attnkit_experiments.recipes import RECIPES
from attnkit_experiments.report import plots
from attnkit_experiments.report.claims import SLOPE_TOLERANCE
from attnkit_experiments.report.claims import hold as claims_hold
from attnkit_experiments.report.html import safe, section, table
from attnkit_experiments.report.results import Line, Spread, StudyResults
from attnkit_experiments.study.recipe import Published

FULL = ("paper", "i1k", "fairseq", "wmt14")
"""Presets at the scale of a paper."""

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
.badge { display: inline-block; font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 99px;
  border: 1px solid var(--accent); color: var(--accent); }
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
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; font-size: 14.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: 13.5px/1.5 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px;
  overflow-x: auto; }
li { max-width: 76ch; margin: 4px 0; }
"""


def render(study: StudyResults, *, show_images: bool = True) -> str:
    """The whole page; without `show_images` nothing of the data set is in it."""
    about = study.about
    recipe = RECIPES[about["recipe"]]
    parts = [_head(study), _headline_table(study)]
    columns = [column for column in recipe.published if _concerns(column, study)]
    if columns:
        parts.append(_published(study, columns))
    parts += [section(part) for part in recipe.domain.sections(study, show_images)]
    if study.claims:
        parts.append(_claims(study.claims))
    parts.append(_limits(study))
    parts.append(_made_with(study))
    title = f"{recipe.id} ({about['preset']}) · attnkit experiments"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{STYLE}</style></head><body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _badge(study: StudyResults) -> str:
    kind = "badge smoke" if study.smoke else "badge"
    return f'<span class="{kind}">{"SMOKE · not a result" if study.smoke else safe(study.label)}</span>'


def _head(study: StudyResults) -> str:
    about, recipe = study.about, RECIPES[study.about["recipe"]]
    settings = about["study"]
    finished = sum(len(line.results) for line in study.lines)
    text = (
        f"<h1>{safe(recipe.title)}</h1>"
        f"<p>{_badge(study)} &nbsp; <code>{recipe.id}</code> "
        f'<span class="soft">· after {safe(recipe.source)}</span></p>'
        f"<p>{finished} runs of {settings['steps']} steps, {safe(about['data']['name'])}: "
        f"{safe(about['data']['text'])}.</p>"
    )
    if study.smoke:
        text += (
            '<div class="alarm"><b>This is a smoke run, not a result.</b> It trains for '
            f"{settings['steps']} steps to show that data, models, training and this page work. "
            "Its numbers say nothing about the variants.</div>"
        )
    if study.missing:
        text += (
            f'<div class="alarm"><b>Unfinished:</b> {len(study.missing)} of {len(about["cells"])} cells have no '
            "result yet; what follows shows the others.</div>"
        )
    for line in study.lines:
        for seed, diagnosis in line.diverged.items():
            text += f'<div class="alarm"><b>{safe(line.label)}, seed {seed}:</b> {safe(diagnosis)}</div>'
    return text


def _headline_table(study: StudyResults) -> str:
    rows, measure = [], RECIPES[study.about["recipe"]].domain.measure
    counted = all("flops_per_sample" in line.first for line in plots.trained(study))
    for line in plots.trained(study):
        found = line.over_seeds(measure.key)
        value = found.text(measure.digits, measure.factor)
        averaged = ""
        if (ema := f"{measure.key}_ema") in line.first:
            averaged = f"<br><small>averaged {line.over_seeds(ema).text(measure.digits, measure.factor)}</small>"
        ratio, difference = study.step_ratio(line), study.difference(line, measure.key)
        rows.append(
            (
                safe(line.label),
                str(found.n),
                f'<span class="{"soft" if study.smoke else "big"}">{value}</span>{averaged}',
                difference.text(measure) if difference else "",
                line.over_seeds("last_loss").text(3),
                f"{line.first['parameters']:,}",
                *([f"{line.first['flops_per_sample'] / 1e6:.1f}"] if counted else []),
                f"{line.step_ms():.0f}" + (f" <small>×{ratio:.2f}</small>" if ratio else ""),
                line.over_seeds("seconds").text(0),
            )
        )
    head = (
        "variant", "seeds", f"{measure.head}<br>{study.preset}", "difference to<br>its baseline", "training<br>loss",
        "parameters", *(["MFLOPs<br>per sample"] if counted else []), "ms per step", "seconds",
    )  # fmt: skip
    text = (
        f"Test {measure.name} after the last step, mean ± standard deviation over seeds. Differences are paired by "
        "seed (same first weights where shapes agree, same batches), with a 95 % interval (Student); the baseline is "
        "named by the recipe. Averaged: with the moving average of the weights. Training loss: mean of the last tenth "
        f"of the steps. Step time: median over steps and seeds, and its ratio to the baseline's. {study.load_text()}"
    )
    return (
        f"<h2>{'What came out (smoke: ignore the numbers)' if study.smoke else 'Result'} {_badge(study)}</h2>"
        f'<p class="soft">{text}</p>{table(head, rows)}'
    )


def _concerns(column: Published, study: StudyResults) -> bool:
    given = study.about["study"] | {"preset": study.preset}
    return all(given[key] in values for key, values in column.where.items())


def _published(study: StudyResults, columns: list[Published]) -> str:
    """The paper's table, ours beside it and labelled with the preset."""
    rows = []
    for line in study.lines:
        cells = [safe(line.label)]
        for column in columns:
            cells += [_ours(line, column), _theirs(line, column)]
        rows.append(cells)
    head = ["variant"]
    for column in columns:
        head += [f"{column.name}<br>{safe(study.preset)}", f"{column.name}<br>paper"]
    text = (
        "The paper's numbers are of its own data and scale: they stand here to compare the order of the rows, not the "
        "values. A dash in them is a training that did not converge."
    )
    return f'<h2>Beside the paper {_badge(study)}</h2><p class="soft">{text}</p>{table(head, rows)}'


def _ours(line: Line, column: Published) -> str:
    if not line.results:
        return "diverged"
    values = [result.get(column.key) for result in line.results.values()]
    known = [value for value in values if value is not None]
    return Spread.of(known).text(column.digits, column.factor) if known else "not measured"


def _theirs(line: Line, column: Published) -> str:
    if line.name not in column.values:
        return ""
    value = column.values[line.name]
    return "–" if value is None else f"{value:.{column.digits}f}"


def _claims(claims: dict[str, Any]) -> str:
    alphas = sorted({row["alpha"] for row in claims["weights"]})
    found = {(row["activation"], row["alpha"]): row["slope"] for row in claims["weights"]}
    activations = list(dict.fromkeys(row["activation"] for row in claims["weights"]))
    worst = max(abs(row["slope"] + row["alpha"]) for row in claims["weights"])
    holds = "holds" if claims_hold(claims) else "does NOT hold"
    slopes = table(
        ("h", *(f"α = {alpha:g}: slope" for alpha in alphas)),
        [(name, *(f"{round(found[name, alpha], 4) + 0.0:+.4f}" for alpha in alphas)) for name in activations],
    )
    variance = table(
        ("n", *(str(row["n"]) for row in claims["variance"])),
        [
            ("n/2", *(f"{row['expected']:.0f}" for row in claims["variance"])),
            ("relu, no scale", *(f"{row['relu']:.2f}" for row in claims["variance"])),
            ("ratio to n/2", *(f"{row['relu'] / row['expected']:.4f}" for row in claims["variance"])),
            ("reluformer", *(f"{row['reluformer']:.4f}" for row in claims["variance"])),
        ],
    )
    return (
        "<h2>Two exact statements, measured</h2>"
        '<p class="soft">They hold at any size and need no training: standard normal q, k, v with 64 features per '
        f"head, lengths {claims['lengths'][0]} to {claims['lengths'][-1]}, through attnkit's public functions. "
        f"Measured to {100 * SLOPE_TOLERANCE:g} %: <b>{holds}</b>.</p>"
        f'<div class="card">{plots.claim_plots(claims)}</div>'
        "<p><b>The mean weight scales as L<sup>-α</sup></b> (Wortsman et al. 2023 §3). Slope of log mean |w| against "
        f"log L, which should be -α; the largest deviation is {worst:.4f}.</p>{slopes}"
        "<p><b>Without a scale the output variance of relu attention is n/2; reluformer keeps it flat</b> (Shen et al. "
        f"2023, Theorem 4.1). Slope of log variance against log n: {claims['variance_slope']:.4f} (should be 1).</p>"
        f"{variance}"
    )


def _limits(study: StudyResults) -> str:
    if study.smoke:
        limits = ["Anything about quality: the models have barely begun to learn."]
    else:
        measure = RECIPES[study.about["recipe"]].domain.measure
        undecided = [
            line.label
            for line in plots.trained(study)
            if (difference := study.difference(line, measure.key)) and not difference.decided
        ]
        limits = []
        if study.preset not in FULL:
            limits.append(
                "What the paper shows. Models, data and training are far smaller, and the paper's differences are "
                "between models that are trained to the end."
            )
        limits += [
            "That one variant is better in general: the spread covers seeds (weights, order of samples, dropout or "
            "augmentation), not data sets, sizes or hyperparameters, which were not tuned for any variant.",
        ]
        if undecided:
            limits.insert(
                0,
                f"A difference to the baseline for: {'; '.join(undecided)}: one seed, or an interval that holds zero.",
            )
        if study.preset == "cpu":
            limits.append("Speed: at this size the step time is mostly overhead.")
    texts = "".join(f"<li>{safe(text)}</li>" for text in limits)
    deviations = "".join(f"<li>{safe(text)}</li>" for text in study.about["deviations"])
    return (
        f"<h2>What this does not show</h2><ul>{texts}</ul><h2>Where it departs from the paper</h2><ul>{deviations}</ul>"
    )


def _made_with(study: StudyResults) -> str:
    about, environment, data = study.about, study.about["environment"], study.about["data"]
    facts = {
        "versions": f"attnkit {environment['attnkit']}, torch {environment['torch']}, numpy {environment['numpy']}, "
        f"Python {environment['python']}",
        "commit": environment["commit"] or "unknown (no git)",
        "device": f"{environment['device']} ({about['device']}), {environment['threads']} threads of "
        f"{environment['cores']} cores, {environment['processes']} processes, {environment['system']}",
        "data": f"{data['name']}, {data['text']}",
        "data checksum": f"sha256 {data['checksum']}",
        "seeds": ", ".join(map(str, about["study"]["seeds"])),
    }
    settings = {key: value for key, value in about["study"].items() if key != "seeds"}
    listed = "".join(f"<dt>{safe(key)}</dt><dd>{safe(value)}</dd>" for key, value in facts.items())
    chosen = ", ".join(f"{key}={_plain(value)}" for key, value in settings.items())
    changed = "".join(f" --set {word}" for word in about["settings"])
    command = f"python -m experiments run {about['recipe']} --preset {about['preset']}{changed} --data DATA --out DIR"
    return (
        f'<h2>How it was made</h2><div class="card"><dl>{listed}</dl></div>'
        f"<pre><code>{safe(command)}\npython -m experiments report DIR</code></pre>"
        f'<p class="soft">Settings: <code>{safe(chosen)}</code></p>'
    )


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
