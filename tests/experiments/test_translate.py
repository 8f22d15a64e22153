"""The translation task: losses that add up, dropout by (seed, step), label smoothing, evaluation and BLEU."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import sacrebleu
import torch
from torch.nn.functional import cross_entropy

import attnkit
from attnkit_experiments.data.text.pairs import BOS, EOS, PAD, Sentences
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.translation.bleu import moses
from attnkit_experiments.translation.decode import DecodeConfig
from attnkit_experiments.translation.methods import METHODS
from attnkit_experiments.translation.smoothing import fairseq_smoothed, torch_smoothed
from attnkit_experiments.translation.task import ObjectiveConfig, TranslationTask, make_batch, padded
from tests.experiments.translation_cases import TRANSLATOR, VOCABULARY, Numbers, config, numbers, sentences, split
from tests.library.arrays import assert_agrees, assert_close

CPU = torch.device("cpu")


def task(
    method: str = "vanilla", *, data: Numbers | None = None, seed: int = 0, precision: str = "float32", **changes
) -> TranslationTask:
    model = changes.pop("model", None) or config(method, dropout=changes.pop("dropout", 0.0), **NO_DROPOUT)
    rest = {"objective": ObjectiveConfig(), "decoding": DecodeConfig(beam=3)} | changes
    return TranslationTask(
        data or numbers(), model, rest.pop("objective"), rest.pop("decoding"), budget=40, precision=precision,
        seed=seed, device=CPU, **rest,
    )  # fmt: skip


NO_DROPOUT = {"attention_dropout": 0.0}


def double(method: str, **changes) -> TranslationTask:
    made = task(method, **changes)
    made.model.double()
    return made


def gradients(task: TranslationTask, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    task.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in task.model.named_parameters()}


# ---------------------------------------------------------------------------------------------- batches


def test_sentences_are_padded_between_their_marks():
    found = padded(sentences([[4, 5, 6], [], [7]]), np.array([2, 0, 1]), before=BOS)
    assert found.tolist() == [[BOS, 7, PAD, PAD], [BOS, 4, 5, 6], [BOS, PAD, PAD, PAD]]
    found = padded(sentences([[4, 5, 6], [], [7]]), np.array([2, 0, 1]), after=EOS)
    assert found.tolist() == [[7, EOS, PAD, PAD], [4, 5, 6, EOS], [EOS, PAD, PAD, PAD]]


def test_a_batch_holds_the_pairs_and_no_other_padding():
    pairs = split(12, seed=3)
    ids = np.array([5, 0, 7])
    batch = make_batch(pairs, ids, CPU)
    assert batch.source.shape[1] == pairs.source.lengths[ids].max() + 1
    for row, number in enumerate(ids):
        source, target = pairs.source[number].tolist(), pairs.target[number].tolist()
        assert batch.source[row][batch.source_mask[row]].tolist() == [*source, EOS]
        assert [x for x in batch.target_in[row].tolist() if x != PAD] == [BOS, *target]
        assert [x for x in batch.target_out[row].tolist() if x != PAD] == [*target, EOS]


def test_a_step_takes_the_same_pairs_again():
    one, other = task(), task(seed=1)
    assert one.sample_ids(5).tolist() == task().sample_ids(5).tolist()
    steps = range(one.batches.batches_per_epoch)
    assert sorted(np.concatenate([one.sample_ids(step) for step in steps]).tolist()) == list(range(20))
    assert [one.sample_ids(step).tolist() for step in steps] != [other.sample_ids(step).tolist() for step in steps]


# ---------------------------------------------------------------------------------------------- label smoothing


def test_fairseq_spreads_over_the_other_classes_and_torch_over_all():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, VOCABULARY, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (3, 4), generator=generator)
    logs = logits.log_softmax(-1)
    nll = -logs.gather(-1, targets[..., None])[..., 0]
    for smoothed, others in ((fairseq_smoothed, VOCABULARY - 1), (torch_smoothed, VOCABULARY)):
        wanted = torch.full_like(logits, 0.1 / others)
        wanted.scatter_(-1, targets[..., None], 0.9 + (0.1 / others if others == VOCABULARY else 0.0))
        assert_close(wanted.sum(-1), torch.ones(3, 4, dtype=torch.float64))
        assert_close(smoothed(logits, targets, 0.1), -(wanted * logs).sum(-1))
        assert_close(smoothed(logits, targets, 0.0), nll)
    assert not torch.allclose(fairseq_smoothed(logits, targets, 0.1), torch_smoothed(logits, targets, 0.1), rtol=1e-3)


@pytest.mark.parametrize("smoothed", [fairseq_smoothed, torch_smoothed])
def test_half_precision_logits_are_widened(smoothed):
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(5)
    found = smoothed(logits, targets, 0.1)
    assert found.dtype == torch.float32
    assert_close(found, smoothed(logits.float(), targets, 0.1))


# ---------------------------------------------------------------------------------------------- the loss


def test_the_loss_is_the_mean_over_target_tokens():
    made = double("vanilla")
    ids = made.sample_ids(0)
    batch = make_batch(made.data.train, ids, CPU)
    there = batch.target_out != PAD
    logits = made.model(*batch[:3])[there]
    wanted = fairseq_smoothed(logits, batch.target_out[there], 0.1).mean()
    assert_close(made.loss(ids, 0, slice(None)), wanted, TRANSLATOR)
    other = double("vanilla", smoothed=torch_smoothed)
    wanted = cross_entropy(logits, batch.target_out[there], label_smoothing=0.1)
    assert_close(other.loss(ids, 0, slice(None)), wanted, TRANSLATOR)


@torch.no_grad()
def regulariser(made: TranslationTask, ids: np.ndarray) -> float:
    """Shen et al. 2023 eq 7 from the weights themselves, with C = 0.7·log n, over every layer."""
    batch, seen = make_batch(made.data.train, ids, CPU), {}
    for name, attention in made.model.attentions().items():

        def remember(op, q, k, options, name=name):
            seen[name] = attnkit.reluformer_attention_weights(q, k, **options)

        attention.observers.append(remember)
    made.model(*batch[:3])
    source, target = batch.source_mask, batch.target_in != PAD
    means = []
    for name, weights in seen.items():
        queries = (source if name.startswith("encoder") else target)[:, None, :].expand(weights.shape[:-1])
        if name in ("decoder.0.attention", "decoder.1.attention"):
            n = torch.arange(1, weights.shape[-1] + 1)
        else:
            n = source.sum(1)[:, None, None]
        total = weights.sum(-1)
        share = weights / total[..., None]
        entropy = -(share * share.where(share > 0, 1.0).log()).sum(-1)
        each = total.log().abs() + (entropy - 0.7 * n.double().log()).clamp(min=0)
        means.append(float(each[(total > 0) & queries].sum() / queries.sum()))
    return sum(means) / len(means)


def test_the_regulariser_is_the_formula_of_the_paper():
    made = double("reluformer")
    without = double("reluformer_unregularised")
    ids = made.sample_ids(1)
    loss = made.loss(ids, 0, slice(None))
    wanted = METHODS["reluformer"].regulariser * regulariser(made, ids)
    assert_close((loss - without.loss(ids, 0, slice(None))).item(), wanted, TRANSLATOR, magnitude=loss)
    assert wanted > 0.01


def test_weights_of_the_regulariser_scale_its_terms():
    plain, ids = double("reluformer_unregularised"), double("vanilla").sample_ids(1)
    terms = [ObjectiveConfig(sum_weight=a, entropy_weight=b) for a, b in ((1, 0), (0, 1), (3, 5))]
    base = plain.loss(ids, 0, slice(None)).item()
    losses = [double("reluformer", objective=o).loss(ids, 0, slice(None)).item() for o in terms]
    sums, entropies, both = (loss - base for loss in losses)
    assert_close(both, 3 * sums + 5 * entropies, TRANSLATOR, magnitude=np.multiply(losses, (3, 5, 1)))
    method = dataclasses.replace(METHODS["reluformer"], regulariser=0.5 * METHODS["reluformer"].regulariser)
    half = double(
        "", model=config("reluformer", encoder=method, decoder=method, cross=method, dropout=0.0, **NO_DROPOUT)
    )
    found = half.loss(ids, 0, slice(None)).item() - base
    assert_close(found, 0.5 * (sums + entropies), TRANSLATOR, magnitude=losses)


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_slices_add_up(method):
    made = double(method)
    ids = np.arange(11)
    whole = made.loss(ids, 0, slice(None))
    grads = gradients(made, whole)
    largest = max(grad.abs().max() for grad in grads.values())
    for cuts in ((0, 4, 11), (0, 1, 5, 9, 11)):
        parts = [made.loss(ids, 0, slice(a, b)) for a, b in pairwise(cuts)]
        assert_close(sum(parts), whole, TRANSLATOR)
        added = gradients(made, sum(parts))
        for name, grad in grads.items():  # there and back; some are sums that cancel to nothing
            assert_close(added[name], grad, 2 * TRANSLATOR, magnitude=largest)


def test_shares_that_are_means_of_their_own_are_noticed():
    made, ids = double("vanilla"), np.arange(11)
    parts = [made.loss(ids[cut], 0, slice(None)) for cut in (slice(4), slice(4, None))]
    assert not torch.allclose(sum(parts) / 2, made.loss(ids, 0, slice(None)), rtol=1e-4)


# ---------------------------------------------------------------------------------------------- dropout


def test_dropout_is_a_function_of_seed_step_and_slice():
    made = task(model=config("reluformer", dropout=0.3, attention_dropout=0.3))
    ids = np.arange(8)
    made.model.train()
    before = torch.random.get_rng_state()
    first = made.loss(ids, 3, slice(2, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(made.loss(ids, 3, slice(2, 6)), first)
    assert not torch.equal(made.loss(ids, 4, slice(2, 6)), first)
    other = task(model=config("reluformer", dropout=0.3, attention_dropout=0.3), seed=1)
    other.model.load_state_dict(made.model.state_dict())
    other.model.train()
    assert not torch.equal(other.loss(ids, 3, slice(2, 6)), first)
    twice = np.array([0, 0])
    assert not torch.equal(made.loss(twice, 3, slice(0, 1)), made.loss(twice, 3, slice(1, 2)))


# ---------------------------------------------------------------------------------------------- evaluation


def test_losses_of_sentences_are_those_of_each_alone():
    made = double("vanilla")
    made.model.eval()
    found = made.sentence_losses(made.data.valid, made.valid_batches)
    for number, loss in enumerate(found.tolist()):
        batch = make_batch(made.data.valid, np.array([number]), CPU)
        alone = cross_entropy(made.model(*batch[:3])[0], batch.target_out[0], reduction="sum")
        assert_close(loss, alone.item(), TRANSLATOR)


def test_valid_loss_is_the_mean_over_all_tokens():
    made = double("vanilla")
    made.model.eval()
    lengths = made.data.valid.target.lengths + 1
    total = made.sentence_losses(made.data.valid, made.valid_batches).sum()
    assert_close(made.evaluate()["valid_loss"], total / lengths.sum(), TRANSLATOR)


def test_translations_come_in_the_order_of_the_split():
    made = task()
    made.model.eval()
    found = made.translate(made.scored, made.search_batches)
    for number in range(len(made.scored.source)):
        source, target = made.scored.source, made.scored.target
        one = dataclasses.replace(
            made.scored, source=sentences([source[number]]), target=sentences([target[number]]),
            source_text=made.scored.source_text[number : number + 1],
            target_text=made.scored.target_text[number : number + 1],
        )  # fmt: skip
        alone = task(data=dataclasses.replace(made.data, test=one))
        alone.model.eval()
        assert alone.translate(one, alone.search_batches).texts == found.texts[number : number + 1]


def test_training_on_reversed_numbers_is_seen_in_bleu():
    pairs = split(8, seed=0, longest=6)
    data = Numbers("numbers", "a", "b", pairs, pairs, pairs, VOCABULARY, "", {})
    sharp = ObjectiveConfig(smoothing=0.0)
    made = task(data=data, model=config(dim=32, dropout=0.0, **NO_DROPOUT), objective=sharp)
    before = made.evaluate()
    optimizer = torch.optim.Adam(made.model.parameters(), lr=3e-3)
    losses = []
    for step in range(100):
        loss = made.loss(np.arange(8), step, slice(None))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = made.evaluate()
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert after["valid_loss"] < 0.1 * before["valid_loss"]
    assert_close(after["valid_perplexity"], math.exp(after["valid_loss"]))
    assert_close(after["bleu"], 100.0)
    assert_close(after["bleu_tokenised"], 100.0)
    assert before["bleu"] < 20
    assert after["length_ratio"] == 1
    assert after["cut"] == 0


def test_evaluation_is_deterministic_and_leaves_the_model_in_its_mode():
    made = task(model=config(dropout=0.3, attention_dropout=0.3))
    made.model.train()
    first, second = made.evaluate(), made.evaluate()
    assert made.model.training
    assert first.pop("decode_seconds") > 0
    assert second.pop("decode_seconds") > 0
    assert first == second
    assert set(first) == {"valid_loss", "valid_perplexity", "bleu", "bleu_tokenised", "length_ratio", "cut"}
    assert all(math.isfinite(value) for value in first.values())


def test_signatures_say_how_bleu_was_computed():
    made = task()
    made.evaluate()
    assert set(made.signatures) == {"bleu", "bleu_tokenised"}
    assert "tok:13a" in made.signatures["bleu"]
    assert "case:mixed" in made.signatures["bleu"]
    assert "tok:none" in made.signatures["bleu_tokenised"]
    assert "case:lc" in made.signatures["bleu_tokenised"]
    assert all(text.endswith(f"version:{sacrebleu.__version__}") for text in made.signatures.values())


def test_bleu_of_known_texts():
    from attnkit_experiments.translation.bleu import corpus_bleu

    assert_close(corpus_bleu(["The cat sat here."], ["The cat sat here."]).score, 100.0)
    # 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples, no brevity penalty
    known = corpus_bleu(["a b c d x"], ["a b c d e"], tokenize="none")
    assert_close(known.score, 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert corpus_bleu(["A B C D E"], ["a b c d e"], tokenize="none").score == 0
    assert_close(corpus_bleu(["A B C D E"], ["a b c d e"], tokenize="none", lowercase=True).score, 100.0)
    assert corpus_bleu(["a b c d"], ["a b c d e f g h"]).length_ratio == 0.5
    with pytest.raises(ValueError, match="2 hypotheses and 1 references"):
        corpus_bleu(["a", "b"], ["a"])


@pytest.mark.parametrize("method", ["vanilla", "reluformer"])
def test_half_precision_has_a_loss_and_an_evaluation(method):
    made = task(method, precision="bfloat16")
    ids = made.sample_ids(0)
    with torch.autocast("cpu", torch.bfloat16):
        half = made.loss(ids, 0, slice(None))
    half.backward()
    full = made.loss(ids, 0, slice(None))
    assert half.item() != full.item()
    assert_agrees(half.item(), full, dtype="bfloat16")  # a mean, in which the errors of many ops average out
    made.model.eval()
    pair = (made, task(method))
    losses = [one.sentence_losses(made.data.valid, made.valid_batches).sum() for one in pair]
    assert losses[0] != losses[1]
    assert_agrees(losses[0], losses[1], dtype="bfloat16")
    assert len(made.translate(made.scored, made.search_batches).texts) == 7


# ---------------------------------------------------------------------------------------------- mistakes


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="numbers has a vocabulary of 23; the model was given 24"):
        task(model=config(vocabulary=24))
    data = numbers()
    with pytest.raises(UserError, match=r"the train split has a sentence of 7 tokens with EOS; .* max_length=6"):
        task(model=config(max_length=6))
    nothing = dataclasses.replace(data.valid, source=Sentences(np.empty(0, np.int32), np.zeros(1, np.int64)))
    with pytest.raises(UserError, match="numbers: the valid split is empty"):
        task(data=dataclasses.replace(data, valid=nothing))
    with pytest.raises(ValueError, match=r"smoothing must lie in \[0, 1\); got 1"):
        ObjectiveConfig(smoothing=1)


def test_tokenised_bleu_is_computed_on_moses_tokens():
    assert moses("en")("It's a dog, isn't it?") == "It 's a dog , isn 't it ?"
    assert moses("de")('Der Hund sagte: "Ja." & nein') == 'Der Hund sagte : " Ja . " & nein'
