"""The classes of ILSVRC2012's validation images, which are in one archive without folders.

Source: the development kit ILSVRC2012_devkit_t12.tar.gz: data/ILSVRC2012_validation_ground_truth.txt holds one number
    for each image, in the order of their names, and data/meta.mat says which synset has which number. These numbers
    are the kit's own; ours follow the synsets' names, as usual.
"""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

from attnkit_experiments.data import archives
from attnkit_experiments.engine.errors import UserError

VALIDATION = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"


def validation_classes(devkit: Path) -> list[str]:
    """The synset of each validation image (n01440764, ...), image 1 first.

    Errors: UserError if the kit is missing, cannot be read, or has a number that no synset has.
    """
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    if not devkit.exists():
        raise UserError(f"{devkit.parent}: {VALIDATION} has no classes in it; put {DEVKIT}, which says them, beside it")
    files = archives.read(devkit, (TRUTH, META))
    try:
        synsets = loadmat(io.BytesIO(files[META]), squeeze_me=True)["synsets"]
        names: dict[int, Any] = {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in synsets}
    except (MatReadError, ValueError, KeyError, IndexError, TypeError, zlib.error) as error:
        raise UserError(f"{devkit}: {META} cannot be read ({error})") from None
    numbers = archives.lines(files, TRUTH)
    for place, number in enumerate(numbers):
        if not number.isdecimal() or int(number) not in names:
            raise UserError(f"{devkit}: line {place + 1} of {TRUTH} is {number[:20]!r}, which {META} does not name")
    return [names[int(number)] for number in numbers]


def class_of(name: str, classes: list[str], path: Path) -> str:
    """The synset of a name such as ILSVRC2012_val_00000001.JPEG. Errors: UserError for a number beyond the kit's."""
    number = name.rpartition(".")[0].rpartition("_")[2]
    if not number.isdecimal() or not 1 <= int(number) <= len(classes):
        raise UserError(f"{path}: {name} is none of the {len(classes)} images that {DEVKIT} knows")
    return classes[int(number) - 1]
