"""The learner: one update, whatever the mesh, the microbatches and the padding; rounded policies and unrounded masters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from models.config import ModelConfig, Precision
from models.sharding import MESH_AXES, ShardingError, parameter_shardings
from models.transformer import Model
from rl.corrections import CorrectionOptions, Discrepancy
from rl.learner import (
    Learner,
    OptimizerOptions,
    StepOptions,
    check_batch_rows,
    policy_parameters,
    publish_cast,
)
from rl.objective import Objective
from rl.scorer import Scorer
from rl.surrogates import Clip, SecondMomentClip
from rl.types import Batch

MODEL = Model(ModelConfig(vocab_size=16, num_layers=1, d_model=16, d_ff=16, num_heads=2, num_kv_heads=2, head_dim=4,
                          max_length=8))
ROWS, LENGTH = 32, 8
# A large epsilon makes the update proportional to the gradient: without it, Adam turns rounding into steps of full size.
OPTIMIZER = OptimizerOptions(learning_rate=3e-2, adam_epsilon=1e-2, warmup_updates=2, max_gradient_norm=0.05)
OBJECTIVE = Objective(Clip(0.1, 0.1), correction=CorrectionOptions(discrepancy_bound=8.0), entropy_coefficient=0.01)
STEP = StepOptions(minibatches=2, epochs=2)
NUM_UPDATES = 4
TEMPERATURE = 0.7


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:data * fsdp * tensor]).reshape(data, fsdp, tensor), MESH_AXES)


ONE_DEVICE = make_mesh(1, 1, 1)


def make_learner(mesh: Mesh = ONE_DEVICE, **options) -> Learner:
    """Publishes float32 unless told otherwise: bfloat16 would turn a difference of 1e-8 into one of a rounding, now and then."""
    defaults = {"optimizer": OPTIMIZER, "objective": OBJECTIVE, "step": STEP, "publish_dtype": Precision.FLOAT32}
    return Learner(MODEL, mesh, **{**defaults, **options}, temperature=TEMPERATURE)


def random_params(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(np.float32), MODEL.shapes)


PARAMS = random_params(0)
ROUNDED_PARAMS = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), PARAMS)
shared_learner = functools.cache(make_learner)  # what it compiled is shared, too
shared_scorer = functools.cache(
    lambda: Scorer(MODEL, ONE_DEVICE, rows_per_device=ROWS, lengths=(LENGTH,), temperature=TEMPERATURE))


def score_rows(params: dict, batch: Batch) -> np.ndarray:
    return np.stack([row.logprobs for row in shared_scorer().score(params, list(batch.tokens))])


def make_batch(old_params: dict) -> Batch:
    """Ragged rows with holes in the mask; anchored by the exact old logprobs, NaN outside the mask."""
    rng = np.random.default_rng(1)
    shape = ROWS, LENGTH
    valid = np.arange(LENGTH)[None] < rng.integers(3, LENGTH + 1, ROWS)[:, None]
    mask = valid & (np.arange(LENGTH)[None] >= 2) & (rng.random(shape) < 0.9)
    zeros = np.zeros(shape, np.float32)
    batch = Batch(tokens=rng.integers(16, size=shape).astype(np.int32), valid=valid, loss_mask=mask, sampler_logprobs=zeros,
                  proximal_logprobs=zeros, advantages=rng.normal(size=shape).astype(np.float32),
                  policy_versions=np.where(mask, rng.integers(0, 3, shape), -1).astype(np.int32))
    old = np.where(mask, score_rows(old_params, batch), np.nan)
    return batch.replace(proximal_logprobs=old, sampler_logprobs=old + 0.1 * rng.normal(size=shape).astype(np.float32))


@functools.cache
def stale_batch() -> Batch:
    """Sampled by other parameters than those that it will train."""
    return make_batch(jax.tree.map(lambda leaf, other: leaf + 0.1 * other, PARAMS, random_params(2)))


@dataclasses.dataclass
class Run:
    """One learner step and what it left."""

    updates: list[dict]
    step: dict
    state: dict


def run_step(learner: Learner, batch: Batch, params: dict = PARAMS) -> Run:
    learner.start(params)
    metrics = jax.tree.map(float, learner.step(batch, version=2))
    return Run(metrics.updates, metrics.step, learner.state())


@functools.cache
def reference() -> Run:
    return run_step(shared_learner(), stale_batch())


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_same_run(found: Run, expected: Run) -> None:
    """Every metric of every update, and master weights and moments after them."""
    for mine, theirs in zip(found.updates, expected.updates, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for mine, theirs in zip(found.state["leaves"], expected.state["leaves"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * max(1e-3, np.abs(theirs).max()))


# --- one update, however it is computed ---


def test_the_program_known_beforehand_is_the_one_that_runs(monkeypatch):
    class Called(Exception):
        pass

    def call(*arguments):
        raise Called(update.lower(*arguments).as_text())

    def anchor(logprobs, sampler_logprobs, policy_versions, learner_version):  # all that a program may take
        return jnp.where(policy_versions < learner_version, logprobs, sampler_logprobs)

    learner = make_learner(make_mesh(2, 2, 2), anchor=anchor)
    expected, update = learner.lower_update(ROWS // STEP.minibatches, LENGTH).as_text(), learner._update
    monkeypatch.setattr(learner, "_update", call)
    with pytest.raises(Called) as called:
        run_step(learner, stale_batch())
    assert str(called.value) == expected


def pad(batch: Batch, num_tokens: int) -> Batch:
    """Longer by tokens that do not exist, with NaN wherever there is one."""
    outside = {"tokens": 7, "valid": False, "loss_mask": False, "policy_versions": -1}
    return Batch(**{name: np.pad(array, ((0, 0), (0, num_tokens)), constant_values=outside.get(name, np.nan))
                    for name, array in batch.items() if array is not None})


@pytest.mark.parametrize(("mesh_shape", "microbatches", "remat", "padding"),
                         [pytest.param((1, 8, 1), 1, False, 0, marks=pytest.mark.slow),
                          pytest.param((1, 4, 2), 2, True, 0, marks=pytest.mark.slow), ((2, 2, 2), 4, False, 3)])
def test_meshes_microbatches_rematerialisation_and_padding_change_nothing(capfd, mesh_shape, microbatches, remat, padding):
    """Nor does the compiler give up on a sharding, which would cost a copy of the array on every device."""
    mesh = make_mesh(*mesh_shape)
    learner = make_learner(mesh, step=dataclasses.replace(STEP, microbatches=microbatches, remat=remat))
    run = run_step(learner, pad(stale_batch(), padding))
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
    assert_same_run(run, reference())
    shardings = parameter_shardings(MODEL.axes, MODEL.shapes, mesh)
    for tree in (learner.train_state.params, optax.tree_utils.tree_get(learner.train_state.optimizer, "mu")):
        lies_there = jax.tree.map(lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim), tree, shardings)
        assert all(jax.tree.leaves(lies_there))


@pytest.mark.slow
def test_an_objective_that_depends_on_the_minibatch_is_one_update_however_it_is_divided():
    """A band and weights that only all rows together decide, and a denominator of what is kept."""
    correction = CorrectionOptions(discrepancy=Discrepancy.BOTH, normalize_weights=True, second_moment_budget=0.005)
    objective = Objective(SecondMomentClip(0.001, 0.0, 0.0), correction=correction, count_kept=True)
    batch = stale_batch()
    expected = run_step(make_learner(objective=objective), batch)
    assert 0 < expected.step["clip_fraction"] < 1 and 0 < expected.step["kept_fraction"] < 1
    step = dataclasses.replace(STEP, microbatches=4)
    assert_same_run(run_step(make_learner(make_mesh(2, 2, 1), step=step, objective=objective), batch), expected)


# --- what a step consists of ---


def test_a_step_is_minibatches_times_epochs_updates():
    run, mask = reference(), stale_batch().loss_mask
    assert len(run.updates) == NUM_UPDATES
    learner = shared_learner()
    run_step(learner, stale_batch())
    counts = optax.tree_utils.tree_get_all_with_path(learner.train_state.optimizer, "count")
    assert {int(count) for _, count in counts} == {NUM_UPDATES}
    tokens = [update["tokens"] for update in run.updates]
    assert tokens[0] + tokens[1] == tokens[2] + tokens[3] == mask.sum()  # each epoch sees each token
    assert tokens[:2] != tokens[2:]  # in another order
    assert run.step["tokens"] == 2 * mask.sum()
    assert run.step["loss"] == pytest.approx(np.mean([update["loss"] for update in run.updates]), rel=1e-5)


def test_an_old_anchor_makes_ratios_that_clip_from_the_first_update():
    first = reference().updates[0]
    assert abs(first["staleness_ratio_mean"] - 1) > 1e-3 and first["clip_fraction"] > 0
    assert first["staleness_ratio_min"] < 0.9 and first["staleness_ratio_max"] > 1.1


def test_an_exact_anchor_has_ratio_one_at_first_and_not_again():
    batch = make_batch(PARAMS)
    run = run_step(shared_learner(), batch)
    for extreme in ("min", "mean", "max"):
        assert run.updates[0][f"staleness_ratio_{extreme}"] == pytest.approx(1, abs=1e-5)
    assert run.updates[0]["clip_fraction"] == 0
    rows = np.random.default_rng((0, 0, 0)).permutation(ROWS)[:ROWS // 2]  # of seed 0, step 0, epoch 0
    bonus = OBJECTIVE.entropy_coefficient * run.updates[0]["entropy"]
    assert run.updates[0]["loss"] == pytest.approx(-batch.advantages[rows][batch.loss_mask[rows]].mean() - bonus, abs=1e-5)
    assert run.updates[1]["staleness_ratio_max"] > 1 + 1e-3
    # The second epoch is no repetition of the first: its policy has moved.
    assert run.updates[2]["staleness_kl_k3"] > 1e-5 > run.updates[0]["staleness_kl_k3"]


def test_the_discrepancy_is_between_anchor_and_sampler():
    batch, run = stale_batch(), reference()
    log_ratio = (batch.proximal_logprobs - batch.sampler_logprobs)[batch.loss_mask]
    assert run.step["discrepancy_kl"] == pytest.approx(-log_ratio.mean(), abs=1e-5)
    assert run.step["nonfinite_fraction"] == 0  # NaN outside the mask is nobody's token


# --- rounding, publishing, donation ---


def test_publishing_rounds_to_the_nearest_even_bfloat16():
    special = np.asarray([0.0, -0.0, 1e-40, -3e-39, np.inf, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-7 - 2**-8], np.float32)
    values = np.concatenate([special, np.random.default_rng(0).normal(size=500).astype(np.float32)])
    published = jax.jit(functools.partial(publish_cast, precision=Precision.BFLOAT16))({"x": values})["x"]
    np.testing.assert_array_equal(np.asarray(published).view(np.uint16), values.astype(jnp.bfloat16).view(np.uint16))
    policy = jax.jit(functools.partial(policy_parameters, precision=Precision.BFLOAT16))({"x": values})["x"]
    np.testing.assert_array_equal(policy, np.asarray(published, np.float32))
    exact = publish_cast({"x": values}, Precision.FLOAT32)["x"]
    assert exact.dtype == np.float32 and bits(exact) == bits(values)


def test_gradients_pass_straight_through_the_rounding():
    def loss(params):
        return jnp.sum(policy_parameters(params, Precision.BFLOAT16)["x"] ** 2)

    values = np.random.default_rng(0).normal(size=20).astype(np.float32)
    gradient = jax.grad(loss)({"x": values})["x"]
    np.testing.assert_array_equal(gradient, 2 * np.asarray(publish_cast({"x": values}, Precision.BFLOAT16)["x"], np.float32))


def test_published_and_given_parameters_survive_further_steps():
    """Float32 is the type in which a copy could have been forgotten."""
    learner = shared_learner()
    given = jax.device_put(PARAMS, learner.shardings.params)
    learner.start(given)
    published = learner.published()
    for version in range(2):
        learner.step(stale_batch(), version=version)
    assert bits(published) == bits(given) == bits(PARAMS)
    assert bits(learner.published()) != bits(PARAMS)


def test_scoring_leaves_live_parameters_untouched():
    learner = shared_learner()
    learner.start(PARAMS)
    old = learner.published()
    learner.step(stale_batch(), version=0)
    live = learner.train_state.params
    before = bits(live), [(leaf.sharding, leaf.dtype) for leaf in jax.tree.leaves(live)]
    rows = [np.arange(3, dtype=np.int32), np.arange(7, dtype=np.int32)]
    assert [len(row.logprobs) for row in shared_scorer().score(old, rows)] == [3, 7]
    assert (bits(live), [(leaf.sharding, leaf.dtype) for leaf in jax.tree.leaves(live)]) == before
    learner.step(stale_batch(), version=1)


# --- an anchor inside the step, rounded policies, a tiny rate, a rate of 0 ---


def version_anchor(logprobs, sampler_logprobs, policy_versions, learner_version):
    """0.1 nats below the policy for each version of lag."""
    lag = (learner_version - policy_versions).astype(jnp.float32)
    return jnp.where(policy_versions >= 0, logprobs - 0.1 * lag, sampler_logprobs)


@functools.cache
def tiny_learner() -> Learner:
    """Its rate is too small for a bfloat16 to notice, and gone after one step."""
    optimizer = OptimizerOptions(learning_rate=1e-7, decay_updates=NUM_UPDATES, final_rate_fraction=0.0)
    return make_learner(optimizer=optimizer, anchor=version_anchor, publish_dtype=Precision.BFLOAT16)


def test_an_anchor_inside_the_step_takes_the_place_of_the_proximal_logprobs():
    learner, batch = tiny_learner(), stale_batch()
    lag = (2 - batch.policy_versions)[batch.loss_mask]
    run = run_step(learner, batch.replace(proximal_logprobs=np.full_like(batch.proximal_logprobs, 5.0)))
    assert run.step["staleness_ratio_mean"] == pytest.approx(np.exp(0.1 * lag).mean(), abs=1e-5)
    for update in run.updates:  # none moves the policy, and ratios stay what the anchor makes them
        assert (update["staleness_ratio_min"], update["staleness_ratio_max"]) == pytest.approx((1, np.exp(0.2)), abs=1e-5)


def test_the_loss_computes_with_the_published_parameters():
    """Where the anchor is the current policy, the discrepancy compares it with logprobs of the rounded parameters: none."""
    batch = stale_batch()
    rounded = score_rows(ROUNDED_PARAMS, batch)
    assert np.abs(rounded - score_rows(PARAMS, batch))[batch.loss_mask].max() > 1e-3
    batch = batch.replace(policy_versions=np.full_like(batch.policy_versions, 2), sampler_logprobs=rounded)
    run = run_step(tiny_learner(), batch)
    for extreme in ("min", "max"):
        assert run.step[f"discrepancy_ratio_{extreme}"] == pytest.approx(1, abs=1e-5)


def test_a_rate_too_small_for_the_policy_moves_the_masters_and_no_rate_moves_nothing():
    learner = tiny_learner()
    learner.start(PARAMS)
    published, masters = learner.published(), bits(learner.train_state.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(published)} == {jnp.dtype(jnp.bfloat16)}
    learner.step(stale_batch(), version=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(learner.train_state.params)} == {jnp.dtype(jnp.float32)}
    moved = bits(learner.train_state.params)
    assert bits(learner.published()) == bits(published) and moved != masters
    learner.step(stale_batch(), version=2)
    assert bits(learner.train_state.params) == moved


def test_gradients_are_those_at_the_published_parameters_and_float32():
    """Moments are sums of gradients: they do not tell masters from their rounding, as long as the policy stays."""
    moments = []
    for params in (PARAMS, ROUNDED_PARAMS):
        run_step(tiny_learner(), stale_batch(), params)
        moments.append(optax.tree_utils.tree_get(tiny_learner().train_state.optimizer, "mu"))
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype(jnp.float32)}
    assert bits(moments[0]) == bits(moments[1]) and np.any(moments[0]["embedding"])


# --- the optimizer ---


def rates(options: OptimizerOptions, num_updates: int) -> list[float]:
    """Adam's first updates by a constant gradient have the size of the rate."""
    optimizer, one = options.make(), jnp.ones(())
    with jax.numpy_dtype_promotion("standard"):
        step, state = jax.jit(lambda state: optimizer.update(one, state, one)), optimizer.init(one)
        found = []
        for _ in range(num_updates):
            update, state = step(state)
            found.append(-float(update))
    return found


def test_the_rate_warms_up_to_its_value_and_then_decays():
    warm = OptimizerOptions(learning_rate=1.0, warmup_updates=3, decay_updates=4, final_rate_fraction=0.2)
    np.testing.assert_allclose(rates(warm, 9), [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2], rtol=1e-5)
    np.testing.assert_allclose(rates(OptimizerOptions(learning_rate=0.5), 3), [0.5] * 3, rtol=1e-5)
    assert rates(OptimizerOptions(learning_rate=0.0), 2) == [0.0, 0.0]


def test_gradients_are_clipped_by_their_common_norm():
    """(3, 4, 12) has norm 13; at most 1.3 are left, a tenth of each, whatever leaf it lies in."""
    gradients = {"a": np.asarray([3.0, 4.0], np.float32), "b": np.asarray([[12.0]], np.float32)}
    optimizer = OptimizerOptions(max_gradient_norm=1.3, adam_b1=0.9).make()
    with jax.numpy_dtype_promotion("standard"):
        _, state = jax.jit(lambda tree: optimizer.update(tree, optimizer.init(tree), tree))(gradients)
    moments = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(np.concatenate([moments["a"], moments["b"][0]]), 0.1 * 0.1 * np.asarray([3, 4, 12]), rtol=1e-5)


def test_the_reported_norm_is_that_before_clipping():
    first = reference().updates[0]
    assert first["gradient_norm"] > 2 * OPTIMIZER.max_gradient_norm


# --- state ---


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy whose memory a device array would share with it, rather than copy."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    copy = memory[offset:offset + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_a_restored_learner_continues_bit_by_bit():
    learner = shared_learner()
    run = run_step(learner, stale_batch())
    run.state["leaves"] = [aligned(leaf) for leaf in run.state["leaves"]]
    assert bits(run.state["leaves"]) == bits(reference().state["leaves"])  # a run is a function of its inputs
    metrics = learner.step(stale_batch(), version=3)
    after = learner.state()
    assert after["num_steps"] == 2
    fresh = make_learner(make_mesh(2, 2, 2))
    fresh.restore(run.state)
    assert bits(fresh.state()["leaves"]) == bits(run.state["leaves"])
    assert fresh.train_state.params["embedding"].sharding.spec == PartitionSpec("tensor", "fsdp")
    learner.restore(run.state)
    assert learner.num_steps == 1
    again = learner.step(stale_batch(), version=3)
    assert bits(again) == bits(metrics) and bits(learner.state()["leaves"]) == bits(after["leaves"])
    assert bits(run.state["leaves"]) == bits(reference().state["leaves"])  # a state is no view of what is donated


def test_another_seed_takes_rows_in_another_order():
    tokens = [update["tokens"] for update in reference().updates]
    order = [np.random.default_rng((0, 0, epoch)).permutation(ROWS) for epoch in range(2)]
    counts = stale_batch().loss_mask.sum(axis=1)
    assert tokens == [counts[half].sum() for epoch in order for half in np.split(epoch, 2)]
    other = [counts[half].sum() for half in np.split(np.random.default_rng((1, 0, 0)).permutation(ROWS), 2)]
    assert tokens[:2] != other


# --- refusals ---


@pytest.mark.parametrize(("rows", "minibatches", "microbatches", "error", "message"), [
    (30, 4, 1, ValueError, "a batch of 30 rows does not divide into 4 minibatches x 1 microbatches; change --groups-per-step"),
    (32, 2, 3, ValueError, "a batch of 32 rows does not divide into 2 minibatches x 3 microbatches"),
    (32, 2, 4, ShardingError, "the batch of 32 .*: 4 rows do not divide over data x fsdp = 1 x 8 = 8 devices"),
])
def test_rows_that_do_not_divide_are_refused(rows, minibatches, microbatches, error, message):
    with pytest.raises(error, match=message):
        check_batch_rows(rows, StepOptions(minibatches=minibatches, microbatches=microbatches), make_mesh(1, 8, 1))


def test_a_step_refuses_such_a_batch_before_it_does_anything():
    learner = shared_learner()
    learner.start(PARAMS)
    before = bits(learner.train_state)
    batch = jax.tree.map(lambda array: array[:31], stale_batch())
    with pytest.raises(ValueError, match="a batch of 31 rows does not divide into 2 minibatches"):
        learner.step(batch, version=0)
    assert bits(learner.train_state) == before and learner.num_steps == 0


def test_a_model_that_does_not_divide_over_the_mesh_is_refused():
    odd = Model(dataclasses.replace(MODEL.config, d_model=12))
    with pytest.raises(ShardingError, match="'embed' has size 12"):
        Learner(odd, make_mesh(1, 8, 1), optimizer=OPTIMIZER, objective=OBJECTIVE, step=STEP, publish_dtype=Precision.FLOAT32,
                temperature=TEMPERATURE)
