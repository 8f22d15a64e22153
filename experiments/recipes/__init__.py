"""One file per figure or table; this is the list of them."""

from __future__ import annotations

from experiments.measurement import Measurement
from experiments.recipes import (
    r000_causal,
    r000_fig1,
    r000_fig2,
    r000_fig3,
    r000_fig4,
    r000_learned,
    r000_lengths,
    r001_fig1,
    r001_fig2,
    r001_fig3,
    r001_fig4,
    r001_fig5,
    r001_table1,
    r001_table2,
    r001_table3,
    r001_table4,
    r001_table5,
    r001_table6,
    r002_fig1b,
    r002_fig3,
    r002_fig4,
    r002_table1,
    r002_table2,
    r002_table3,
    r002_table4,
    r002_table5,
    r002_table6,
)
from experiments.study import Recipe

FILES = (
    r000_fig1,
    r000_fig2,
    r000_fig3,
    r000_fig4,
    r000_learned,
    r000_lengths,
    r000_causal,
    r001_table1,
    r001_table2,
    r001_table3,
    r001_table4,
    r001_table5,
    r001_table6,
    r001_fig1,
    r001_fig2,
    r001_fig3,
    r001_fig4,
    r001_fig5,
    r002_table1,
    r002_table4,
    r002_table5,
    r002_table6,
    r002_fig3,
    r002_fig4,
)
RECIPES: dict[str, Recipe] = {file.RECIPE.id: file.RECIPE for file in FILES}
MEASUREMENTS: dict[str, Measurement] = {
    file.MEASUREMENT.id: file.MEASUREMENT for file in (r002_table2, r002_table3, r002_fig1b)
}
