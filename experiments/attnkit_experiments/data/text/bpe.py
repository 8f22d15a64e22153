"""Joint byte-pair encoding of both languages, by the `tokenizers` library.

Byte-level (Radford et al. 2019, §2.2, on Sennrich et al. 2016): text is cut into words with the space before them,
words into UTF-8 bytes, and the pair of symbols that is most frequent in the training text is merged until the
vocabulary is full. Since all 256 bytes are in it, every text can be encoded and decoded exactly: UNK keeps its id
but never occurs. Papers split words with the Moses scripts instead, so lengths in tokens differ slightly from theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnkit_experiments.engine.arrays import Arrays, are_parts, cached_arrays
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.files import write_text, written_aside

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
"""The tokens with ids 0, 1, 2, 3 = PAD, BOS, EOS, UNK."""
SMALLEST = len(SPECIAL) + 256
SCHEME = "byte-level, space in front"  # part of the cache key: change it together with `train`
CHUNK = 100_000  # lines encoded at a time, to limit the memory of the library's objects


def train(lines: Iterable[str], vocabulary: int) -> str:
    """The library's JSON of a tokenizer of at most `vocabulary` tokens (few lines may not contain that many pairs)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return str(tokenizer.to_str())


@lru_cache(maxsize=4)
def loaded(tokenizer: str) -> Tokenizer:
    """The tokenizer of this JSON. "</s>" in a sentence is treated as text, not as the token."""
    from tokenizers import Tokenizer

    result = Tokenizer.from_str(tokenizer)
    result.encode_special_tokens = True
    return result


def trained(source: Sequence[str], target: Sequence[str], vocabulary: int, cache: Path) -> str:
    """The tokenizer of these lines: from `cache` if present, otherwise trained and cached."""
    if vocabulary < SMALLEST:
        raise UserError(f"vocabulary {vocabulary}: a byte-level vocabulary has at least {SMALLEST} tokens")
    file = cache / f"bpe-{_key(chain(source, target), SCHEME, str(vocabulary))}.json"
    if not _is_tokenizer(file):
        write_text(file, train(chain(source, target), vocabulary))
    return file.read_text(encoding="utf-8")


def _is_tokenizer(file: Path) -> bool:
    """Whether a file holds one: a damaged one is trained again."""
    try:
        library = loaded(file.read_text(encoding="utf-8"))
    except Exception:  # the library raises this class itself
        return False
    return tuple(map(library.id_to_token, range(len(SPECIAL)))) == SPECIAL


def encoded(lines: Sequence[str], tokenizer: str, cache: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (total,) int32 of all lines, concatenated, and the start of each (n + 1,) int64; cached."""
    path, library = cache / f"tokens-{_key(lines, tokenizer)}.npz", loaded(tokenizer)

    def are_tokens(arrays: Arrays) -> bool:
        ids, starts = arrays["ids"], arrays["starts"]
        inside = np.all((ids >= len(SPECIAL)) & (ids < library.get_vocab_size()))
        return len(starts) == len(lines) + 1 and are_parts(starts, len(ids)) and bool(inside)

    if arrays := cached_arrays(path, {"ids": "int32 tokens", "starts": "int64 lines+1"}, are_tokens):
        return arrays["ids"], arrays["starts"]
    ids, starts = _encode(lines, library)
    with written_aside(path) as aside, aside.open("wb") as out:
        np.savez(out, ids=ids, starts=starts)
    return ids, starts


def _encode(lines: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    parts, lengths = [np.empty(0, dtype=np.int32)], [0]
    for first in range(0, len(lines), CHUNK):
        ids_of = [encoding.ids for encoding in tokenizer.encode_batch(list(lines[first : first + CHUNK]))]
        lengths += [len(ids) for ids in ids_of]
        parts.append(np.fromiter(chain.from_iterable(ids_of), dtype=np.int32))
    ids = np.concatenate(parts)
    if len(ids) and int(ids.min()) < len(SPECIAL):
        raise RuntimeError(f"the tokenizer wrote the special token {SPECIAL[ids.min()]} into a sentence")
    return ids, np.cumsum(lengths, dtype=np.int64)


def _key(lines: Iterable[str], *more: str) -> str:
    digest = hashlib.sha256()
    for text in chain(more, lines):
        digest.update(text.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:20]
