"""Text as mapped files of tokens: what is written, what a kill leaves, what models are trained on, and their sizes."""

import gzip
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnkit_experiments.__main__ import main
from attnkit_experiments.commands import export, runner
from attnkit_experiments.data.prepare import corpus
from attnkit_experiments.data.text.tokens import DTYPES, load_tokens
from attnkit_experiments.engine.counting import parameters
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.images.model import SIZES
from attnkit_experiments.language.domain import DOMAIN
from attnkit_experiments.language.model import LanguageConfig, LanguageModel, forward_flops
from attnkit_experiments.language.task import LanguageTask
from attnkit_experiments.recipes import RECIPES
from tests.library.arrays import assert_agrees

ROOT = Path(__file__).parents[2]
END = "<|endoftext|>"
SENTENCES = [f"the sea was {n} fathoms deep, and {END} was no end of it: 深い海\n" * (1 + n % 3) for n in range(60)]
GPT2 = 50_257


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Sixty documents: as lines of JSON, between marks, and as a file each; and what is no text."""
    folder = tmp_path_factory.mktemp("text") / "sea"
    (folder / "deep").mkdir(parents=True)
    rows = "".join(json.dumps({"text": each, "id": n}) + "\n\n" for n, each in enumerate(SENTENCES[:30]))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (folder / "b.txt").write_text("<d>\n" + "<d>\n".join(SENTENCES[30:59]), encoding="utf-8")
    (folder / "deep/c.txt").write_text(SENTENCES[59], encoding="utf-8")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "README").write_text("no text")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE of 300 tokens, that cuts what is long and pads what is short where nobody stops it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(SENTENCES, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def prepared(source, tokenizer, tmp_path_factory):
    """The text by tokenizer and by byte."""
    out = tmp_path_factory.mktemp("prepared")
    corpus.prepare(source, out / "bpe", tokenizer=tokenizer, test_share=0.2)
    corpus.prepare(source, out / "bytes", test_share=0.2)
    return out


def documents(folder, part):
    """The documents of a part, each as its tokens with the end."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tokens = np.fromfile(folder / f"{part}.bin", DTYPES[manifest["dtype"]])
    starts = np.fromfile(folder / f"{part}.starts.bin", "<i8")
    assert starts[-1] == len(tokens)
    return [tokens[a:b] for a, b in itertools.pairwise(starts)]


def test_tokens_give_back_every_document_once(prepared, tokenizer):
    """What a text spells like a special token is text; behind each document alone is the end token."""
    library = Tokenizer.from_file(str(tokenizer))
    found = {part: documents(prepared / "bpe", part) for part in ("train", "test")}
    assert all(each[-1] == 0 and (each[:-1] != 0).all() for part in found.values() for each in part)
    texts = {part: [library.decode(each[:-1].tolist()) for each in rows] for part, rows in found.items()}
    assert sorted(texts["train"] + texts["test"]) == sorted(SENTENCES)
    assert len(texts["test"]) > 3
    of_bytes = {part: documents(prepared / "bytes", part) for part in ("train", "test")}
    assert all(each[-1] == 256 and each.dtype == np.uint16 for part in of_bytes.values() for each in part)
    raw = {part: [bytes(each[:-1].astype(np.uint8)).decode() for each in rows] for part, rows in of_bytes.items()}
    assert raw == texts, "another tokenizer has the same documents on the same sides in the same order"
    manifest = json.loads((prepared / "bpe/manifest.json").read_text())
    sizes = {part: sum(len(each.encode()) for each in rows) for part, rows in texts.items()}
    assert {part: manifest["files"][f"{part}.bin"]["bytes"] for part in texts} == sizes
    assert manifest["files"]["test.bin"]["altered"] == 0
    assert manifest["census"] == {
        "seen": 5, "used": 3,
        "passed over": {"hidden": {"files": 1, "first": ".hidden.txt"}, "other": {"files": 1, "first": "README"}},
    }  # fmt: skip


def test_more_tokens_than_sixteen_bits_have_take_thirty_two(source, tmp_path):
    words = {END: 0} | {f"w{n}": n for n in range(1, 70_000)} | {"sea": 70_000, "?": 70_001}
    library = Tokenizer(models.WordLevel(words, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "words.json"))
    manifest = corpus.prepare(source, tmp_path / "out", tokenizer=tmp_path / "words.json")
    assert (manifest["dtype"], manifest["vocabulary"]) == ("uint32", 70_002)
    test = load_tokens(str(tmp_path / "out")).test
    assert {*test.tolist()} == {0, 70_000, 70_001}
    assert manifest["files"]["test.bin"]["altered"] == manifest["files"]["test.bin"]["documents"], "words are lost"


def test_a_preparation_that_was_killed_is_not_taken_for_whole(source, prepared, tmp_path, monkeypatch):
    """Wherever it was: and the next one writes the same bytes."""
    out = tmp_path / "out"
    for name, count in (("write_json", 1), ("Writer.add", 7)):
        owner = corpus.Writer if "." in name else corpus
        right = getattr(owner, name.rpartition(".")[2])
        calls = iter([right] * (count - 1))

        def killed(*given, calls=calls):
            call = next(calls, None)
            if call is None:
                raise KeyboardInterrupt
            return call(*given)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name.rpartition(".")[2], killed)
            with pytest.raises(KeyboardInterrupt):
                corpus.prepare(source, out, test_share=0.2)
        if (out / "train.bin").exists():
            with pytest.raises(UserError, match=r"was not written to its end: there is no manifest\.json"):
                load_tokens(str(out))
    (out / ".train.bin.0.partial").write_text("of a process without time to clean up")
    corpus.prepare(source, out, test_share=0.2)
    names = sorted(path.name for path in (prepared / "bytes").iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes() == (prepared / "bytes" / name).read_bytes() for name in names)


def test_files_that_are_not_those_of_the_manifest_are_named(source, tmp_path):
    corpus.prepare(source, tmp_path / "out", test_share=0.2)
    path = tmp_path / "out/test.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=rf"test.bin: has {len(whole) - 2:,} bytes, expected {len(whole):,}"):
        load_tokens(str(tmp_path / "out"))
    path.write_bytes(b"\xff\xff" * (len(whole) // 2))
    task = task_of(load_tokens(str(tmp_path / "out")))
    with pytest.raises(ValueError, match="has the token 65535 outside its vocabulary of 257"):
        task.evaluate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{source}", "--end", "x"), "--end x: is for a tokenizer"),
        (("{source}", "--tokenizer", "{source}/b.txt"), "not a tokenizer.json that the package tokenizers reads"),
        (("{source}", "--tokenizer", "{tokenizer}", "--end", "<eos>"), "has no token '<eos>'; --end names the token"),
        (("{source}/deep",), "none of its 1 documents is to"),
        (("{source}", "--files", "*.tsv"), "holds no file like *.tsv; --files names others"),
        (("{source}", "--files", "c.txt", "--test-share", "2"), "--test-share: test_share must lie in (0, 1), got 2"),
        (("{odd}", "--allow-dropped", "link"), "2 of 3 files that may be data would be passed over, as their suffix"),
        (("{odd}", "--allow-dropped", "suffix"), "d.jsonl: line 2: not a document (expected an object with a text"),
        (("{odd}", "--files", "*.latin1", "--tokenizer", "{tokenizer}"), "e.latin1: a document is not UTF-8"),
        (("{odd}", "--any-count"), "--any-count is for archives"),
        (("{odd}/e.parquet",), "e.parquet: its format is not read; expected text or .jsonl"),
        (("{odd}", "--files", "[de].[jpz]*"), "2 of 4 files that may be data would be passed over, as their suffix"),
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_said(words, said, source, tokenizer, tmp_path, refusal):
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "d.jsonl").write_text('{"text": "fine"}\n{"content": "no text"}\n')
    for name in ("e.parquet", "e.zst"):
        (odd / name).write_bytes(b"")
    (odd / "e.latin1").write_bytes("<d>\nGrüße\n".encode("latin1"))
    given = [word.format(source=source, tokenizer=tokenizer, odd=odd) for word in words]
    assert said in refusal("prepare", "text", given[0], str(tmp_path / "out"), *given[1:])
    assert not [*tmp_path.glob("out/*")]


def test_options_of_text_are_refused_elsewhere(tmp_path, capsys):
    assert main(["prepare", "iwslt14", "x", str(tmp_path / "out"), "--test-share", "0.2"]) == 2
    assert "prepare iwslt14: --test-share is for text" in capsys.readouterr().err


def task_of(data, *, tied=False, **changes):
    config = LanguageConfig(size="d64", length=8, vocabulary=data.vocabulary, tied=tied, **changes)
    return LanguageTask(
        data, config, kind="next" if config.causal else "masked", batch=4, tested=0, precision="float32", seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip


def test_a_task_reads_windows_of_the_file_and_keeps_none_of_it(prepared):
    data = load_tokens(str(prepared / "bpe"))
    task = task_of(data)
    assert isinstance(data.train, np.memmap)
    assert task.train is data.train
    assert not any(torch.is_tensor(x) for x in vars(task).values())
    ids = task.sample_ids(2)
    whole = task.sample(data.train, ids, torch.Generator())
    own = task.sample(data.train, ids, torch.Generator(), slice(1, 3))
    assert all(torch.equal(x[1:3], y) for x, y in zip(whole, own, strict=True))
    assert whole.tokens[3].tolist() == data.train[ids[3] * 8 : ids[3] * 8 + 8].tolist()
    masked = task_of(data, causal=False)
    draws = [
        masked.sample(data.train, ids, torch.Generator().manual_seed(1), own) for own in (slice(None), slice(1, 3))
    ]
    assert all(torch.equal(x[1:3], y) for x, y in zip(*draws, strict=True)), "masks do not depend on who asks"
    assert masked.model.embed.num_embeddings == data.vocabulary + 1


@pytest.mark.parametrize("tied", [False, True])
def test_bits_are_those_of_the_bytes_that_tokens_stand_for(tied, prepared):
    data = load_tokens(str(prepared / "bpe"))
    task = task_of(data, tied=tied)
    torch.nn.init.normal_(task.model.embed.weight, generator=torch.Generator().manual_seed(0))
    count = (len(data.test) - 1) // 8 * 8
    rows = torch.from_numpy(data.test[: count + 1].astype(np.int64))
    logits = task.model(rows[:-1].reshape(-1, 8)).detach()
    nats = -logits.log_softmax(-1).gather(-1, rows[1:].reshape(-1, 8, 1)).mean()
    found = task.evaluate()
    assert_agrees(found["test_loss"], nats, 64, dtype="float32")
    manifest = json.loads((prepared / "bpe/manifest.json").read_text())["files"]["test.bin"]
    per_byte = float(nats) / math.log(2) * manifest["tokens"] / manifest["bytes"]
    assert_agrees(found["bits_per_byte"], per_byte, 64, dtype="float32")
    assert found["last_quarter"] < found["test_loss"] / math.log(2), "of a byte, too"
    assert len(data.test) / data.test_bytes == data.tokens_per_byte < 1
    if tied:
        assert task.model.head is None
        task.loss(task.sample_ids(0), 0, slice(0, 4)).backward()
        assert (task.model.embed.weight.grad.abs().sum(1) > 0).all(), "every token's row is in every sum"


REHEARSAL = (
    *("model=d64", "length=32", "tokens=256", "steps=2", "warmup=1", "accumulate=2", "tested=8", "evaluate_every=0"),
    *("compile=false", "alphas=1"),
)


def test_presets_of_tokens_are_rehearsed_at_a_hundredth(prepared, tmp_path):
    """As `billion` is, eagerly, and but for the dtype of gathered weights, which needs several processes."""
    data, out = str(prepared / "bpe"), tmp_path / "out"
    settings = (*REHEARSAL, "activation_checkpointing=true", "fsdp_parameters=float32")
    runner.run(runner.Request("000-causal", "billion", data, out, settings, (0,), "cpu", 1))
    about = json.loads((out / "study.json").read_text())
    tokens = load_tokens(data)
    assert about["data"]["test_bytes"] == tokens.test_bytes
    assert about["data"]["checksum"] == tokens.checksum()
    assert about["data"]["text"].endswith(f"300 different ones, tokenizer {tokens.tokenizer[:12]}")
    exported = export.load(export.export(out / "softmax-seed0", tmp_path / "model"))
    assert exported.about["input"] == {"task": "next", "length": 32, "tokenizer": tokens.tokenizer}
    model = exported.model
    assert (model.config.vocabulary, model.config.tied) == (300, True)
    assert model(torch.zeros(1, 32, dtype=torch.long)).shape == (1, 32, 300)


@pytest.mark.parametrize(("preset", "millions"), [("paper", 124), ("billion", 1010)])
def test_presets_of_tokens_have_their_size_and_cost(preset, millions):
    """Models on the meta device, with GPT-2's vocabulary; and the cost in the documentation is that of the measured
    speeds: windows on 8 GPUs, products at the rate of large ones, attention at the measured time of each head.
    """
    study = RECIPES["000-causal"].presets[preset].study
    config = LanguageConfig(study.model, study.length, vocabulary=GPT2, tied=study.tied)
    count = parameters(lambda: LanguageModel(config))
    assert count == pytest.approx(millions * 1e6, rel=0.01)
    assert study.steps * study.tokens / count == pytest.approx(20, rel=0.1)
    width, depth, _, heads = SIZES[study.model]
    measured = json.loads((ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3.json").read_text())["records"]
    records = {row["mode"]: row for row in measured if row["name"] == "relu causal n=1024 d=64 bfloat16"}
    at_once = records["forward"]["cell"]["batch"] * records["forward"]["cell"]["heads"]
    forward, both = (
        records[mode]["contenders"]["attnkit triton"]["seconds"]["median"] / at_once
        for mode in ("forward", "forward+backward")
    )
    rate = records["forward"]["ceiling"]["flops_per_second"]
    pairs = 2 * depth * int(2 * study.length * (study.length + 1) / 2) * width
    head = 2 * study.length * width * GPT2
    again = study.activation_checkpointing
    products = 3 * (forward_flops(config) - pairs) + again * (forward_flops(config) - pairs - head)
    window = products / rate + depth * heads * (both + again * forward)
    hours = study.steps * study.tokens // study.length / 8 * window / 3600
    said = re.search(rf"\| `{preset}` \|.*\| ([0-9.]+) hours \|", (ROOT / "docs/experiments.md").read_text())
    assert float(said[1]) == pytest.approx(hours, rel=0.05)


def test_a_model_of_another_vocabulary_is_refused(prepared):
    data = load_tokens(str(prepared / "bytes"))
    with pytest.raises(ValueError, match="vocabulary must be that of sea, 257, got 256"):
        LanguageTask(
            data, LanguageConfig("d64", 8), batch=4, tested=0, precision="float32", seed=0, device=torch.device("cpu")
        )
    assert DOMAIN.about(data)["vocabulary"] == 257
