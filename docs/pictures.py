"""Pictures of attention weights: every variant on one real input, with the same queries and keys for all of them.

    python docs/pictures.py                      # all of them, and one of speeds, into docs/families/pictures
    python docs/pictures.py --only entmax_attention --out FOLDER

The ops come from the op database of the conformance kit: every row with weights gets a picture of each of its settings
in `SETTINGS`, or of its defaults. The input is one 8×8 image of scikit-learn's digits; docs/families/index.md says what
q and k are. The same bytes come out of two runs on one machine.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "reference"), str(ROOT / "conformance")]  # this checkout, installed or not

import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from PIL import Image  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402

import attnkit  # noqa: E402
from attnkit_conformance.model.op import Op, weights_of  # noqa: E402
from attnkit_conformance.opdb import BY_NAME, PUBLIC  # noqa: E402
from attnkit_conformance.report.pages import figures  # noqa: E402
from docs import drawing  # noqa: E402
from docs.drawing import SIDE, Drawn, Params, Scene  # noqa: E402

Array = Any

FOLDER = ROOT / "docs" / "families" / "pictures"
TIMES = ROOT / "benchmarks" / "results" / "variants-cpu.json"
FEATURES, POOL = 8, 2
DIGIT = 0  # the first image of the set, a nought

# ------------------------------------------------------------------------------------------------- the input


def positions() -> Array:
    """√2 cos(π u (x + ½)/8) of row and of column, u = 1, 2: (64, 4), orthogonal, of mean 0 and variance 1."""
    along = [np.sqrt(2) * np.cos(np.pi * u * (np.arange(SIDE) + 0.5) / SIDE) for u in (1, 2)]
    rows = [np.repeat(x, SIDE) for x in along]
    columns = [np.tile(x, SIDE) for x in along]
    return np.stack([*rows, *columns], axis=1)


def looks(image: Array) -> Array:
    """The first four principal components of the 3×3 neighbourhoods of one image, whitened: (64, 4)."""
    padded = np.pad(image, 1)
    near = np.stack([padded[r : r + SIDE, c : c + SIDE].ravel() for r in range(3) for c in range(3)], axis=1)
    near = near - near.mean(axis=0)
    axes = np.linalg.eigh(near.T @ near / len(near))[1][:, : -FEATURES // 2 - 1 : -1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])])
    components = near @ axes
    return components / components.std(axis=0)


def scene() -> Scene:
    """k = z, the features of a pixel; q = z R with R a fixed rotation near the identity. Nothing is trained."""
    image = load_digits().images[DIGIT] / 16
    z = np.concatenate([looks(image), positions()], axis=1)
    matrix = np.random.default_rng(0).standard_normal((FEATURES, FEATURES))
    turn, one = 0.1 * (matrix - matrix.T), np.eye(FEATURES)
    return Scene(image, z @ np.linalg.solve(one + turn, one - turn), z)


def pooling() -> Array:
    """Means over windows of 2×2 pixels as a matrix, (16, 64)."""
    return attnkit.landmarks.average_pool(np.eye(SIDE * SIDE), SIDE, SIDE, POOL)


def standard_normal(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape)


# Arguments of `<op>_weights`, by name: what an op gets for them.
ARGUMENTS: dict[str, Callable[[Scene], Array]] = {
    "q": lambda x: x.q,
    "k": lambda x: x.k,
    "qk": lambda x: x.k,
    "landmarks": lambda x: attnkit.landmarks.average_pool(x.q, SIDE, SIDE, POOL),
    "proj_k": lambda x: pooling(),
    "projection": lambda x: attnkit.orthogonal_features(64, FEATURES, 1),
    "rotations": lambda x: standard_normal(FEATURES, 2, 4),
    "log_forget": lambda x: np.full(SIDE * SIDE, np.log(0.95)),
    "log_gate": lambda x: np.broadcast_to(np.log(np.linspace(0.5, 0.99, FEATURES)), x.k.shape),
    "beta": lambda x: 1 / np.sum(x.k**2, axis=1),  # a token's value is all that the state then answers to its key
}

# File name and parameters of each picture of an op; an op that is not here is drawn once, with its defaults.
SETTINGS: dict[str, dict[str, Params]] = {
    "softmax_attention": {"": {}, "causal": {"causal": True}, "sink": {"sink": 4.0}},
    "pointwise_attention": {
        "": {},
        "alpha-0": {"alpha": 0.0},
        "causal": {"causal": True},
        "relu-squared": {"activation": "relu_squared"},
        "softplus": {"activation": "softplus"},
        "gelu": {"activation": "gelu"},
        "identity": {"activation": "identity"},
    },
    "entmax_attention": {"": {}, "alpha-1.25": {"alpha": 1.25}},
    "gaussian_attention": {"": {}, "wide": {"scale": 0.1}},
    "soft_attention": {"": {}, "steps-2": {"newton_steps": 2}},
    "nystrom_attention": {"": {"num_landmarks": 16}, "steps-20": {"num_landmarks": 16, "inverse_steps": 20}},
    "lsh_attention": {"": {"chunk_size": 16}},
    "linear_attention": {"": {}, "decay": {"causal": True, "log_decay": -0.05}},
}

# Weights of slots, (64, m), as weights of pixels: what they are multiplied with, (m, 64).
SLOTS: dict[str, Callable[[], Array]] = {"linformer_attention": pooling}


def arguments(op: Op, scene: Scene, params: Params) -> dict[str, Array]:
    """The arrays of `<op>_weights`, in order."""
    arrays = {}
    for name in weights_of(op).arguments:
        if name not in ARGUMENTS:
            raise LookupError(f"{op.name}: argument {name!r} has no value; add it to ARGUMENTS in docs/pictures.py")
        arrays[name] = ARGUMENTS[name](scene)
    for name, parameter in inspect.signature(getattr(attnkit, f"{op.name}_weights")).parameters.items():
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and name not in params:
            raise LookupError(f"{op.name}: parameter {name!r} has no value; add it to SETTINGS in docs/pictures.py")
    return arrays


def weigh(op: Op, params: Params, scene: Scene) -> Drawn:
    arrays = arguments(op, scene, params)
    w = getattr(attnkit, f"{op.name}_weights")(*arrays.values(), **params)
    size = SIDE * SIDE
    pixels = w @ SLOTS[op.name]() if op.name in SLOTS else w
    if pixels.shape != (size, size):
        text = f"weights {w.shape} are not weights of {size} pixels; add their matrix to SLOTS in docs/pictures.py"
        raise LookupError(f"{op.name}: {text}")
    return Drawn(op, params, scene, arrays, w, pixels)


def speeds() -> list[tuple[str, dict[str, float]]]:
    """How many times as fast as torch's softmax the variants are, of what `python -m benchmarks variants` has measured,
    by mode: at the most tokens, without causality, but for ops that know no other order. torch's own is the line at 1.
    """
    rows = [row for row in json.loads(TIMES.read_text())["rows"] if row["op"] in BY_NAME]
    most, found = max(row["n"] for row in rows), dict[str, dict[str, float]]()
    both = {row["op"] for row in rows if not row["causal"]}
    for row in rows:
        if row["n"] == most and row["causal"] == (row["op"] not in both):
            found.setdefault(row["op"], {})[row["mode"]] = row["ratio"]["median"]
    names = {name: drawing.short(BY_NAME[name]) + ("" if name in both else ", causal") for name in found}
    return [(names[name], by_mode) for name, by_mode in found.items()]


# ------------------------------------------------------------------------------------------------- files


def with_palette(match: re.Match[str]) -> str:
    """An embedded PNG with its few colours in a palette: the same pixels in a third of the bytes."""
    rgb = np.asarray(Image.open(io.BytesIO(base64.b64decode(match.group(1)))).convert("RGB"))
    colours, index = np.unique(rgb.reshape(-1, 3), axis=0, return_inverse=True)
    if len(colours) > 256:
        return match.group(0)
    image = Image.fromarray(index.reshape(rgb.shape[:2]).astype(np.uint8))
    image.putpalette(colours.tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def save(figure: Figure, path: Path) -> None:
    """SVG without dates, versions and indentation; what shows it has a better description than the name of its file."""
    text = figures.svg(figure, path.stem, crop=False)
    text = re.sub(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)", with_palette, text)
    path.write_text(re.sub(r"\n\s*", "\n", text))
    print(path.name, f"{path.stat().st_size / 1024:.0f} KB")


def ops(only: list[str]) -> list[Op]:
    selection = [op for op in PUBLIC if op.weights]
    unknown = set(only) - {op.name for op in selection}
    if unknown:
        raise LookupError(f"no op with weights is called {', '.join(sorted(unknown))}")
    return [op for op in selection if not only or op.name in only]


def settings(op: Op) -> dict[str, Params]:
    """The parameters of the pictures of an op, by the end of their file's name."""
    return SETTINGS.get(op.name, {"": {}})


def draw(folder: Path, only: list[str]) -> None:
    """The pictures of the named ops, or of all, and those that show several."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = scene()
    first: list[Drawn] = []
    with mpl.rc_context(drawing.STYLE):
        for op in ops(only):
            for label, params in settings(op).items():
                x = weigh(op, params, inputs)
                first += [] if label else [x]
                save(drawing.picture(x), folder / f"{op.name}{'-' if label else ''}{label}.svg")
        if only:
            return
        save(drawing.input_picture(inputs, BY_NAME["softmax_attention"]), folder / "input.svg")
        save(drawing.overview_picture(first), folder / "overview.svg")
        save(drawing.entropy_picture(first), folder / "entropy.svg")
    with mpl.rc_context(drawing.FILE):
        save(drawing.speed_picture(speeds()), folder / "speed.svg")
        save(drawing.concentration_picture(first), folder / "concentration.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--only", nargs="*", default=[], metavar="OP", help="only these ops")
    args = parser.parse_args()
    draw(args.out, args.only)


if __name__ == "__main__":
    main()
