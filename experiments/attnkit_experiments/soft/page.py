"""The figures of SOFT studies on images: cost at the published size, curves, heat maps, residuals."""

from __future__ import annotations

from attnkit_conformance.report.pages import Markup, table
from attnkit_experiments.report import plots
from attnkit_experiments.report.html import column_head
from attnkit_experiments.report.results import StudyResults
from attnkit_experiments.soft import plots as soft_plots
from attnkit_experiments.study.recipe import Section
from attnkit_experiments.study.stored import MAPS_FILE

COSTS = (
    ("full_parameters", "parameters, M", 1e-6, 2),
    ("full_multiply_adds", "multiply-adds, G", 1e-9, 2),
    ("full_multiply_adds_without_inverse", column_head("without the", "inverse, G"), 1e-9, 2),
    ("full_memory", column_head("training memory,", "GB"), 1e-9, 2),
    ("full_training_rate", column_head("images/s", "training"), 1.0, 1),
    ("full_prediction_rate", column_head("images/s", "predicting"), 1.0, 1),
)


def sections(study: StudyResults, show_images: bool) -> list[Section]:
    """In page order; without `show_images` there is no image of the data set and no attention to one."""
    lines = plots.trained(study)
    parts = []
    if "full_parameters" in lines[0].first:
        parts.append(Section("Cost of the published models", cost_text(study), cost_table(study)))
    parts.append(Section("Learning curves", CURVES, plots.in_card(plots.learning_curves(study))))
    if show_images and any((line.first_cell / MAPS_FILE).exists() for line in lines):
        parts.append(Section("Heat maps", MAPS, plots.in_card(soft_plots.heat_maps(study))))
    if any("residuals" in line.first for line in lines):
        parts.append(Section("How the inverse converges", RESIDUALS, plots.in_card(soft_plots.residuals(study))))
    return parts


CURVES = "Loss on augmented batches, averaged over short stretches of steps and over seeds."
MAPS = (
    "First test images, first seed: the weights of the token in the middle (blue square) in the last block of stage 1, "
    "in each of its first two heads (a mini model has one there). Every picture has its own scale; blue is negative, "
    "which SOFT's and Nyströmformer's products of matrices can be. What a convolution of values adds is not in them. "
    "Linformer has no weight for single tokens."
)
RESIDUALS = Markup(
    "‖A A<sub>k</sub> A − A‖₂ / ‖A‖₂ after k steps, in float64, for 32 test images and the first seed. A is the matrix "
    "that the layers invert, its ridge included (0.01 with the options of the authors' code), so that the residual "
    "goes to 0; against the kernel without the ridge it would stay above it. Lines: median over blocks, heads and "
    "images; the upper edge of a band is the largest. Dashed: before training. The last stage is softmax attention "
    "with the options of the code, and inverts nothing."
)


def cost_text(study: StudyResults) -> str:
    text = (
        "The model of the paper's row at 224 pixels and 1,000 classes. Multiply-adds are those of matrix products and "
        "convolutions of one image, counted from the model; the paper's FLOPs are closest to the column without "
        "Newton's iteration."
    )
    batch = study.about["study"]["measured_batch"]
    if batch:
        text += (
            f" Memory is the peak of one training step of {batch} images beyond the weights, speed the median of three "
            f"passes, float32, on {study.about['environment']['device']}; the paper's 1,024 images lay on "
            f"several GPUs. {study.load_text()}"
        )
    return text


def cost_table(study: StudyResults) -> Markup:
    lines = plots.trained(study)
    columns = [column for column in COSTS if column[0] in lines[0].first]
    rows = [
        [line.label, *(f"{factor * line.first[key]:,.{digits}f}" for key, _, factor, digits in columns)]
        for line in lines
    ]
    return table(("variant", *(name for _, name, _, _ in columns)), rows)
