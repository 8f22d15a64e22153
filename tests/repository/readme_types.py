"""The README's examples, and what ops return, as mypy sees them where attnkit is installed, or the pyright that is
named: `make types`, `make pyright`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RETURNED = """
from typing import assert_type

import attnkit, attnkit.nn, jax, numpy as np, torch

t = torch.zeros(2, 4, 3)
assert_type(attnkit.pointwise_attention(t, t, t), torch.Tensor)
assert_type(attnkit.entmax_attention(t, t, t, alpha=1.5, causal=True), torch.Tensor)
assert_type(attnkit.soft_attention(t, t, t[:, :2]), torch.Tensor)
assert_type(attnkit.softmax_attention(t, t, t, causal=True), torch.Tensor)
assert_type(attnkit.softmax_attention(t, t, t, return_lse=True), tuple[torch.Tensor, torch.Tensor])
assert_type(attnkit.linear_attention(t, t, t, feature_map="relu"), torch.Tensor)
assert_type(attnkit.linear_attention(t, t, t, return_state=True)[1], tuple[torch.Tensor, ...])
assert_type(attnkit.softmax_attention_weights(t, t, causal=True), torch.Tensor)
assert_type(attnkit.softmax_attention_vjp(t, t, t, t)["q"], torch.Tensor)
assert_type(attnkit.linear_attention_weights(t, t, feature_map="relu"), torch.Tensor)
assert_type(attnkit.forgetting_attention(t, t, t, t[..., 0], return_lse=True), tuple[torch.Tensor, torch.Tensor])
assert_type(attnkit.stick_breaking_attention(t, t, t), torch.Tensor)
assert_type(attnkit.stick_breaking_attention(t, t, t, return_remainder=True), tuple[torch.Tensor, torch.Tensor])
assert_type(attnkit.gated_linear_attention(t, t, t, t), torch.Tensor)
assert_type(attnkit.delta_attention_step(None, t, t, t, t)[0], torch.Tensor)
edges = torch.tensor([0, 1])
assert_type(attnkit.softmax_attention_packed(t, t, t, edges, edges), torch.Tensor)
assert_type(attnkit.linear_attention_packed(t, t, t, edges, edges, feature_map="relu"), torch.Tensor)
attnkit.linear_attention(t, t, t, feature="relu")  # type: ignore[call-overload]
attnkit.row_statistics("softmax_attention", t, t)
attnkit.row_statistics("softmax", t, t)  # type: ignore[arg-type]
attnkit.nn.MultiHeadAttention(8, 2, op="relu")
attnkit.nn.MultiHeadAttention(8, 2, op="rely")  # type: ignore[arg-type]
j = jax.numpy.zeros((2, 4, 3))
assert_type(attnkit.sparsemax_attention(j, j, j), jax.Array)
a: np.ndarray = np.zeros((2, 4, 3))
assert_type(attnkit.gaussian_attention(a, a, a), np.ndarray)
assert_type(attnkit.qk_layernorm(a, a, a, a), tuple[np.ndarray, np.ndarray])
attnkit.gaussian_attention([1], [2], [3])  # type: ignore[type-var]
for name in attnkit.ACTIVATIONS:
    attnkit.pointwise_attention(t, t, t, activation=name)
attnkit.pointwise_attention(t, t, t, activation="rleu")  # type: ignore[arg-type]
attnkit.linear_attention(t, t, t, feature_map="elu")  # type: ignore[call-overload]
attnkit.key_value_memory(t, t, t, activation="gelu")  # type: ignore[arg-type]
"""


def main(*pyright: str) -> int:
    """The exit code of mypy, with the settings of the project, so that what it knows of torch and attnkit is taken; or
    that of pyright.
    """
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as base:
        (folder := Path(base) / "readme").mkdir()
        for n, code in enumerate(blocks):
            (folder / f"block_{n}.py").write_text(code)
        (folder / "returned.py").write_text(RETURNED)
        if pyright:
            settings = {"include": ["readme"], "extraPaths": [str(ROOT)]}
            (Path(base) / "pyrightconfig.json").write_text(json.dumps(settings))
            command = [*pyright, "--project", base, "--pythonpath", sys.executable]
        else:
            command = [sys.executable, "-m", "mypy", *map(str, sorted(folder.iterdir()))]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"MYPYPATH": base}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
