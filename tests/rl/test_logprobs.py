"""What `score` says of a token: alignment, temperature, entropy, and that it never holds logits for every token at once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from models.config import ModelConfig
from models.transformer import Model
from rl import logprobs
from rl.logprobs import log_softmax_and_entropy, score

CONFIG = ModelConfig(vocab_size=11, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8, max_length=24,
                     tied_embeddings=False)
MODEL = Model(CONFIG)
LENGTHS = np.asarray([24, 9])
TOKENS = np.random.default_rng(0).integers(11, size=(2, 24)).astype(np.int32)
VALID = np.arange(24)[None] < LENGTHS[:, None]


def random_params(model: Model) -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: 0.5 * rng.normal(size=leaf.shape).astype(np.float32), model.shapes)


PARAMS = random_params(MODEL)
jit_score = jax.jit(score, static_argnums=0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def logits():
    return np.asarray(jax.jit(lambda params: MODEL.logits(params, MODEL.hidden(params, TOKENS)))(PARAMS))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.5])
def test_the_state_before_a_token_predicts_it_at_the_temperature(logits, temperature):
    """Nothing is shifted outside: index t speaks of token t, whose distribution the state at t - 1 makes."""
    scored = jit_score(MODEL, PARAMS, TOKENS, VALID, temperature=temperature)
    expected = log_softmax(logits / temperature)
    for row, position in np.ndindex(TOKENS.shape):
        if position and VALID[row, position]:
            distribution = expected[row, position - 1]
            assert scored.logprobs[row, position] == pytest.approx(distribution[TOKENS[row, position]], abs=1e-5)
            assert scored.entropy[row, position] == pytest.approx(-np.sum(np.exp(distribution) * distribution), abs=1e-5)
        else:
            assert scored.logprobs[row, position] == scored.entropy[row, position] == 0


def test_another_temperature_is_seen():
    """Scoring at 1 what was sampled at 0.7 puts the temperature into every ratio."""
    by_temperature = [np.asarray(jit_score(MODEL, PARAMS, TOKENS, VALID, temperature=t).logprobs) for t in (0.7, 1.0)]
    assert np.abs(by_temperature[0] - by_temperature[1])[VALID].mean() > 0.1


def test_half_the_temperature_is_twice_the_logits():
    doubled = {**PARAMS, "head": {"kernel": 2 * PARAMS["head"]["kernel"]}}
    np.testing.assert_allclose(jit_score(MODEL, PARAMS, TOKENS, VALID, temperature=0.5).logprobs,
                               jit_score(MODEL, doubled, TOKENS, VALID, temperature=1.0).logprobs, rtol=0, atol=1e-5)


def test_scores_of_three_logits_by_hand():
    """exp(0), exp(ln 2), exp(ln 5) make 1/8, 2/8, 5/8; at temperature 1/2 their squares make 1/30, 4/30, 25/30."""
    hand = jnp.log(jnp.asarray([1.0, 2.0, 5.0]))
    for temperature, expected in ((1.0, np.asarray([1, 2, 5]) / 8), (0.5, np.asarray([1, 4, 25]) / 30)):
        log_probabilities, entropy = log_softmax_and_entropy(hand, temperature=temperature)
        np.testing.assert_allclose(np.exp(log_probabilities), expected, rtol=1e-6)
        assert entropy == pytest.approx(-np.sum(expected * np.log(expected)), rel=1e-6)


def test_uniform_over_eight_tokens_has_entropy_ln_8():
    """A second softmax over logprobs, or ids that pad the vocabulary to sixteen, would make it another number."""
    assert log_softmax_and_entropy(jnp.full(8, 3.0), temperature=0.7)[1] == pytest.approx(math.log(8), rel=1e-6)
    model = Model(ModelConfig(**{**CONFIG.__dict__, "vocab_size": 8, "vocab_multiple": 16}))
    params = random_params(model)
    params["head"] = {"kernel": np.zeros_like(params["head"]["kernel"])}
    scored = jit_score(model, params, TOKENS % 8, VALID, temperature=0.7)
    np.testing.assert_allclose(np.asarray(scored.entropy)[:, 1:][VALID[:, 1:]], math.log(8), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(scored.logprobs)[:, 1:][VALID[:, 1:]], -math.log(8), rtol=1e-6)


def test_a_padded_vocabulary_gives_the_same_scores_and_takes_no_gradient():
    padded = Model(ModelConfig(**{**CONFIG.__dict__, "vocab_multiple": 8}))
    columns = np.random.default_rng(1).normal(size=(16, 5)).astype(np.float32)
    rows = np.random.default_rng(2).normal(size=(5, 16)).astype(np.float32)
    wide = {**PARAMS, "embedding": np.concatenate([PARAMS["embedding"], rows]),
            "head": {"kernel": np.concatenate([PARAMS["head"]["kernel"], columns], axis=1)}}

    def both(kernel):
        return score(padded, {**wide, "head": {"kernel": kernel}}, TOKENS, VALID, temperature=0.7)

    scored, pullback = jax.jit(lambda kernel: jax.vjp(both, kernel))(wide["head"]["kernel"])
    expected = jit_score(MODEL, PARAMS, TOKENS, VALID, temperature=0.7)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6), scored, expected)
    gradient, = pullback(jax.tree.map(jnp.ones_like, scored))
    assert np.any(np.asarray(gradient)[:, :11]) and not np.any(np.asarray(gradient)[:, 11:])


# --- chunks ---


@pytest.mark.parametrize("chunk", [23, 5])
def test_chunks_change_nothing(monkeypatch, chunk):
    expected = jit_score(MODEL, PARAMS, TOKENS, VALID, temperature=0.7)
    monkeypatch.setattr(logprobs, "VOCABULARY_CHUNK", chunk)
    chunked = jax.jit(lambda params: score(MODEL, params, TOKENS, VALID, temperature=0.7))(PARAMS)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=2e-6), chunked, expected)


def array_shapes(jaxpr):
    """The shapes of all intermediate arrays, those inside loops and remembered for the backward pass included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda leaf: isinstance(leaf, (ClosedJaxpr, Jaxpr))):
            if isinstance(parameter, ClosedJaxpr):
                yield from array_shapes(parameter.jaxpr)
            elif isinstance(parameter, Jaxpr):
                yield from array_shapes(parameter)


def test_no_array_holds_logits_for_every_token(monkeypatch):
    """In the forward and the backward pass; 13 is nobody's size but the vocabulary's."""
    monkeypatch.setattr(logprobs, "VOCABULARY_CHUNK", 6)
    model = Model(ModelConfig(**{**CONFIG.__dict__, "vocab_size": 13}))

    def total(params):
        scored = score(model, params, TOKENS, VALID, temperature=1.0)
        return jnp.sum(scored.logprobs) + jnp.sum(scored.entropy)

    shapes = set(array_shapes(jax.make_jaxpr(jax.value_and_grad(total))(model.shapes).jaxpr))
    largest = max(math.prod(shape) for shape in shapes if 13 in shape and len(shape) > 2)  # of two axes are only the tables
    assert largest == 2 * 6 * 13
