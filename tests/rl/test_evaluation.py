"""Evaluation: the fixed held-out instances, once each, whatever the slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig
from models.tokenizer import ByteTokenizer
from models.transformer import Model
from rl.engine import PolicyEngine
from rl.environments import EnvironmentName, FrozenLakeOptions, Split, make
from rl.evaluation import REQUEST_OFFSET, evaluate
from rl.requests import Request, SampledTokens, Swap
from rl.sampler import Sampler
from tests.tiny import BYTES, CONTRACT

MODEL = Model(ModelConfig(vocab_size=259, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8,
                          max_length=32))
LAKE = FrozenLakeOptions(max_turns=3, frozen_probability=0.5)  # many holes, so that episodes end early
MAKE = functools.partial(make, EnvironmentName.FROZEN_LAKE, Split.HELD_OUT, LAKE)
EPISODES = 11


@pytest.fixture(scope="module")
def engine():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return PolicyEngine(MODEL, mesh, slots=4, max_steps=4, temperature=1.0, seed=7)


def params_of(seed):
    """A policy that all but always moves, so that episodes differ: the rows of `LDRU` stand out in the tied embedding."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), jnp.float32), MODEL.shapes)
    moves = ByteTokenizer().encode("LDRU")
    return {**params, "embedding": params["embedding"].at[moves].multiply(20.0)}


def make_sampler(engine, seed=4, version=4):
    sampler = Sampler(engine, lengths=(32,), refill_rows=2, swap=Swap.REPREFILL)
    sampler.publish(version, params_of(seed))
    return sampler


def run(engine, *, greedy, seed=4, version=4):
    return evaluate(make_sampler(engine, seed, version), MAKE, BYTES, num_episodes=EPISODES, greedy=greedy, max_length=32)


def told(evaluation):
    return [(trajectory.tokens.tolist(), trajectory.sampler_logprobs.tobytes(), trajectory.reward, trajectory.finish_reason)
            for trajectory in evaluation.trajectories]


@pytest.mark.parametrize("greedy", [True, False])
def test_each_held_out_instance_is_played_once(engine, greedy):
    evaluation = run(engine, greedy=greedy)
    assert [t.request_id for t in evaluation.trajectories] == [REQUEST_OFFSET + seed for seed in range(EPISODES)]
    prompts = [MAKE().reset(seed) for seed in range(EPISODES)]
    assert len(set(prompts)) > 1
    for trajectory, prompt in zip(evaluation.trajectories, prompts, strict=True):
        assert trajectory.tokens[: 1 + len(prompt)].tolist() == [ByteTokenizer.bos, *prompt.encode()]
        assert trajectory.versions == (4,)
        assert trajectory.loss_mask.any() != greedy
        assert 1 <= len(trajectory.turn_starts) <= 3
    assert len({len(trajectory) for trajectory in evaluation.trajectories}) > 1  # so that slots free up at different times


def test_greedy_is_the_same_again_whatever_the_version_and_the_noise(engine):
    first = run(engine, greedy=True)
    assert told(first) == told(run(engine, greedy=True, version=9))
    sampled = run(engine, greedy=False)
    assert told(sampled) == told(run(engine, greedy=False))  # the noise is of the request ids, which are the same
    assert told(first) != told(sampled)
    assert told(first) != told(run(engine, greedy=True, seed=5))


def test_a_sampler_may_evaluate_again(engine):
    sampler = make_sampler(engine)
    first, again = (evaluate(sampler, MAKE, BYTES, num_episodes=EPISODES, greedy=True, max_length=32) for _ in range(2))
    assert told(first) == told(again)
    assert sampler.num_running == sampler.num_waiting == 0


class Calculator:
    """A sampler of one slot that knows some sums."""

    max_steps, num_running, num_waiting, is_paused = 1, 0, 0, False

    def __init__(self, answers):
        self.answers, self.waiting = answers, []

    def submit(self, request):
        self.waiting.append(request)

    def step(self, num_steps):
        request = self.waiting.pop(0)
        tokens = ByteTokenizer().encode(self.answers[ByteTokenizer().decode(request.prompt[1:])])
        zeros = np.zeros_like(tokens)
        return [SampledTokens(request.request_id, tokens, zeros.astype(np.float32), zeros, zeros, True, CONTRACT)]

    def release(self, request_id):
        pass


def test_means_are_over_episodes():
    make_environment = functools.partial(make, EnvironmentName.ARITHMETIC, Split.HELD_OUT)
    answers, lengths = {}, []
    for seed in range(5):
        environment = make_environment()
        prompt = environment.reset(seed)
        answers[prompt] = environment.expert(np.random.default_rng(0)) if seed in (1, 3) else "no"
        lengths.append(1 + len(prompt) + len(answers[prompt]))
    evaluation = evaluate(Calculator(answers), make_environment, BYTES, num_episodes=5, greedy=True, max_length=100)
    assert evaluation.success == evaluation.reward == 0.4
    assert evaluation.tokens == np.mean(lengths)
    assert [trajectory.success for trajectory in evaluation.trajectories] == [False, True, False, True, False]


def busy(sampler):
    sampler.submit(Request(0, 0, np.array([1], np.int32), 4))
    sampler.step(1)


def waiting(sampler):
    sampler.submit(Request(0, 0, np.array([1], np.int32), 4))


@pytest.mark.parametrize(("prepare", "message"), [
    (busy, "1 running and 0 waiting requests; wanted an idle one"),
    (waiting, "0 running and 1 waiting requests; wanted an idle one"),
    (Sampler.pause, "0 running and 0 waiting requests, paused; wanted an idle one, not paused"),
])
def test_a_sampler_that_could_not_finish_is_refused(engine, prepare, message):
    sampler = make_sampler(engine)
    prepare(sampler)
    with pytest.raises(ValueError, match=message):
        evaluate(sampler, MAKE, BYTES, num_episodes=1, greedy=True, max_length=32)


def test_no_episodes_are_refused(engine):
    with pytest.raises(ValueError, match="evaluation of 0 episodes, wanted at least 1"):
        evaluate(make_sampler(engine), MAKE, BYTES, num_episodes=0, greedy=True, max_length=32)
