"""One draw: the right distribution, the right logprob, and noise that depends on nothing it should not."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.transformer import MASKED_LOGIT
from rl import sampling

LOGITS = np.array([1.5, -0.5, 0.0, 2.0, -3.0, 0.7], np.float32)
ROWS = 20_000
CHI_SQUARE_5_DEGREES = 25.7  # exceeded once in 10,000


@functools.partial(jax.jit, static_argnames="top_p")  # few programs: each takes seconds to compile
def draw(logits, key, request_ids, positions, greedy, temperature, top_p):
    return sampling.sample(logits, key, request_ids=request_ids, positions=positions, greedy=greedy, temperature=temperature,
                           top_p=top_p)


nucleus = jax.jit(sampling.nucleus)


def draw_rows(logits=LOGITS, *, seed=0, request_ids=None, positions=None, greedy=False, temperature=0.7, top_p=1.0):
    """Tokens and logprobs of many rows of one distribution, in numpy."""
    request_ids = np.arange(ROWS) if request_ids is None else request_ids
    positions = np.full(ROWS, 5) if positions is None else positions
    tokens, logprobs = draw(np.broadcast_to(logits, (len(request_ids), len(logits))), jax.random.key(seed),
                            jnp.asarray(request_ids, jnp.int32), jnp.asarray(positions, jnp.int32),
                            np.broadcast_to(greedy, len(request_ids)), jnp.float32(temperature), top_p)
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
@pytest.mark.parametrize("greedy", [False, True])
def test_logprobs_are_those_of_the_distribution_sampled_from(temperature, greedy):
    tokens, logprobs = draw_rows(temperature=temperature, greedy=greedy)
    np.testing.assert_allclose(logprobs, log_softmax(LOGITS / temperature)[tokens], atol=1e-6)


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
def test_nucleus_matches_a_slow_reference(logits, top_p):
    log_probabilities = log_softmax(np.array(logits) / 10)
    masses = np.cumsum(np.sort(np.exp(log_probabilities))[::-1])
    hypothesis.assume(np.abs(masses - top_p).min() > 1e-5)  # rounding decides what is on the edge
    actual = nucleus(jnp.asarray(log_probabilities, jnp.float32)[None], jnp.float32(top_p))[0]
    np.testing.assert_allclose(actual, reference_nucleus(log_probabilities.astype(np.float32), top_p), atol=1e-5)


def test_top_p_samples_the_nucleus_with_renormalised_logprobs():
    # Probabilities in order: token 3 .52, 0 .25, 5 .08, 2 .03 ...: a mass of .7 takes tokens 3 and 0.
    tokens, logprobs = draw_rows(top_p=0.7, temperature=0.7)
    expected = log_softmax(LOGITS[[3, 0]] / 0.7)
    assert set(tokens) == {3, 0}
    np.testing.assert_allclose(logprobs, np.where(tokens == 3, expected[0], expected[1]), atol=1e-6)
    assert chi_square((tokens == 0).astype(int), np.exp(expected)) < 15.1  # 1 degree, once in 10,000


def test_top_p_keeps_at_least_the_likeliest():
    log_probabilities = jnp.asarray(log_softmax(LOGITS), jnp.float32)[None]
    expected = np.where(np.arange(len(LOGITS)) == 3, 0, -np.inf)
    np.testing.assert_array_equal(nucleus(log_probabilities, jnp.float32(1e-6))[0], expected)
