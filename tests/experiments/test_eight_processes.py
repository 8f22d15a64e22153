"""What is new in training on a GPU, by eight processes: the run of one process, within the rounding of float64."""

import json
from pathlib import Path

import pytest

from attnkit_experiments.commands import runner
from attnkit_experiments.data.prepare import corpus as texts
from attnkit_experiments.engine import compiling

from .conftest import FEW
from .doubles import in_float64
from .forks import forked
from .test_processes import assert_equal_runs

# torch looks at .grad of what it compiles, and hides its warning from any filter but "error"
pytestmark = [
    pytest.mark.survival,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

SHORT = ("steps=3", "checkpoint_every=0", "warmup=1")
IMAGES = (*SHORT, *FEW, "softmax=false", "image_size=8", "patch=4", "train_images=0", "test_images=0", "batch=12",
          "crop=inception", "ema=0.6")  # fmt: skip
KEPT = (*IMAGES, "lazy=true", "decoded_side=8")
TEXT = (*SHORT, "model=d32", "length=16", "tokens=96", "tested=7", "tied=true", "alphas=0.5")
PATHS = {
    "compiled": ("000-fig2", IMAGES, ("compile=true", "accumulate=2"), {}),
    "compiled, sharded, blocks computed again": (
        "000-fig2", IMAGES, ("compile=true", "activation_checkpointing=true"), {"sharding": "fsdp"},
    ),
    "decoded once": ("000-fig2", KEPT, (), {"sharding": "fsdp"}),
    "tokens": ("000-causal", TEXT, ("accumulate=2",), {}),
    "tokens, compiled and sharded": ("000-causal", TEXT, ("compile=true",), {"sharding": "fsdp"}),
    "tokens in parts of windows": ("000-causal", TEXT, ("context=4",), {"sharding": "fsdp"}),
}  # fmt: skip
"""A recipe, the settings of one process, those of eight besides, and options of the command."""


def study(given: dict) -> Path:
    given |= {"out": Path(given["out"]), "cache": Path(given["cache"]), "settings": tuple(given["settings"])}
    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "BACKEND", "aot_eager")
        return runner.run(runner.Request(seeds=(0,), **given))


def process(given: str) -> None:
    study(json.loads(given))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Forty short documents of bytes, prepared."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("".join(f"<d>\nthe sea was {n} fathoms deep, and so it stayed\n" for n in range(40)))
    texts.prepare(folder, folder / "bytes", test_share=0.3)
    return folder / "bytes"


@pytest.mark.parametrize("name", PATHS)
def test_eight_processes_equal_one(name, image_folder, tokens, tmp_path):
    recipe, settings, more, options = PATHS[name]
    data = str(image_folder if recipe == "000-fig2" else tokens)
    common = {"recipe": recipe, "preset": "cpu", "data": data, "device": "cpu", "threads": 1}
    places = {"cache": str(tmp_path / "cache")}
    one = study(common | places | {"out": str(tmp_path / "one"), "settings": settings})
    asked = common | places | options | {"out": str(tmp_path / "eight"), "settings": (*settings, *more)}
    forked(__name__, (8, (json.dumps(asked),)))
    cells = sorted(path.name for path in (one / "cells").iterdir())
    assert cells
    for cell in cells:
        result = json.loads((tmp_path / "eight" / "cells" / cell / "result.json").read_text())
        assert (result.get("compiled", {}).get("blocks") == 2) == ("compile=true" in more)
        assert_equal_runs(tmp_path / "eight", one, Path("cells", cell))
