"""The grammar of the calls of an op: factors with levels, forbidden combinations, and covering arrays of rows.

A row has one level of each factor. An array of strength t covers every combination of t levels of different factors
that is not forbidden: 2 covers the interactions of any two options, 3 those of any three.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import factorial
from typing import TypeAlias

Level: TypeAlias = bool | int | float | str | tuple["Level", ...] | None
Row = Mapping[str, Level]
Choice = tuple[str, Level]  # a factor and one of its levels
CANDIDATES = 10  # candidate rows, of which the one that covers most is taken


@dataclass(frozen=True)
class Grammar:
    """Factors with their levels, the first being that of a plain call, which may be combined with every other level."""

    factors: Mapping[str, tuple[Level, ...]]
    forbidden: frozenset[frozenset[Choice]] = frozenset()  # two or three levels that cannot be combined

    def __post_init__(self) -> None:
        choices = {choice for some in self.forbidden for choice in some}
        plain = [(name, levels[0]) for name, levels in self.factors.items() if (name, levels[0]) in choices]
        if plain:
            raise ValueError(f"grammar: the first level of a factor meets every other; got {plain[0]} forbidden")

    def within(self, subset: Mapping[str, Collection[Level]]) -> Grammar:
        """The part of a grammar that has these levels of each factor; ValueError for an unknown level."""
        for name, levels in subset.items():
            unknown = [level for level in levels if level not in self.factors[name]]
            if unknown:
                legal = ", ".join(map(str, self.factors[name]))
                raise ValueError(f"grammar: {name} has no level {unknown[0]!r}; expected some of {legal}")
        factors = {name: tuple(x for x in levels if x in subset[name]) for name, levels in self.factors.items()}
        known_choices = {(name, level) for name, levels in factors.items() for level in levels}
        return Grammar(factors, frozenset(some for some in self.forbidden if some <= known_choices))

    @cached_property
    def digest(self) -> str:
        """Equal for equal grammars, in any process."""
        forbidden = sorted(sorted(map(repr, some)) for some in self.forbidden)
        return hashlib.sha256(repr((dict(self.factors), forbidden)).encode()).hexdigest()

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Every level of every factor."""
        return tuple((name, level) for name, levels in self.factors.items() for level in levels)

    @cached_property
    def plain(self) -> Row:
        """The row of a plain call."""
        return {name: levels[0] for name, levels in self.factors.items()}

    @cached_property
    def meeting(self) -> tuple[int, ...]:
        """For each choice, as bits, the choices that it may be combined with."""
        return tuple(
            sum(1 << j for j, other in enumerate(self.choices) if self.may_meet(choice, other))
            for choice in self.choices
        )

    def may_meet(self, one: Choice, other: Choice) -> bool:
        """Whether two levels may be combined."""
        return one[0] != other[0] and frozenset((one, other)) not in self.forbidden

    @cached_property
    def third(self) -> Mapping[frozenset[int], int]:
        """For two choices, as bits, those forbidden with both, where triples are forbidden."""
        index = {choice: n for n, choice in enumerate(self.choices)}
        hidden: dict[frozenset[int], int] = {}
        for some in self.forbidden:
            numbers = [index[choice] for choice in some if choice in index]
            if len(some) == len(numbers) == 3:
                for n in numbers:
                    two = frozenset(m for m in numbers if m != n)
                    hidden[two] = hidden.get(two, 0) | 1 << n
        return hidden

    def allows(self, row: Row) -> bool:
        """Whether a row holds nothing forbidden."""
        return not any(some <= {*row.items()} for some in self.forbidden)

    def tuples(self, strength: int) -> Iterator[tuple[Choice, ...]]:
        """Everything that an array of this strength has to cover."""
        for some in itertools.combinations(self.choices, strength):
            meet = all(self.may_meet(one, other) for one, other in itertools.combinations(some, 2))
            if meet and frozenset(some) not in self.forbidden:
                yield some

    def covering(self, strength: int, start: Sequence[Row] = (), seed: int = 0) -> tuple[Row, ...]:
        """`start` and the rows missing to cover pairs (strength 2) or triples (3); deterministic."""
        index = {choice: n for n, choice in enumerate(self.choices)}
        missing = Missing(self.meeting, self.third, strength)
        rows = list(start)
        for row in rows:
            missing.remove([index[choice] for choice in row.items()])
        draw = random.Random(seed).random
        while missing:
            candidates = [self.candidate(missing, draw) for _ in range(CANDIDATES)]
            best = max(candidates, key=missing.count)
            missing.remove(best)
            rows.append(dict(self.choices[n] for n in sorted(best)))
        return tuple(rows)

    def candidate(self, missing: Missing, draw: Callable[[], float]) -> list[int]:
        """A row around a missing combination: factor by factor the level that covers most of the missing ones."""
        row = missing.some(draw)
        factors = {self.choices[n][0] for n in row}
        allowed = (1 << len(self.choices)) - 1
        for n, choice in enumerate(row):
            allowed &= self.beside(choice, row[:n])
        for name in sorted((name for name in self.factors if name not in factors), key=lambda name: draw()):
            levels = [n for n in self.levels_of[name] if allowed >> n & 1]
            within = missing.within(row)
            gains = [missing.gain(n, within) for n in levels]
            best = [n for n, gain in zip(levels, gains, strict=True) if gain == max(gains)]
            choice = best[int(draw() * len(best))]
            allowed &= self.beside(choice, row)
            row.append(choice)
        return row

    def beside(self, choice: int, row: Sequence[int]) -> int:
        """As bits, the choices compatible with a choice in a row with others."""
        hidden = 0
        for n in row if self.third else ():
            hidden |= self.third.get(frozenset((n, choice)), 0)
        return self.meeting[choice] & ~hidden

    @cached_property
    def levels_of(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers of the choices of each factor."""
        numbers = itertools.count()
        return {name: tuple(next(numbers) for _ in levels) for name, levels in self.factors.items()}


class Missing:
    """The uncovered pairs or triples of choices: for each choice a number whose bits are its partners, or its pairs of
    partners: bit j · count + k for the choices j and k.
    """

    def __init__(self, meeting: Sequence[int], third: Mapping[frozenset[int], int], strength: int) -> None:
        if strength not in (2, 3):
            raise ValueError(f"covering: expected strength 2 or 3; got {strength}")
        self.strength, self.count_of_choices = strength, len(meeting)
        self.partners = list(meeting)
        if strength == 3:
            self.partners = [
                sum((own & meeting[j] & ~third.get(frozenset((i, j)), 0)) << j * len(meeting) for j in ones(own))
                for i, own in enumerate(meeting)
            ]
        self.left = sum(x.bit_count() for x in self.partners) // factorial(strength)

    def __bool__(self) -> bool:
        return self.left > 0

    def some(self, draw: Callable[[], float]) -> list[int]:
        """A missing combination."""
        i = one_of([n for n, x in enumerate(self.partners) if x], draw)
        own, size = self.partners[i], self.count_of_choices
        if self.strength == 2:
            return [i, one_of(ones(own), draw)]
        of_pairs = {j: own >> j * size & ((1 << size) - 1) for j in range(size)}
        j = one_of([n for n, x in of_pairs.items() if x], draw)
        return [i, j, one_of(ones(of_pairs[j]), draw)]

    def within(self, row: Iterable[int]) -> int:
        """A row's choices, or pairs of them, as bits."""
        choices = list(row)
        bits = sum(1 << n for n in choices)
        return bits if self.strength == 2 else sum(bits << n * self.count_of_choices for n in choices)

    def gain(self, n: int, within: int) -> int:
        """How many more a row covers with choice n."""
        return (self.partners[n] & within).bit_count() // (self.strength - 1)

    def count(self, row: Sequence[int]) -> int:
        """How many a row covers."""
        within = self.within(row)
        return sum(self.gain(n, within) for n in row) // self.strength

    def remove(self, row: Sequence[int]) -> None:
        """Remove the combinations that a row covers."""
        self.left -= self.count(row)
        within = self.within(row)
        for n in row:
            self.partners[n] &= ~within


def ones(bits: int) -> list[int]:
    """The positions of the set bits of a number."""
    return [n for n in range(bits.bit_length()) if bits >> n & 1]


def one_of(items: Sequence[int], draw: Callable[[], float]) -> int:
    return items[int(draw() * len(items))]
