"""The learner: float32 master weights, sharded, and the gradient steps on them.

One learner step takes a batch through `epochs` passes of `minibatches` optimizer steps each, with the proximal logprobs frozen;
each optimizer step accumulates `microbatches` gradients that sum to the minibatch's own. What the loss computes with is not
the master weights but the *published parameters*, their rounding to the publish type: the policy that is trained is the policy
that samples. Gradients pass straight through the rounding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from models.config import Precision
from models.sharding import batch_sharding, check_rows, num_batch_shards, parameter_shardings, placed, replicated
from models.transformer import Model, Params
from rl import processes
from rl.batching import batch_shapes
from rl.logprobs import score
from rl.loss_metrics import Metrics, combine_metrics, finalize_metrics
from rl.losses import LossInputs, MinibatchStatistics, denominator_weights, loss_terms, minibatch_statistics
from rl.objective import Objective
from rl.types import Batch

AnchorFunction = Callable[..., jax.Array]
"""An old-logprob source that acts inside the step: (logprobs, sampler_logprobs, policy_versions, learner_version) to [B, T]."""


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """AdamW (arXiv 1711.05101) after clipping by the global norm; the rate warms up linearly, then decays linearly."""

    learning_rate: float = 3e-4
    warmup_updates: int = 0
    decay_updates: int | None = None  # updates until the rate has decayed; None keeps it constant after the warmup
    final_rate_fraction: float = 0.1  # of the learning rate, at the end of the decay
    adam_b1: float = 0.9
    adam_b2: float = 0.99
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0

    def make(self) -> optax.GradientTransformation:
        rate = self.learning_rate
        schedule = optax.constant_schedule(rate)
        if self.decay_updates is not None:
            schedule = optax.linear_schedule(rate, rate * self.final_rate_fraction, self.decay_updates)
        if self.warmup_updates:
            warmup = optax.linear_schedule(rate / (self.warmup_updates + 1), rate, self.warmup_updates)
            schedule = optax.join_schedules([warmup, schedule], [self.warmup_updates])
        return optax.chain(optax.clip_by_global_norm(self.max_gradient_norm),
                           optax.adamw(schedule, self.adam_b1, self.adam_b2, self.adam_epsilon, weight_decay=self.weight_decay))


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a learner step is divided."""

    minibatches: int = 1
    epochs: int = 1
    microbatches: int = 1
    remat: bool = False


@chex.dataclass(frozen=True)
class LearnerState:
    """Master weights (float32) and the optimizer's moments, sharded alike. Donated by each update."""

    params: Params
    optimizer: optax.OptState


class Forward(NamedTuple):
    """What the forward inside an optimizer step computed."""

    rows: np.ndarray  # int64 [b]: which rows of this process's batch
    logprobs: np.ndarray  # float32 [b, T] nats


class StepMetrics(NamedTuple):
    """Metrics of a learner step, and of each of its optimizer steps in order; `forwards` if they were asked for."""

    step: Metrics
    updates: list[Metrics]
    forwards: list[Forward]


def publish_cast(params: Params, precision: Precision) -> Params:
    """Master weights to published parameters: the single place where the policy is rounded."""
    return jax.tree.map(lambda leaf: _rounded(leaf, precision).astype(precision.dtype), params)


def published_shapes(model: Model, mesh: jax.sharding.Mesh, precision: Precision) -> Params:
    """What `Learner.published` returns, as `jax.ShapeDtypeStruct` with shardings."""
    shardings = parameter_shardings(model.axes, model.shapes, mesh)
    return jax.tree.map(lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, precision.dtype, sharding=sharding),
                        model.shapes, shardings)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def policy_parameters(params: Params, precision: Precision) -> Params:
    """The published parameters' values, still in float32, with the identity as gradient."""
    return jax.tree.map(lambda leaf: _rounded(leaf, precision), params)


policy_parameters.defvjp(lambda params, precision: (policy_parameters(params, precision), None),
                         lambda precision, _, cotangents: (cotangents,))


def _rounded(leaf: jax.Array, precision: Precision) -> jax.Array:
    """Rounds by `reduce_precision`: XLA may drop a cast to bfloat16 and back ("excess precision"), but never this."""
    info = jnp.finfo(precision.dtype)
    return jax.lax.reduce_precision(leaf, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def state_shardings(model: Model, mesh: jax.sharding.Mesh, optimizer: optax.GradientTransformation) -> LearnerState:
    """Where master weights and moments lie: a moment lies where its weight lies."""
    parameters = parameter_shardings(model.axes, model.shapes, mesh)
    shapes = jax.eval_shape(optimizer.init, model.shapes)
    moments = optax.tree_utils.tree_map_params(optimizer, lambda _, sharding: sharding, shapes, parameters,
                                               transform_non_params=lambda _: replicated(mesh))
    return LearnerState(params=parameters, optimizer=moments)


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """How the rows of a minibatch are divided: each microbatch takes its rows from every shard, so no row changes its device."""

    number: int
    num_shards: int

    def split(self, rows):
        """[B, ...] to [microbatches, b, ...], for every array of a tree."""
        def of(array: jax.Array) -> jax.Array:
            shape = (self.num_shards, self.number, array.shape[0] // (self.num_shards * self.number), *array.shape[1:])
            return array.reshape(shape).swapaxes(0, 1).reshape(self.number, -1, *array.shape[1:])

        return jax.tree.map(of, rows)

    def join(self, rows):
        """The inverse of `split`."""
        def of(array: jax.Array) -> jax.Array:
            shape = (self.number, self.num_shards, -1, *array.shape[2:])
            return array.reshape(shape).swapaxes(0, 1).reshape(-1, *array.shape[2:])

        return jax.tree.map(of, rows)


def make_update(loss: Callable, optimizer: optax.GradientTransformation, microbatches: Microbatches, *,
                prepare: Callable = lambda params, minibatch: minibatch) -> Callable:
    """(state, minibatch) to (state, loss, sums, gradient norm, rows), for any tree of [B, ...] arrays as minibatch.

    `prepare(params, minibatch)` sees all rows, and returns the tree of [B, ...] arrays to be divided. `loss(params, microbatch)`
    returns its share of the minibatch's loss, and (sums for `combine_metrics`, a tree of arrays [b, ...] with the microbatch's
    rows); `rows` are those of the whole minibatch, in its order.
    """
    def update(state: LearnerState, minibatch):
        minibatch = prepare(state.params, minibatch)

        def accumulate(gradients, microbatch):
            (share, (sums, rows)), new = jax.value_and_grad(loss, has_aux=True)(state.params, microbatch)
            return jax.tree.map(jnp.add, gradients, new), (share, sums, rows)

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradients, (shares, stacked, rows) = jax.lax.scan(accumulate, zeros, microbatches.split(minibatch))
        parts = [jax.tree.map(lambda leaf, index=index: leaf[index], stacked) for index in range(microbatches.number)]
        sums = functools.reduce(combine_metrics, parts)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int count
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        state = LearnerState(params=optax.apply_updates(state.params, updates), optimizer=optimizer_state)
        return state, jnp.sum(shares), sums, optax.tree.norm(gradients), microbatches.join(rows)

    return update


class Learner:
    """Trains a model on a mesh.

    Args:
      model: the decoder's structure.
      mesh: of axes data, fsdp and tensor.
      optimizer, step: the options above.
      objective: what is maximised.
      publish_dtype: what the policy is rounded to.
      temperature: that of sampling.
      anchor: an old-logprob source that acts inside the step, in place of the batch's proximal logprobs.
      seed: of the order of rows in minibatches.
    """

    def __init__(self, model: Model, mesh: jax.sharding.Mesh, *, optimizer: OptimizerOptions, objective: Objective,
                 step: StepOptions, publish_dtype: Precision, temperature: float, anchor: AnchorFunction | None = None,
                 seed: int = 0):
        objective.check()
        self._mesh, self.objective, self._step_options, self._seed = mesh, objective, step, seed
        self._rows = batch_sharding(mesh)
        self._model = dataclasses.replace(model, remat=step.remat, activation_sharding=self._rows)
        self._temperature, self._anchor, self._publish_dtype = temperature, anchor, publish_dtype
        self._optimizer = optimizer.make()
        whole = replicated(mesh)
        self.shardings = state_shardings(model, mesh, self._optimizer)
        self.state_shapes = placed(jax.eval_shape(self._fresh, model.shapes), self.shardings)
        self._microbatches = Microbatches(step.microbatches, num_batch_shards(mesh))
        update = make_update(self._loss, self._optimizer, self._microbatches, prepare=self._prepare)
        self._update = jax.jit(update, donate_argnums=0, out_shardings=(self.shardings, whole, whole, whole, self._rows))
        self.published_shapes = published_shapes(model, mesh, publish_dtype)
        self._publish = jax.jit(functools.partial(publish_cast, precision=publish_dtype), out_shardings=self.shardings.params)
        self._start = jax.jit(self._fresh, out_shardings=self.shardings)
        # A device array may share memory with the numpy array it came from; what is donated must not.
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=self.shardings)
        self.train_state: LearnerState | None = None
        self.num_steps = 0

    def start(self, params: Params) -> None:
        """Takes over master weights (float32) with a fresh optimizer. They are copied: the learner donates its own."""
        self.train_state = self._start(params)
        self.num_steps = 0

    def published(self) -> Params:
        """The present policy: master weights cast to the publish type, in buffers of their own."""
        return self._publish(self.train_state.params)

    def step(self, batch: Batch, *, version: int, before_update: Callable[[np.ndarray], None] | None = None) -> StepMetrics:
        """One learner step on a host batch; `version` is the learner's policy version. Results are dispatched, not awaited.

        Each of several processes gives its share of the rows; a minibatch takes equally many from all.

        Args:
          batch: of numpy arrays.
          version: of the learner.
          before_update: called with the rows of each minibatch before its optimizer step; then the forwards are fetched as well.

        Raises:
          ShardingError, ValueError: the rows do not divide into minibatches, microbatches and devices.
        """
        options = self._step_options
        check_batch_rows(len(batch.tokens) * processes.num_processes(), options, self._mesh)
        updates, forwards = [], []
        for epoch in range(options.epochs):
            order = np.random.default_rng((self._seed, self.num_steps, epoch)).permutation(len(batch.tokens))
            for rows in np.split(order, options.minibatches):
                if before_update is not None:
                    before_update(rows)
                minibatch = jax.tree.map(lambda array, rows=rows: np.asarray(array)[rows], batch)
                minibatch, versions = processes.from_rows((minibatch, np.full(len(rows), version, np.int32)), self._rows)
                with jax.transfer_guard("disallow"):
                    self.train_state, loss, sums, norm, logprobs = self._update(self.train_state, (minibatch, versions))
                updates.append((loss, sums, norm))
                if before_update is not None:
                    forwards.append(Forward(rows, processes.own_rows(logprobs)))
        self.num_steps += 1
        losses, sums, norms = zip(*updates, strict=True)
        whole = {**finalize_metrics(functools.reduce(combine_metrics, sums)), "loss": sum(losses) / len(updates),
                 "gradient_norm": sum(norms) / len(updates)}
        each = [{**finalize_metrics(part), "loss": loss, "gradient_norm": norm} for loss, part, norm in updates]
        return StepMetrics(whole, each, forwards)

    def lower_update(self, rows: int, length: int) -> jax.stages.Lowered:
        """The program of an optimizer step on a minibatch of [rows, length], for whoever wants to know it before it runs."""
        batch = batch_shapes(rows, length, self._rows, has_reference=self.objective.needs_reference)
        versions = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=self._rows)
        return self._update.lower(self.state_shapes, (batch, versions))

    def state(self) -> dict:
        """Master weights and moments as numpy arrays in a fixed order, and the step count.

        Collective with several processes; every process then has the global arrays.
        """
        return {"num_steps": self.num_steps, "leaves": [processes.whole(leaf) for leaf in jax.tree.leaves(self.train_state)]}

    def restore(self, state: dict) -> None:
        """Takes a `state` back, sharded as this learner shards.

        Raises:
          ValueError: the arrays are those of another model or optimizer; nothing has changed.
        """
        shapes = [leaf.shape for leaf in jax.tree.leaves(self.state_shapes)]
        found = [leaf.shape for leaf in state["leaves"]]
        if found != shapes:
            raise ValueError(f"the saved learner has arrays of shapes {found}, wanted {shapes}; "
                             "restore it with the config of its run")
        shardings, structure = jax.tree.flatten(self.shardings)
        leaves = processes.from_whole(state["leaves"], shardings)
        self.train_state = self._copy(jax.tree.unflatten(structure, leaves))
        self.num_steps = state["num_steps"]

    def _fresh(self, params: Params) -> LearnerState:
        params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
        return LearnerState(params=params, optimizer=self._optimizer.init(params))

    def _inputs(self, params: Params, batch: Batch, versions: jax.Array) -> LossInputs:
        """The forward of some rows, and what the loss takes beside it."""
        policy = policy_parameters(params, self._publish_dtype)
        logprobs, entropy = score(self._model, policy, batch.tokens, batch.valid, temperature=self._temperature)
        proximal = batch.proximal_logprobs
        if self._anchor is not None:
            proximal = self._anchor(jax.lax.stop_gradient(logprobs), batch.sampler_logprobs, batch.policy_versions,
                                    versions[:, None])
        return LossInputs(logprobs, proximal, batch.sampler_logprobs, batch.advantages, batch.loss_mask, entropy,
                          batch.reference_logprobs)

    def _prepare(self, params: Params, minibatch) -> tuple[Batch, jax.Array, jax.Array, MinibatchStatistics | None]:
        """Weights by the denominator; and what a token depends on beyond its row, which takes a forward of its own."""
        statistics = None
        if self.objective.needs_batch:
            inputs = jax.lax.map(lambda part: self._inputs(params, *part), self._microbatches.split(minibatch))
            statistics = minibatch_statistics(self.objective, self._microbatches.join(inputs))
        weights = denominator_weights(self.objective, minibatch[0].loss_mask, statistics, longest=self._model.config.max_length)
        return *minibatch, weights, statistics

    def _loss(self, params: Params, microbatch) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        batch, versions, weights, statistics = microbatch
        inputs = self._inputs(params, batch, versions)
        share, sums = loss_terms(self.objective, inputs, weights=weights, statistics=statistics)
        return share, (sums, inputs.logprobs)


def check_batch_rows(rows: int, options: StepOptions, mesh: jax.sharding.Mesh) -> None:
    """Raises when a batch does not divide into minibatches, microbatches and devices."""
    parts = options.minibatches * options.microbatches
    division = f"{options.minibatches} minibatches x {options.microbatches} microbatches"
    if rows % parts:
        raise ValueError(f"a batch of {rows} rows does not divide into {division}; "
                         "change --groups-per-step, --group-size, --minibatches or --microbatches")
    check_rows(f"a microbatch of the batch of {rows} (in {division})", rows // parts, mesh)
