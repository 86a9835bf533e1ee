"""Warm start: imitate the scripted expert until the policy speaks the task's alphabet.

Reinforcement learning needs a policy that earns a reward now and then. The result is frozen as version 0 before it begins.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from models.conversation import Conversation
from models.sharding import batch_sharding, check_rows, num_batch_shards, replicated
from models.transformer import Model, Params
from rl import processes
from rl.batching import bucket_length, pad_rows
from rl.environments import Environment
from rl.learner import LearnerState, Microbatches, OptimizerOptions, make_update, state_shardings
from rl.logprobs import score


@dataclasses.dataclass(frozen=True)
class WarmStartOptions:
    """Supervised learning on the expert's episodes."""

    episodes: int = 2_000
    updates: int = 100  # 0: no warm start
    rows: int = 64  # episodes an update
    microbatches: int = 1
    learning_rate: float = 2e-3


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One expert episode; arrays [T]. `loss_mask` is True where the expert wrote."""

    tokens: np.ndarray
    loss_mask: np.ndarray


def demonstrate(environment: Environment, conversation: Conversation, seed: int, rng: np.random.Generator, *,
                max_length: int) -> Demonstration:
    """Plays one episode with the environment's expert, cut at `max_length` tokens."""
    tokens, mask = [], []
    said, done = conversation.first(environment.reset(seed)), False
    while not done and len(tokens) < max_length:
        action = environment.expert(rng)
        for ids, is_expert in ((said, False), (conversation.turn(action), True)):
            tokens.extend(ids.tolist())
            mask.extend([is_expert] * len(ids))
        step = environment.step(action)
        done = step.done
        if not done:
            said = conversation.reply(step.observation, last_token=tokens[-1])
    return Demonstration(np.asarray(tokens[:max_length], np.int32), np.asarray(mask[:max_length], bool))


def check_warm_rows(options: WarmStartOptions, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError when an update's rows do not divide into microbatches and devices, or there are too few episodes."""
    if options.rows > options.episodes or options.rows % options.microbatches:
        raise ValueError(f"warm start: {options.rows} rows an update of {options.episodes} episodes in {options.microbatches} "
                         "microbatches; wanted at most as many rows as episodes, and a whole number a microbatch")
    check_rows("a warm-start microbatch", options.rows // options.microbatches, mesh)


def warm_start(model: Model, params: Params, mesh: jax.sharding.Mesh, make_environment: Callable[[], Environment],
               conversation: Conversation, options: WarmStartOptions, *, seed: int, lengths: tuple[int, ...],
               progress: Callable[[int, float], None] = lambda update, loss: None) -> Params:
    """Trains master weights (float32) on expert episodes.

    Args:
      model: the structure.
      params: where to begin; donated.
      mesh: the learner's.
      make_environment: with training instances.
      conversation: of the policy with them.
      options: how long and how fast.
      seed: of instances, the expert's choices and the order.
      lengths: length buckets; all rows use the smallest that holds the longest episode.
      progress: told the update's number and its loss in nats a token.

    Returns:
      The trained weights.
    """
    if not options.updates:
        return params
    check_warm_rows(options, mesh)
    model = dataclasses.replace(model, activation_sharding=batch_sharding(mesh))
    rng = np.random.default_rng((seed, 1))
    demonstrations = [demonstrate(make_environment(), conversation, int(rng.integers(2**31)), rng, max_length=lengths[-1])
                      for _ in range(options.episodes)]
    length = bucket_length(max(len(demonstration.tokens) for demonstration in demonstrations), lengths)
    tokens = pad_rows([d.tokens for d in demonstrations], length, fill=0)
    masks = pad_rows([d.loss_mask for d in demonstrations], length, fill=False)
    valid = np.arange(length)[None, :] < np.asarray([len(d.tokens) for d in demonstrations])[:, None]

    optimizer = OptimizerOptions(learning_rate=options.learning_rate, warmup_updates=options.updates // 10,
                                 decay_updates=options.updates - options.updates // 10).make()

    def imitation_loss(params, microbatch):
        rows, is_valid, mask, weights = microbatch
        logprobs = score(model, params, rows, is_valid, temperature=1.0).logprobs
        return -jnp.sum(jnp.where(mask, weights[:, None] * logprobs, 0.0)), ({}, ())

    update = make_update(imitation_loss, optimizer, Microbatches(options.microbatches, num_batch_shards(mesh)))
    shardings = state_shardings(model, mesh, optimizer)
    whole = replicated(mesh)
    update = jax.jit(update, donate_argnums=0, out_shardings=(shardings, whole, whole, whole, whole))
    state = LearnerState(params=params, optimizer=jax.jit(optimizer.init, out_shardings=shardings.optimizer)(params))
    for number in range(options.updates):
        rows = rng.choice(options.episodes, options.rows, replace=False)
        weights = np.full(options.rows, 1 / max(int(masks[rows].sum()), 1), np.float32)
        minibatch = processes.from_whole((tokens[rows], valid[rows], masks[rows], weights), batch_sharding(mesh))
        state, loss, _, _, _ = update(state, minibatch)
        progress(number + 1, float(loss))
    return state.params
