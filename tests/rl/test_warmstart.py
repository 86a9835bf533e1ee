"""Warm start: episodes laid out as rollouts lay them out, a loss on the expert's tokens only, and the same weights again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig
from models.conversation import read_conversation
from models.sharding import ShardingError, parameter_shardings
from models.tokenizer import ByteTokenizer
from models.transformer import Model
from rl.environments import EnvironmentName, NoExpert, Split, base, make
from rl.logprobs import score
from rl.requests import SampledTokens
from rl.rollout import Rollouts
from rl.warmstart import WarmStartOptions, demonstrate, warm_start
from tests import chat
from tests.families import FAMILIES
from tests.tiny import BYTES, CONTRACT

MODEL = Model(ModelConfig(vocab_size=264, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, head_dim=8,
                          max_length=88))


def mesh_of(data=1, fsdp=1, tensor=1):
    return Mesh(np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def make_params(mesh=None):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(scale=0.2, size=leaf.shape).astype(np.float32), MODEL.shapes)
    return jax.device_put(params, parameter_shardings(MODEL.axes, MODEL.shapes, mesh or mesh_of()))


def arithmetic():
    return make(EnvironmentName.ARITHMETIC, Split.TRAIN)


def train(mesh=None, *, make_environment=arithmetic, seed=4, **options):
    """Weights and losses. As a rule every episode is in every update."""
    mesh, losses = mesh or mesh_of(), []
    options = WarmStartOptions(**{"episodes": 8, "updates": 20, "rows": 8, "microbatches": 2, "learning_rate": 2e-2, **options})
    params = warm_start(MODEL, make_params(mesh), mesh, make_environment, BYTES, options, seed=seed, lengths=(16, 88),
                        progress=lambda update, loss: losses.append((update, loss)))
    return params, losses


@pytest.fixture(scope="module")
def trained():
    return train()  # each run compiles for seconds


# --- demonstrations ---


class Quoting:
    """A sampler whose policy says given texts, one a turn."""

    def __init__(self, texts):
        self.texts = list(texts)

    def submit(self, request):
        self.request_id = request.request_id

    def extend(self, request_id, tokens):
        pass

    def release(self, request_id):
        pass

    def step(self, num_steps):
        tokens = ByteTokenizer().encode(self.texts.pop(0))
        zeros = np.zeros_like(tokens)
        return [SampledTokens(self.request_id, tokens, zeros.astype(np.float32), zeros, zeros, True, CONTRACT)]


class Remembering(base.Environment):
    """Another environment, and what its expert said."""

    def __init__(self, environment):
        self.environment, self.said = environment, []

    def reset(self, seed):
        return self.environment.reset(seed)

    def step(self, action):
        return self.environment.step(action)

    def expert(self, rng):
        self.said.append(self.environment.expert(rng))
        return self.said[-1]

    _begin = _advance = _instance_state = _restore_instance = None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_demonstration_is_laid_out_like_a_rollout(family, seed):
    environment = Remembering(make(family, Split.TRAIN))
    demonstration = demonstrate(environment, BYTES, seed, np.random.default_rng(seed), max_length=200)
    rollouts = Rollouts(Quoting(environment.said), functools.partial(make, family, Split.TRAIN), BYTES, max_length=200)
    rollouts.start(0, [0], seed=seed)
    finished = [trajectory for _ in environment.said for trajectory in rollouts.step(1).finished]
    np.testing.assert_array_equal(demonstration.tokens, finished[0].tokens)
    np.testing.assert_array_equal(demonstration.loss_mask, finished[0].loss_mask)
    assert demonstration.loss_mask.sum() == len("".join(environment.said)) > 0
    assert demonstration.tokens.dtype == np.int32 and demonstration.loss_mask.dtype == bool


@pytest.mark.parametrize("max_length", [1, 5, 8, 20])
def test_a_demonstration_is_cut_at_the_length_it_may_have(max_length):
    environment = make(EnvironmentName.FROZEN_LAKE, Split.TRAIN)
    whole = demonstrate(environment, BYTES, 3, np.random.default_rng(5), max_length=200)
    cut = demonstrate(environment, BYTES, 3, np.random.default_rng(5), max_length=max_length)
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:max_length])
    np.testing.assert_array_equal(cut.loss_mask, whole.loss_mask[:max_length])


def test_in_a_chat_the_expert_closes_its_turns(tmp_path):
    """What it says and the token that closes a turn are learnt; what the template writes around them is not."""
    conversation = read_conversation(chat.write_folder(tmp_path, chat.CHATML), vocab_size=400, stop=None)
    environment = Remembering(make(EnvironmentName.FROZEN_LAKE, Split.TRAIN))
    demonstration = demonstrate(environment, conversation, 3, np.random.default_rng(5), max_length=2_000)
    text = chat.train_tokenizer().decode(demonstration.tokens.tolist(), skip_special_tokens=False)
    turns = text.split("<|im_start|>assistant\n")
    assert len(turns) == 1 + len(environment.said) > 2
    assert all(turn.startswith(f"{said}<|im_end|>") for said, turn in zip(environment.said, turns[1:], strict=True))
    assert turns[-1] == f"{environment.said[-1]}<|im_end|>"
    learnt = demonstration.tokens[demonstration.loss_mask]
    assert np.sum(learnt == chat.IM_END) == len(environment.said)
    assert conversation.tokenizer.decode(learnt) == "".join(f"{said}\ufffd" for said in environment.said)


# --- training ---


@jax.jit
def score_once(params, tokens, valid):
    return score(MODEL, params, tokens, valid, temperature=1.0).logprobs


def first_loss(seed):
    """Of an update with all episodes: nats a token, over the tokens that the expert wrote and no others."""
    rng = np.random.default_rng((seed, 1))
    total, count = 0.0, 0
    for _ in range(8):
        demonstration = demonstrate(arithmetic(), BYTES, int(rng.integers(2**31)), rng, max_length=88)
        length = len(demonstration.tokens)
        tokens = np.pad(demonstration.tokens, (0, 16 - length))[None]
        logprobs = np.asarray(score_once(make_params(), tokens, np.arange(16)[None] < length))[0, :length]
        total += float(logprobs[demonstration.loss_mask].sum())
        count += int(demonstration.loss_mask.sum())
    return -total / count


def test_the_loss_is_the_mean_over_the_experts_tokens_and_falls(trained):
    params, losses = trained
    assert [update for update, _ in losses] == list(range(1, 21))
    assert losses[0][1] == pytest.approx(first_loss(seed=4), abs=1e-5)
    assert losses[-1][1] < losses[0][1] - 1.0
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_the_same_seed_trains_the_same_weights(trained):
    params, losses = train()
    assert losses == trained[1]
    for left, right in zip(jax.tree.leaves(params), jax.tree.leaves(trained[0]), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
def test_a_sharded_run_with_another_seed_compiles_once_and_computes_the_same_loss():
    compiled, mesh = [], mesh_of(fsdp=2)

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        params, losses = train(mesh, seed=5, updates=3)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled.count("jit(update)") == 1
    assert losses[0][1] == pytest.approx(first_loss(seed=5), abs=1e-5)
    assert abs(first_loss(seed=5) - first_loss(seed=4)) > 1e-3
    shardings = parameter_shardings(MODEL.axes, MODEL.shapes, mesh)
    assert all(jax.tree.leaves(jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, params, shardings)))


def test_no_updates_leave_the_weights_alone():
    params = make_params()
    assert warm_start(MODEL, params, mesh_of(), lambda: None, BYTES, WarmStartOptions(updates=0), seed=0, lengths=(16,)) is params


# --- refusals ---


@pytest.mark.parametrize(("mesh", "options", "error", "message"), [
    ((2, 4, 1), {"rows": 8}, ShardingError, "a warm-start microbatch: 4 rows do not divide over data x fsdp = 2 x 4 = 8 devices"),
    ((1, 1, 1), {"microbatches": 3}, ValueError, "warm start: 8 rows an update of 8 episodes in 3 microbatches"),
    ((1, 1, 1), {"episodes": 7}, ValueError, "warm start: 8 rows an update of 7 episodes"),
])
def test_rows_that_do_not_divide_are_refused(mesh, options, error, message):
    with pytest.raises(error, match=message):
        train(mesh_of(*mesh), **options)


class Silent(base.Environment):
    """Has no expert."""

    stop, max_turns, max_turn_tokens, max_observation_tokens = None, 1, 1, 1

    def _begin(self, seed):
        return "?"

    _advance = _instance_state = _restore_instance = None


def test_an_environment_without_an_expert_is_refused():
    with pytest.raises(NoExpert, match="Silent has no scripted expert"):
        train(make_environment=Silent)
