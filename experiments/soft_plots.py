"""Figures of SOFT: memory against tokens, residuals of the inverse, heat maps."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt

from experiments.measurement import Row
from experiments.plots import COLOURS, DASHES, INK, STYLE, svg


def memory(rows: Sequence[Row], methods: Sequence[str], modes: Sequence[str], smoke: bool) -> str:
    """Peak memory against the number of tokens, a panel per mode, a line per method; the Transformer is ink."""
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(modes), figsize=(10.2, 3.9), gridspec_kw={"wspace": 0.22})
        for axes, mode in zip(panels, modes, strict=True):
            for index, method in enumerate(methods):
                here = [row for row in rows if (row["method"], row["mode"]) == (method, mode) and row["bytes"]]
                if not here:
                    continue
                softmax = method.startswith("transformer")
                axes.plot(
                    [row["tokens"] for row in here],
                    [row["bytes"] / 1e9 for row in here],
                    "o-" if method != "transformer, fused" else "s",
                    color=INK if softmax else COLOURS[index - 1],
                    linestyle=DASHES[1] if method == "transformer, fused" else "-",
                    markersize=4,
                    label=method,
                )
            axes.set_yscale("log")
            axes.set(xlabel="tokens n", ylabel="peak memory, GB" if axes is panels[0] else "", title=mode)
            if smoke:
                axes.text(0.5, 0.5, "SMOKE · not a result", transform=axes.transAxes, ha="center", color="#d2493f")
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1))
        return svg(figure, "peak memory against the number of tokens for every method, predicting and training")
