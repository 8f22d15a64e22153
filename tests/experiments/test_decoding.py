"""Greedy decoding and beam search against searches that are written out, and that no batch or padding changes them."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnkit.nn import KeyValueCache
from attnkit_experiments.data.text.pairs import BOS, EOS, PAD, UNK
from attnkit_experiments.engine.errors import Diverged
from attnkit_experiments.translation import decode
from attnkit_experiments.translation.decode import NEVER, DecodeConfig, beam_search, first_largest, greedy, limits
from attnkit_experiments.translation.model import DecoderState
from tests.experiments.translation_cases import CAUSAL, TRANSLATOR, Tokens, talker, tokens
from tests.library.arrays import assert_close

SEARCHES = {"greedy": greedy, "beam": beam_search}
SHORT = {"a": 1.0, "b": 4}  # limits of 6 to 11 tokens, which some translations come to and some do not


def batch() -> Tokens:
    return tokens(((7, 1), (3, 1), (5, 1), (2, 1)))


def next_logs(model, alone: Tokens, histories: list[list[int]], limit: int) -> torch.Tensor:
    """log p (len(histories), V) of what follows histories of one length, without caches."""
    source, mask = (x.expand(len(histories), -1) for x in (alone.source, alone.mask))
    target = torch.tensor([[BOS, *history] for history in histories])
    logs = model(source, mask, target)[:, -1].log_softmax(-1)
    logs[:, [PAD, BOS]] = -math.inf
    if len(histories[0]) == limit:
        logs[:, torch.arange(logs.shape[1]) != EOS] = -math.inf
    return logs


@torch.no_grad()
def plain_greedy(model, alone: Tokens, limit: int) -> list[int]:
    history: list[int] = []
    while not history or history[-1] != EOS:
        history.append(int(next_logs(model, alone, [history], limit).argmax()))
    return history


@torch.no_grad()
def plain_beam_search(model, alone: Tokens, limit: int, beam: int, penalty: float) -> tuple[float, list[int]]:
    """One item, lists, no caches: (score, tokens with EOS)."""
    live, finished = [(0.0, [])], []
    while True:
        logs = next_logs(model, alone, [history for _, history in live], limit).tolist()
        candidates = [
            (total + log, place, word, [*history, word])
            for place, (total, history) in enumerate(live)
            for word, log in enumerate(logs[place])
        ]
        candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
        candidates = [c for c in candidates[: 2 * beam] if c[0] > -math.inf]
        finished += [(c[0] / len(c[3]) ** penalty, c[3]) for c in candidates[:beam] if c[2] == EOS]
        at_limit = len(live[0][1]) == limit
        live = [(c[0], c[3]) for c in candidates if c[2] != EOS][:beam]
        if at_limit or len(finished) >= beam:
            return max(finished, key=lambda pair: pair[0])


def test_the_translations_of_these_tests_are_not_all_alike():
    found = [beam_search(talker(method), batch().source, batch().mask, DecodeConfig(**SHORT)) for method in CAUSAL]
    cut = torch.cat([translations.cut for translations in found])
    assert cut.any()
    assert not cut.all()
    different = {tuple(sequence) for translations in found for sequence in translations.sequences()}
    assert len(different) > len(CAUSAL)
    assert max(len(set(sequence)) for sequence in different) > 3


@pytest.mark.parametrize("method", CAUSAL)
def test_greedy_with_caches_is_greedy_without(method):
    model, whole, config = talker(method), batch(), DecodeConfig(**SHORT)
    found, limit = greedy(model, whole.source, whole.mask, config), limits(model, whole.mask, config)
    for item, sequence in enumerate(found.sequences()):
        assert [*sequence, EOS] == plain_greedy(model, whole.only(item), int(limit[item]))


@pytest.mark.parametrize("method", CAUSAL)
def test_a_beam_of_one_is_greedy(method):
    model, whole = talker(method), batch()
    config = DecodeConfig(beam=1, length_penalty=1.1, **SHORT)
    one, other = (search(model, whole.source, whole.mask, config) for search in (beam_search, greedy))
    assert torch.equal(one.tokens, other.tokens)
    assert_close(one.score, other.score, TRANSLATOR)
    assert torch.equal(one.cut, other.cut)


@pytest.mark.parametrize(("method", "beam", "penalty"), [("vanilla", 3, 1.1), ("reluformer", 5, 0.6), ("rela", 2, 1.0)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beam_search_is_the_one_written_out(method, beam, penalty, seed):
    model, whole = talker(method, seed=seed), batch()
    config = DecodeConfig(beam=beam, length_penalty=penalty, a=1.0, b=3)
    found, limit = beam_search(model, whole.source, whole.mask, config), limits(model, whole.mask, config)
    for item, sequence in enumerate(found.sequences()):
        score, history = plain_beam_search(model, whole.only(item), int(limit[item]), beam, penalty)
        assert [*sequence, EOS] == history
        assert_close(found.score[item].item(), score, TRANSLATOR)


@pytest.mark.parametrize("lost", ["follow", "keep"])
def test_caches_that_lose_track_are_noticed(lost, monkeypatch):
    """Hypotheses that keep the cache of another one, and items that keep that of another one."""

    def follow(state, parents):
        rows = torch.arange(len(parents))[:, None] * (len(state.own[0].keys) // len(parents))
        for cache in state.own:
            cache.reorder(rows.expand(-1, parents.shape[1]).flatten())

    def keep(state, items):
        right_keep(state, items)
        for cache in state.cross:
            cache.keys = cache.keys.roll(1, 0)

    right_keep = DecoderState.keep
    config = DecodeConfig(beam=3, a=1.0, b=3)
    differ = 0
    for seed in range(3):
        model, whole = talker(seed=seed), batch()
        right = beam_search(model, whole.source, whole.mask, config)
        with monkeypatch.context() as patch:
            patch.setattr(DecoderState, lost, {"follow": follow, "keep": keep}[lost])
            wrong = beam_search(model, whole.source, whole.mask, config)
        differ += not torch.allclose(right.score, wrong.score)
    assert differ


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.1, 2.0])
def test_a_beam_that_holds_everything_finds_the_best_of_all(penalty):
    model, alone = (
        talker(vocabulary=6),
        Tokens(torch.tensor([[4, 5, EOS]]), torch.ones(1, 3, dtype=torch.bool), None),
    )
    config = DecodeConfig(beam=64, length_penalty=penalty, a=0.0, b=3)
    found = beam_search(model, alone.source, alone.mask, config)
    scores = {}
    for length in range(4):
        for words in itertools.product((UNK, 4, 5), repeat=length):
            target = torch.tensor([[BOS, *words]])
            logs = model(alone.source, alone.mask, target)[0].log_softmax(-1).detach()
            before = sum(float(logs[t, word]) for t, word in enumerate(words))
            # at the limit EOS is certain to come, and its probability counts all the same
            scores[words] = (before + float(logs[length, EOS])) / (length + 1) ** penalty
    best = max(scores, key=scores.get)
    assert len(scores) == 40
    assert found.sequences() == [list(best)]
    assert_close(found.score.item(), scores[best], TRANSLATOR)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("method", CAUSAL)
def test_a_batch_is_its_items_and_padding_changes_nothing(method, search):
    model, whole = talker(method), batch()
    config = DecodeConfig(beam=3, length_penalty=1.1, **SHORT)
    found = SEARCHES[search](model, whole.source, whole.mask, config)
    wide = whole.wider(4)
    wider = SEARCHES[search](model, wide.source, wide.mask, config)
    assert wider.sequences() == found.sequences()
    assert_close(wider.score, found.score, TRANSLATOR)
    for item, sequence in enumerate(found.sequences()):
        alone = whole.only(item)
        single = SEARCHES[search](model, alone.source, alone.mask, config)
        assert single.sequences() == [sequence]
        assert_close(single.score, found.score[[item]], TRANSLATOR)


@pytest.mark.parametrize("search", SEARCHES)
def test_translations_end_at_the_limit_of_their_own_source(search):
    model, whole = talker(), batch()
    with torch.no_grad():  # whatever the decoder says, EOS is the least likely
        model.decoder[-1].memory_norm.bias[:] = -20 * model.output.weight[EOS] / model.output.weight[EOS].norm()
    config = DecodeConfig(beam=2, a=1.2, b=2)
    assert limits(model, whole.mask, config).tolist() == [9, 4, 6, 3]
    found = SEARCHES[search](model, whole.source, whole.mask, config)
    assert [len(sequence) for sequence in found.sequences()] == [9, 4, 6, 3]
    assert found.cut.all()
    assert found.tokens.shape == (4, 10)
    assert found.tokens[1].tolist()[4:] == [EOS, *[PAD] * 5]
    assert not ((found.tokens == BOS) | (found.tokens == PAD))[0].any()
    assert limits(model, whole.mask, DecodeConfig(b=1000)).tolist() == [39] * 4, "positions are the last limit"


@pytest.mark.parametrize("search", SEARCHES)
def test_of_equally_likely_tokens_the_first_is_taken(search):
    model, whole = talker(), batch()
    right = SEARCHES[search](model, whole.source, whole.mask, DecodeConfig(beam=3))
    with torch.no_grad():
        model.output.weight[:] = 0.0
    same = [SEARCHES[search](model, whole.source, whole.mask, DecodeConfig(beam=3)) for _ in range(2)]
    assert torch.equal(same[0].tokens, same[1].tokens)
    assert same[0].sequences() == [[]] * 4, "EOS has the smallest number that may come"
    assert right.sequences() != same[0].sequences()


@pytest.mark.parametrize("different", [4, 10**6])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_first_largest_is_a_stable_sort(k, different):
    generator = np.random.default_rng(0)
    x = generator.integers(0, different, (50, 9)).astype(float)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    values, places = first_largest(torch.from_numpy(x), k)
    assert places.tolist() == order.tolist()
    assert values.tolist() == np.take_along_axis(x, order, 1).tolist()


def test_first_largest_takes_what_is_impossible_last():
    x = torch.tensor([[NEVER, 1.0, NEVER, 1.0], [NEVER, 0.0, NEVER, 2.0]])
    values, places = first_largest(x, 3)
    assert values.tolist() == [[1.0, 1.0, NEVER], [2.0, 0.0, NEVER]]
    assert places[:, :2].tolist() == [[1, 3], [3, 1]]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_model_without_numbers_is_refused(search):
    model, whole = talker(), batch()
    with torch.no_grad():
        model.output.weight[5] = math.nan
    with pytest.raises(Diverged, match=r"probabilities of items \[0, 1, 2, 3\] of the batch are not finite"):
        SEARCHES[search](model, whole.source, whole.mask)


def test_hypotheses_are_chosen_on_the_device_of_the_tokens():
    """On a device without storage: an index that is made on the CPU would be refused there."""
    items, beams = 3, 2
    own, cross = (KeyValueCache(*torch.empty(2, n, 1, 4, 8, device="meta")) for n in (items * beams, items))
    memory, mask = torch.empty(items, 4, 8, device="meta"), torch.empty(items, 4, device="meta")
    state = DecoderState([own], [cross], memory, mask)
    state.follow(torch.empty(items, beams, dtype=torch.long, device="meta"))
    state.keep(torch.empty(2, dtype=torch.long, device="meta"))
    assert [x.shape[0] for x in (own.keys, cross.keys, state.memory, state.mask)] == [2 * beams, 2, 2, 2]
    model = SimpleNamespace(decode_step=lambda last, state: torch.empty(2, beams, 7, device="meta"))
    at_limit = torch.empty(2, dtype=torch.bool, device="meta")
    assert decode._next_logs(model, None, state, at_limit).shape == (2, beams, 7)
