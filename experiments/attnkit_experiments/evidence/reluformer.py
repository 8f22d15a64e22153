"""The claims of Shen et al. 2023."""

from __future__ import annotations

from attnkit_experiments.evidence.checks import (
    Compare,
    Diverges,
    Exact,
    Level,
    alike,
    as_good,
    better,
    higher,
    lower,
    worse,
)
from attnkit_experiments.evidence.claim import Claim

SIZES = "sizes=32,512,4096"
"""Memories of all sizes: those that a study lacks are read from another one of the same models."""
SPARSE = ("sparsemax", "entmax15")
ALIKENESS = (("softmax_norm", "softmax"), ("relu", "softmax_norm"))

CLAIMS = (
    Claim(
        "a memory with softmax is worse than with relu",
        "Table 1, §3.1",
        "Softmax in the place of relu in feed-forward networks loses BLEU (34.22 to 33.08).",
        "001-table1",
        (worse("softmax", "relu"),),
    ),
    Claim(
        "a LayerNorm closes the gap",
        "Table 1, §3.2",
        "A LayerNorm behind the memory makes softmax better, and as good as relu (here: 0.05 nats at most above).",
        "001-table1",
        (better("softmax_norm", "softmax"), as_good("softmax_norm", "relu")),
    ),
    Claim(
        "softmax memories barely change the residual",
        "Table 1, §3.2",
        "The variance of a memory's output over that of its residual is far lower with softmax (0.01) than with relu "
        "(0.27) or with a LayerNorm (0.34).",
        "001-table1",
        (lower("softmax", "relu", "variance_ratio"), lower("softmax", "softmax_norm", "variance_ratio")),
    ),
    Claim(
        "relu memories are better at every size",
        "Fig. 1, §3.3",
        "From 32 to 4,096 slots relu is better than softmax.",
        "001-fig1",
        (better("relu-slots*", "softmax-slots*"),),
    ),
    Claim(
        "large memories need relu even with a LayerNorm",
        "Fig. 1, §3.3",
        "At 4,096 slots relu is better than softmax with LayerNorm.",
        "001-fig1",
        (better("relu-slots4096", "softmax_norm-slots4096"),),
    ),
    Claim(
        "softmax uses few slots",
        "Fig. 2, §3.4",
        "With softmax the top 0.2 % of the slots hold more than 85 % of the scores: 8 of 4,096, which decide here; of "
        "512 it is one.",
        "001-fig2",
        (Level("softmax-slots4096", "slots_top_0.2", low=0.85),),
        needs=(SIZES,),
        beside=(Level("softmax-slots512", "slots_top_0.2", low=0.85),),
    ),
    Claim(
        "relu uses more slots",
        "Fig. 2, §3.4",
        "With relu the top 0.2 % of the slots hold a smaller share than with softmax.",
        "001-fig2",
        (lower("relu-slots*", "softmax-slots*", "slots_top_0.2"),),
        needs=(SIZES,),
    ),
    Claim(
        "values of softmax memories collapse",
        "Fig. 3, §3.4",
        "Value slots are most alike with softmax, less with a LayerNorm, least with relu (mean cosine of two slots). "
        "Memories of 512 and 4,096 slots decide; 32 are far fewer than in any of the paper's tables.",
        "001-fig3",
        tuple(
            lower(f"{less}-slots{n}", f"{more}-slots{n}", "slot_anisotropy")
            for less, more in ALIKENESS
            for n in (512, 4096)
        ),
        needs=(SIZES,),
        beside=tuple(lower(f"{less}-slots32", f"{more}-slots32", "slot_anisotropy") for less, more in ALIKENESS),
    ),
    Claim(
        "a higher temperature has little effect",
        "§3.4",
        "A temperature above 1 flattens the scores of softmax memories and hardly changes the loss (here: within 0.05 "
        "nats).",
        "001-temperature",
        (alike("softmax_t*", "softmax"), lower("softmax_t*", "softmax", "slots_top_0.2")),
    ),
    Claim(
        "relu attention has the variance n/2",
        "Theorem 4.1",
        "Without a scale the variance of the output grows as n/2; γ√(n/2) keeps it level. Exact, at any size.",
        "000-fig2",
        (Exact("variance"),),
    ),
    Claim(
        "a LayerNorm behind attention is not enough",
        "§4",
        "Relu attention with a LayerNorm trains, but translates worse than softmax.",
        "001-layernorm",
        (worse("relu_norm", "vanilla"),),
    ),
    Claim(
        "relu attention without a scale does not converge",
        "Table 2, §4.1",
        "Relu in softmax's place diverges.",
        "001-table2",
        (Diverges("relu_unscaled"),),
    ),
    Claim(
        "the scale makes relu attention trainable",
        "Table 2, §4.1",
        "With the scale relu attention translates better than without.",
        "001-table2",
        (better("reluformer_unregularised", "relu_unscaled"),),
    ),
    Claim(
        "the scale alone leaves a gap",
        "Table 2, §4.1",
        "Scaled relu attention translates worse than softmax (33.19 to 34.22).",
        "001-table2",
        (worse("reluformer_unregularised", "vanilla"),),
    ),
    Claim(
        "most weights of relu are 0",
        "§4.2",
        "Of scaled relu's weights 94 % are 0 (here: more than 90 %).",
        "001-table3",
        (Level("reluformer_unregularised", "zeros", low=0.9),),
    ),
    Claim(
        "relu's rows have little entropy",
        "Table 3, §4.2",
        "Rows of scaled relu have less entropy than softmax's. So say text and Table 5; Table 3 prints 3.45 for relu, "
        "1.40 for softmax.",
        "001-table3",
        (lower("reluformer_unregularised", "vanilla", "entropy"),),
    ),
    Claim(
        "ReLUFormer beats softmax on sentences",
        "Table 4, §4.3.1",
        "ReLUFormer translates better than softmax (34.56 to 34.22).",
        "001-table4",
        (better("reluformer", "vanilla"),),
    ),
    Claim(
        "ReLUFormer beats sparse attention",
        "Table 4, §4.3.1",
        "ReLUFormer translates better than sparsemax, 1.5-entmax and ReLA.",
        "001-table4",
        tuple(better("reluformer", name) for name in (*SPARSE, "rela")),
    ),
    Claim(
        "sparsemax and entmax are near softmax",
        "Table 4",
        "Sparsemax and 1.5-entmax translate as well as softmax (here: within 0.05 nats).",
        "001-table4",
        tuple(alike(name, "vanilla") for name in SPARSE),
    ),
    Claim(
        "ReLUFormer translates as fast as softmax",
        "Table 4, §4.3.1",
        "Its speed of translation is softmax's (1.01 times; here: within 10 %).",
        "001-table4",
        (Compare("reluformer", "vanilla", "sentences_per_second", low=-0.1, high=0.1, relative=True),),
    ),
    Claim(
        "sparsemax and entmax translate slowly",
        "Table 4, §4.3.1",
        "Sparsemax and 1.5-entmax translate at about half of softmax's speed (here: below 0.8 of it).",
        "001-table4",
        tuple(Compare(name, "vanilla", "sentences_per_second", high=-0.2, relative=True) for name in SPARSE),
    ),
    Claim(
        "ReLUFormer needs its scale",
        "Table 5",
        "Without the scale, but with the regulariser, training diverges.",
        "001-table5",
        (Diverges("relu_regularised"),),
    ),
    Claim(
        "ReLUFormer needs its regulariser",
        "Table 5",
        "Without the regulariser it translates worse (34.56 to 33.19).",
        "001-table5",
        (worse("reluformer_unregularised", "reluformer"),),
    ),
    Claim(
        "the regulariser raises entropy",
        "Table 5, §4.2",
        "Rows have more entropy with the regulariser (1.60) than without (0.08).",
        "001-table5",
        (higher("reluformer", "reluformer_unregularised", "entropy"),),
    ),
    Claim(
        "ReLUFormer wins on long documents",
        "Table 6, §4.3.2",
        "From 512 tokens on ReLUFormer translates documents better than softmax.",
        "001-table6",
        (better("reluformer-*", "vanilla-*"),),
    ),
    Claim(
        "softmax attends to fewer tokens of documents",
        "Fig. 4, §4.3.2",
        "The largest weights of a row hold a larger share with softmax than with ReLUFormer.",
        "001-fig4",
        (higher("vanilla", "reluformer", "attention_top_0.5"),),
    ),
    Claim(
        "relu sees distant words and less noise",
        "Fig. 5, §4.3.2",
        "Attention maps of one document, judged by eye.",
        "001-fig5",
    ),
)
