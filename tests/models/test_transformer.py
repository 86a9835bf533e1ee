"""The decoder against Hugging Face's numbers, and what must hold of any causal decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models import decode, sharding
from models.attention import attention
from models.config import ModelConfig, Precision, RopeScaling
from models.parameters import Declaration, draw
from models.transformer import MASKED_LOGIT, Model, rotate
from rl.logprobs import score
from tests.golden_models import FOLDERS, assert_equal_but_for_rounding, double_model, float64_for_float32, golden_model

TINY = ModelConfig(vocab_size=11, num_layers=1, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=4, max_length=8,
                   tied_embeddings=False)


def config(**changes) -> ModelConfig:
    return ModelConfig(**{**TINY.__dict__, **changes})


def random_params(model: Model, seed: int = 0) -> dict:
    """Numbers everywhere, also where `init` puts zeros and ones; and nothing to compile."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(np.float32), model.shapes)


def forward(model, params, tokens):
    return model.logits(params, model.hidden(params, tokens))


jit_forward = jax.jit(forward, static_argnums=0)
jit_init = jax.jit(Model.init, static_argnums=0)

PARAMS = random_params(Model(TINY))
TOKENS = np.asarray([[1, 2, 3, 4, 5, 6, 7, 8], [8, 3, 3, 0, 1, 0, 0, 0]], np.int32)


# --- Hugging Face ---


@functools.cache
def scored(name: str):
    """Of a golden model: logits, and logprobs at two temperatures."""
    sizes, params, golden = golden_model(name)
    tokens, valid = golden["input_ids"], golden["attention_mask"].astype(bool)
    model = Model(sizes)

    @jax.jit
    def compute(params):
        logprobs = {at: score(model, params, tokens, valid, temperature=at).logprobs for at in (1.0, 0.7)}
        return forward(model, params, tokens), logprobs

    return jax.tree.map(np.asarray, compute(params))


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_and_logprobs_agree_with_hugging_face(name):
    golden = golden_model(name)[2]
    logits, logprobs = scored(name)
    np.testing.assert_allclose(np.where(golden["attention_mask"][..., None], logits, 0), golden["logits"], rtol=0, atol=2e-5)
    for temperature, found in logprobs.items():
        np.testing.assert_allclose(found[:, 1:], golden[f"logprob_T{temperature}"], rtol=0, atol=2e-5)
        assert not np.any(found[:, 0])


def decoded_greedily(sizes, params, golden):
    """Token by token from nothing, so that each window slides over the cache: the given tokens, then the likeliest ones.

    The logits of all steps [R, S, V] and the likeliest tokens [R, S].
    """
    model, counts = Model(sizes), golden["attention_mask"].sum(axis=1, dtype=np.int32)
    given = np.pad(golden["input_ids"], ((0, 0), (0, golden["greedy_ids"].shape[1])))

    @jax.jit
    def continue_greedily(params):
        prepared = decode.prepare(model, params)

        def step(carry, column):
            cache, chosen = carry
            position, given_tokens = column
            fed = jnp.where(position < counts, given_tokens, chosen)
            logits, cache = decode.decode_step(model, prepared, cache, fed, positions=jnp.full_like(fed, position))
            chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            return (cache, chosen), (logits, chosen)

        first = decode.init_cache(sizes, *given.shape), jnp.zeros_like(counts)
        positions = jnp.arange(given.shape[1], dtype=jnp.int32)
        logits, chosen = jax.lax.scan(step, first, (positions, jnp.asarray(given.T)))[1]
        return jnp.moveaxis(logits, 0, 1), chosen.T

    return jax.tree.map(np.asarray, continue_greedily(params))


@pytest.mark.parametrize("name", FOLDERS)
def test_decoding_agrees_with_hugging_face_and_with_the_full_forward(name):
    golden = golden_model(name)[2]
    valid, num_new = golden["attention_mask"].astype(bool), golden["greedy_ids"].shape[1]
    logits, chosen = decoded_greedily(*golden_model(name))
    assert_equal_but_for_rounding(logits[:, :valid.shape[1]][valid], scored(name)[0][valid])
    assert golden["greedy_margin"].min() > 1e-3  # so that rounding decides nowhere
    for row, count in enumerate(valid.sum(axis=1)):
        np.testing.assert_array_equal(chosen[row, count - 1:count - 1 + num_new], golden["greedy_ids"][row])


def on_eight_devices(sizes, params, golden) -> np.ndarray:
    """The logits of a sharded model."""
    model, mesh = Model(sizes), Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), sharding.MESH_AXES)
    sharded = jax.device_put(params, sharding.parameter_shardings(model.axes, model.shapes, mesh))
    return np.asarray(jit_forward(model, sharded, jax.device_put(golden["input_ids"], sharding.batch_sharding(mesh))))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_sharded_model_computes_what_an_unsharded_one_does(name):
    assert_equal_but_for_rounding(on_eight_devices(*golden_model(name)), scored(name)[0])


@pytest.mark.parametrize("name", FOLDERS)
def test_decoded_or_sharded_a_model_is_the_same_function(name):
    """In float64, where a difference of 1e-11 is no order of summation; float32 leaves room for a small mistake."""
    sizes, params, golden = double_model(name)
    valid = golden["attention_mask"].astype(bool)
    with float64_for_float32():
        full = np.asarray(jit_forward(Model(sizes), params, golden["input_ids"]))
        decoded, sharded = decoded_greedily(sizes, params, golden)[0], on_eight_devices(sizes, params, golden)
    np.testing.assert_allclose(full[valid], golden["logits"][valid], rtol=0, atol=3e-5)  # theirs are of float32: up to 2.05e-5
    assert_equal_but_for_rounding(decoded[:, :valid.shape[1]][valid], full[valid])
    assert_equal_but_for_rounding(sharded, full)


# --- attention ---


def reference_attention(queries, keys, values, query_positions, window=None):
    """One query, one head at a time, in float64."""
    queries, keys, values = (np.asarray(array, np.float64) for array in (queries, keys, values))
    attended = np.zeros(queries.shape)
    group = queries.shape[2] // keys.shape[2]
    for row, position, head in np.ndindex(queries.shape[:3]):
        stop = query_positions[row, position] + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        logits = keys[row, seen, head // group] @ queries[row, position, head] / np.sqrt(queries.shape[-1])
        weights = np.exp(logits - logits.max())
        attended[row, position, head] = weights @ values[row, seen, head // group] / weights.sum()
    return attended


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_sees_keys_up_to_its_position(num_kv_heads):
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(2, 3, 4, 6)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 5, num_kv_heads, 6)).astype(np.float32)
    positions = np.asarray([[0, 1, 2], [2, 3, 4]], np.int32)
    attended = jax.jit(attention)(queries, keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2), query_positions=positions)
    np.testing.assert_allclose(attended, reference_attention(queries, keys, values, positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_a_window_hides_all_but_the_last_keys(window):
    queries, keys, values = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 6)).astype(np.float32)
    positions = np.broadcast_to(np.arange(5, dtype=np.int32), (2, 5))
    attended = jax.jit(attention)(queries, keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2), query_positions=positions,
                                  window=window)
    np.testing.assert_allclose(attended, reference_attention(queries, keys, values, positions, window), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 6])
def test_keys_from_the_span_on_are_not_looked_at(length):
    """Few queries and many, which are multiplied in different ways; NaN there would show."""
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(2, length, 4, 8)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 20, 2, 8)).astype(np.float32)
    keys[:, 8:], values[:, 8:] = np.nan, np.nan
    positions = np.stack([np.arange(length), 7 - np.arange(length)]).astype(np.int32)
    attended = jax.jit(attention, static_argnames="span")(queries, keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2),
                                                          query_positions=positions, span=8)
    np.testing.assert_allclose(attended, reference_attention(queries, keys, values, positions), rtol=0, atol=1e-6)


def test_a_layers_window_bounds_how_far_back_its_output_reads():
    """Through two layers of window 3 a token reaches 4 positions ahead; a full layer among them has no such bound."""
    embedding = np.random.default_rng(1).normal(size=PARAMS["embedding"].shape).astype(np.float32)
    for sliding_layers, reach in (((0, 1), 4), ((1,), 7)):
        model = Model(config(num_layers=2, sliding_window=3, sliding_layers=sliding_layers))
        params = {**random_params(model), "embedding": embedding}
        tokens = np.arange(8, dtype=np.int32)[None]
        changed = jit_forward(model, params, tokens.copy()) != jit_forward(model, params, np.where(tokens == 0, 9, tokens))
        np.testing.assert_array_equal(np.any(np.asarray(changed)[0], axis=-1), np.arange(8) <= reach)


def test_scaled_frequencies_are_kept_mixed_or_divided():
    """Angles at position 1 by hand: many turns within the original length stay, few are divided, between lies a mix."""
    theta, half, length = 100.0, 4, 256
    frequencies = theta ** (-np.arange(half) / half)
    turns = frequencies * length / (2 * np.pi)
    low, high = turns[2] - 1, turns[1] - 1
    mixed = (turns[2] - low) / (high - low)
    expected = frequencies * [1, 1, mixed + (1 - mixed) / 8, 1 / 8]
    scaling = RopeScaling(8.0, low, high, length)
    x = np.concatenate([np.ones(half), np.zeros(half)]).astype(np.float32)[None, None, None]
    turned = np.asarray(rotate(x, np.ones((1, 1), np.int32), theta, scaling))[0, 0, 0]
    np.testing.assert_allclose(np.arctan2(turned[half:], turned[:half]), expected, rtol=1e-5)


def test_rotated_products_depend_on_distance_alone():
    queries, keys = np.random.default_rng(0).normal(size=(2, 1, 6, 1, 8)).astype(np.float32)
    queries, keys = queries[:, :1].repeat(6, axis=1), keys[:, :1].repeat(6, axis=1)
    turn = jax.jit(lambda x: rotate(x, jnp.arange(6)[None], 100.0))
    products = np.einsum("bthd,bshd->ts", turn(queries), turn(keys))
    for distance in range(-5, 6):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-5)
    assert np.ptp(products) > 0.1


# --- causality and padding ---


def test_no_gradient_from_a_later_token():
    """Of logprob t by the embedding of token s: exactly 0 unless s < t. The head is its own, so token t itself has none."""
    model = Model(TINY)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]

    @jax.jit
    @jax.jacrev
    def jacobian(embedding):
        return score(model, {**PARAMS, "embedding": embedding}, tokens, tokens >= 0, temperature=1.0).logprobs[0]

    sizes = np.abs(jacobian(PARAMS["embedding"])[:, :8]).max(axis=-1)
    np.testing.assert_array_equal(sizes > 0, np.tril(np.ones((8, 8), bool), -1))


def test_padding_and_other_rows_do_not_matter_at_all():
    rng = np.random.default_rng(0)
    valid = np.arange(8)[None] < np.asarray([8, 5])[:, None]
    logits = np.asarray(jit_forward(Model(TINY), PARAMS, TOKENS))
    for _ in range(3):
        padded = np.where(valid, TOKENS, rng.integers(11, size=TOKENS.shape)).astype(np.int32)
        np.testing.assert_array_equal(np.asarray(jit_forward(Model(TINY), PARAMS, padded))[valid], logits[valid])
        other = np.stack([rng.integers(11, size=8), TOKENS[0]]).astype(np.int32)
        np.testing.assert_array_equal(jit_forward(Model(TINY), PARAMS, other)[1], logits[0])


# --- variants ---


def test_a_padded_vocabulary_has_no_mass_and_changes_nothing():
    padded = Model(config(vocab_multiple=8))
    assert padded.config.padded_vocab_size == 16
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(5, 16)).astype(np.float32), 9 * rng.normal(size=(16, 5)).astype(np.float32)
    wide = {**PARAMS, "embedding": np.concatenate([PARAMS["embedding"], rows]),
            "head": {"kernel": np.concatenate([PARAMS["head"]["kernel"], columns], axis=1)}}
    logits = np.asarray(jit_forward(padded, wide, TOKENS))
    np.testing.assert_allclose(logits[..., :11], jit_forward(Model(TINY), PARAMS, TOKENS), rtol=0, atol=1e-6)
    assert np.all(logits[..., 11:] == np.float32(MASKED_LOGIT))
    assert not np.any(np.asarray(jax.nn.softmax(logits))[..., 11:])


def test_a_tied_embedding_is_the_transposed_head():
    tied = {name: leaf for name, leaf in PARAMS.items() if name != "head"}
    untied = {**PARAMS, "head": {"kernel": PARAMS["embedding"].T}}
    np.testing.assert_allclose(jit_forward(Model(config(tied_embeddings=True)), tied, TOKENS),
                               jit_forward(Model(TINY), untied, TOKENS), rtol=0, atol=1e-6)


def test_bfloat16_computes_in_bfloat16_and_speaks_float32():
    model = Model(config(compute_dtype=Precision.BFLOAT16))
    assert jax.eval_shape(model.hidden, PARAMS, TOKENS).dtype == jnp.bfloat16
    logits = jit_forward(model, PARAMS, TOKENS)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - jit_forward(Model(TINY), PARAMS, TOKENS)).max() < 0.1


@pytest.mark.parametrize("num_layers", [2, 4])
def test_rematerialisation_keeps_only_what_enters_each_layer(num_layers):
    """That gradients stay what they are is seen in the learner's tests."""
    sizes = {}
    for remat in (False, True):
        model = Model(config(num_layers=num_layers), remat=remat)
        _, pullback = jax.eval_shape(lambda params, model=model: jax.vjp(lambda p: model.hidden(p, TOKENS), params), model.shapes)
        sizes[remat] = sum(leaf.size for leaf in jax.tree.leaves(pullback) if TOKENS.shape[1] in leaf.shape)
    residuals = TOKENS.size * model.config.d_model
    assert sizes[True] <= (num_layers + 1) * residuals + 2 * TOKENS.size < sizes[False]


# --- initial parameters ---


WIDE = Model(config(num_layers=3, d_model=64, d_ff=96, qk_norm=True, qkv_bias=True, vocab_size=50))


def test_initial_parameters_have_their_scales():
    params = jit_init(WIDE, jax.random.key(0))
    fan_ins = {"query": 64, "key": 64, "value": 64, "gate": 64, "up": 64, "output": 16 * 6, "down": 96 * 6}  # 6 residual branches
    for name, fan_in in fan_ins.items():
        kernel = np.asarray(params["blocks"][name]["kernel"]).reshape(3, -1)
        np.testing.assert_allclose(kernel.std(axis=1), fan_in**-0.5, rtol=0.1, err_msg=name)
        assert np.abs(kernel.mean()) < 0.1 * fan_in**-0.5
    np.testing.assert_allclose(np.std(params["embedding"]), 64**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(params["head"]["kernel"]), 64**-0.5, rtol=0.1)
    for name in ("query", "key", "value"):
        assert not np.any(params["blocks"][name]["bias"])
    for norm in (*(params["blocks"][f"{name}_norm"] for name in ("attention", "mlp", "query", "key")), params["final_norm"]):
        assert np.all(np.asarray(norm["scale"]) == 1)


def test_no_drawn_number_serves_two_places():
    def declared(shape, *axes):
        return Declaration(shape, axes, mean=0.0, deviation=1.0)

    constant = Declaration((4,), ("embed",), mean=3.0, deviation=0.0)
    block = {"a": declared((4, 6), "embed", "mlp"), "b": constant, "c": declared((2, 3, 4), "heads", "head", "embed")}
    others = {"d": declared((5, 4), "vocab", "embed"), "e": constant, "f": declared((4, 5), "embed", "vocab")}
    params = jax.jit(lambda key: draw(key, block, others, d_model=4, num_layers=3))(jax.random.key(0))
    assert np.all(np.asarray(params["blocks"].pop("b")) == 3) and np.all(np.asarray(params.pop("e")) == 3)
    assert len(np.unique(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)]))) == 3 * (24 + 24) + 20 + 20


def test_initial_parameters_are_a_function_of_the_key():
    first, again, other = (jit_init(WIDE, jax.random.key(seed)) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.any(np.asarray(first["head"]["kernel"]) == np.asarray(other["head"]["kernel"]))


def test_one_generator_draws_all_parameters():
    """Each one would take about half a second to compile."""
    assert str(jax.make_jaxpr(WIDE.init)(jax.random.key(0))).count("random_bits[") == 1


def test_shapes_and_axes_describe_the_parameters():
    model = Model(config(num_layers=2, qk_norm=True, qkv_bias=True, vocab_multiple=4))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert model.shapes == shapes
    is_axes = lambda tree: isinstance(tree, tuple)  # noqa: E731
    ranks = jax.tree.map(len, model.axes, is_leaf=is_axes)
    assert ranks == jax.tree.map(lambda leaf: len(leaf.shape), shapes)
    assert model.axes["blocks"]["output"]["kernel"] == ("layers", "heads", "head", "embed")
    assert model.axes["head"]["kernel"] == ("embed", "vocab")


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_kv_heads": 3}, "4 query heads do not divide over 3 kv heads"),
    ({"head_dim": 5}, "head_dim is 5, wanted an even number"),
    ({"num_layers": 0}, "num_layers is 0, wanted at least 1"),
    ({"sliding_window": 4}, "sliding_window is 4 and sliding_layers are \\(\\); wanted both or neither"),
    ({"sliding_layers": (0,)}, "sliding_window is None and sliding_layers are \\(0,\\); wanted both or neither"),
    ({"sliding_layers": (0,), "sliding_window": 0}, "sliding_window is 0, wanted at least 1"),
    ({"sliding_layers": (1,), "sliding_window": 4}, "sliding_layers are \\(1,\\), wanted layers from 0 to 0"),
])
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize("numbers", [(0.0, 1.0, 4.0, 32), (8.0, 4.0, 4.0, 32), (8.0, 0.0, 4.0, 32), (8.0, 1.0, 4.0, 0)])
def test_a_scaling_without_meaning_is_refused(numbers):
    with pytest.raises(ValueError, match="has no meaning, wanted positive numbers"):
        RopeScaling(*numbers)
