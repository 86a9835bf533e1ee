"""Ragged trajectories in a few fixed shapes: nothing lost, nothing invented."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from rl.batching import batch_shapes, bucket_length, length_buckets, make_batch, pad_rows
from rl.types import NO_POLICY, FinishReason, Trajectory


def make_trajectory(request_id: int, length: int, prompt: int = 2) -> Trajectory:
    """`prompt` tokens of the environment, then tokens of version `request_id`."""
    sampled = np.arange(length) >= prompt
    logprobs = np.where(sampled, -0.1 * np.arange(length) - request_id, np.nan).astype(np.float32)
    versions = np.where(sampled, request_id, NO_POLICY).astype(np.int32)
    return Trajectory(request_id=request_id, group_id=0, tokens=np.arange(1, length + 1, dtype=np.int32), loss_mask=sampled,
                      sampler_logprobs=logprobs, policy_versions=versions, context_versions=versions,
                      turn_starts=np.asarray([prompt], np.int32), reward=1.0, success=True,
                      finish_reason=FinishReason.ENVIRONMENT)


# --- buckets ---


@hypothesis.given(st.integers(1, 300), st.integers(1, 12))
def test_buckets_are_few_increasing_multiples_of_8_up_to_the_exact_end(max_length, num_buckets):
    hypothesis.assume(num_buckets <= max_length)
    buckets = length_buckets(max_length, num_buckets)
    assert 1 <= len(buckets) <= num_buckets and buckets[-1] == max_length
    assert all(small < large for small, large in zip(buckets, buckets[1:], strict=False))
    assert all(bucket % 8 == 0 for bucket in buckets[:-1])


def test_buckets_by_hand():
    assert length_buckets(88, 1) == (88,)
    assert length_buckets(88, 3) == (32, 64, 88)  # 29.3 and 58.7, rounded up
    assert length_buckets(20, 4) == (8, 16, 20)  # 5 and 10 both round to a multiple of 8; 15 does, too
    assert length_buckets(5, 5) == (5,)


@pytest.mark.parametrize("num_buckets", [0, 6])
def test_an_impossible_number_of_buckets_is_refused(num_buckets):
    with pytest.raises(ValueError, match=f"{num_buckets} length buckets for contexts of 5 tokens; wanted 1 to 5"):
        length_buckets(5, num_buckets)


@hypothesis.given(st.integers(0, 40))
def test_a_length_gets_the_smallest_bucket_that_holds_it(length):
    buckets = (8, 16, 40)
    assert bucket_length(length, buckets) == min(bucket for bucket in buckets if bucket >= length)


def test_a_length_beyond_the_last_bucket_is_refused():
    with pytest.raises(ValueError, match="41 tokens do not fit the largest length bucket, 40; raise --model.max-length"):
        bucket_length(41, (8, 16, 40))


# --- rows ---


def test_rows_are_padded_on_the_right_and_below_in_their_type():
    rows = [np.asarray([1, 2, 3], np.int16), np.asarray([4], np.int16)]
    padded = pad_rows(rows, 4, fill=-7, num_rows=3)
    assert padded.dtype == np.int16
    np.testing.assert_array_equal(padded, [[1, 2, 3, -7], [4, -7, -7, -7], [-7] * 4])
    assert pad_rows(rows, 3, fill=0).shape == (2, 3)


# --- batches ---


def advantages_of(*lengths):
    return [np.ones(length) for length in lengths]



def test_a_batch_holds_each_trajectory_in_its_row():
    trajectories = [make_trajectory(3, 6), make_trajectory(5, 4)]
    anchors = [np.linspace(-1, -2, 6), np.linspace(-3, -4, 4)]
    batch = make_batch(trajectories, proximal_logprobs=anchors, advantages=advantages_of(6, 4), reference_logprobs=anchors,
                       num_rows=3, length=8)
    for name, array in batch.items():
        assert array.shape == (3, 8), name
    assert {name: array.dtype for name, array in batch.items()} == {
        "tokens": np.int32, "valid": bool, "loss_mask": bool, "sampler_logprobs": np.float32, "proximal_logprobs": np.float32,
        "advantages": np.float32, "policy_versions": np.int32, "reference_logprobs": np.float32}
    for row, (trajectory, anchor) in enumerate(zip(trajectories, anchors, strict=True)):
        length = len(trajectory)
        np.testing.assert_array_equal(batch.tokens[row, :length], trajectory.tokens)
        np.testing.assert_array_equal(batch.sampler_logprobs[row, :length], trajectory.sampler_logprobs)
        np.testing.assert_array_equal(batch.proximal_logprobs[row, :length], anchor.astype(np.float32))
        np.testing.assert_array_equal(batch.reference_logprobs[row, :length], anchor.astype(np.float32))
        np.testing.assert_array_equal(batch.policy_versions[row, :length], trajectory.policy_versions)
        np.testing.assert_array_equal(batch.loss_mask[row, :length], trajectory.loss_mask)
        np.testing.assert_array_equal(batch.valid[row], np.arange(8) < length)
        assert not np.any(batch.loss_mask[row, length:]) and np.all(batch.policy_versions[row, length:] == NO_POLICY)
    assert not np.any(batch.valid[2]) and not np.any(batch.loss_mask[2])


@pytest.mark.parametrize("reference", [None, [np.zeros(6, np.float32)]])
def test_a_batch_is_known_beforehand(reference):
    batch = make_batch([make_trajectory(3, 6)], proximal_logprobs=[np.zeros(6)], advantages=advantages_of(6),
                       reference_logprobs=reference, num_rows=2, length=8)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = batch_shapes(2, 8, sharding, has_reference=reference is not None)
    assert jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), batch) == shapes


def test_advantages_reach_the_tokens_of_their_row():
    batch = make_batch([make_trajectory(0, 6), make_trajectory(1, 4)], proximal_logprobs=[np.zeros(6), np.zeros(4)],
                       advantages=[np.asarray([0, 0, 0.5, 0.25, 0.5, 0.5]), np.asarray([0, 0, -2, -2])], num_rows=2, length=6)
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 0.5, 0.25, 0.5, 0.5], [0, 0, -2, -2, 0, 0]])


def test_what_is_missing_stays_missing():
    """A NaN in an anchor or a sampler logprob is not taken for 0."""
    trajectory = make_trajectory(0, 4)
    batch = make_batch([trajectory], proximal_logprobs=[trajectory.sampler_logprobs], advantages=advantages_of(4), num_rows=1,
                       length=5)
    for array in (batch.sampler_logprobs, batch.proximal_logprobs):
        np.testing.assert_array_equal(np.isnan(array[0]), [True, True, False, False, False])


@pytest.mark.parametrize(("num_rows", "length", "anchor_length", "message"), [
    (1, 8, 6, "2 trajectories of up to 6 tokens do not fit a batch of 1 rows of 8 tokens"),
    (2, 5, 6, "2 trajectories of up to 6 tokens do not fit a batch of 2 rows of 5 tokens"),
    (2, 8, 5, "trajectory 7 has 6 tokens, 5 proximal logprobs and 6 advantages"),
])
def test_what_does_not_fit_is_refused(num_rows, length, anchor_length, message):
    with pytest.raises(ValueError, match=message):
        make_batch([make_trajectory(7, 6), make_trajectory(1, 4)], proximal_logprobs=[np.zeros(anchor_length), np.zeros(4)],
                   advantages=advantages_of(6, 4), num_rows=num_rows, length=length)


def test_every_trajectory_has_an_advantage_and_an_anchor():
    trajectories = [make_trajectory(0, 6), make_trajectory(1, 4)]
    with pytest.raises(ValueError, match="zip"):
        make_batch(trajectories, proximal_logprobs=[np.zeros(6), np.zeros(4)], advantages=advantages_of(6), num_rows=2, length=6)
    with pytest.raises(ValueError, match="zip"):
        make_batch(trajectories, proximal_logprobs=[np.zeros(6)], advantages=advantages_of(6, 4), num_rows=2, length=6)
