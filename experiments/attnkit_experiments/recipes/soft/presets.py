"""The common presets of the tables and figures of Lu et al. 2021 that train on images: settings, and differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attnkit_experiments.engine.errors import require_names
from attnkit_experiments.soft.domain import SoftStudy
from attnkit_experiments.soft.methods import METHODS
from attnkit_experiments.study.recipe import Scale, Variant

# digits enlarged to 16 pixels: 16 × 16, 8 × 8, 4 × 4 and 2 × 2 tokens
SMOKE: dict[str, Any] = {
    "stem_stride": 1,
    "image_size": 16,
    "train_images": 1000,
    "test_images": 100,
    "steps": 20,
    "batch": 32,
    "lr": 3e-3,
    "warmup": 3,
    "padding": 1,
    "flip": False,
    "mixup": 0.0,
    "checkpoint_every": 10,
    "full_scale": False,
}

CPU: dict[str, Any] = {"steps": 1000, "warmup": 100, "mixup": 0.0, "checkpoint_every": 250, "seeds": (0, 1, 2)}

SMALL: dict[str, Any] = {
    "size": "tiny",
    "image_size": 64,
    "landmarks": 16,
    "steps": 600,
    "batch": 512,
    "warmup": 60,
    "precision": "bfloat16",
    "compile": True,
    "channels_last": True,
    "checkpoint_every": 300,
}

# 300 epochs of 1,281,167 images, 10 of them for the warm-up
PAPER: dict[str, Any] = {
    "size": "tiny",
    "stem_stride": 4,
    "image_size": 224,
    "landmarks": 49,
    "steps": 375_342,
    "batch": 1024,
    "warmup": 12_511,
    "drop_path": 0.1,
    "crop": "inception",
    "randaug": "rand-m9-mstd0.5-inc1",
    "mixup": 0.8,
    "cutmix": 1.0,
    "erase": 0.25,
    "ema": 0.99996,
    "precision": "bfloat16",
    "compile": True,
    "channels_last": True,
    "checkpoint_every": 1251,
}

SCALES = {
    "smoke": Scale(
        SMOKE, "smoke: shows that the code runs; its accuracies mean nothing", "under a minute, 2 CPU cores"
    ),
    "small": Scale(
        SMALL,
        "small: Tiny on images of 64 pixels, one GPU, few steps; not the paper's scale",
        "under 8 minutes, one H200 (estimated)",
    ),
    "cpu": Scale(
        CPU,
        "cpu: a model of four narrow stages on small images, minutes on two CPU cores; not the paper's scale",
    ),
    "paper": Scale(
        PAPER,
        "paper: the published model, images and number of steps; see below for what is not as published",
        "15 to 25 hours a row, one H200 (estimated)",
    ),
}


TABLE_1 = ("transformer", "linformer", "performer", "nystromformer", "soft")


@dataclass(frozen=True)
class MethodStudy(SoftStudy):
    """`methods` of attention are rows or columns, the Transformer's what others are compared with."""

    methods: tuple[str, ...] = TABLE_1


def by_method(study: MethodStudy) -> tuple[Variant, ...]:
    require_names("methods", "method", study.methods, METHODS)
    return tuple(
        Variant(name=name, series=name, op=name, baseline="transformer" if name != "transformer" else "")
        for name in study.methods
    )


DEVIATIONS = (
    "The paper trains on ImageNet-1k at 224 pixels for 300 epochs; other presets train small models on small images.",
    "RandAugment, mixup, CutMix, random erasing and the moving average of weights are those of the authors' "
    "configuration in preset paper alone; the others have crop, flip, mixup and label smoothing. RandAugment "
    "interpolates bilinearly (timm draws bilinear or bicubic), and images are erased after they are mixed (timm "
    "erases before).",
    "The average forgets the untrained weights faster: its decay is min(0.99996, (1 + t)/(10 + t)) at step t. Accuracy "
    "is that of the weights of the last step, accuracy_ema that of the average.",
    "Weight decay falls on linear maps only; the authors' training decays convolutions too. The learning rate falls to "
    "0 (there to a hundredth of its peak), and there is no cool-down at its end.",
    "SOFT is that of the authors' code unless options=paper: landmarks through LayerNorm and GELU, a ridge of 0.01, a "
    "convolution of values (9×9, 5×5, 3×3 in stages 1 to 3), softmax in stage 4. Newton's iteration starts from the "
    "norm of the matrix with its ridge; the code's from that without it.",
    "drop_path is an option of the study; with the options of the code it drops single features, as the code does.",
    "Batch normalisation takes its statistics from the images of one process and one part of a batch.",
)
