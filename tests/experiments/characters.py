"""A stand-in for the tokenizers library that cuts text into characters, so that lengths are plain to see."""

import sys
from dataclasses import dataclass

from attnkit_experiments.data.text import bpe


@dataclass
class Encoding:
    ids: list[int]


class Characters:
    """The methods of the library's tokenizer that are used: one token per character, a space in front."""

    def encode_batch(self, lines):
        return [Encoding([4 + ord(character) for character in f" {line}"]) for line in lines]

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(chr(token - 4) for token in ids if token >= 4)

    def id_to_token(self, token):
        return bpe.SPECIAL[token]

    def get_vocab_size(self):
        return 4 + sys.maxunicode


def replace_tokenizers(monkeypatch) -> list[list[str]]:
    """Replace the library; returns the lines of every training that follows."""
    seen: list[list[str]] = []

    def train(lines, vocabulary):
        seen.append(list(lines))
        return "characters"

    monkeypatch.setattr(bpe, "train", train)
    monkeypatch.setattr(bpe, "loaded", lambda tokenizer: Characters())
    return seen
