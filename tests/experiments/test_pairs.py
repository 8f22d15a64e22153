"""Sentence pairs: files in, tokens and counts out, and the texts for files that are missing, torn or not aligned.

Most tests cut text into characters instead of subwords, so that lengths are plain to see; the subwords themselves are
tested at the end.
"""

import dataclasses
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from attnkit_experiments.data.text import bpe
from attnkit_experiments.data.text.lines import normalise, pair, read_lines
from attnkit_experiments.data.text.pairs import BOS, EOS, PAD, UNK, PairRequest, Sentences, TranslationData, load_pairs
from attnkit_experiments.engine.errors import UserError
from tests.attacks.data import samples

from .characters import Encoding, replace_tokenizers


@pytest.fixture
def characters(monkeypatch):
    return replace_tokenizers(monkeypatch)


def packed(*lines: str) -> bytes:
    return gzip.compress("".join(f"{line}\n" for line in lines).encode())


def write(path: Path, lines: list[str]) -> None:
    samples.write(path, packed(*lines))


GERMAN = ["Ein Hund läuft.", "Zwei  Männer\tsitzen. ", "Eine Frau.", "Ja."]
ENGLISH = ["A dog runs.", "Two men sit.", "A woman.", "Yes."]


@pytest.fixture
def sentences(tmp_path):
    """A folder in the layout of Multi30k."""
    folder = tmp_path / "multi30k"
    for split, count in (("train", 4), ("val", 2), ("test2016", 3)):
        write(folder / f"{split}.de.gz", GERMAN[:count])
        write(folder / f"{split}.en.gz", ENGLISH[:count])
    return folder


def document_lines(sizes: list[int], language: str) -> list[str]:
    lines = []
    for document, size in enumerate(sizes):
        lines.append("<d>")
        lines += [f"{language} {document} {index}" for index in range(size)]
    return lines


@pytest.fixture
def documents(tmp_path):
    """A folder in the layout of the public document sets: dev and test, no train."""
    for split, sizes in (("dev", [3, 1, 5, 2, 4, 3, 2, 1, 6, 7, 2]), ("test", [4, 2])):
        for language in ("de", "en"):
            write(tmp_path / "documents" / f"talks.{split}.{language}.gz", document_lines(sizes, language))
    return tmp_path / "documents" / "talks"


def load(source: Path, tmp_path: Path, **request) -> TranslationData:
    return load_pairs(str(source), PairRequest(**request), cache=tmp_path / "cache")


def test_text_becomes_tokens_and_back(sentences, tmp_path, characters):
    data = load(sentences, tmp_path)
    assert (data.name, data.source_language, data.target_language) == ("multi30k", "de", "en")
    assert [len(split.source) for split in (data.train, data.valid, data.test)] == [4, 2, 3]
    assert data.train.source_text == ("Ein Hund läuft.", "Zwei Männer sitzen.", "Eine Frau.", "Ja.")
    for split in (data.train, data.valid, data.test):
        for side, texts in ((split.source, split.source_text), (split.target, split.target_text)):
            assert side.ids.dtype == np.int32
            assert side.starts.dtype == np.int64
            assert [data.decode(side[index]) for index in range(len(side))] == list(texts)
            assert side.lengths.tolist() == [len(text) + 1 for text in texts]
            assert side.ids.min() > max(PAD, BOS, EOS, UNK)
            assert side.ids.max() < data.vocabulary


def test_decoding_ends_at_the_first_eos(sentences, tmp_path, characters):
    data = load(sentences, tmp_path)
    ids = data.test.target[0].tolist()
    assert data.decode([BOS, *ids, EOS, *ids, PAD]) == "A dog runs."
    assert data.decode(np.array([*ids, PAD])) == "A dog runs."
    assert data.decode([EOS]) == ""


def test_the_direction_swaps_the_sides(sentences, tmp_path, characters):
    there, back = load(sentences, tmp_path), load(sentences, tmp_path, direction="en-de")
    assert there.train.source_text == back.train.target_text
    assert there.train.target_text == back.train.source_text
    assert (back.source_language, back.target_language) == ("en", "de")


def test_lower_case_is_of_both_sides_and_of_the_references(sentences, tmp_path, characters):
    data = load(sentences, tmp_path, lowercase=True)
    assert data.test.source_text[0] == "ein hund läuft."
    assert data.test.target_text[0] == "a dog runs."
    assert data.checksum() != load(sentences, tmp_path).checksum()


def test_the_tokenizer_sees_the_training_split_only_and_both_languages(sentences, tmp_path, characters):
    load(sentences, tmp_path, train_pairs=2)
    assert characters == [["Ein Hund läuft.", "Zwei Männer sitzen.", "A dog runs.", "Two men sit."]]


def test_limits_take_the_first_pairs(sentences, tmp_path, characters):
    data = load(sentences, tmp_path, train_pairs=3, valid_pairs=1, test_pairs=2)
    assert [len(split.target) for split in (data.train, data.valid, data.test)] == [3, 1, 2]
    assert data.test.target_text == ("A dog runs.", "Two men sit.")


def test_filters_drop_training_pairs_only_and_count_them(sentences, tmp_path, characters):
    data = load(sentences, tmp_path, max_length=16, max_ratio=1.3)
    # tokens with the space in front: 16/12 = 1.33 is uneven, 20 is long, 11/9 and 4/5 stay
    assert data.train.source_text == ("Eine Frau.", "Ja.")
    assert len(data.test.source) == 3
    assert data.about["counts"]["train"] == {
        "pairs with an empty side, dropped": 0,
        "pairs": 4,
        "pairs longer than max_length, dropped": 1,
        "pairs more uneven than max_ratio, dropped": 1,
        "source tokens": 15,
        "target tokens": 14,
    }
    with pytest.raises(UserError, match=r"no train pairs are left; counted: .*max_length, dropped.: 4"):
        load(sentences, tmp_path, max_length=2)


def test_pairs_with_an_empty_side_are_dropped_and_counted(sentences, tmp_path, characters):
    write(sentences / "train.de.gz", ["Eins.", " ", "Drei.", "Vier."])
    write(sentences / "train.en.gz", ["One.", "Two.", "\u00a0", "Four."])
    data = load(sentences, tmp_path)
    assert data.train.target_text == ("One.", "Four.")
    assert data.about["counts"]["train"]["pairs with an empty side, dropped"] == 2


def test_lines_are_cut_at_newlines_only(tmp_path):
    write(tmp_path / "a.gz", ["one\u2028still one\x0b", "two\r", "three\x85"])
    lines = read_lines(tmp_path / "a.gz")
    assert [normalise(line) for line in lines] == ["one still one", "two", "three"]


def test_plain_files_are_read_too(sentences, tmp_path, characters):
    expected = load(sentences, tmp_path).checksum()
    for file in list(sentences.iterdir()):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    assert load(sentences, tmp_path).checksum() == expected


def test_a_test_set_can_be_chosen(sentences, tmp_path, characters):
    for language, lines in (("de", GERMAN), ("en", ENGLISH)):
        write(sentences / f"test2017.{language}.gz", lines[3:])
    assert load(sentences, tmp_path, test_set="test2017").test.target_text == ("Yes.",)
    assert load(sentences, tmp_path).about["splits"]["test"] == "test2016.de.gz and test2016.en.gz"
    with pytest.raises(UserError, match="no test files for de-en and test_set=test2018"):
        load(sentences, tmp_path, test_set="test2018")


def test_a_manifest_beside_the_files_is_part_of_the_record(sentences, tmp_path, characters):
    (sentences / "manifest.json").write_text('{"name": "prepared"}')
    assert load(sentences, tmp_path).about["prepared"] == {"name": "prepared"}


def test_tokens_are_kept_until_the_text_changes(sentences, tmp_path, characters, monkeypatch):
    first = load(sentences, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(bpe, "train", lambda *_: pytest.fail("trained again"))
        patch.setattr(bpe, "_encode", lambda *_: pytest.fail("encoded again"))
        assert load(sentences, tmp_path).checksum() == first.checksum()
    write(sentences / "train.en.gz", ["A dog barks.", *ENGLISH[1:]])
    changed = load(sentences, tmp_path)
    assert changed.checksum() != first.checksum()
    assert changed.train.target_text[0] == "A dog barks."


def test_the_checksum_is_of_the_content(sentences, tmp_path, characters):
    data = load(sentences, tmp_path)
    moved = sentences.rename(tmp_path / "elsewhere")
    assert load(moved, tmp_path).checksum() == data.checksum()
    for change in (
        {"source_text": ("x", *data.test.source_text[1:])},
        {"target": Sentences(data.test.target.ids + 1, data.test.target.starts)},
    ):
        other = dataclasses.replace(data, test=dataclasses.replace(data.test, **change))
        assert other.checksum() != data.checksum()


def test_document_sets_train_on_dev_and_say_so(documents, tmp_path, characters):
    data = load(documents, tmp_path)
    assert [len(split.source) for split in (data.train, data.valid, data.test)] == [29, 7, 6]
    assert set(data.valid.source_text) == {f"de 9 {index}" for index in range(7)}
    assert not set(data.train.source_text) & set(data.valid.source_text)
    origin = "talks.dev.de.gz and talks.dev.en.gz"
    assert data.about["splits"] == {
        "train": f"{origin} without every 10th document",
        "valid": f"every 10th document of {origin}",
        "test": "talks.test.de.gz and talks.test.en.gz",
    }


def test_documents_are_joined_to_the_limit(documents, tmp_path, characters):
    data = load(documents, tmp_path, document_tokens=21)  # three sentences of 7 tokens; a tenth document has 7 of them
    assert data.test.target_text == ("en 0 0 en 0 1 en 0 2", "en 0 3", "en 1 0 en 1 1")
    assert data.valid.source_text == ("de 9 0 de 9 1 de 9 2", "de 9 3 de 9 4 de 9 5", "de 9 6")
    for split in (data.train, data.valid, data.test):
        assert max(split.source.lengths.max(), split.target.lengths.max()) <= 21
        for side, texts in ((split.source, split.source_text), (split.target, split.target_text)):
            assert [data.decode(side[index]) for index in range(len(side))] == list(texts)
            assert all(len({part.split()[0] for part in text.split("de ")[1:]}) <= 1 for text in texts)
    assert data.about["counts"]["train"]["documents"] == len(data.train.source)
    assert " ".join(data.train.source_text) == " ".join(load(documents, tmp_path).train.source_text)


def test_a_sentence_longer_than_the_limit_is_not_trained_on_but_tested(documents, tmp_path, characters):
    for split in ("dev", "test"):
        file = documents.with_name(f"talks.{split}.en.gz")
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        lines[2] = "a sentence of more than twenty-one characters"
        write(file, lines)
    data = load(documents, tmp_path, document_tokens=21)
    assert data.test.target_text[:3] == ("en 0 0", lines[2], "en 0 2 en 0 3")
    assert not any("sentence" in text for text in data.train.target_text)
    assert data.about["counts"]["train"]["sentences longer than document_tokens, dropped"] == 1
    assert data.about["counts"]["test"]["sentences longer than document_tokens, each a document of its own"] == 1


def test_documents_need_marks(sentences, tmp_path, characters):
    with pytest.raises(UserError, match="document_tokens=9 needs lines <d> between documents"):
        load(sentences, tmp_path, document_tokens=9)


def test_document_marks_become_numbers():
    lines = pair(["<d>", "a", "b", "<d>", "", "c"], ["<d>", "A", "B", " <d> ", "x", "C"], lowercase=False)
    assert (lines.source, lines.target, lines.dropped) == (["a", "b", "c"], ["A", "B", "C"], 1)
    np.testing.assert_array_equal(lines.documents, [0, 0, 1])
    assert pair(["a"], ["A"], lowercase=False).documents is None


DE, EN = "val.de.gz", "val.en.gz"
WRONG = {
    "shorter": ({EN: packed(ENGLISH[0])}, r"val.de.gz has 2 lines and .*val.en.gz has 1: they are not translations"),
    "lone mark": ({EN: packed("A", "<d>")}, r"val.de.gz and .*val.en.gz: line 2 opens a document in only one of them"),
    "no text": ({EN: gzip.compress(b"good\n\xff\n")}, r"val.en.gz: line 2 is not UTF-8 \(invalid start byte\)"),
    "no gzip": ({EN: b"A dog runs.\n"}, r"val.en.gz: cannot be read \(Not a gzipped file"),
    "torn": ({EN: packed(*ENGLISH[:2])[:-12]}, r"val.en.gz: cannot be read \("),
    "one side": ({EN: None}, r"val.en: no such file"),
    "no valid": (
        {DE: None, EN: None},
        r"no valid files for de-en; expected SPLIT.LANGUAGE.gz in a folder.*holds test2016.de.gz, test2016",
    ),
    "no train": (
        {"train.de.gz": None, "train.en.gz": None},
        r"there is no train split, and dev marks no documents",
    ),
    "all empty": ({EN: packed("", " ")}, r"hold no sentence pair \(2 have an empty side\)"),
}


@pytest.mark.parametrize(("changed", "text"), WRONG.values(), ids=WRONG)
def test_what_a_person_reads_when_the_files_are_wrong(changed, text, sentences, tmp_path, characters):
    for file, content in changed.items():
        (sentences / file).unlink()
        if content is not None:
            (sentences / file).write_bytes(content)
    with pytest.raises(UserError, match=text) as caught:
        load(sentences, tmp_path)
    assert "\n" not in str(caught.value)


def test_what_a_person_reads_when_the_place_is_wrong(documents, tmp_path, characters):
    with pytest.raises(UserError, match=r"--data .*nowhere/at/all: no such file or directory"):
        load(tmp_path / "nowhere" / "at" / "all", tmp_path)
    with pytest.raises(UserError, match=r"or FOLDER/NAME for NAME.SPLIT.LANGUAGE.gz; .* holds talks.dev.de.gz"):
        load(documents.parent, tmp_path)
    with pytest.raises(UserError, match="no valid and no test files for it-fr"):
        load(documents, tmp_path, direction="it-fr")


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"direction": "de"}, "two languages like de-en, got 'de'"),
        ({"direction": "de-de"}, "two languages"),
        ({"max_length": -1}, "max_length must be at least 0, got -1"),
        ({"max_ratio": 0.5}, "max_ratio must be 0 or at least 1, got 0.5"),
        ({"max_length": 9, "document_tokens": 20}, "would leave holes in documents"),
    ],
)
def test_requests_are_checked(request_, text):
    with pytest.raises(ValueError, match=text):
        PairRequest(**request_)


def test_sentences_are_taken_in_any_order():
    sentences = Sentences.of([[5, 6], [], [7, 8, 9]])
    taken = sentences.take(np.array([2, 0, 2, 1]))
    assert [taken[index].tolist() for index in range(4)] == [[7, 8, 9], [5, 6], [7, 8, 9], []]
    assert taken.lengths.tolist() == [3, 2, 3, 0]
    assert len(Sentences.of([])) == len(sentences.take(np.array([], dtype=int))) == 0
    with pytest.raises(IndexError, match="sentence 3 of 3"):
        sentences[3]


# --- the subwords themselves

TEXTS = ["der Hund läuft schnell", "the dog runs fast", "the dog's bone isn't here", "Größe 3.14 (€)"] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.train(TEXTS, 300)


def test_special_tokens_have_their_ids(tokenizer):
    made = bpe.loaded(tokenizer)
    assert [made.token_to_id(token) for token in bpe.SPECIAL] == [PAD, BOS, EOS, UNK]
    assert made.get_vocab_size() == 300


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS[:4],
        "unseen words",
        "数学 🙂 ﬁ",
        "</s> and <pad> and <unk> are text here",
        "a . b ,c 's",
        "\x00\x7f",
        "e\u0301 is not é",
    ],
)
def test_every_text_is_read_back_as_it_was(text, tokenizer, tmp_path):
    ids, starts = bpe.encoded([text, text], tokenizer, tmp_path)
    sentences = Sentences(ids, starts)
    data = TranslationData("", "de", "en", None, None, None, 300, tokenizer, {})
    assert ids.min() >= len(bpe.SPECIAL)
    assert data.decode(sentences[0]) == text
    assert data.decode([BOS, *sentences[0], EOS, 9]) == text
    assert data.decode(ids) == f"{text} {text}", "sentences that are joined to a document are parted by a space"


def test_the_same_letters_in_other_lines_are_no_cached_text(tokenizer, tmp_path):
    for lines in (["the d", "og"], ["the", " dog"]):
        ids, starts = bpe.encoded(lines, tokenizer, tmp_path)
        alone = [bpe.encoded([line], tokenizer, tmp_path)[0] for line in lines]
        assert [list(x) for x in np.split(ids, starts[1:-1])] == [list(x) for x in alone]


def test_training_is_deterministic_and_frequent_words_are_one_token(tokenizer, tmp_path):
    assert bpe.train(TEXTS, 300) == tokenizer
    ids, _ = bpe.encoded(["the dog"], tokenizer, tmp_path)
    assert len(ids) == 2


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocabulary 100: a byte-level vocabulary has at least 260 tokens"):
        bpe.trained(TEXTS, TEXTS, 100, tmp_path)


def test_a_special_token_in_a_sentence_is_noticed(tmp_path):
    class Careless:
        def encode_batch(self, lines):
            return [Encoding([7, EOS]) for _ in lines]

    with pytest.raises(RuntimeError, match="wrote the special token </s> into a sentence"):
        bpe._encode(["x"], Careless())


real_data = pytest.mark.skipif("ATTNKIT_DATA" not in os.environ, reason="ATTNKIT_DATA names no folder of real data")


@real_data
def test_multi30k_as_it_lies_there(tmp_path, characters):
    data = load(Path(os.environ["ATTNKIT_DATA"]) / "multi30k", tmp_path)
    assert [len(split.source) for split in (data.train, data.valid, data.test)] == [29_000, 1014, 1000]
    assert data.train.source_text[0] == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."


@real_data
@pytest.mark.parametrize(("name", "pairs"), [("europarl7", 8721), ("iwslt2017", 11_238), ("nc2016", 5168)])
def test_document_sets_as_they_lie_there(name, pairs, tmp_path, characters):
    data = load(Path(os.environ["ATTNKIT_DATA"]) / "documents" / name, tmp_path, document_tokens=1024)
    counts = data.about["counts"]
    assert sum(split["pairs"] + split["pairs with an empty side, dropped"] for split in counts.values()) == pairs
    assert max(data.train.source.lengths.max(), data.train.target.lengths.max()) <= 1024
    index = int(data.test.target.lengths.argmin())
    assert data.decode(data.test.target[index]) == data.test.target_text[index]
