"""The figures of image studies: accuracy against α and compute, curves, attention maps, rows of weights."""

from __future__ import annotations

import math
import statistics

from attnkit_conformance.report.pages import Markup, table
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.images import fewshot
from attnkit_experiments.images import plots as image_plots
from attnkit_experiments.report import plots
from attnkit_experiments.report.html import column_head
from attnkit_experiments.report.results import StudyResults
from attnkit_experiments.study.recipe import Section


def sections(study: StudyResults, show_images: bool) -> list[Section]:
    """In page order; without `show_images` there is no image of the data set and no attention to one."""
    parts = []
    alphas = [figure for point in plots.points(study) if (figure := plots.against_alpha(study, point))]
    if alphas:
        parts.append(Section("Accuracy against α", alpha_text(study), Markup().join(map(plots.in_card, alphas))))
    compute = plots.in_card(plots.against_compute(study)) + compute_table(study)
    parts.append(Section("Accuracy against compute", compute_text(study), compute))
    if all(line.has("fewshot_accuracy") for line in plots.trained(study)):
        probes = plots.in_card(plots.against_compute(study, "fewshot_accuracy", "few-shot accuracy"))
        parts.append(Section("Few-shot probes", probe_text(study), probes + probe_table(study)))
    if any(line.first.get("learned") for line in plots.trained(study)):
        parts.append(Section("Learned scales", LEARNED, learned_table(study)))
    parts.append(Section("Learning curves", curves_text(study), plots.in_card(plots.learning_curves(study))))
    if show_images:
        parts.append(Section("Attention maps", MAPS, plots.in_card(image_plots.attention_maps(study))))
        parts.append(Section("", LAYERS, plots.in_card(image_plots.layer_maps(study))))
    entropy = image_plots.entropy_bars(study)
    if entropy:
        parts.append(Section("Entropy per layer", entropy_text(study), plots.in_card(entropy)))
    parts.append(Section("Rows of the attention matrix after training", ROWS, rows_table(study)))
    return parts


MAPS = (
    "First four test images, first seed. Each map shows the weights of the query in the middle (blue square) in "
    "the last layer, mean over heads, before any normalisation; every picture has its own scale. Black is zero; an "
    "all-black map is a row without any weight."
)
LAYERS = (
    "The first image through the layers: the weight each patch receives, mean over heads and queries. Every picture "
    "has its own scale."
)
LEARNED = (
    "What was learned in each layer, mean over heads and seeds (lowest and highest in brackets): the factor e^value on "
    "the weights of a gain, which begins at 1, or alpha, which begins where the label says."
)
ROWS = "Means over valid rows, heads and 64 test images; a row with no weight at all is counted on the right."


def alpha_text(study: StudyResults) -> str:
    seeds = len(study.about["study"]["seeds"])
    if seeds == 1:
        return "One seed: there is no spread to judge differences by."
    band = ", the grey band is softmax ± one standard deviation" if plots.has_softmax(study) else ""
    return (
        f"Mean and standard deviation over {seeds} seeds; dots are single seeds{band}. Points whose bars overlap "
        "are undecided by this study."
    )


def compute_text(study: StudyResults) -> str:
    cores = "threads" if study.about["device"] == "cpu" else "GPUs"
    return (
        "Training FLOPs are counted (3 × forward, matrix products only), so at equal shape they are equal for every "
        f"activation. Core hours are {cores} × steps × the median measured step on the machine named below, so a pause "
        f"does not count; the paper's are of TPU cores. {study.load_text()}"
    )


def compute_table(study: StudyResults) -> Markup:
    rows = [
        (
            line.label,
            f"{line.first['tokens']:,}",
            f"{line.first['training_flops']:.3g}",
            f"{line.core_hours():.3g}",
            line.over_seeds("accuracy").text(1, 100),
        )
        for line in plots.trained(study)
    ]
    return table(("variant", "tokens", "training FLOPs", "core hours", column_head("accuracy, %", study.preset)), rows)


def probe_text(study: StudyResults) -> str:
    shots = fewshot.headline_shots(study.about["study"]["shots"])
    return (
        f"A linear probe on the features before the head, {shots} images of each class, mean over data sets, three "
        "draws of the images and the seeds of training; test images are all of each set's. Ridge regression as in "
        "big_vision, whose settings the paper uses with 10 images."
    )


def probe_table(study: StudyResults) -> Markup:
    shots = fewshot.headline_shots(study.about["study"]["shots"])
    names = [data["name"] for data in study.about["data"]["probed"]]
    rows = []
    for line in plots.trained(study):
        cells = [line.label]
        cells += [line.over_seeds(fewshot.key(name, shots)).text(1, 100) for name in names]
        rows.append((*cells, line.over_seeds("fewshot_accuracy").text(1, 100)))
    return table(("variant", *names, column_head("mean, %", study.preset)), rows)


def curves_text(study: StudyResults) -> str:
    smoothing = study.about["study"]["smoothing"]
    return (
        f"Loss on augmented batches (label smoothing {smoothing:g}, mixup {study.about['study']['mixup']:g}), averaged "
        "over short stretches of steps and over seeds."
    )


def entropy_text(study: StudyResults) -> str:
    signed = [line.label for line in plots.trained(study) if not line.layers("entropy_share")]
    text = (
        "Entropy of each row's normalised weights over log n: 1 is attention spread evenly over all tokens, 0 is "
        "attention to one. Mean over valid rows, heads and 64 test images; the tick is the same model before "
        "training."
    )
    if signed:
        text += f" Not defined where weights can be negative: {', '.join(signed)}."
    return text


def learned_table(study: StudyResults) -> Markup:
    rows = []
    for line in plots.trained(study):
        if not line.first.get("learned"):
            continue
        if "learned_scale" not in line.variant["changes"]:
            name = line.variant["name"]
            raise UserError(f"result.json of {name}: learned must be [], as study.json gives {name} no learned_scale")
        cells = []
        for layer in range(len(line.first["learned"])):
            values = [value for result in line.results.values() for value in result["learned"][layer]]
            if "gain" in line.variant["changes"]["learned_scale"]:
                values = [math.exp(value) for value in values]
            cells.append(f"{statistics.fmean(values):.3f} ({min(values):.3f} … {max(values):.3f})")
        rows.append((line.label, " · ".join(cells)))
    return table(("variant", "layer by layer"), rows)


def rows_table(study: StudyResults) -> Markup:
    rows = []
    for line in plots.trained(study):
        cells = [line.label]
        for key, digits, factor in (("total", 3, 1.0), ("nonzero", 1, 100.0), ("dead", 1, 100.0)):
            layers = line.layers(key) or []
            cells.append(" · ".join(f"{factor * spread.mean:.{digits}f}" for spread in layers))
        rows.append(cells)
    head = ("variant", "row sum, layer by layer", "non-zero weights, %", "rows with no weight, %")
    return table(head, rows)
