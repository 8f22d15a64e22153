"""The two exact statements hold, and the measurement would notice if they did not."""

import pytest

import attnkit
from attnkit_experiments.report import claims

PAIRS = 1 << 20


@pytest.mark.parametrize("activation", claims.ACTIVATIONS)
@pytest.mark.parametrize("alpha", claims.ALPHAS)
def test_the_mean_weight_scales_as_length_to_the_minus_alpha(activation, alpha):
    lengths = claims.LENGTHS
    means = [claims.mean_weight(activation, alpha, length, pairs=PAIRS) for length in lengths]
    assert abs(claims.slope(list(lengths), means) + alpha) <= claims.SLOPE_TOLERANCE


def test_the_mean_weight_of_softmax_is_one_over_length():
    means = claims.softmax_scaling(pairs=PAIRS)
    assert abs(claims.slope(list(claims.LENGTHS), means) + 1) <= claims.SLOPE_TOLERANCE


def test_output_variance_grows_as_half_the_length_and_reluformer_stays_flat():
    rows = claims.output_variance(pairs=PAIRS)
    n = [row["n"] for row in rows]
    assert abs(claims.slope(n, [row["relu"] for row in rows]) - 1) <= claims.SLOPE_TOLERANCE
    assert abs(claims.slope(n, [row["reluformer"] for row in rows])) <= claims.SLOPE_TOLERANCE
    assert [row["expected"] for row in rows] == [length / 2 for length in claims.LENGTHS]
    for row in rows:
        assert abs(row["relu"] / row["expected"] - 1) <= 3 * claims.SLOPE_TOLERANCE


def test_the_measurement_notices_a_divisor_that_is_not_the_length(monkeypatch):
    right = attnkit.pointwise_attention_weights

    def padded(q, k, *, activation, alpha):
        return right(q, k, activation=activation, alpha=alpha, length=k.shape[-2] + 100)

    monkeypatch.setattr(attnkit, "pointwise_attention_weights", padded)
    means = [claims.mean_weight("relu", 1.0, length, pairs=PAIRS) for length in claims.LENGTHS]
    assert abs(claims.slope(list(claims.LENGTHS), means) + 1) > claims.SLOPE_TOLERANCE


def test_the_verdict_follows_the_numbers():
    good = {
        "weights": [{"slope": -0.5, "alpha": 0.5}],
        "variance": [{"n": 64, "reluformer": 1.0}, {"n": 128, "reluformer": 1.001}],
        "variance_slope": 1.002,
    }
    assert claims.hold(good)
    assert not claims.hold(good | {"variance_slope": 0.9})
    assert not claims.hold(good | {"weights": [{"slope": -0.45, "alpha": 0.5}]})
