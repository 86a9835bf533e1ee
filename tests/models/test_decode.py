"""Decoding with a cache is the full forward, taken in pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import decode
from models.config import ModelConfig, Precision
from models.transformer import Model

CONFIG = ModelConfig(vocab_size=11, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=4, max_length=12,
                     vocab_multiple=4, qk_norm=True, qkv_bias=True, tied_embeddings=False)
MODEL = Model(CONFIG)
ROOM = 12
LENGTHS = np.asarray([12, 7, 4], np.int32)
TOKENS = np.random.default_rng(0).integers(11, size=(3, ROOM)).astype(np.int32)


def random_like(tree, seed: int, scale: float):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: scale * rng.normal(size=leaf.shape).astype(np.float32), tree)


PARAMS = random_like(MODEL.shapes, 0, 0.3)
NOTHING = np.zeros(3, np.int32)
extend = jax.jit(decode.extend, static_argnums=0)
decode_step = jax.jit(decode.decode_step, static_argnums=0)


@functools.cache
def prepared():
    return jax.jit(functools.partial(decode.prepare, MODEL))(PARAMS)


@functools.cache
def full_logits() -> np.ndarray:
    return np.asarray(jax.jit(lambda params: MODEL.logits(params, MODEL.hidden(params, TOKENS)))(PARAMS))


@jax.jit
def logits_of(hidden):
    return MODEL.logits(PARAMS, hidden)


def pieces_of(starts, counts, width) -> np.ndarray:
    """The next `counts` tokens of each row, then padding."""
    pieces = np.full((len(starts), width), 9, np.int32)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        pieces[row, :count] = TOKENS[row, start:start + count]
    return pieces


def test_ragged_extensions_and_decode_steps_equal_the_full_forward():
    """Prefill unequal contexts, extend them by unequal turns (by none in a row), then decode token by token to the end."""
    contexts, turns = np.asarray([5, 3, 2], np.int32), np.asarray([3, 0, 1], np.int32)
    cache = decode.init_cache(CONFIG, 3, ROOM)
    hidden, cache = extend(MODEL, prepared(), cache, pieces_of(NOTHING, contexts, 5), starts=NOTHING, counts=contexts)
    found = np.full((3, ROOM, CONFIG.padded_vocab_size), np.nan, np.float32)
    for row, count in enumerate(contexts):
        found[row, :count] = logits_of(hidden)[row, :count]
    hidden, cache = extend(MODEL, prepared(), cache, pieces_of(contexts, turns, 5), starts=contexts, counts=turns)
    for row, (start, count) in enumerate(zip(contexts, turns, strict=True)):
        found[row, start:start + count] = logits_of(hidden)[row, :count]
    positions = contexts + turns
    while np.any(positions < LENGTHS):
        running = positions < LENGTHS
        fed = np.where(running, TOKENS[np.arange(3), np.minimum(positions, ROOM - 1)], 0)
        logits, cache = decode_step(MODEL, prepared(), cache, fed, positions=np.where(running, positions, ROOM))
        found[np.flatnonzero(running), positions[running]] = np.asarray(logits)[running]
        positions = positions + running
    exists = np.arange(ROOM)[None] < LENGTHS[:, None]
    assert np.array_equal(np.isfinite(found).all(axis=-1), exists)
    np.testing.assert_allclose(found[exists], full_logits()[exists], rtol=1e-5, atol=1e-5)


def test_a_prefill_is_an_extension_of_nothing():
    counts, cache = np.asarray([5, 3, 0], np.int32), decode.init_cache(CONFIG, 3, ROOM)
    filled = jax.jit(functools.partial(decode.prefill, MODEL))(prepared(), pieces_of(NOTHING, counts, ROOM), counts=counts)
    _, extended = extend(MODEL, prepared(), cache, pieces_of(NOTHING, counts, 5), starts=NOTHING, counts=counts)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6), filled, extended)


def test_padding_writes_nothing():
    """All that lies outside [start, start + count) keeps its bits: what was there before, and rows without new tokens."""
    before = random_like(decode.init_cache(CONFIG, 3, ROOM), 1, 1.0)
    starts, counts = np.asarray([4, 2, 10], np.int32), np.asarray([3, 0, 2], np.int32)
    _, after = extend(MODEL, prepared(), before, pieces_of(starts, counts, 5), starts=starts, counts=counts)
    offsets = np.arange(ROOM)[None]
    written = (offsets >= starts[:, None]) & (offsets < (starts + counts)[:, None])
    for name, others in (("keys", (1, 2)), ("values", (1, 3))):
        for old, new in zip(before[name], after[name], strict=True):
            np.testing.assert_array_equal(np.any(np.asarray(new) != old, axis=others), written)


def test_a_decode_step_outside_the_cache_leaves_the_row():
    before = random_like(decode.init_cache(CONFIG, 3, ROOM), 2, 1.0)
    tokens, positions = np.asarray([1, 2, 3], np.int32), np.asarray([0, ROOM, 5], np.int32)
    _, after = decode_step(MODEL, prepared(), before, tokens, positions=positions)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = np.any(np.asarray(new) != old, axis=(1, 2, 3))
        np.testing.assert_array_equal(changed, [True, False, True])


def test_stale_entries_above_a_row_are_never_seen():
    counts = np.asarray([5, 3, 1], np.int32)
    empty = decode.init_cache(CONFIG, 3, ROOM)
    hidden = [extend(MODEL, prepared(), cache, pieces_of(NOTHING, counts, 5), starts=NOTHING, counts=counts)[0]
              for cache in (empty, random_like(empty, 3, 50.0))]
    valid = np.arange(5)[None] < counts[:, None]
    np.testing.assert_array_equal(np.asarray(hidden[0])[valid], np.asarray(hidden[1])[valid])


@pytest.mark.parametrize("published", [Precision.FLOAT32, Precision.BFLOAT16])
def test_preparing_unstacks_layers_puts_outputs_first_and_keeps_every_bit(published):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, published.dtype), PARAMS)
    laid_out = decode.prepare(MODEL, params)
    assert len(laid_out["blocks"]) == CONFIG.num_layers
    stacked = jax.tree.map(lambda *layers: np.stack(layers), *laid_out["blocks"])

    def compare(path, mine, whole):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        whole = np.asarray(whole, np.float32)
        if name == "blocks/output/kernel":  # [L, N, H, D]
            whole = whole.transpose(0, 3, 1, 2)
        elif name.endswith("kernel"):  # [L, D, ...], and the head's [D, V]
            whole = np.moveaxis(whole, 0 if name == "head/kernel" else 1, -1)
        np.testing.assert_array_equal(mine, whole)

    jax.tree.map_with_path(compare, {**laid_out, "blocks": stacked}, params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(laid_out))


def test_a_bfloat16_model_decodes_in_bfloat16():
    model = Model(ModelConfig(**{**CONFIG.__dict__, "compute_dtype": Precision.BFLOAT16}))
    shapes = jax.eval_shape(functools.partial(decode.prepare, model), model.shapes)
    cache = jax.eval_shape(functools.partial(decode.init_cache, model.config, 3, ROOM))
    assert {leaf.dtype for leaf in jax.tree.leaves((shapes, cache))} == {jnp.dtype(jnp.bfloat16)}
    vector = jax.ShapeDtypeStruct((3,), jnp.int32)
    logits, after = jax.eval_shape(functools.partial(decode.decode_step, model), shapes, cache, vector, positions=vector)
    assert logits.dtype == jnp.float32 and logits.shape == (3, 12)
    assert after == cache
