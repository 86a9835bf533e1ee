"""The scorer gives the same tokens the same bits, whatever surrounds them. As a script, this file scores in another process."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig, Precision
from models.sharding import MESH_AXES, parameter_shardings
from models.transformer import Model
from rl.logprobs import score
from rl.scorer import Bucket, Scorer

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = Model(ModelConfig(vocab_size=16, num_layers=1, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=4,
                          max_length=16))
LENGTHS = (8, 16)
RNG = np.random.default_rng(0)
PARAMS = jax.tree.map(lambda leaf: 0.5 * RNG.normal(size=leaf.shape).astype(np.float32), MODEL.shapes)
ROWS = [RNG.integers(16, size=size).astype(np.int32) for size in (3, 7, 16, 8, 1, 12, 9, 5)]
LONG_ROWS = [row for row in ROWS if len(row) > 8]  # those of one bucket, where a second type is to be compiled


jit_score = jax.jit(score, static_argnums=0)


def make_scorer(mesh_shape: tuple[int, int, int], rows_per_device: int, lengths: tuple[int, ...] = LENGTHS) -> Scorer:
    devices = np.asarray(jax.devices()[:np.prod(mesh_shape)]).reshape(mesh_shape)
    return Scorer(MODEL, Mesh(devices, MESH_AXES), rows_per_device=rows_per_device, lengths=lengths, temperature=0.7)


shared_scorer = functools.cache(make_scorer)  # what it compiled is shared, too


def publish(precision: Precision) -> dict:
    return jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, precision.dtype)), PARAMS)


def bits(scores) -> list[bytes]:
    return [row.logprobs.tobytes() for row in scores]


@pytest.fixture(scope="module", params=[(1, 1, 1), (2, 2, 2)], ids=["1 device", "8 devices"])
def scorer(request):
    return shared_scorer(request.param, 2 if request.param == (1, 1, 1) else 1)


def test_the_program_known_beforehand_is_the_one_that_runs(scorer, monkeypatch):
    params = scorer.place(publish(Precision.FLOAT32))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    expected, run, programs = scorer.lower(shapes, 16).as_text(), scorer._score, []
    monkeypatch.setattr(scorer, "_score", lambda *args: (programs.append(run.lower(*args).as_text()), run(*args))[1])
    scorer.score(params, LONG_ROWS)
    assert set(programs) == {expected}


def test_rows_of_any_length_come_back_in_order_with_their_bucket(scorer):
    params = publish(Precision.FLOAT32)
    scores = scorer.score(params, ROWS)
    padded = np.stack([np.pad(row, (0, 16 - len(row))) for row in ROWS])
    valid = np.arange(16)[None] < np.asarray([len(row) for row in ROWS])[:, None]
    expected = np.asarray(jit_score(MODEL, params, padded, valid, temperature=0.7).logprobs)
    for index, (row, scored) in enumerate(zip(ROWS, scores, strict=True)):
        assert scored.logprobs.shape == row.shape and scored.logprobs.dtype == np.float32
        np.testing.assert_allclose(scored.logprobs, expected[index, :len(row)], rtol=0, atol=1e-5)
        assert scored.bucket == Bucket(scorer.rows, 8 if len(row) <= 8 else 16)


@pytest.mark.parametrize(("precision", "rows"), [(Precision.FLOAT32, ROWS), (Precision.BFLOAT16, LONG_ROWS)])
def test_neighbours_order_and_padding_do_not_move_a_bit(scorer, precision, rows):
    params, rng = publish(precision), np.random.default_rng(1)
    alone = [scorer.score(params, [row])[0].logprobs for row in rows]
    for _ in range(4):
        chosen = rng.permutation(len(rows))[:rng.integers(2, len(rows) + 1)]
        for index, scored in zip(chosen, scorer.score(params, [rows[index] for index in chosen]), strict=True):
            np.testing.assert_array_equal(scored.logprobs, alone[index])
    placed = scorer.place(params)
    for length in sorted({scored.bucket.length for scored in scorer.score(params, rows)}):
        fitting = [row for row in rows if len(row) <= length][:scorer.rows]
        fills = [np.asarray(scorer._dispatch(scorer._score, placed, fitting, length, fill=fill)) for fill in (0, 15)]
        np.testing.assert_array_equal(*fills)


def test_a_bucket_is_compiled_once_wherever_parameters_lie(scorer):
    """A ring may hand out host arrays, or arrays that lie where the learner's do; neither moves a bit."""
    host, rng = publish(Precision.FLOAT32), np.random.default_rng(2)
    placed = jax.device_put(host, parameter_shardings(MODEL.axes, MODEL.shapes, scorer._row_sharding.mesh))
    expected = bits(scorer.score(host, ROWS))
    before = scorer._score._cache_size()
    assert bits(scorer.score(placed, ROWS)) == expected
    for _ in range(20):
        rows = [rng.integers(16, size=rng.integers(1, 17)).astype(np.int32) for _ in range(rng.integers(1, 9))]
        assert [len(scored.logprobs) for scored in scorer.score(placed, rows)] == [len(row) for row in rows]
    assert scorer._score._cache_size() == before <= len(LENGTHS) + 1  # the one is the other type, in one bucket
    jax.tree.map(np.testing.assert_array_equal, placed, host)


def test_the_self_test_finds_replay_bitwise(scorer):
    report = scorer.self_test(publish(Precision.FLOAT32))
    assert json.loads(json.dumps(report)) == report
    assert report["replay"] == "bitwise"
    assert report["permuted_rows_max_error"] == report["recompiled_max_error"] == 0.0
    assert (report["rows"], report["length"], report["platform"]) == (scorer.rows, 16, "cpu")


def test_the_self_test_sees_a_program_that_listens_to_padding(monkeypatch):
    scorer = make_scorer((1, 1, 1), 2)
    for name, program in (("_score", lambda params, tokens, valid: tokens), ("_compile", lambda: scorer._score)):
        monkeypatch.setattr(scorer, name, program)
    report = scorer.self_test(PARAMS)
    assert report["replay"] == "approximate"
    assert (report["permuted_rows_max_error"], report["recompiled_max_error"]) == (1.0, 0.0)


def test_weights_are_gathered_to_the_rows():
    """Were the rows' products summed over devices instead, each row's bits would depend on how many there are."""
    scorer = make_scorer((1, 2, 1), 1, (8,))
    tokens = jax.ShapeDtypeStruct((2, 8), np.int32)
    text = scorer._score.lower(MODEL.shapes, tokens, jax.ShapeDtypeStruct((2, 8), bool)).compile().as_text()
    assert "all-gather" in text and "all-reduce" not in text and "reduce-scatter" not in text


def test_another_bucket_or_mesh_moves_logprobs_a_little():
    """How little is what the recorded bucket protects from."""
    params, row = publish(Precision.FLOAT32), ROWS[1]
    shared = [shared_scorer((1, 1, 1), 2), shared_scorer((2, 2, 2), 1)]
    scorers = [*shared, make_scorer((1, 1, 1), 1, (16,)), make_scorer((1, 1, 1), 4)]
    scores = np.stack([scorer.score(params, [row])[0].logprobs for scorer in scorers])
    assert np.ptp(scores, axis=0).max() < 1e-4


def test_rows_share_calls_and_are_counted():
    scorer = make_scorer((1, 1, 1), 2)
    calls = []
    scorer._score = lambda params, tokens, valid: calls.append(tokens.shape) or jnp.zeros(tokens.shape)
    scorer.score(PARAMS, [row for row in ROWS if len(row) <= 8])  # five rows: 3, 7, 8, 1 and 5 tokens
    assert calls == [(2, 8)] * 3
    assert (scorer.num_scored_tokens, scorer.num_padded_tokens) == (24, 48)
    assert scorer.score(PARAMS, []) == []


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="takes 0 rows a device, wanted at least 1; change --score-rows"):
        make_scorer((1, 1, 1), 0)
    with pytest.raises(ValueError, match="17 tokens do not fit the largest length bucket, 16"):
        make_scorer((1, 1, 1), 1).score(PARAMS, [np.zeros(17, np.int32)])


def test_another_process_computes_the_same_bits():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True).stdout
    scorer = shared_scorer((1, 1, 1), 2)
    assert json.loads(printed) == [row.hex() for row in bits(scorer.score(publish(Precision.BFLOAT16), LONG_ROWS))]


if __name__ == "__main__":
    print(json.dumps([row.hex() for row in bits(make_scorer((1, 1, 1), 2).score(publish(Precision.BFLOAT16), LONG_ROWS))]))
