"""The whole loop on a tiny task: exactness, determinism, the synchronous limit, full rings, and going on from a state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from launch.build import Foundation
from launch.config import check
from models.config import Precision
from models.tokenizer import ByteTokenizer
from rl.advantages import AdvantageEstimator, group_advantages
from rl.auditing import check_ledger
from rl.drawing import STRETCH
from rl.environments import Split
from rl.learner import StepOptions
from rl.logprobs import score
from rl.loop import LoopOptions, RingFullPolicy, instance_seed
from rl.losses import LossInputs, objective_loss
from rl.old_logprobs import GonePolicy
from tests.tiny import MAX_LENGTH, assert_same_weights, rows_of, tiny_config, tiny_loop, tiny_rooms, weights, without_times


@pytest.mark.parametrize(
    ("devices", "precision"),
    [
        ((1, 1, 1), Precision.FLOAT32),
        pytest.param((1, 8, 1), Precision.FLOAT32, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), Precision.BFLOAT16, marks=pytest.mark.slow),
    ],
)
def test_ring_replay_is_bitwise_what_was_scored_live(tmp_path, devices, precision):
    config = tiny_config()
    config = dataclasses.replace(
        config, snapshots=dataclasses.replace(config.snapshots, publish_dtype=precision), step=StepOptions()
    )
    loop = tiny_loop(tmp_path, config, devices=devices)
    loop.run(8)
    assert loop.probe.num_compared > 20
    assert loop.probe.max_error == 0.0
    row = rows_of(tmp_path)[-1]
    assert row["versions_per_trajectory_max"] == 5
    assert row["engine_numerics_max"] < 1e-4


@pytest.mark.slow
def test_bfloat16_compute_replays_bitwise(tmp_path):
    config = tiny_config()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, compute_dtype=Precision.BFLOAT16),
        snapshots=dataclasses.replace(config.snapshots, publish_dtype=Precision.BFLOAT16),
    )
    loop = tiny_loop(tmp_path, config)
    loop.run(7)
    assert loop.probe.num_compared > 20
    assert loop.probe.max_error == 0.0


@pytest.mark.slow
def test_a_damaged_snapshot_would_be_noticed(tmp_path):
    """The exactness measure itself can fail."""
    loop = tiny_loop(tmp_path)
    loop.run(1)
    get = loop._rooms.ring.get
    loop._rooms.ring.get = lambda version: jax.tree.map(lambda leaf: leaf * 1.001, get(version))
    loop.run(7)
    assert loop.probe.max_error > 1e-6


@pytest.mark.slow
def test_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    first, second = tiny_loop(tmp_path / "first"), tiny_loop(tmp_path / "second")
    other = tiny_loop(tmp_path / "other", tiny_config(seed=1))
    for loop in (first, second, other):
        loop.run(7)
    assert without_times(rows_of(tmp_path / "first")) == without_times(rows_of(tmp_path / "second"))
    assert without_times(rows_of(tmp_path / "first")) != without_times(rows_of(tmp_path / "other"))
    assert_same_weights(first, second)


def test_staleness_follows_the_schedule(tmp_path):
    """The bound is reached and not exceeded, and a bound of 0 is synchronous."""
    config = tiny_config()
    for bound in (0, 2, 4):
        bounded = dataclasses.replace(config, loop=dataclasses.replace(config.loop, max_staleness=bound))
        tiny_loop(tmp_path / str(bound), bounded).run(8)
        rows = rows_of(tmp_path / str(bound))
        assert max(row["staleness_max"] for row in rows) == bound
        assert all(row["ring_versions"] <= config.snapshots.ring_capacity for row in rows)


def test_learning_rate_zero_moves_nothing(tmp_path):
    config = tiny_config()
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=0.0))
    loop = tiny_loop(tmp_path, config)
    before = weights(loop)
    loop.run(6)
    for left, right in zip(before, weights(loop), strict=True):
        np.testing.assert_array_equal(left, right)
    for row in rows_of(tmp_path):
        assert row["clip_fraction"] == 0
        assert row["staleness_ratio_min"] == pytest.approx(1, abs=1e-5)
        assert row["staleness_ratio_max"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_anchors_of_older_versions_clip_from_the_first_minibatch_on(tmp_path):
    """The fault that this project exists to avoid: with recomputed anchors the first minibatch's ratios are all 1."""
    config = tiny_config()
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-2))
    loop = tiny_loop(tmp_path, config)
    firsts, versions = [], []
    learner_step, anchor = loop._rooms.learner.step, loop._rooms.source.anchor

    def watched_step(batch, **options):
        result = learner_step(batch, **options)
        firsts.append(float(result.updates[0]["staleness_ratio_max"]))
        return result

    def watched_anchor(trajectories, version, params):
        versions.append(max(len(trajectory.versions) for trajectory in trajectories))
        return anchor(trajectories, version, params)

    loop._rooms.learner.step, loop._rooms.source.anchor = watched_step, watched_anchor
    loop.run(8)
    assert max(versions) == 5
    assert firsts[versions.index(5)] > 1.01
    assert firsts[0] == pytest.approx(1, abs=1e-5)  # the first batch is as old as the learner


@pytest.mark.slow
def test_without_lag_the_loop_is_plain_synchronous_training(tmp_path):
    config = tiny_config()
    config = dataclasses.replace(
        config, step=StepOptions(), loop=LoopOptions(groups_per_step=4, group_size=2, max_staleness=0, decode_steps=1)
    )
    loop = tiny_loop(tmp_path, config)
    loop.run(3)
    reference = synchronous_reference(config, num_steps=3)
    for left, right in zip(weights(loop), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def synchronous_reference(config, *, num_steps: int):
    """Samples token by token with the whole context, scores, takes one gradient step: only the mathematics is shared."""
    foundation = Foundation.of(config)
    model, params = foundation.model, foundation.initial_params()
    optimizer = config.optimizer.make()
    optimizer_state = optimizer.init(params)
    scored = jax.jit(lambda params, tokens, valid: score(model, params, tokens, valid, temperature=1.0).logprobs)
    key = jax.random.key(config.seed)

    @jax.jit
    def draw(params, padded, length, request_id):
        log_probabilities = jax.nn.log_softmax(model.logits(params, model.hidden(params, padded))[0, length - 1])
        first, second = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, request_id), length), (2,))
        mass = jnp.exp(log_probabilities)
        is_early = jnp.arange(len(mass)) < STRETCH  # there are two stretches
        early = jnp.sum(jnp.where(is_early, mass, 0))
        inside = jnp.where(is_early == (first * jnp.sum(mass) < early), mass, 0)
        token = jnp.searchsorted(jnp.cumsum(inside), second * jnp.sum(inside), side="right")
        return token, log_probabilities[token]

    def play(params, request_id, group_id):
        environment = config.make_environment(Split.TRAIN)
        tokens = [ByteTokenizer.bos, *ByteTokenizer().encode(environment.reset(instance_seed(config.seed, group_id)))]
        mask, logprobs, reward = [False] * len(tokens), [0.0] * len(tokens), 0.0
        while True:
            padded = np.zeros((1, MAX_LENGTH), np.int32)
            padded[0, : len(tokens)] = tokens
            token, logprob = (array.item() for array in draw(params, padded, len(tokens), request_id))
            tokens, mask, logprobs = [*tokens, token], [*mask, True], [*logprobs, logprob]
            step = environment.step(ByteTokenizer().decode(np.asarray([token])))
            reward += step.reward
            if step.done:
                return tokens, mask, logprobs, reward
            observation = ByteTokenizer().encode(step.observation).tolist()
            tokens, mask, logprobs = tokens + observation, mask + [False] * len(observation), logprobs + [0.0] * len(observation)

    def pad(rows, dtype):
        return np.asarray([list(row) + [0] * (MAX_LENGTH - len(row)) for row in rows], dtype)

    def loss(params, tokens, valid, mask, sampler, proximal, advantages):
        logprobs, entropy = score(model, params, tokens, valid, temperature=1.0)
        inputs = LossInputs(logprobs, proximal, sampler, advantages, mask, entropy)
        return objective_loss(config.objective, inputs)[0]

    @jax.jit
    def learn(params, optimizer_state, *batch):
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(jax.grad(loss)(params, *batch), optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state

    groups, size = config.loop.groups_per_step, config.loop.group_size
    for step in range(num_steps):
        group_ids = [step * groups + group for group in range(groups) for _ in range(size)]
        played = [play(params, step * groups * size + index, group_id) for index, group_id in enumerate(group_ids)]
        tokens, mask, sampler = (
            pad(column, dtype)
            for column, dtype in zip(list(zip(*played, strict=True))[:3], (np.int32, bool, np.float32), strict=True)
        )
        valid = np.arange(MAX_LENGTH)[None, :] < np.asarray([len(row[0]) for row in played])[:, None]
        advantages = group_advantages(
            np.asarray([row[3] for row in played]),
            np.asarray(group_ids),
            np.ones(len(played), bool),
            estimator=AdvantageEstimator.GROUP_RELATIVE,
        )
        proximal = scored(params, tokens, valid)
        batch = (tokens, valid, mask, sampler, proximal, np.broadcast_to(advantages[:, None], mask.shape))

        params, optimizer_state = learn(params, optimizer_state, *batch)
    return params


@pytest.mark.parametrize("policy", list(RingFullPolicy))
def test_a_ring_full_of_pins_does_not_stop_the_run(tmp_path, policy):
    config = tiny_config()
    config = dataclasses.replace(
        config,
        loop=dataclasses.replace(config.loop, max_staleness=2, ring_full=policy),
        snapshots=dataclasses.replace(config.snapshots, ring_capacity=3),
    )
    loop = tiny_loop(tmp_path, config)
    # Somebody else holds all that the ring may hold for a while.
    for version in (0, 1, 2):
        loop.run(version + 1)
        loop._rooms.ring.pin([min(version, loop.version)])
    loop.run(5)
    last = rows_of(tmp_path)[-1]
    if policy is RingFullPolicy.SKIP_PUBLISH:
        assert last["skipped_publishes"] > 0
        assert loop.version < loop.step
    elif policy is RingFullPolicy.EVICT:
        assert last["skipped_publishes"] == 0 and last["evicted_versions"] > 0
        assert loop.version == loop.step
        assert last["gone_tokens"] == 0  # a ring as large as this loses only what is too old to train
    else:
        assert last["skipped_publishes"] + last["dropped_groups_ring_full"] > 0
    assert loop.step == 5


@pytest.mark.slow
@pytest.mark.parametrize("policy", [GonePolicy.MASK, GonePolicy.DROP])
def test_a_ring_smaller_than_the_staleness_gives_tokens_up_and_counts_them(tmp_path, policy):
    config = tiny_config()
    config = dataclasses.replace(
        config,
        loop=dataclasses.replace(config.loop, max_staleness=4, ring_full=RingFullPolicy.EVICT),
        snapshots=dataclasses.replace(config.snapshots, ring_capacity=2, version_gone=policy, decompose_every=1),
    )
    check(config)
    straight, first = (tiny_loop(tmp_path / name, config) for name in ("straight", "resumed"))
    for loop in (straight, first):
        loop.run(6)
        state = loop.state()
    first._rooms.store.wait()
    resumed = tiny_rooms(tmp_path / "resumed", config)
    resumed.restore(state)  # pins of versions that are gone included
    for loop in (straight, resumed):
        loop.run(9)
        loop.finish()
    assert_same_weights(straight, resumed)
    rows = rows_of(tmp_path / "straight")
    assert rows[-1]["evicted_versions"] > 0 and rows[-1]["skipped_publishes"] == 0
    assert sum(row["gone_tokens"] for row in rows) > 0 and sum(row["gone_trajectories"] for row in rows) > 0
    assert rows[-1]["exactness_error_max"] == 0
    report = check_ledger(tmp_path / "straight" / "ledger")
    assert report.failures == [] and report.num_exact_tokens == report.num_trained_tokens > 0


def test_every_pin_is_released_at_the_end(tmp_path):
    loop = tiny_loop(tmp_path)
    loop.run(6)
    assert loop._rooms.ring.pins
    loop.finish()
    assert loop._rooms.ring.pins == {}
    assert loop._rooms.rollouts.num_running == 0


def test_going_on_from_a_state_is_the_same_run(tmp_path):
    straight = tiny_loop(tmp_path / "straight")
    straight.run(6)
    saved = straight.state()
    straight.run(9)

    first = tiny_loop(tmp_path / "resumed")
    first.run(6)
    state = first.state()
    first.run(8)  # goes further; then its process dies, but not in the middle of a save, which another test kills
    first._rooms.store.wait()
    del first
    resumed = tiny_rooms(tmp_path / "resumed")
    resumed.restore(state)
    resumed.run(9)
    assert_same_weights(straight, resumed)
    assert without_times(rows_of(tmp_path / "straight")) == without_times(rows_of(tmp_path / "resumed"))
    assert saved["own"]["step"] == state["own"]["step"] == 6
