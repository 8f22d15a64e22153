"""Table 2 of Lu et al. 2021: the stages of SOFT Tiny to Huge.

Source: "SOFT: Softmax-free Transformer with Linear Complexity", Table 2 and §3.3; parameters are those of Table 3.
Expected: 13, 24, 45, 64, 87 M parameters (digits cut), checked. `--set options=paper` counts models of equation 9
    alone, which have fewer (12.4 M for Tiny: one projection less in each layer of stage 4, no convolutions in the
    blocks), and fails the check.
Cost: a minute on 2 CPU cores, smoke (Tiny alone) seconds.
Command: python -m experiments run 002-table2 --preset paper --out runs/table2
"""

from __future__ import annotations

import dataclasses

from attnkit_experiments.recipes.soft.table3 import (
    COUNTED,
    DEVIATIONS,
    OUR_COLUMNS,
    PAPER_COLUMNS,
    PRESETS,
    check,
    items,
    measure,
    sections,
)
from attnkit_experiments.study.measurement import Column, Measurement

MEASUREMENT = Measurement(
    id="002-table2",
    title="The stages of SOFT Tiny to Huge",
    shows="tokens, features, heads and blocks of each stage, and the parameters that they make",
    source="Lu et al. 2021, Table 2",
    presets={
        name: dataclasses.replace(preset, study=dataclasses.replace(preset.study, cited=False))
        for name, preset in PRESETS.items()
    },
    items=items,
    measure=measure,
    columns=(Column("model", "model"), Column("stages", "stages 1 to 4"), *OUR_COLUMNS[:1], *PAPER_COLUMNS[:1]),
    sections=sections,
    about=COUNTED,
    deviations=DEVIATIONS[:2],
    check=check,
)
