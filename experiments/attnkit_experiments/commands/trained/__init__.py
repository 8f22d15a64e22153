"""Small trained models that come with the package: a folder each, as `python -m experiments export` writes it.

    from attnkit_experiments.commands import trained
    model = trained.load("digits-relu").model

`names()` lists them. Beside the weights lies card.md: what the model reads and answers, its data with their licence,
how good it is, and the command that trained it. They were trained on scikit-learn's digits or on generated data, which
may be passed on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnkit_experiments.commands import export
from attnkit_experiments.commands.export import Exported
from attnkit_experiments.engine.errors import unknown
from attnkit_experiments.recipes import RECIPES

FOLDER = Path(__file__).parent
CARD = "card.md"
SOURCES = {
    "scikit-learn digits": (
        "digits",
        "the test set of Optical Recognition of Handwritten Digits (E. Alpaydin and C. Kaynak, 1998, UCI Machine "
        "Learning Repository, CC BY 4.0), which comes with scikit-learn",
    ),
    "copying": ("generated", "drawn from a seed"),
}
"""By the name of the data, --data and where they are from."""


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{export.CONFIG}"))


def load(name: str) -> Exported:
    """The model of this name in evaluation mode on the CPU, and its config.json; UserError for an unknown name."""
    if name not in names():
        raise unknown("trained model", name, names())
    return export.load(FOLDER / name)


def card(name: str, about: dict[str, Any]) -> str:
    """The text of a model's card, from its config.json."""
    origin, data = about["provenance"], about["provenance"]["data"]
    measure = RECIPES[origin["recipe"]].domain.measure
    changed = "".join(f" --set {setting}" for setting in origin["settings"])
    place, source = SOURCES[data["name"]]
    answer = f"one of {len(about['classes'])} classes" if "classes" in about else "logits of the next symbol"
    return f"""# {name}

Variant `{origin["variant"]}` of {origin["recipe"]}, "{RECIPES[origin["recipe"]].title}". It answers with {answer}.

- **How good**: {measure.text(origin[measure.key])} on test data after {origin["steps"]} steps, seed {origin["seed"]}.
- **Data**: {data["text"]}; {source}. Checksum {data["checksum"]}.
- **What it reads**: {reads(about["input"])}.
- **Trained by** attnkit {origin["attnkit"]} (commit {origin["commit"]}), torch {origin["torch"]}:

```
python -m experiments run {origin["recipe"]} --preset {origin["preset"]} --data {place}{changed} --threads 1 --out RUN
python -m experiments export RUN/{origin["cell"]} {name}
```

{origin["label"]}. Its numbers say nothing about models of other sizes.
"""


def reads(inputs: dict[str, Any]) -> str:
    """What a model takes, in words."""
    if "length" in inputs:
        return f"windows of up to {inputs['length']} bytes, for the task {inputs['task']}"
    size, channels = inputs["size"], inputs["channels"]
    scaled = f"pixels / {inputs['divide']:g} - {inputs['subtract']:g}"
    return f"images (batch, {channels}, {size}, {size}) of {scaled}, pixels from 0 to 255"
