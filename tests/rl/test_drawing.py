"""One draw: the right distribution, the right logprob, and noise that depends on nothing it should not."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.transformer import MASKED_LOGIT
from rl.drawing import STRETCH, sample, truncate

LOGITS = np.array([1.5, -0.5, 0.0, 2.0, -3.0, 0.7], np.float32)
ROWS = 20_000
CHI_SQUARE_5_DEGREES = 25.7  # exceeded once in 10,000


@functools.partial(jax.jit, static_argnames=("top_k", "top_p"))  # few programs: each takes seconds to compile
def draw(logits, key, request_ids, positions, greedy, temperature, top_k, top_p):
    return sample(logits, key, request_ids=request_ids, positions=positions, greedy=greedy, temperature=temperature, top_k=top_k,
                  top_p=top_p)


def draw_rows(logits=LOGITS, *, seed=0, request_ids=None, positions=None, greedy=False, temperature=0.7, top_k=0, top_p=1.0):
    """Tokens and logprobs of many rows of one distribution, in numpy."""
    request_ids = np.arange(ROWS) if request_ids is None else request_ids
    positions = np.full(ROWS, 5) if positions is None else positions
    tokens, logprobs = draw(np.broadcast_to(logits, (len(request_ids), len(logits))), jax.random.key(seed),
                            jnp.asarray(request_ids, jnp.int32), jnp.asarray(positions, jnp.int32),
                            np.broadcast_to(greedy, len(request_ids)), jnp.float32(temperature), top_k, top_p)
    return np.asarray(tokens), np.asarray(logprobs)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def chi_square(tokens, probabilities):
    expected = probabilities * len(tokens)
    return float((np.square(np.bincount(tokens, minlength=len(probabilities)) - expected) / expected).sum())


@pytest.mark.parametrize("vary", ["request_ids", "positions"])
def test_frequencies_follow_the_tempered_softmax(vary):
    fixed = {"request_ids": np.full(ROWS, 3), "positions": np.full(ROWS, 9)}
    tokens, _ = draw_rows(**{**fixed, vary: np.arange(ROWS)})
    assert chi_square(tokens, np.exp(log_softmax(LOGITS / 0.7))) < CHI_SQUARE_5_DEGREES
    assert chi_square(tokens, np.exp(log_softmax(LOGITS))) > CHI_SQUARE_5_DEGREES  # the temperature matters


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(temperature):
    tokens, logprobs = draw_rows(temperature=temperature)
    np.testing.assert_allclose(logprobs, log_softmax(LOGITS / temperature)[tokens], atol=1e-6)


@pytest.mark.parametrize("choice", [{"greedy": True}, {"top_k": 2}, {"top_p": 0.5}, {"greedy": np.arange(ROWS) < 9}])
def test_what_is_not_drawn_from_the_policy_has_its_logprobs_at_temperature_one(choice):
    tokens, logprobs = draw_rows(temperature=0.5, **choice)
    expected = np.where(choice.get("greedy", True), log_softmax(LOGITS)[tokens], log_softmax(LOGITS / 0.5)[tokens])
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_a_hundred_thousand_draws_from_many_stretches_pass_a_chi_square_test():
    size = 2 * STRETCH + 7
    logits = np.random.default_rng(0).normal(scale=2.0, size=size).astype(np.float32)
    parts = [draw_rows(logits, temperature=1.0, request_ids=np.arange(ROWS) + part * ROWS) for part in range(5)]
    tokens = np.concatenate([tokens for tokens, _ in parts])
    probabilities = np.exp(log_softmax(logits))
    # Neighbours together, so that a bin has a thousand draws or so.
    _, bins = np.unique(np.digitize(np.cumsum(probabilities), np.linspace(0, 1, 101)[1:-1]), return_inverse=True)
    expected = np.bincount(bins, weights=probabilities)
    degrees = len(expected) - 1
    assert degrees > 60
    assert chi_square(bins[tokens], expected / expected.sum()) < degrees + 3.7 * np.sqrt(2 * degrees)  # once in some thousands
    assert tokens.max() < size and len(set(tokens // STRETCH)) == 3


def test_uniform_logits_over_eight_tokens_have_minus_log_eight():
    tokens, logprobs = draw_rows(np.zeros(8, np.float32), temperature=1.0)
    assert set(tokens) == set(range(8))
    np.testing.assert_array_equal(logprobs, np.float32(-np.log(8)))


@pytest.mark.parametrize("base", [0.0, 1e4, -3e4])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_token_far_above_the_rest_is_certain(base, greedy):
    logits = np.full(STRETCH + 44, base, np.float32)
    logits[STRETCH + 3] += 60.0
    tokens, logprobs = draw_rows(logits, greedy=greedy)
    assert set(tokens) == {STRETCH + 3} and set(logprobs.tolist()) == {0.0}


@hypothesis.given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]), temperature=st.floats(0.01, 10),
                  is_coarse=st.booleans())
def test_logprobs_are_never_positive_and_exact_for_large_logits(seed, scale, temperature, is_coarse):
    logits = (scale * np.random.default_rng(seed).normal(size=600)).astype(np.float32)
    logits = np.asarray(jnp.asarray(logits).astype(jnp.bfloat16).astype(jnp.float32)) if is_coarse else logits
    tokens, logprobs = draw_rows(logits, request_ids=np.arange(64), positions=np.zeros(64), temperature=temperature)
    assert (logprobs <= 0).all()
    shifted = logits.astype(np.float64) - logits.max()
    expected = log_softmax(shifted / np.float32(temperature))[tokens]
    np.testing.assert_allclose(logprobs, expected, rtol=2e-6, atol=2e-6)


@hypothesis.given(seed=st.integers(0, 10**6), share=st.floats(0.01, 1.0))
def test_what_has_no_probability_is_never_drawn(seed, share):
    rng = np.random.default_rng(seed)
    logits = np.where(rng.random(700) < share, rng.normal(scale=5, size=700), MASKED_LOGIT).astype(np.float32)
    logits[rng.integers(700)] = 0.0
    tokens, _ = draw_rows(logits, seed=seed, request_ids=np.arange(512), positions=np.zeros(512))
    assert (logits[tokens] > MASKED_LOGIT).all()


def test_greedy_takes_the_likeliest_whatever_the_noise():
    tokens, _ = draw_rows(greedy=True, temperature=5.0)
    assert set(tokens) == {3}


def test_greedy_is_a_choice_of_each_row():
    greedy = np.arange(ROWS) % 2 == 0
    tokens, _ = draw_rows(greedy=greedy, temperature=5.0)
    assert set(tokens[greedy]) == {3}
    assert len(set(tokens[~greedy])) == len(LOGITS)


def test_noise_is_a_function_of_seed_request_and_position_alone():
    order = np.random.default_rng(0).permutation(ROWS)
    request_ids, positions = np.arange(ROWS) // 10, np.arange(ROWS) % 10
    tokens, logprobs = draw_rows(request_ids=request_ids, positions=positions)
    moved_tokens, moved_logprobs = draw_rows(request_ids=request_ids[order], positions=positions[order])
    np.testing.assert_array_equal(moved_tokens, tokens[order])
    np.testing.assert_array_equal(moved_logprobs, logprobs[order])
    few_tokens, _ = draw_rows(request_ids=request_ids[40:47], positions=positions[40:47])
    np.testing.assert_array_equal(few_tokens, tokens[40:47])


@pytest.mark.parametrize("change", [{"seed": 1}, {"request_ids": np.arange(ROWS) + 1}, {"positions": np.full(ROWS, 6)}])
def test_seed_request_and_position_each_change_the_noise(change):
    assert np.mean(draw_rows(**change)[0] != draw_rows()[0]) > 0.3


def test_request_and_position_are_not_interchangeable():
    small, large = np.arange(ROWS), np.arange(ROWS) + ROWS
    tokens, swapped = (draw_rows(request_ids=ids, positions=positions)[0] for ids, positions in ((small, large), (large, small)))
    assert np.mean(tokens != swapped) > 0.3


def test_a_padded_vocabulary_is_never_sampled():
    padded = np.where(np.arange(len(LOGITS)) < 4, LOGITS, MASKED_LOGIT).astype(np.float32)
    tokens, logprobs = draw_rows(padded, temperature=10.0)
    assert set(tokens) == {0, 1, 2, 3}
    np.testing.assert_allclose(logprobs, log_softmax(LOGITS[:4] / 10.0)[tokens], atol=1e-6)


def reference_nucleus(log_probabilities, top_p):
    """The likeliest tokens, one after another, until their mass reaches top_p; then all as likely as the last."""
    kept, mass = [], 0.0
    for token in sorted(range(len(log_probabilities)), key=lambda token: -log_probabilities[token]):
        if mass >= top_p and log_probabilities[token] < log_probabilities[kept[-1]]:
            break
        kept.append(token)
        mass += np.exp(log_probabilities[token])
    result = np.full(len(log_probabilities), -np.inf)
    result[kept] = log_softmax(log_probabilities[kept])
    return result


@hypothesis.given(logits=st.lists(st.integers(-40, 40), min_size=6, max_size=6), top_p=st.floats(0.05, 0.97))
def test_top_p_matches_a_slow_reference(logits, top_p):
    log_probabilities = log_softmax(np.array(logits) / 10)
    masses = np.cumsum(np.sort(np.exp(log_probabilities))[::-1])
    hypothesis.assume(np.abs(masses - top_p).min() > 1e-5)  # rounding decides what is on the edge
    kept = truncate(jnp.asarray(log_probabilities, jnp.float32)[None], top_k=0, top_p=top_p)[0]
    expected = reference_nucleus(log_probabilities.astype(np.float32), top_p)
    np.testing.assert_allclose(jax.nn.log_softmax(kept), expected, atol=1e-5)


@pytest.mark.parametrize(("choice", "kept"), [
    ({"top_p": 0.7}, [3, 0]),  # probabilities in order: token 3 .56, 0 .28, 5 .09, 2 .03 ...
    ({"top_k": 2}, [3, 0]),
    ({"top_k": 3}, [3, 0, 5]),
    ({"top_k": 3, "top_p": 0.5}, [3]),
    ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
    ({"top_p": 1e-6}, [3]),
])  # fmt: skip
def test_a_truncated_distribution_is_drawn_from_renormalised(choice, kept):
    tokens, _ = draw_rows(temperature=0.7, **choice)
    assert set(tokens) == set(kept)
    probabilities = np.exp(log_softmax(LOGITS[kept] / 0.7))
    assert chi_square(np.argmax(tokens[:, None] == kept, axis=1), probabilities) < CHI_SQUARE_5_DEGREES


def test_tokens_as_likely_as_the_last_one_are_kept():
    assert set(draw_rows(np.zeros(4, np.float32), top_k=1)[0]) == {0, 1, 2, 3}
