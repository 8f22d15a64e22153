"""ListOps of Long Range Arena: nested operations on lists of digits, whose value is the class.

Nangia and Bowman 2018 (arXiv:1804.06028), in the lengths of Tay et al. 2021 (arXiv:2011.04006) §2.2.1. A node is an
operator with probability ¼ and a digit otherwise; nodes at the largest depth are digits. Operators are MIN, MAX, MED
(the median, rounded down) and SM (the sum modulo 10), with 2 to 10 arguments. Expressions have more than 500 and fewer
than 2,000 tokens, and none occurs twice. The parentheses of the original's text carry no information and are left out,
here as by its readers; `]` is a token, and only operators open a list.

The original keeps expressions in a set, so that its splits differ from run to run; here everything is a function of
(rules, seed). Trees are drawn by the thousand, one level of all of them after the other.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnkit_experiments.data.census import Census
from attnkit_experiments.data.sequences.dataset import SequenceData, Split, flat, single
from attnkit_experiments.data.text.lines import read_lines
from attnkit_experiments.engine.arrays import Arrays, are_parts, cached_arrays
from attnkit_experiments.engine.errors import UserError, require_in
from attnkit_experiments.engine.files import fingerprint, written_aside
from attnkit_experiments.engine.progress import meter
from attnkit_experiments.engine.terms import LIMITS, Limits

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
CLOSE = "]"
WORDS = ("", *(str(digit) for digit in range(10)), *OPERATORS, CLOSE)  # by id; 0 is padding
IDS = {word: number for number, word in enumerate(WORDS) if word}
FIRST_DIGIT, FIRST_OPERATOR, CLOSE_ID = 1, 11, 15
TREES = 32_768  # per block
PATIENCE = 10  # blocks of trees without anything new before giving up
GENERATOR = 1  # incremented when the meaning of (rules, seed) changes, to invalidate caches


@dataclass(frozen=True)
class ListOpsRules:
    """The rules; the defaults are Long Range Arena's. Lengths count tokens and are exclusive on both sides."""

    longer_than: int = 500
    shorter_than: int = 2000
    depth: int = 10
    arguments: int = 10
    operator_share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.longer_than < self.shorter_than - 1:
            lengths = f"{self.longer_than} and {self.shorter_than}"
            raise ValueError(f"longer_than must be at least 0 and below shorter_than - 1, got {lengths}")
        require_in("[1, inf)", depth=self.depth)
        require_in("[2, inf)", arguments=self.arguments)
        require_in("(0, 1)", operator_share=self.operator_share)


def load(rules: ListOpsRules, *, train: int, valid: int, test: int, seed: int, cache: Path) -> SequenceData:
    """The data of these rules from `cache`, or generated and cached."""
    settings = {**dataclasses.asdict(rules), "sizes": [train, valid, test], "seed": seed, "generator": GENERATOR}
    path = cache / f"listops-{fingerprint(settings)[:20]}.npz"
    middle = train + valid
    kinds = {"tokens": "uint8 tokens", "starts": f"int64 {middle + test + 1}", "values": f"int64 {middle + test}"}
    if cached := cached_arrays(path, kinds, _are_expressions):
        arrays = Expressions(**cached)
    else:
        arrays = generate(rules, middle + test, seed)
        with written_aside(path) as aside, aside.open("wb") as file:
            np.savez(file, **arrays._asdict())
    return SequenceData(
        name="listops",
        vocabulary=len(WORDS),
        classes=tuple(str(digit) for digit in range(10)),
        tokens=arrays.tokens,
        starts=arrays.starts,
        train=single(0, arrays.values[:train]),
        valid=single(train, arrays.values[train:middle]),
        test=single(middle, arrays.values[middle:]),
    )


def read(path: Path, limits: Limits = LIMITS) -> SequenceData:
    """The benchmark's own files: `basic_{train,val,test}.tsv` (or *_train.tsv and so on, or .gz) in a folder, with a
    line of heads, then an expression and its value in each.

    Errors: UserError if a file is missing, or a line is not an expression and a digit.
    """
    tokens: list[np.ndarray] = []
    splits: list[Split] = []
    for name in ("train", "val", "test"):
        files = sorted(file for kind in ("tsv", "tsv.gz") for file in path.glob(f"*_{name}.{kind}"))
        files = [file for file in files if not file.name.startswith(".")]
        if len(files) != 1:
            there = ", ".join(file.name for file in files) or "none"
            expected = f"expected one file *_{name}.tsv, as basic_{name}.tsv"
            raise UserError(f"--data {path}: {expected}, found {there}; --data generated draws expressions")
        lines = read_lines(files[0], limits)
        rows = [_expression(line, f"{files[0]}, line {number}") for number, line in enumerate(lines[1:], 2)]
        if not rows:
            raise UserError(f"{files[0]}: holds no expression")
        splits.append(single(len(tokens), np.array([value for _, value in rows], dtype=np.int64)))
        tokens += [sequence for sequence, _ in rows]
    train, valid, test = splits
    census = Census(used=len(splits))
    census.pass_over("other", path.name, sum(file.is_file() for file in path.iterdir()) - len(splits))
    classes = tuple(str(digit) for digit in range(10))
    flattened, starts = flat(tokens)
    return SequenceData("listops", len(WORDS), classes, flattened, starts, train, valid, test, census=census)


def _expression(line: str, where: str) -> tuple[np.ndarray, int]:
    """Tokens and value of a line; parentheses say nothing that brackets do not (see the module)."""
    source, _, value = line.rstrip("\r").rpartition("\t")
    words = [word for word in source.split() if word not in ("(", ")")]
    if not words or any(word not in IDS for word in words) or value not in WORDS[FIRST_DIGIT:FIRST_OPERATOR]:
        raise UserError(f"{where}: not an expression of ListOps and its value ({line[:40]!r})")
    return np.array([IDS[word] for word in words], dtype=np.uint8), int(value)


def text(tokens: np.ndarray) -> str:
    """Tokens as words between spaces, such as "[MAX 2 [SM 9 4 ] ]"."""
    return " ".join(WORDS[token] for token in tokens)


class Expressions(NamedTuple):
    """tokens (T,) uint8, starts (N + 1,), values (N,)."""

    tokens: np.ndarray
    starts: np.ndarray
    values: np.ndarray


def generate(rules: ListOpsRules, count: int, seed: int) -> Expressions:
    """`count` different expressions. UserError if the rules hardly allow that many."""
    seen: set[bytes] = set()
    tokens: list[np.ndarray] = []
    values: list[int] = []
    block, last_new = 0, 0
    with meter("generating ListOps", count) as update:
        while len(tokens) < count:
            if block - last_new >= PATIENCE:
                raise UserError(
                    f"ListOps: {rules} gave {len(tokens)} different expressions of the {count} asked for, and none "
                    f"in the last {PATIENCE * TREES} trees; allow other lengths or ask for fewer"
                )
            batch = draw(rules, np.random.Generator(np.random.Philox(key=[seed, block])))
            block += 1
            for sequence, value in zip(np.split(batch.tokens, batch.starts[1:-1]), batch.values, strict=True):
                key = hashlib.blake2b(sequence.tobytes(), digest_size=16).digest()
                if key not in seen and len(tokens) < count:
                    seen.add(key)
                    tokens.append(sequence)
                    values.append(int(value))
                    last_new = block
            update(len(tokens))
    return Expressions(*flat(tokens), np.array(values, dtype=np.int64))


def _are_expressions(arrays: Arrays) -> bool:
    """Whether tokens and values are of ListOps, and no expression is empty."""
    tokens, starts, values = (arrays[name] for name in Expressions._fields)
    return (
        are_parts(starts, len(tokens))
        and bool(np.all(np.diff(starts) > 0))
        and bool(np.all((tokens > 0) & (tokens < len(WORDS))))
        and bool(np.all((values >= 0) & (values < 10)))
    )


# ---------------------------------------------------------------------------------------------- one block of trees


class _Level(NamedTuple):
    """The nodes of one depth, children of one parent side by side, parents in their order."""

    tree: np.ndarray
    arguments: np.ndarray  # 0 for a digit


def draw(rules: ListOpsRules, rng: np.random.Generator, trees: int = TREES) -> Expressions:
    """Those of `trees` trees with an allowed length, with their values."""
    levels = _shapes(rules, rng, trees)
    lengths = np.zeros(trees, dtype=np.int64)
    for level in levels:
        lengths += np.bincount(level.tree, weights=1 + (level.arguments > 0), minlength=trees).astype(np.int64)
    fits = (lengths > rules.longer_than) & (lengths < rules.shorter_than)
    starts = np.concatenate([[0], np.cumsum(lengths[fits])])
    if not fits.any():
        return Expressions(np.empty(0, np.uint8), starts, np.empty(0, np.int64))
    # a tree is kept or not as a whole, so that children stay children of the parents in their order
    arguments = [level.arguments[fits[level.tree]] for level in levels]
    symbols = [np.where(n > 0, rng.integers(0, 4, len(n)), rng.integers(0, 10, len(n))) for n in arguments]
    return Expressions(_written(arguments, symbols, starts), starts, _evaluated(arguments, symbols))


def _shapes(rules: ListOpsRules, rng: np.random.Generator, trees: int) -> list[_Level]:
    """The numbers of arguments of nodes (0 for digits), level by level from the roots."""
    tree, levels = np.arange(trees), []
    for depth in range(1, rules.depth + 1):
        arguments = np.zeros(len(tree), dtype=np.int64)
        if depth < rules.depth:
            operator = rng.random(len(tree)) < rules.operator_share
            arguments[operator] = rng.integers(2, rules.arguments + 1, np.count_nonzero(operator))
        levels.append(_Level(tree, arguments))
        tree = np.repeat(tree, arguments)
    return levels


def _firsts(arguments: np.ndarray) -> np.ndarray:
    """For every operator of a level the position of its first argument in the next one."""
    counts = arguments[arguments > 0]
    return np.cumsum(counts) - counts


def _evaluated(arguments: list[np.ndarray], symbols: list[np.ndarray]) -> np.ndarray:
    """The values of the roots, from the deepest level up."""
    below = np.empty(0, dtype=np.int64)
    for counts, symbol in zip(reversed(arguments), reversed(symbols), strict=True):
        values, operator = symbol.copy(), counts > 0
        if operator.any():
            first, counts = _firsts(counts), counts[operator]
            in_order = below[np.lexsort((below, np.repeat(np.arange(len(counts)), counts)))]
            median = (in_order[first + (counts - 1) // 2] + in_order[first + counts // 2]) // 2
            smallest, largest = in_order[first], in_order[first + counts - 1]
            total = np.add.reduceat(below, first) % 10
            values[operator] = np.choose(symbol[operator], (smallest, largest, median, total))
        below = values
    return below


def _sizes(arguments: list[np.ndarray]) -> list[np.ndarray]:
    """The number of tokens of the tree below each node, including the node and its bracket."""
    sizes: list[np.ndarray] = []
    for counts in reversed(arguments):
        size = np.ones(len(counts), dtype=np.int64)
        if (counts > 0).any():
            size[counts > 0] = 2 + np.add.reduceat(sizes[-1], _firsts(counts))
        sizes.append(size)
    return sizes[::-1]


def _written(arguments: list[np.ndarray], symbols: list[np.ndarray], starts: np.ndarray) -> np.ndarray:
    """The tokens of all trees, the root of tree t at starts[t]: a node, its arguments, and an operator's bracket."""
    sizes = _sizes(arguments)
    tokens = np.empty(starts[-1], dtype=np.uint8)
    place = starts[:-1]
    for depth, (counts, symbol) in enumerate(zip(arguments, symbols, strict=True)):
        operator = counts > 0
        tokens[place] = np.where(operator, FIRST_OPERATOR, FIRST_DIGIT) + symbol
        tokens[(place + sizes[depth] - 1)[operator]] = CLOSE_ID
        if not operator.any():
            break
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
        first = np.repeat(before[_firsts(counts)], counts[operator])
        place = np.repeat(place[operator] + 1, counts[operator]) + before - first
    return tokens
