"""Objectives in a run: the reference policy, groups that are replaced, rewards that are shaped, advantages of turns."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from rl import presets
from rl.admission import DropReason
from rl.advantages import AdvantageEstimator, AdvantageOptions
from rl.learner import StepOptions
from tests.tiny import assert_same_weights, rows_of, tiny_config, tiny_loop, tiny_rooms, without_times


def config_of(objective, **loop):
    config = tiny_config(objective=objective)
    return dataclasses.replace(config, loop=dataclasses.replace(config.loop, **loop))


def batches_of(loop, monkeypatch) -> list:
    """The batches that the learner gets, as they come."""
    batches, step = [], loop.rooms.learner.step
    monkeypatch.setattr(loop.rooms.learner, "step", lambda batch, **options: (batches.append(batch), step(batch, **options))[1])
    return batches


@pytest.mark.slow
def test_the_reference_is_the_policy_of_version_0_and_survives_a_stop(tmp_path, monkeypatch):
    """Its KL divergence is 0 before the first update and not after, and a resumed run goes on with the same reference."""
    config = config_of(dataclasses.replace(presets.grpo(), kl_coefficient=1.0))
    config = dataclasses.replace(config, step=StepOptions(minibatches=1))
    straight = tiny_loop(tmp_path / "straight", config)
    batches, first = batches_of(straight, monkeypatch), straight.live
    straight.run(4)
    state = straight.state()
    straight.run(6)
    straight.rooms.store.wait()
    rows = rows_of(tmp_path / "straight")
    assert 0 <= rows[0]["reference_kl"] < 1e-6 and rows[5]["reference_kl"] > 1e-4
    last = batches[-1]
    tokens = [row[valid] for row, valid in zip(last.tokens, last.valid, strict=True)]
    expected = straight.rooms.reference._scorer.score(first, tokens)
    for row, logprobs in enumerate(expected):
        np.testing.assert_array_equal(last.reference_logprobs[row, : len(tokens[row])], logprobs.logprobs)
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    resumed = tiny_rooms(tmp_path / "resumed", config)
    resumed.restore(state)
    resumed.run(6)
    assert_same_weights(straight, resumed)
    assert without_times(rows_of(tmp_path / "straight")) == without_times(rows_of(tmp_path / "resumed"))


def test_without_a_kl_penalty_no_reference_is_kept(tmp_path):
    loop = tiny_loop(tmp_path, tiny_config())
    assert loop.rooms.reference.state() == [] and loop.rooms.reference.score([]) is None


def test_groups_of_equal_rewards_are_replaced_and_not_padded(tmp_path, monkeypatch):
    """Rewards are made up, every other group has equal ones, and batches are full all the same."""
    loop = tiny_loop(tmp_path, config_of(presets.dapo()))
    batches, finish = batches_of(loop, monkeypatch), loop.rooms.admission.finish

    def make_up(trajectory):
        is_uneven = trajectory.group_id % 2 and trajectory.request_id % 2
        finish(dataclasses.replace(trajectory, reward=float(is_uneven)))

    monkeypatch.setattr(loop.rooms.admission, "finish", make_up)
    loop.run(3)
    assert loop.rooms.admission.dropped[DropReason.UNIFORM] >= 4
    options = tiny_config().loop
    for batch in batches:
        assert len(batch.tokens) == options.groups_per_step * options.group_size
        trained = batch.loss_mask.any(axis=1)
        assert np.all(trained) and np.all(np.abs(batch.advantages).max(axis=1) > 0)


@pytest.mark.slow
def test_long_episodes_lose_reward(tmp_path, monkeypatch):
    """Over the last part of the context, in a straight line; the rest keep theirs."""
    objective = dataclasses.replace(
        presets.dapo(), dynamic_sampling=False, overlong_fraction=1.0, overlong_penalty=2.0,
        advantage=AdvantageOptions(AdvantageEstimator.RAW))  # fmt: skip
    loop = tiny_loop(tmp_path, config_of(objective))
    batches = batches_of(loop, monkeypatch)
    loop.run(1)
    (batch,) = batches
    lengths = batch.valid.sum(axis=1)
    rewards = np.abs(batch.advantages).max(axis=1)  # none is won here
    np.testing.assert_allclose(rewards, 2.0 * lengths / tiny_config().model.max_length, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gigpo", "m2po", "ipa", "estr"])
def test_objectives_that_ask_more_of_a_batch_run(tmp_path, name):
    """Turns, minibatches, entropy: three steps, finite, and the policy has moved, by the entropy bonus if no game is won."""
    objective = dataclasses.replace(presets.PRESETS[name](), entropy_coefficient=0.01)
    config = dataclasses.replace(config_of(objective), step=dataclasses.replace(tiny_config().step, microbatches=2))
    loop = tiny_loop(tmp_path, config)
    before = jax.tree.leaves(jax.device_get(loop.live))
    loop.run(3)
    rows = rows_of(tmp_path)
    assert len(rows) == 3 and all(np.isfinite(row["loss"]) and row["tokens"] > 0 for row in rows)
    after = jax.tree.leaves(jax.device_get(loop.live))
    assert any(np.any(mine != theirs) for mine, theirs in zip(before, after, strict=True))
