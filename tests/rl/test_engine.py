"""The engine keeps JetStream's contract, and samples what a naive forward over the whole context would."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig, Precision
from models.sharding import ShardingError
from models.transformer import Model
from rl import drawing
from rl.engine import PolicyEngine, engine_api, token_utils

MODEL = Model(ModelConfig(vocab_size=60, vocab_multiple=8, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2,
                          head_dim=4, max_length=32))
ROOM, SLOTS, MAX_STEPS, TEMPERATURE, SEED, STOP = 32, 4, 8, 0.7, 3, 17
WIDTH = 16  # of padded prompts; each other width would be compiled
PROMPTS = [np.array(prompt, np.int32) for prompt in ([1, 2, 3, 4, 5], [9], range(12), [20, 21, 22])]


def mesh_of(data=1, fsdp=1, tensor=1):
    return Mesh(np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def make_engine(mesh=None, **changes):
    options = {"slots": SLOTS, "max_steps": MAX_STEPS, "temperature": TEMPERATURE, "seed": SEED, "stop_tokens": (STOP,)}
    return PolicyEngine(MODEL, mesh or mesh_of(), **{**options, **changes})


def make_params(seed=0):
    """Large weights, so that the context shows in the logits; from numpy, because the model's own take long to compile."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.4, size=leaf.shape), leaf.dtype), MODEL.shapes)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture(scope="module")
def policy(engine, params):
    return engine.load_params(params, 5)


@functools.partial(jax.jit, static_argnames="vocabulary")
def reference_step(params, tokens, length, request_id, seed, temperature, vocabulary):
    """The next token after `length` tokens of [ROOM], by a forward over all of them and the noise that the design promises.

    The vocabulary is of one stretch, so that the second number decides alone.
    """
    hidden = MODEL.hidden(params, tokens[None])[0, length - 1]
    log_probabilities = jax.nn.log_softmax(MODEL.logits(params, hidden) / temperature)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request_id), length)
    assert vocabulary <= drawing.STRETCH
    drawn = jnp.searchsorted(jnp.cumsum(jnp.exp(log_probabilities)), jax.random.uniform(key, (2,))[1], side="right")
    return drawn, jnp.argmax(log_probabilities), jax.nn.log_softmax(MODEL.logits(params, hidden)), log_probabilities


def reference(params, prompt, request_id, steps, *, greedy=False, seed=SEED):
    """Tokens and logprobs, until the stop token."""
    context = prompt.tolist()
    logprobs = []
    while len(logprobs) < steps and STOP not in context[len(prompt):]:
        padded = jnp.asarray(context + [0] * (ROOM - len(context)), jnp.int32)
        drawn, likeliest, of_policy, distribution = reference_step(params, padded, len(context), request_id, seed, TEMPERATURE,
                                                                   MODEL.config.padded_vocab_size)
        context.append(int(likeliest if greedy else drawn))
        logprobs.append(float((of_policy if greedy else distribution)[context[-1]]))
    return context[len(prompt):], logprobs


def pad(tokens, width=WIDTH):
    return np.pad(np.asarray(tokens, np.int32), (0, width - len(tokens)))


def prefill(engine, policy, prompt, **facts):
    return engine.prefill(params=policy, padded_tokens=pad(prompt), true_length=len(prompt), **facts)


def fill(engine, policy, requests, state=None):
    """A decode state with {slot: (prompt, facts)} in it."""
    state = engine.init_decode_state() if state is None else state
    for slot, (prompt, facts) in requests.items():
        state = engine.insert(prefill(engine, policy, prompt, **facts), state, slot)
    return state


def decode(engine, policy, state, calls):
    """The state after decode calls of so many steps each, and {slot: (tokens, logprobs, versions)}."""
    taken = {slot: ([], [], []) for slot in range(SLOTS)}
    for steps in calls:
        state, sampled = engine.decode(policy, state, steps)
        sampled = jax.device_get(sampled)
        for slot, lists in taken.items():
            for collected, array in zip(lists, (sampled.tokens, sampled.logprobs, sampled.versions), strict=True):
                collected.extend(array[slot][sampled.valid[slot]].tolist())
    return state, taken


# --- the contract ---


def test_the_contract_alone_samples_a_request(engine, policy, params):
    """Nothing here but what engine_api.Engine declares."""
    assert isinstance(engine, engine_api.Engine)
    assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length) == (SLOTS, 1, ROOM)
    assert engine.mesh.size == 1 and engine.colocated_cpus is None
    expected, _ = reference(params, PROMPTS[0], 0, ROOM - 5)
    prefix = engine.prefill(params=policy, padded_tokens=jnp.asarray(pad(PROMPTS[0])), true_length=5)
    prefix = jax.device_put(prefix, engine.get_prefix_destination_sharding())
    state = engine.insert(prefix, engine.init_decode_state(), slot=2)
    tokens = []
    for step in range(len(expected)):
        state, result = engine.generate(policy, state)
        result.copy_to_host_async()
        slot = result.convert_to_numpy().get_result_at_slot(2)
        assert slot.tokens.shape == slot.valid.shape == (1, 1)
        assert slot.valid.item() == 1
        assert slot.lengths.tolist() == [step + 1]  # of the answer, which JetStream holds against the request's max_tokens
        assert result.convert_to_numpy().get_result_at_slot(0).valid.item() == 0  # an empty slot says nothing
        tokens.append(slot.tokens.item())
    assert tokens == expected
    assert engine.generate(policy, state)[1].convert_to_numpy().get_result_at_slot(2).valid.item() == 0  # the turn is over


def test_jetstream_detokenizes_what_generate_returns(engine, policy, params):
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    state = engine.init_decode_state()
    for request_id in (4, 6):  # one after another in one slot; JetStream, not the engine, ends them after three tokens
        state = fill(engine, policy, {1: (PROMPTS[2], {"request_id": request_id})}, state)
        pieces, complete = [], np.zeros(1, bool)
        while not complete.all():
            state, result = engine.generate(policy, state)
            samples, complete = token_utils.process_result_tokens(tokenizer, 1, 3, result.convert_to_numpy(), complete)
            pieces.extend(samples[0].token_ids)
        assert pieces == reference(params, PROMPTS[2], request_id, 3)[0]


def test_the_tokenizer_pads_as_jetstream_asks(engine):
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    tokens, true_length = tokenizer.encode("hé", is_bos=True, max_prefill_length=16, jax_padding=False)
    assert tokens.tolist() == [tokenizer.bos_id, 104, 195, 169] + [tokenizer.pad_id] * 12 and true_length == 4
    assert tokenizer.encode("hé", is_bos=False, max_prefill_length=16)[1] == 3
    assert tokenizer.decode([104, 195, 169]) == "hé"
    assert token_utils.text_tokens_to_str([tokenizer.decode([token]) for token in (104, 195, 169)]) == "hé"  # as it streams
    assert tokenizer.stop_tokens == {tokenizer.eos_id, tokenizer.pad_id}


@pytest.mark.parametrize(("room", "padded"), [(8, 16), (16, 16), (17, 32), (ROOM, ROOM), (88, 128)])
def test_prompts_are_padded_to_a_length_that_jetstream_knows(room, padded):
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, max_length=room))
    engine = PolicyEngine(model, mesh_of(), slots=SLOTS, max_steps=1, temperature=1.0, seed=0)
    assert (engine.room, engine.max_prefill_length) == (room, padded)
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    assert tokenizer.encode("a" * (padded - 1), max_prefill_length=engine.max_prefill_length)[0].shape == (padded,)


def test_generate_is_one_step_of_decode(engine, policy):
    requests = {0: (PROMPTS[0], {"request_id": 1}), 3: (PROMPTS[2], {"request_id": 2})}
    generated, decoded = fill(engine, policy, requests), fill(engine, policy, requests)
    for _ in range(4):
        generated, result = engine.generate(policy, generated)
        decoded, sampled = engine.decode(policy, decoded, 1)
        data = np.asarray(result.data)
        np.testing.assert_array_equal(data[:, 1], sampled.valid[:, 0])
        np.testing.assert_array_equal(data[data[:, 1] == 1, 0], np.asarray(sampled.tokens)[data[:, 1] == 1, 0])
    for left, right in zip(jax.tree.leaves(generated), jax.tree.leaves(decoded), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(("prompt", "cut"), [(PROMPTS[2], 1), (PROMPTS[2], 11), (np.arange(20), 4), (np.arange(20), WIDTH)])
def test_an_existing_prefix_goes_on_as_if_prefilled_at_once(engine, policy, params, prompt, cut):
    begun = prefill(engine, policy, prompt[:cut])
    prefix = prefill(engine, policy, prompt[cut:], existing_prefix=begun, request_id=8)
    _, taken = decode(engine, policy, engine.insert(prefix, engine.init_decode_state(), 0), [8, 2])
    tokens, logprobs = reference(params, prompt, 8, 10)
    assert taken[0][0] == tokens
    np.testing.assert_allclose(taken[0][1], logprobs, atol=1e-5)


def test_a_prefix_may_be_extended_twice_and_the_first_stays_whole(engine, policy, params):
    """As JetStream's prefix cache would: a prefix is used again, and its padding outgrows the slot."""
    prompt = PROMPTS[2]
    first = prefill(engine, policy, prompt[:3])
    longer = prefill(engine, policy, prompt[3:7], existing_prefix=first)
    whole = prefill(engine, policy, prompt[7:], existing_prefix=longer)
    state = engine.insert(whole, engine.init_decode_state(), 0)
    state = engine.insert(first, state, 1)
    _, taken = decode(engine, policy, state, [6])
    assert taken[0][0] == reference(params, prompt, 0, 6)[0]
    assert taken[1][0] == reference(params, prompt[:3], 0, 6)[0]


# --- against the naive reference ---


def test_ragged_slots_match_a_full_forward_for_each_token(engine, policy, params):
    requests = {slot: (prompt, {"request_id": 10 + slot, "greedy": slot == 3}) for slot, prompt in enumerate(PROMPTS)}
    _, taken = decode(engine, policy, fill(engine, policy, requests), [3, 1, 8, 8])
    for slot, (prompt, facts) in requests.items():
        tokens, logprobs = reference(params, prompt, facts["request_id"], 20, greedy=facts["greedy"])
        assert taken[slot][0] == tokens
        np.testing.assert_allclose(taken[slot][1], logprobs, atol=1e-5)
        assert set(taken[slot][2]) == {5}  # the version of the policy
    assert max(len(taken[slot][0]) for slot in range(SLOTS)) == 20


@pytest.mark.parametrize("calls", [[1] * 8, [8], [3, 5]])
@pytest.mark.parametrize("slot", [0, 3])
def test_a_request_samples_the_same_wherever_and_whenever(engine, policy, params, slot, calls):
    """Another slot, other neighbours, submitted later, other calls: the noise knows only seed, request id and position."""
    neighbours = {other: (PROMPTS[(other + slot) % 4], {"request_id": 100 * slot + other}) for other in range(SLOTS)}
    state = engine.free_resource(fill(engine, policy, neighbours), slot)
    state, _ = decode(engine, policy, state, [2 + slot])
    state = fill(engine, policy, {slot: (PROMPTS[0], {"request_id": 42})}, state)
    _, taken = decode(engine, policy, state, calls)
    tokens, logprobs = reference(params, PROMPTS[0], 42, 8)
    assert taken[slot][0] == tokens
    np.testing.assert_allclose(taken[slot][1], logprobs, atol=1e-5)


def test_other_request_ids_sample_otherwise(engine, policy):
    requests = {slot: (PROMPTS[0], {"request_id": slot}) for slot in range(SLOTS)}
    _, taken = decode(engine, policy, fill(engine, policy, requests), [8])
    assert len({tuple(tokens) for tokens, _, _ in taken.values()}) == SLOTS


def test_a_mesh_of_eight_devices_samples_the_same(engine, policy, params):
    mesh = mesh_of(2, 2, 2)
    sharded = make_engine(mesh)
    sharded_policy = sharded.load_params(params, 5)
    prefix = prefill(sharded, sharded_policy, PROMPTS[2], request_id=2)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(prefix.replace(cache=None)))
    for leaf in jax.tree.leaves(prefix.cache):  # half the heads on every device
        shards = {(shard.index[1].start, shard.data.shape[:2]) for shard in leaf.addressable_shards}
        assert shards == {(0, (1, 1)), (1, (1, 1))} and len(leaf.addressable_shards) == 8
    assert jax.tree.map(lambda leaf: leaf.sharding, prefix) == sharded.get_prefix_destination_sharding()
    state = fill(sharded, sharded_policy, {slot: (prompt, {"request_id": slot}) for slot, prompt in enumerate(PROMPTS)})
    assert state.cache.keys[0].addressable_shards[0].data.shape == (1, 1, 4, ROOM)  # a slot and a kv head a device
    state = sharded.append(sharded_policy, state, np.array([3, 1, SLOTS]), tokens=np.tile(PROMPTS[0], (3, 1)),
                           counts=np.array([2, 5, 1], np.int32), remaining=np.full(3, 8, np.int32))
    _, taken = decode(sharded, sharded_policy, state, [8])
    contexts = [PROMPTS[0], np.append(PROMPTS[1], PROMPTS[0]), PROMPTS[2], np.append(PROMPTS[3], PROMPTS[0][:2])]
    for slot, context in enumerate(contexts):
        tokens, logprobs = reference(params, context, slot, 8)
        assert taken[slot][0] == tokens
        np.testing.assert_allclose(taken[slot][1], logprobs, atol=1e-5)


# --- beyond the contract ---


def test_a_stop_token_ends_the_turn_and_is_kept(engine, policy, params):
    answers = [reference(params, PROMPTS[0], request_id, 8)[0] for request_id in range(100)]
    request_id, expected = next((index, answer) for index, answer in enumerate(answers) if answer[-1] == STOP and len(answer) < 8)
    state, taken = decode(engine, policy, fill(engine, policy, {0: (PROMPTS[0], {"request_id": request_id})}), [8])
    assert taken[0][0] == expected
    assert int(state.remaining[0]) == 0


def test_decoding_ends_when_every_slot_is_idle_and_says_how_far_it_got(engine, policy):
    requests = {slot: (PROMPTS[1], {"request_id": slot, "remaining": 2 + slot}) for slot in range(2)}
    state = fill(engine, policy, requests)
    state, sampled = engine.decode(policy, state, 8)
    valid = np.asarray(sampled.valid)
    longest = valid.sum(axis=1).max()
    assert longest <= 3 and np.asarray(sampled.num_steps).tolist() == [longest] * SLOTS
    assert not engine.decode(policy, state, 8)[1].num_steps.any()


def test_remaining_is_what_the_turn_may_sample_and_never_more_than_fits(engine, policy):
    prompt = PROMPTS[2]
    requests = {0: (prompt, {"remaining": 4}), 1: (prompt, {"remaining": 99}), 3: (prompt, {})}
    assert np.asarray(fill(engine, policy, requests).remaining).tolist() == [4, ROOM - len(prompt), 0, ROOM - len(prompt)]


def test_idle_and_other_slots_stay_as_they_are(engine, policy):
    requests = {slot: (prompt, {"request_id": slot, "remaining": 0 if slot == 1 else 9}) for slot, prompt in enumerate(PROMPTS)}
    state = fill(engine, policy, requests)

    def rows(state, slots):
        return [np.asarray(leaf)[slots].copy() for leaf in jax.tree.leaves(state)]

    before = rows(state, [1])
    state, _ = engine.decode(policy, state, 4)
    for left, right in zip(before, rows(state, [1]), strict=True):
        np.testing.assert_array_equal(left, right)
    before = rows(state, [0, 2])
    state = engine.append(policy, state, np.array([1, 3, SLOTS]), tokens=np.ones((3, 8), np.int32),
                          counts=np.array([3, 1, 2], np.int32), remaining=np.full(3, 5, np.int32))
    state = engine.free_resource(state, 3)
    state = engine.insert(prefill(engine, policy, PROMPTS[0]), state, 3)
    zeros = np.zeros(3, np.int32)
    state = engine.refill(policy, state, np.array([1, SLOTS, SLOTS], np.int32), contexts=np.ones((3, WIDTH), np.int32),
                          counts=zeros + 4, request_ids=zeros, remaining=zeros + 3, greedy=np.zeros(3, bool))
    for left, right in zip(before, rows(state, [0, 2]), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("span", [None, 20])
def test_append_goes_on_like_a_prefill_of_everything(engine, policy, params, span):
    requests = {0: (PROMPTS[0], {"request_id": 30, "remaining": 3}), 2: (PROMPTS[1], {"request_id": 31})}
    state = fill(engine, policy, requests)
    state, taken = decode(engine, policy, state, [2])
    state = engine.free_resource(state, 2)
    written = np.zeros((2, 8), np.int32)
    written[1, :4], written[0, :1] = [40, 41, 42, 43], [50]
    state = engine.append(policy, state, np.array([2, 0]), tokens=written, counts=np.array([1, 4], np.int32),
                          remaining=np.array([5, 6], np.int32), span=span)
    _, after = decode(engine, policy, state, [8])
    for slot, prompt, new, steps in ((0, PROMPTS[0], [40, 41, 42, 43], 6), (2, PROMPTS[1], [50], 5)):
        context = np.array([*prompt, *taken[slot][0], *new], np.int32)
        tokens, logprobs = reference(params, context, 30 + slot // 2, steps)
        assert after[slot][0] == tokens
        np.testing.assert_allclose(after[slot][1], logprobs, atol=1e-5)
    assert not after[1][0] and not after[3][0]


def test_refill_goes_on_like_a_prefill_under_the_new_weights(engine, policy):
    new_params = make_params(1)
    new_policy = engine.load_params(new_params, 6)
    state = fill(engine, policy, {0: (PROMPTS[0], {"request_id": 1}), 1: (PROMPTS[3], {"request_id": 2})})
    state, taken = decode(engine, policy, state, [3])
    contexts = [np.append(PROMPTS[0], taken[0][0]), np.append(PROMPTS[3], taken[1][0])]
    state = engine.refill(new_policy, state, np.array([1, SLOTS, 0], np.int32),
                          contexts=np.stack([pad(contexts[1]), pad([]), pad(contexts[0])]),
                          counts=np.array([len(contexts[1]), 1, len(contexts[0])], np.int32),
                          request_ids=np.array([2, 0, 1], np.int32), remaining=np.array([5, 9, 6], np.int32),
                          greedy=np.array([False, False, True]))
    _, after = decode(engine, new_policy, state, [8])
    for slot, request_id, steps, greedy in ((0, 1, 6, True), (1, 2, 5, False)):
        tokens, logprobs = reference(new_params, contexts[slot].astype(np.int32), request_id, steps, greedy=greedy)
        assert after[slot][0] == tokens and set(after[slot][2]) == {6}
        np.testing.assert_allclose(after[slot][1], logprobs, atol=1e-5)


def test_a_group_shares_one_prefix(engine, policy, params):
    slots = np.array([3, 0, SLOTS], np.int32)
    state = engine.insert_group(prefill(engine, policy, PROMPTS[2]), engine.init_decode_state(), slots,
                                request_ids=np.array([60, 61, 62], np.int32), remaining=np.array([5, 7, 9], np.int32),
                                greedy=np.array([False, True, False]))
    _, taken = decode(engine, policy, state, [8])
    assert taken[3][0] == reference(params, PROMPTS[2], 60, 5)[0]
    assert taken[0][0] == reference(params, PROMPTS[2], 61, 7, greedy=True)[0]
    assert not taken[1][0] and not taken[2][0]


def test_a_loaded_policy_outlives_the_published_arrays(engine):
    params = make_params()
    policy = engine.load_params(params, 0)
    expected = reference(params, PROMPTS[0], 0, 5)[0]
    jax.tree.map(lambda leaf: leaf.delete(), params)  # as donation does
    _, taken = decode(engine, policy, fill(engine, policy, {0: (PROMPTS[0], {"remaining": 5})}), [5])
    assert taken[0][0] == expected


def test_bfloat16_parameters_are_computed_with_in_the_compute_type(engine, params):
    published = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), published)
    policy = engine.load_params(published, 0)
    _, taken = decode(engine, policy, fill(engine, policy, {0: (PROMPTS[0], {"request_id": 3})}), [8])
    tokens, logprobs = reference(rounded, PROMPTS[0], 3, 8)
    assert taken[0][0] == tokens
    np.testing.assert_allclose(taken[0][1], logprobs, atol=1e-5)


@pytest.mark.parametrize("scale", [pytest.param(1.0, marks=pytest.mark.slow), 30.0])
def test_bfloat16_never_gives_a_positive_logprob(scale):
    """With weights so large that most tokens are certain, too."""
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, compute_dtype=Precision.BFLOAT16))
    engine = PolicyEngine(model, mesh_of(), slots=SLOTS, max_steps=MAX_STEPS, temperature=TEMPERATURE, seed=SEED)
    policy = engine.load_params(jax.tree.map(lambda leaf: scale * leaf, make_params()), 0)
    state = fill(engine, policy, {slot: (prompt, {"request_id": slot}) for slot, prompt in enumerate(PROMPTS)})
    _, taken = decode(engine, policy, state, [8, 8])
    logprobs = np.concatenate([logprobs for _, logprobs, _ in taken.values()])
    assert len(logprobs) > 40 and np.isfinite(logprobs).all() and (logprobs <= 0).all()
    assert scale == 1.0 or (logprobs == 0).mean() > 0.5


@contextlib.contextmanager
def compilations():
    """A list that grows by one with each program that XLA compiles."""
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_each_program_is_compiled_once(engine):
    """Slots, lengths, request ids, numbers of steps and versions are data; only the padded length is a shape."""
    rng = np.random.default_rng(0)

    def one_round(number):
        policy = engine.load_params(make_params(number), number)
        state = fill(engine, policy, {slot: (rng.integers(60, size=rng.integers(1, 16)), {"request_id": 10 * number + slot})
                                      for slot in range(SLOTS)})
        state, _ = engine.decode(policy, state, 1 + number % MAX_STEPS)
        state = engine.append(policy, state, rng.permutation(SLOTS)[:3], tokens=rng.integers(60, size=(3, 8)).astype(np.int32),
                              counts=rng.integers(9, size=3).astype(np.int32), remaining=np.full(3, number, np.int32))
        engine.free_resource(state, number % SLOTS)

    one_round(0)
    with compilations() as compiled:
        for number in range(1, 20):
            one_round(number)
    assert not compiled
    with compilations() as compiled:
        jax.jit(lambda x: x + 1.5)(1.0)
    assert compiled  # the listener listens


# --- refusals ---


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": 0.0}, "temperature is 0.0, wanted more than 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_p": 0.0}, r"top_p is 0.0, wanted a probability mass in \(0, 1\]"),
    ({"top_p": 1.5}, "top_p is 1.5"),
    ({"top_k": -1}, "top_k is -1, wanted a number of tokens, or 0 for all"),
])
def test_a_meaningless_distribution_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**changes)


def test_slots_that_do_not_divide_over_the_mesh_are_refused():
    with pytest.raises(ShardingError, match="sampler slots: 6 rows do not divide over data x fsdp = 2 x 2"):
        make_engine(mesh_of(2, 2, 1), slots=6)


def test_a_vocabulary_that_does_not_divide_over_the_mesh_is_refused():
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, vocab_size=61, vocab_multiple=1))
    with pytest.raises(ShardingError, match="axis 'vocab' has size 61"):
        PolicyEngine(model, mesh_of(1, 1, 2), slots=SLOTS, max_steps=1, temperature=1.0, seed=0)


@pytest.mark.parametrize(("true_length", "width", "message"), [
    (0, 16, "prefill of 0 tokens padded to 16; wanted at least 1"),
    (17, 16, "prefill of 17 tokens padded to 16"),
    (ROOM, 64, f"a context of {ROOM} tokens leaves no room to sample: a slot holds {ROOM}"),
])
def test_a_prefill_that_does_not_fit_is_refused(engine, policy, true_length, width, message):
    with pytest.raises(ValueError, match=message):
        engine.prefill(params=policy, padded_tokens=np.ones(width, np.int32), true_length=true_length)


def test_an_existing_prefix_counts_too(engine, policy):
    prefix = prefill(engine, policy, np.ones(WIDTH))
    with pytest.raises(ValueError, match=f"a context of {2 * WIDTH} tokens leaves no room"):
        prefill(engine, policy, np.ones(WIDTH), existing_prefix=prefix)


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_does_not_exist_is_refused(engine, policy, slot):
    prefix = prefill(engine, policy, PROMPTS[0])
    with pytest.raises(ValueError, match=f"insert into slot {slot}, wanted 0 to {SLOTS - 1}"):
        engine.insert(prefix, engine.init_decode_state(), slot)


@pytest.mark.parametrize("steps", [0, MAX_STEPS + 1])
def test_more_steps_than_a_call_holds_are_refused(engine, policy, steps):
    with pytest.raises(ValueError, match=f"decode of {steps} steps, wanted 1 to {MAX_STEPS}"):
        engine.decode(policy, engine.init_decode_state(), steps)
