"""`python -m benchmarks.gpu.data`: the data of what is trained on a GPU, into a folder that is carried with a checkout.

From the sets that ATTNKIT_DATA names: Multi30k as it is; CIFAR-10 with every tenth training image of a class as a split
`val` of its own, on which learning rates are chosen, so that the test split chooses nothing; the reviews as one text.
"""

import argparse
import gzip
import os
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.box import ROOT
from benchmarks.gpu.studies import IMAGES, PAIRS, TEXT

LARGEST = 64 << 20
"""Bytes of a checkout with all that it carries."""
HELD_OUT = 10
SPLITS = (("train", ("de", "en")), ("val", ("de", "en")), ("test2016", ("de", "en")))


def hold_out(images: Path, target: Path) -> None:
    """The zip of train/CLASS/… and test/CLASS/… again, with every tenth image of a class of train in val/CLASS."""
    seen: Counter[str] = Counter()
    with zipfile.ZipFile(images) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as file:
        for name in sorted(source.namelist()):
            split, _, rest = name.partition("/")
            if name.endswith("/"):
                continue
            if split == "train":
                kind = rest.partition("/")[0]
                seen[kind] += 1
                split = "val" if seen[kind] % HELD_OUT == 0 else split
            entry = zipfile.ZipInfo(f"{split}/{rest}")  # without the time, so that the archive is always the same
            file.writestr(entry, source.read(name))


def joined(reviews: Path, target: Path) -> None:
    """All reviews of a zip in the order of their names, a line for each."""
    with zipfile.ZipFile(reviews) as source:
        names = sorted(name for name in source.namelist() if name.endswith(".txt"))
        text = b"\n".join(source.read(name).replace(b"\n", b" ") for name in names)
    target.write_bytes(gzip.compress(text, mtime=0))


def write(source: Path, target: Path) -> None:
    """The carried data of the sets below `source`."""
    target.mkdir(parents=True, exist_ok=True)
    hold_out(source / "cifar10-subset.zip", target / IMAGES)
    joined(source / "imdb-subset.zip", target / TEXT)
    (target / PAIRS).mkdir(exist_ok=True)
    for split, languages in SPLITS:
        for language in languages:
            shutil.copy(source / "multi30k" / f"{split}.{language}.gz", target / PAIRS)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if what is carried is too large, 2 if a set is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.data", description=__doc__)
    default = os.environ.get("ATTNKIT_DATA")
    parser.add_argument("--from", dest="source", type=Path, default=default, metavar="DIR", help="(ATTNKIT_DATA)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "data", metavar="DIR", help="(out/data)")
    options = parser.parse_args(arguments)
    try:
        if options.source is None:
            raise ValueError("give --from DIR, or set ATTNKIT_DATA")
        write(Path(options.source), options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    carried = bytes_of(options.out)
    print(f"{options.out}: {carried / 2**20:.1f} MiB of the {LARGEST >> 20} MiB that a checkout may have")
    return int(carried > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
