"""Tiny archives in the original layouts: what is written, what is counted, and what a person reads otherwise."""

import gzip
import json
from pathlib import Path

import pytest

from attnkit_experiments.__main__ import main
from attnkit_experiments.data import archives
from attnkit_experiments.data.prepare import PREPARE, europarl7, iwslt14, wmt14
from attnkit_experiments.data.prepare.cleaning import clean, count_words
from attnkit_experiments.data.text.lines import read_lines
from attnkit_experiments.data.text.pairs import PairRequest, load_pairs
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import sha256
from tests.attacks.data.samples import fill, tarred, write, zipped

from .characters import replace_tokenizers


def encoded(files: dict[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}


def pack(path: Path, files: dict[str, str]) -> Path:
    """A tar.gz or zip, as the name ends."""
    return write(path, zipped(encoded(files)) if path.suffix == ".zip" else tarred(encoded(files), "w:gz"))


def segments(texts: list[str]) -> str:
    rows = "".join(f'<seg id="{number}"> {text} </seg>\n' for number, text in enumerate(texts, start=1))
    return f'<?xml version="1.0"?>\n<mteval>\n<doc docid="1">\n<title>A talk</title>\n{rows}</doc></mteval>\n'


# --- IWSLT14

TALK = (
    "<url>http://www.ted.com/talks/1</url>\n<keywords>talks</keywords>\n<talkid>1</talkid>\n"
    "<title>{0}: Titel</title>\n<description>{0}  says this</description>\n"
)
SAID = 44  # with title and description 46 lines: exactly two go to valid
IWSLT_EXPECTED = {"train": 46, "dev2010": 2, "dev2012": 1, "tst2010": 3, "tst2011": 1, "tst2012": 1}


def iwslt_files(**changes: str) -> dict[str, str]:
    files = {}
    for language in ("de", "en"):
        said = "".join(f"{language} line {number} .\n" for number in range(SAID)).replace("line 9 .", "R&amp;D .")
        files[f"de-en/train.tags.de-en.{language}"] = TALK.format(language) + said
        for part, series in iwslt14.SETS.items():
            texts = [f"{part} {language}{number} isn’t &amp; is" for number in range(IWSLT_EXPECTED[part])]
            files[f"de-en/IWSLT14.{series}.{part}.de-en.{language}.xml"] = segments(texts)
    files["de-en/README"] = "read me"
    return files | changes


@pytest.fixture
def prepared(tmp_path):
    archive = pack(tmp_path / "de-en.tgz", iwslt_files())
    return iwslt14.prepare(archive, tmp_path / "out", expected=IWSLT_EXPECTED), tmp_path / "out"


def test_iwslt_every_23rd_line_is_valid_and_the_others_are_train(prepared):
    _, out = prepared
    train, valid = (read_lines(out / f"{split}.de.gz") for split in ("train", "valid"))
    everything = ["de: Titel", "de says this", *(f"de line {number} ." for number in range(SAID))]
    everything[11] = "de R&amp;D ."
    assert valid == [everything[22], everything[45]]
    assert train == [line for line in everything if line not in valid]
    assert read_lines(out / "train.en.gz") == [line.replace("de", "en") for line in train]


def test_iwslt_both_test_sets_are_written(prepared):
    _, out = prepared
    paper, fairseq = (read_lines(out / f"{name}.en.gz") for name in ("test", "test-fairseq"))
    assert paper[0] == "dev2010 en0 isn't & is"
    assert [line.split()[0] for line in paper] == ["dev2010"] * 2 + ["tst2010"] * 3 + ["tst2011", "tst2012"]
    assert [line.split()[0] for line in fairseq] == ["dev2010"] * 2 + ["dev2012"] + [
        line.split()[0] for line in paper[2:]
    ]
    assert len(read_lines(out / "test-fairseq.de.gz")) == len(fairseq)


def test_the_manifest_says_what_was_read_kept_and_written(prepared):
    manifest, out = prepared
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert manifest["lines"] == manifest["expected"] == IWSLT_EXPECTED
    assert manifest["train_cleaned"] == {"empty": 0, "longer than 175 words": 0, "ratio above 1.5": 0, "kept": 46}
    assert manifest["train_lines_with_an_entity"] == 1
    assert manifest["train_lines_that_begin_with_a_tag"] == 0
    assert manifest["words"] == "attnkit_experiments.data.prepare.cleaning.count_words"
    assert set(manifest["files"]) == {file.name for file in out.iterdir()} - {"manifest.json"}
    for name, file in manifest["files"].items():
        assert file == {"lines": len(read_lines(out / name)), "sha256": sha256(out / name)}
    assert len(manifest["read"]) == 12


def test_the_command_says_what_it_has_written(tmp_path, capsys, refusal):
    archive = pack(tmp_path / "de-en.tgz", iwslt_files())
    words = ["prepare", "iwslt14", str(archive), str(tmp_path / "out")]
    assert refusal(*words).endswith("--any-count prepares it as it is\n")
    assert main([*words, "--any-count"]) == 0
    *files, last = capsys.readouterr().out.splitlines()
    written = sorted((tmp_path / "out").glob("*.gz"))
    assert sorted(files) == [f"{path.name}: {len(read_lines(path))} lines" for path in written]
    assert f"train.de.gz: {IWSLT_EXPECTED['train'] - 2} lines" in files
    assert last == f"written: {tmp_path / 'out'}"


def test_an_unknown_set_is_answered_with_the_closest(tmp_path, capsys):
    assert main(["prepare", "iwslt41", str(tmp_path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: unknown data set 'iwslt41'; did you mean 'iwslt14'?")


def test_markup_is_counted_in_the_source(tmp_path):
    files = iwslt_files()
    english = "de-en/train.tags.de-en.en"
    files[english] = files[english].replace("en line 12 .", "<i> A&amp;B .")
    manifest = iwslt14.prepare(pack(tmp_path / "de-en.tgz", files), tmp_path / "out", expected=IWSLT_EXPECTED)
    assert (manifest["train_lines_that_begin_with_a_tag"], manifest["train_lines_with_an_entity"]) == (0, 1)


def test_the_same_archive_gives_the_same_bytes_and_a_folder_the_same_files(prepared, tmp_path):
    manifest, _ = prepared
    folder = fill(tmp_path / "unpacked", encoded(iwslt_files()))
    zipped = pack(tmp_path / "de-en.zip", iwslt_files())
    for number, archive in enumerate((tmp_path / "de-en.tgz", folder, zipped)):
        assert iwslt14.prepare(archive, tmp_path / f"again{number}", expected=IWSLT_EXPECTED) == manifest


def test_words_can_be_counted_otherwise(tmp_path):
    archive = pack(tmp_path / "de-en.tgz", iwslt_files())

    def long(text: str) -> int:
        return 176 if "line 7 " in text else 5

    manifest = iwslt14.prepare(archive, tmp_path / "out", words=long, expected=None)
    assert manifest["train_cleaned"]["longer than 175 words"] == 1
    assert manifest["expected"] is None


def test_the_known_counts_add_up_to_the_published_test_sets():
    assert sum(iwslt14.EXPECTED[part] for part in iwslt14.PAPER) == 5585
    assert sum(iwslt14.EXPECTED[part] for part in iwslt14.FAIRSEQ) == 6750
    assert sum(wmt14.EXPECTED[part] for part in wmt14.TRAIN) == 4_520_620
    # 160,239 train and 7,283 valid are published; every 23rd of 167,522 is that
    assert iwslt14.CLEANED_BY_MOSES // 23 == 7283
    assert iwslt14.CLEANED_BY_MOSES - 7283 == 160_239


def test_a_count_that_differs_is_named_with_the_known_one(tmp_path):
    archive = pack(tmp_path / "de-en.tgz", iwslt_files())
    text = (
        r"de-en.tgz: not the archive .* \(train: 46 instead of 174,443; dev2010: 2 instead of 887; .*complete and unch"
    )
    with pytest.raises(UserError, match=text):
        iwslt14.prepare(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- WMT14

WMT_EXPECTED = {"europarl-v7": 3, "commoncrawl": 2, "news-commentary-v9": 1, "newstest2013": 2, "newstest2014": 3}


def wmt_folder(folder: Path) -> Path:
    lines = {part: WMT_EXPECTED[part] for part in wmt14.TRAIN}
    inside = {"europarl-v7": "training/", "commoncrawl": "", "news-commentary-v9": "training/"}
    for part, (url, name) in wmt14.TRAIN.items():
        files = {
            f"{inside[part]}{name}.{language}": "".join(f"{part} {language} {n}\n" for n in range(lines[part]))
            for language in ("en", "de")
        } | {f"{inside[part]}{name.replace('de-en', 'fr-en')}.en": "another pair\n"}
        pack(folder / Path(url).name, files)
    for part, (url, english, german) in wmt14.SETS.items():
        root = Path(url).stem
        texts = {
            name: segments([f"{part} {language} {n}" for n in range(WMT_EXPECTED[part])])
            for name, language in ((english, "en"), (german, "de"))
        }
        pack(folder / Path(url).name, {f"{root}/{name}": text for name, text in texts.items()})
    return folder


def test_wmt_parts_are_joined_in_order(tmp_path):
    manifest = wmt14.prepare(wmt_folder(tmp_path / "wmt"), tmp_path / "out", expected=WMT_EXPECTED)
    assert read_lines(tmp_path / "out" / "train.de.gz") == [
        *(f"europarl-v7 de {n}" for n in range(3)),
        *(f"commoncrawl de {n}" for n in range(2)),
        "news-commentary-v9 de 0",
    ]
    for language in ("en", "de"):
        for split, part in (("valid", "newstest2013"), ("test", "newstest2014")):
            lines = [f"{part} {language} {n}" for n in range(WMT_EXPECTED[part])]
            assert read_lines(tmp_path / "out" / f"{split}.{language}.gz") == lines
    assert manifest["lines"] == WMT_EXPECTED


def test_wmt_names_every_archive_that_is_missing(tmp_path):
    folder = wmt_folder(tmp_path / "wmt")
    (folder / "dev.tgz").unlink()
    (folder / "training-parallel-commoncrawl.tgz").unlink()
    text = (
        r"2 of 5 archives are missing; they are at https://www.statmt.org/ as "
        r"wmt13/training-parallel-commoncrawl.tgz, wmt14/dev.tgz$"
    )
    with pytest.raises(UserError, match=text):
        wmt14.prepare(folder, tmp_path / "out", expected=WMT_EXPECTED)


# --- Europarl7

EUROPARL_EXPECTED = {"dev sentences": 3, "dev documents": 2, "test sentences": 1, "test documents": 1}
EUROPARL = {
    "train": ["<d>", "one", "two", "", "<d>", "three"],
    "dev": ["<d>", "one", "<d>", "two", "three"],
    "test": ["<d>", "one"],
}


def europarl_files() -> dict[str, str]:
    return {
        f"data/Europarl7/concatenated_en2de_{part}_{language}.txt": "".join(
            f"{line if line in ('', '<d>') else f'{language} {line}'}\r\n" for line in lines
        )
        for part, lines in EUROPARL.items()
        for language in ("en", "de")
    }


def test_europarl_keeps_documents_as_they_are(tmp_path):
    folder = fill(tmp_path / "repository", encoded(europarl_files()))
    manifest = europarl7.prepare(folder, tmp_path / "out", expected=EUROPARL_EXPECTED)
    assert read_lines(tmp_path / "out" / "train.de.gz") == ["<d>", "de one", "de two", "", "<d>", "de three"]
    assert read_lines(tmp_path / "out" / "valid.en.gz") == ["<d>", "en one", "<d>", "en two", "en three"]
    assert manifest["lines"] == EUROPARL_EXPECTED | {"train sentences": 4, "train documents": 2}
    with pytest.raises(UserError, match="dev sentences: 3 instead of 3,587"):
        europarl7.prepare(folder, tmp_path / "out")


def test_europarl_without_the_training_files_says_which(tmp_path):
    files = {name: text for name, text in europarl_files().items() if "train" not in name}
    text = r"2 of 6 files are missing: concatenated_en2de_train_en.txt, concatenated_en2de_train_de.txt"
    with pytest.raises(UserError, match=text):
        europarl7.prepare(pack(tmp_path / "europarl.zip", files), tmp_path / "out")


# --- what was prepared is read


def test_what_was_prepared_can_be_trained_on(prepared, tmp_path, monkeypatch):
    replace_tokenizers(monkeypatch)
    manifest, out = prepared
    paper, fairseq = (
        load_pairs(str(out), PairRequest(test_set=name, lowercase=True), cache=tmp_path / "cache")
        for name in ("", "test-fairseq")
    )
    assert [len(split.source) for split in (paper.train, paper.valid, paper.test)] == [44, 2, 7]
    assert len(fairseq.test.source) == 8
    assert paper.train.target_text[0] == "en: titel"
    assert paper.about["prepared"] == manifest


def test_prepared_documents_can_be_joined(tmp_path, monkeypatch):
    replace_tokenizers(monkeypatch)
    europarl7.prepare(
        fill(tmp_path / "repository", encoded(europarl_files())), tmp_path / "out", expected=EUROPARL_EXPECTED
    )
    request = PairRequest(direction="en-de", document_tokens=128)
    data = load_pairs(str(tmp_path / "out"), request, cache=tmp_path / "cache")
    assert data.train.target_text == ("de one de two", "de three")
    assert data.about["counts"]["train"]["pairs with an empty side, dropped"] == 1


# --- archives and cleaning


@pytest.mark.parametrize(
    ("side", "more", "text"),
    [
        ("train.tags.de-en.en", "one more\n", "train.tags.de-en.de has 46 lines and train.tags.de-en.en has 47"),
        (
            "IWSLT14.TED.tst2011.de-en.en.xml",
            segments(["one more"]),
            "TED.tst2011.de-en.de.xml has 1 lines and IWSLT14.TED.tst2011.de-en.en.xml has 2",
        ),
    ],
)
def test_sides_that_are_not_aligned_are_named_with_both_counts(side, more, text, tmp_path):
    files = iwslt_files()
    files[f"de-en/{side}"] += more
    with pytest.raises(UserError, match=text):
        iwslt14.prepare(pack(tmp_path / "de-en.tgz", files), tmp_path / "out", expected=None)


def test_archives_that_cannot_be_read(tmp_path):
    good = pack(tmp_path / "good.tgz", {"a/x": "1", "b/y": "2"})
    assert archives.read(good, ["x"]) == {"x": b"1"}
    with pytest.raises(UserError, match="nowhere: no such file or directory"):
        archives.read(tmp_path / "nowhere", ["x"])
    with pytest.raises(UserError, match="1 of 2 files are missing: z"):
        archives.read(good, ["x", "z"])
    (tmp_path / "text").write_text("hello")
    torn = tmp_path / "torn.tgz"
    torn.write_bytes(good.read_bytes()[:60])
    spoiled = tmp_path / "spoiled.tgz"
    spoiled.write_bytes(gzip.compress(b"not a tar" * 100))
    for path in (tmp_path / "text", torn, spoiled):
        with pytest.raises(UserError, match=": cannot be read "):
            archives.read(path, ["x"])
    with pytest.raises(UserError, match="holds x twice"):
        archives.read(pack(tmp_path / "twice.zip", {"a/x": "1", "b/x": "2"}), ["x"])


def test_cleaning_drops_for_the_first_reason_and_counts_it():
    source = ["a b c", "", "a b c d e f", "a b c", "a  b", "a b c d"]
    target = ["a b", "a", "a", "a", "a b c", "a b c d e"]
    one, other, counts = clean(source, target, ratio=1.5, longest=5, words=count_words)
    assert one == ["a b c", "a b", "a b c d"]
    assert other == ["a b", "a b c", "a b c d e"]
    assert counts == {"empty": 1, "longer than 5 words": 1, "ratio above 1.5": 1, "kept": 3}


@pytest.mark.parametrize(("text", "words"), [("It isn't, is it?", 8), ("Größe: 3 m", 4), ("", 0), ("...", 3)])
def test_words_and_marks_are_counted(text, words):
    assert count_words(text) == words


def test_every_preparation_is_in_the_table():
    assert {name: prepare.__module__.rpartition(".")[2] for name, prepare in PREPARE.items()} == {
        "iwslt14": "iwslt14",
        "wmt14": "wmt14",
        "europarl7": "europarl7",
        "imagenet-shards": "imagenet",
        "imagenet21k": "imagenet",
        "text": "corpus",
    }
