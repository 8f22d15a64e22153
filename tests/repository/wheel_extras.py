"""Install the wheels with each extra into an environment of its own, and run them there: minutes and gigabytes.

    python -m tests.repository.wheel_extras [EXTRA ...]     all by default

For each extra of attnkit or of the kit, and for attnkit-experiments: pip installs the wheels of attnkit and of the kit,
with the extra or beside the experiments, and the pins of constraints.txt into a new virtual environment; import what it
is for, judge one op on every library that is there, or for `peers` a function of each of them.
Exit status 1 if an extra does not work.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.repository.projects import FOLDERS, INSTALLED, ROOT, build

EXPERIMENTS = "experiments"  # a distribution without extras
# What an extra makes importable that nothing else does. cupy imports without a GPU, Triton's kernels need none to load.
IMPORTS = {
    "torch": ("torch", "attnkit.nn", "attnkit.integrations.torch"),
    "jax": ("jax", "attnkit.integrations.jax"),
    "cupy": ("cupy",),
    "triton": ("triton",),
    "jax-triton": ("jax", "jax_triton"),
    "full": ("rich", "safetensors", "ml_dtypes", "array_api_strict"),
    "experiments": ("torch", "tyro", "sklearn", "tokenizers", "sacrebleu", "webdataset"),
    "transformers": ("attnkit.integrations.transformers", "attnkit.integrations.timm"),
    "flax": ("attnkit.integrations.flax",),
    "onnx": ("torch", "onnx", "onnxscript"),
    "peers": ("entmax", "fla", "einops", "transformers"),  # keras alone would look for TensorFlow
    "more-peers": ("equinox", "x_transformers", "openvino", "mlx.core"),
    "docs": ("sphinx", "myst_parser", "furo"),
    "dev": ("pytest", "xdist", "onnxruntime"),
}
RUN = ["-m", "attnkit_conformance", "run"]
JUDGED = [*RUN, "-k", "reluformer_attention and float32 and not property"]
LIBRARIES = (
    "torch_sdpa-math jax_nn keras-numpy keras-torch entmax-exact fla-recurrent transformers-llama_eager numpy_pinv"
)
MORE = "x_transformers local_attention onnxruntime openvino mlx equinox"
JUDGED_OF = {
    extra: [*RUN, *names.split(), "-k", "float32 and not property"]
    for extra, names in (("peers", LIBRARIES), ("more-peers", MORE))
}


def check(extra: str, wheels: Mapping[str, Path], folder: Path) -> str | None:
    """What is wrong with an extra, or None."""
    of = INSTALLED[extra][0]
    asked = {name: str(wheels[name]) for name in ("attnkit", "attnkit-conformance", of)}
    asked[of] += "" if extra == EXPERIMENTS else f"[{extra}]"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pins = ["-c", str(ROOT / "constraints.txt")]
    steps = [
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, *asked.values()],
        ["-c", f"import {', '.join(name for name in IMPORTS[extra] if name != 'jax_triton') or 'attnkit'}"],
        JUDGED_OF.get(extra, JUDGED),
    ]
    for step in steps:
        done = subprocess.run([python, *step], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{' '.join(step)[:200]}\n{(done.stdout + done.stderr)[-2000:]}"
    print(f"{extra}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return None


def main(names: list[str]) -> int:
    """Check the extras named, or all."""
    if unknown := [name for name in names if name not in INSTALLED]:
        print(f"error: no extra {', '.join(unknown)}; there are {', '.join(INSTALLED)}", file=sys.stderr)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        wheels = {name: build(folder, Path(place) / name) for name, folder in FOLDERS.items()}
        for name in names or INSTALLED:
            with tempfile.TemporaryDirectory() as folder:
                wrong = check(name, wheels, Path(folder) / "venv")
            if wrong:
                failed += 1
                print(f"{name}: FAILED at {wrong}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
