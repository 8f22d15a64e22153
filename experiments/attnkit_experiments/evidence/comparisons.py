"""The page of statistics: how verdicts are made, and every comparison with its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnkit_experiments.engine.progress import many
from attnkit_experiments.evidence import overview, paper_page
from attnkit_experiments.evidence.claim import Answer, answers
from attnkit_experiments.evidence.estimates import Estimate
from attnkit_experiments.evidence.measures import measure_of
from attnkit_experiments.evidence.papers import PAPERS
from attnkit_experiments.evidence.runs import Run
from attnkit_experiments.evidence.size import too_small
from attnkit_experiments.evidence.verdict import Finding
from attnkit_experiments.study.recipe import Measure

SMALL = "too small"


@dataclass(frozen=True)
class Row:
    """A comparison of a `report`, or a level, which would see nothing; `p` is what it counts with in Holm's correction,
    None where it does not, and `corrected` what that makes of it.
    """

    report: str
    name: str
    measure: Measure
    estimate: Estimate
    p: float | None
    corrected: float | None
    word: str
    level: bool = False

    @property
    def cells(self) -> dict[str, str]:
        """What the table has of it, by column; numbers are not broken."""
        measure, estimate = self.measure, self.estimate
        sign = "" if self.level else "+"
        mean = round(measure.factor * estimate.mean, measure.digits) + 0.0
        numbers = {
            "difference": f"{mean:{sign}.{measure.digits}f}",
            "95 %, seeds": estimate.seeds(measure, sign),
            SAMPLES: estimate.samples(measure),
            "Holm's p": "" if self.p is None or self.corrected is None else _p_value(self.corrected),
            "would see": "" if self.level else estimate.would_see(measure).removeprefix("would see "),
        }
        return {
            "comparison": f"[{self.report.removesuffix('-cpu')}](../reports/{self.report}/summary.md): {self.name}",
            "verdict": self.word,
            "measure": measure.head,
            "n": str(estimate.n),
            **{head: number.replace(" ", "\u00a0") for head, number in numbers.items()},
        }


SAMPLES = "95 %, with samples"


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


HOW = """# Statistics

How every verdict of the [results](index.md) is reached, and every comparison with its numbers.

## How verdicts are made

A claim is a comparison that a machine can check: a difference or a level, and the bounds that it should lie in.
Its parts *decide*: of trained models the loss over a test set (of translations that over the 1,014 pairs of the
validation set), and what a claim names where it is about something else. The metric of the task stands beside it.
Differences are paired by seed: same first weights where shapes agree, same batches.

- **Two intervals**, 95 %, uncorrected: Student's *over seeds*, on the same test set, and one [over seeds and test
  samples](#seeds-and-test-samples), where what each seed made of each sample was kept. A difference counts where both
  tell it: the p-value, and what would be seen, are those of the wider one.
- **Holm's correction** is for all comparisons of a table below; equal p-values are one comparison that was made twice,
  or are exact. *Uncorrected* is said of what a comparison's own intervals tell, and no more after correction. Studies
  that are too small are compared, but do not count.
- **Supported**: each part that decides is within its bounds, after correction.
- **Contradicted**: each part is outside, and one at least after correction. **Mixed**: some parts are outside after
  correction, and others are not.
- **Undecided**: neither, or there is one seed. What a comparison *would see* is the difference that is found with 80 %
  power: by four studies in five of so many seeds, before correction. With three seeds it is 3.3 standard deviations of
  a paired difference.
- **No floor yet**: the claim is that two variants are equal or nearly so, and the study has no model whose attention
  returns zeros (the method `zeros`). Where that one passes the test of the claim as well, in the variant's place, or
  leaves it undecided after correction, **this study does not see attention**.
- **Too small**: fewer than 3 passes over the data, sequences of less than half of the paper's tokens, language models
  that have not come to use their context, or more compute that is no better where a claim is of compute. Claims about
  trained models are undecided then; what is counted or timed is not touched.

Counted and exact numbers need no seeds; that some trainings did not diverge contradicts nothing; times of a busy
machine decide nothing. All verdicts are of this size: the papers' models, data and trainings are far larger.
[Sentences that changed](../changed-sentences.md), and why.

## Seeds and test samples

The second interval is a bootstrap of both levels, 2,000 draws of a fixed seed. A draw takes a test set from the samples
with replacement, the same for all seeds and both variants, since a sample that is hard is hard for all. Seeds are drawn
from Student's t around the mean of that test set, and not with replacement, which of three seeds gives an interval from
the least to the largest at best. In 300 simulated studies of three seeds and 60 samples, with the standard errors that
are named, the intervals held the true difference in so many:

| standard error over seeds, samples | both levels | Student, seeds | samples alone | both with replacement |
|---|---|---|---|---|
| 0.4, 0.1 | 97 % | 92 % | 43 % | 80 % |
| 0.3, 0.3 | 98 % | 88 % | 80 % | 90 % |
| 0.1, 0.4 | 96 % | 60 % | 91 % | 92 % |

{kept} Pages of translations also have the p-value of sacrebleu's paired bootstrap (1,000 test sets) for each seed.

## Every comparison

Less of a loss is better. What a claim is about is on the page of its paper; a comparison of several claims stands
once, ratios are differences in %, and a level is compared with its bound. *Passes as well* is said of a model without
attention, in the place of a variant that a claim calls equal.
"""


def render(runs: Sequence[Run]) -> dict[str, str]:
    beside = list(_beside_softmax(runs))
    families = [("Variants beside softmax", beside)]
    families += [(paper.title, list(_of_claims(answers(paper.claims, runs)))) for paper in PAPERS]
    parts = [HOW.format(kept=_reports_with_samples(runs, [row for _, rows in families for row in rows]))]
    parts += [_table(title, rows) for title, rows in families if rows]
    return {"statistics.md": "\n".join(parts)}


def _reports_with_samples(runs: Sequence[Run], rows: Sequence[Row]) -> str:
    """Which reports have the second interval, and of how many rows."""
    names = dict.fromkeys(row.get("report", run.name) for run in runs for row in run.differences)
    found = sum(row.estimate.ends is not None for row in rows)
    have = f"{', '.join(names)} have it" if names else "No report has it yet"
    return (
        f"{have}, for differences to a baseline: {found} of the {len(rows)} comparisons below. Where seeds of another "
        "report were added without it, it is left out."
    )


def _beside_softmax(runs: Sequence[Run]) -> Iterator[Row]:
    corrected = overview.family(runs)
    for run in (run for recipes in overview.TASKS.values() for run in runs if run.recipe in recipes):
        small, measure = bool(too_small(run)), measure_of(run.recipe)
        for variant, estimate in overview.rows(run):
            p = None if small else estimate.p
            word = SMALL if small else overview.word(estimate, corrected)
            yield Row(run.name, run.label(variant), measure, estimate, p, corrected.get(estimate.p), word)


def _of_claims(found: Sequence[Answer]) -> Iterator[Row]:
    """Those that decide and the floors, each once."""
    seen = set()
    for each in found:
        rows = [_row(finding, SMALL if each.too_small else finding.word) for finding in each.findings]
        rows += [_row(floor, paper_page.word_of_floor(floor)) for floor in each.floors or ()]
        for row in rows:
            if row and (key := (row.report, row.name, row.measure.key)) not in seen:
                seen.add(key)
                yield row


def _row(finding: Finding, word: str) -> Row | None:
    if not finding.estimate or not finding.measure or finding.p is None:
        return None
    name, p = finding.text.partition(":")[0], None if word == SMALL else finding.p
    level = not finding.would_see
    return Row(finding.run, name, finding.measure, finding.estimate, p, finding.corrected, word, level)


def _table(title: str, rows: Sequence[Row]) -> str:
    counted = len({f"{row.p:.9g}" for row in rows if row.p is not None})
    told = f"Holm's correction is for {many(counted, 'comparison')}."
    lines = [row.cells for row in rows]
    heads = [head for head in lines[0] if head != SAMPLES or any(line[head] for line in lines)]
    table = [heads, ["---"] * len(heads), *([line[head] for head in heads] for line in lines)]
    return "\n".join([f"### {title}", "", told, "", *(f"| {' | '.join(cells)} |" for cells in table), ""])
