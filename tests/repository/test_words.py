import pytest

from tests.repository import words

# what is left of names and phrases that have better ones; a count may fall, and then its number here
LEFT = {
    "attnkit/_core": (35, 4),
    "attnkit/analysis": (3, 0),
    "attnkit/backends": (73, 1),
    "attnkit/integrations": (9, 0),
    "attnkit/kernels": (11, 1),
    "attnkit/nn": (10, 0),
    "attnkit/ops": (43, 2),
    "reference": (18, 1),
    "conformance": (51, 4),
    "experiments": (109, 2),
    "benchmarks": (51, 5),
    "docs": (18, 17),
}


@pytest.mark.parametrize("room", words.ROOMS)
def test_no_new_bare_participles_and_forbidden_words(room):
    found = words.participles(room), words.phrases(room)
    for places, most in zip(found, LEFT[room], strict=True):
        assert len(places) == most, "\n".join(map(str, places))


def test_what_is_a_bare_participle():
    assert all(map(words.is_bare_participle, ("served", "_pulled", "taken", "drawn")))
    assert not any(map(words.is_bare_participle, ("unsupported", "seed", "taken_from", "serve", "sign")))


def test_phrases_are_read_from_the_vocabulary():
    assert words.forbidden()["told apart"] == "distinguish"
