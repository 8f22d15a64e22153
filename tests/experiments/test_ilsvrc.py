"""ILSVRC2012 as it is published: archives of archives, and classes that a development kit says."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from attnkit_experiments.data.images import ilsvrc
from attnkit_experiments.data.images.index import build_index
from attnkit_experiments.data.prepare import imagenet
from attnkit_experiments.engine.errors import UserError
from tests.attacks.data.samples import files_of, tarred, write


@pytest.fixture
def published(image_folder, tmp_path) -> Path:
    """The same images as ILSVRC2012 is published: a tar of tars, a tar without folders, and the development kit.

    The test images in folders get the names that they have there, classes in turn.
    """
    root = tmp_path / "published"
    synsets = sorted(folder.name for folder in (image_folder / "train").iterdir())
    tars = {f"{name}.tar": tarred(files_of(image_folder / "train" / name)) for name in synsets}
    write(root / "ILSVRC2012_img_train.tar", tarred(tars))
    files = []
    for number in range(6):
        name = synsets[number % 2]
        file = image_folder / "test" / name / f"{number // 2:04d}.png"
        files.append((file.rename(file.with_name(f"ILSVRC2012_val_{number + 1:08d}.png")), name))
    write(root / "ILSVRC2012_img_val.tar", tarred({file.name: file.read_bytes() for file, _ in files}))
    numbers = {name: 2 - place for place, name in enumerate(synsets)}
    kinds = [("ILSVRC2012_ID", float), ("WNID", object), ("num_children", float)]
    about = np.array([(numbers[name], name, 0) for name in synsets] + [(3, "animal", 2)], dtype=kinds)
    savemat(tmp_path / "meta.mat", {"synsets": about})
    truth = "".join(f"{numbers[name]}\n" for _, name in files).encode()
    kit = {ilsvrc.META: (tmp_path / "meta.mat").read_bytes(), ilsvrc.TRUTH: truth}
    write(root / ilsvrc.DEVKIT, tarred({f"ILSVRC2012_devkit_t12/data/{n}": x for n, x in kit.items()}, "w:gz"))
    return root


def test_imagenet_is_read_as_it_is_published(published, image_folder, tmp_path):
    index, expected = build_index(str(published)), build_index(str(image_folder))
    assert index.classes == expected.classes

    def contents(index, train):
        ids = np.flatnonzero(index.train == train)
        return sorted((int(index.labels[i]), index.place(i).read()) for i in ids)

    for train in (True, False):
        assert contents(index, train) == contents(expected, train)
    for name, archive in (("a", published), ("b", image_folder)):
        imagenet.prepare(archive, tmp_path / name, expected=None, per_shard=4)
    shards = sorted((tmp_path / "a").glob("*.tar"))
    assert len(shards) == 3 + 2
    for shard in shards:
        assert shard.read_bytes() == (tmp_path / "b" / shard.name).read_bytes()
    assert index.place(0).name == "ILSVRC2012_img_train.tar: cat/0000.png"


def test_what_is_wrong_with_the_development_kit_is_said(published):
    kit = published / ilsvrc.DEVKIT
    with tarfile.open(kit) as whole:
        files = {Path(member.name).name: whole.extractfile(member).read() for member in whole}
    numbers = files[ilsvrc.TRUTH]
    for changes, text in (
        ({ilsvrc.TRUTH: b"9\n" + numbers}, r"line 1 of .*ground_truth.txt is '9', which meta.mat does not name"),
        ({ilsvrc.TRUTH: numbers[:2]}, r"ILSVRC2012_val_00000002.* is none of the 1 images that"),
        ({ilsvrc.META: b"no matrix"}, r"meta.mat cannot be read"),
    ):
        write(kit, tarred(files | changes, "w:gz"))
        with pytest.raises(UserError, match=text):
            build_index(str(published))
    kit.unlink()
    with pytest.raises(UserError, match=r"put ILSVRC2012_devkit_t12\.tar\.gz, which says them, beside it"):
        build_index(str(published))
