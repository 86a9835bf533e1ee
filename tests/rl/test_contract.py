"""The sampling contract: it travels with the tokens, and a learner takes no others than those it was set up for."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from launch.build import Foundation
from models.config import Precision
from rl.admission import Admission, DropReason, StalePolicy
from rl.engine import PolicyEngine
from rl.objective import Objective
from rl.old_logprobs import Anchored, SourceName
from rl.requests import Request, Swap
from rl.rollout import Rollouts
from rl.sampler import Sampler
from rl.training import Training
from rl.types import ContractError, FinishReason, SamplingContract, Trajectory, check_contract
from tests.rl.test_rollout import MODEL, Parrot, ScriptedSampler, params_of, say, through_a_file
from tests.tiny import BYTES, CONTRACT, tiny_config

OTHERS = {
    "temperature": (0.7, "temperature 0.7, wanted 1.0"),
    "compute_dtype": ("bfloat16", "compute_dtype 'bfloat16', wanted 'float32'"),
    "swap": ("keep_kv", "swap 'keep_kv', wanted 'reprefill'"),
    "greedy": (True, "greedy True, wanted False"),
    "top_k": (5, "top_k 5, wanted 0"),
    "top_p": (0.9, "top_p 0.9, wanted 1.0"),
}
"""Another value of each field, and what is said of it."""


def trajectory_of(contract, request_id=0, reward=1.0):
    """Three tokens of a prompt, two that were sampled."""
    sampled = np.array([False] * 3 + [True] * 2)
    return Trajectory(request_id=request_id, group_id=0, tokens=np.arange(5, dtype=np.int32), loss_mask=sampled,
                      sampler_logprobs=np.where(sampled, np.float32(-1), np.float32("nan")),
                      policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                      context_versions=np.where(sampled, 0, -1).astype(np.int32), turn_starts=np.array([3], np.int32),
                      reward=reward, success=False, finish_reason=FinishReason.ENVIRONMENT, contract=contract)


class Nothing:
    """A room without anything to do, which notes what it is called for."""

    def __init__(self, **facts):
        self.calls = []
        self.__dict__.update(facts)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append(name)


def training_of(contract):
    """Training in rooms that are empty but for the contract, and the rooms."""
    def anchor(trajectories, version, live):
        return Anchored(trajectories, [trajectory.sampler_logprobs for trajectory in trajectories], [{} for _ in trajectories])

    rooms = types.SimpleNamespace(
        contract=contract, source=Nothing(anchor=anchor, exact=False, name=SourceName.SAMPLER), probe=Nothing(),
        decomposition=Nothing(is_on=False), ledger=Nothing(), ring=Nothing(digests={}),
        learner=Nothing(objective=Objective()), reference=Nothing())
    return Training(rooms, num_rows=2, lengths=(8,)), rooms


# --- the learner's side ---


def test_the_fields_of_a_contract_are_all_asked_for_here():
    assert set(OTHERS) == {field.name for field in dataclasses.fields(SamplingContract)}


def test_what_was_sampled_as_wanted_is_trained():
    training, rooms = training_of(CONTRACT)
    batch, facts = training.assemble([trajectory_of(CONTRACT, i, reward=float(i)) for i in range(2)], 1, 0, {})
    assert batch.loss_mask.sum() == facts["tokens_trained"] == 4 and rooms.ledger.calls == ["record_step"]
    assert np.all(batch.advantages[batch.loss_mask] != 0)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_what_was_sampled_otherwise_is_refused_before_anything_is_done_with_it(name, position):
    value, words = OTHERS[name]
    training, rooms = training_of(CONTRACT)
    trajectories = [trajectory_of(CONTRACT, 40), trajectory_of(CONTRACT, 41, reward=0.0)]
    trajectories[position] = dataclasses.replace(trajectories[position], contract=dataclasses.replace(CONTRACT, **{name: value}))
    with pytest.raises(ContractError) as error:
        training.assemble(trajectories, 1, 0, {})
    assert str(error.value) == (f"trajectory {40 + position} was sampled with {words}: its ratios would mean something else; "
                                "sample it as the learner scores, or set the learner up for it")
    assert not rooms.ledger.calls and not rooms.source.calls


@pytest.mark.parametrize("name", OTHERS)
def test_a_learner_that_is_set_up_for_it_takes_it(name):
    contract = dataclasses.replace(CONTRACT, **{name: OTHERS[name][0]})
    training, _ = training_of(contract)
    assert training.assemble([trajectory_of(contract, i) for i in range(2)], 1, 0, {})
    with pytest.raises(ContractError, match=f"{name} .*, wanted "):
        training.assemble([trajectory_of(CONTRACT, i) for i in range(2)], 1, 0, {})


def test_what_does_not_say_how_it_was_sampled_is_refused():
    training, _ = training_of(CONTRACT)
    with pytest.raises(ContractError, match="trajectory 7 does not say how it was sampled; wanted SamplingContract") as error:
        training.assemble([trajectory_of(CONTRACT), trajectory_of(None, 7)], 1, 0, {})
    assert "\n" not in str(error.value) and "temperature=1.0" in str(error.value)


def test_all_that_differs_is_said_in_one_line():
    other = SamplingContract(**{name: value for name, (value, _) in OTHERS.items()})
    with pytest.raises(ContractError) as error:
        check_contract(3, other, CONTRACT)
    assert "; ".join(words for _, words in (OTHERS[field.name] for field in dataclasses.fields(other))) in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5, "swap": Swap.KEEP_KV}])
def test_a_configuration_gives_both_sides_the_same_contract(changes):
    config = tiny_config()
    config = dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, **changes))
    foundation = Foundation.of(config)
    assert foundation.sampler_factory()().contract == foundation.contract
    if not changes:
        assert foundation.contract == CONTRACT


def test_the_contract_names_what_the_sampler_computes_in():
    config = tiny_config()
    model = dataclasses.replace(config.model, compute_dtype=Precision.BFLOAT16)
    foundation = Foundation.of(dataclasses.replace(config, model=model))
    expected = dataclasses.replace(CONTRACT, compute_dtype="bfloat16")
    assert foundation.sampler_factory()().contract == foundation.contract == expected


def test_a_truncating_sampler_does_not_match_its_learner():
    config = tiny_config()
    foundation = Foundation.of(dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, top_k=5)))
    with pytest.raises(ContractError, match="top_k 5, wanted 0"):
        check_contract(0, foundation.sampler_factory()().contract, foundation.contract)


# --- the sampler's side ---


@pytest.mark.parametrize(("changes", "is_trainable"), [
    ({}, True), ({"temperature": 0.5}, True), ({"compute_dtype": "bfloat16"}, True), ({"swap": "keep_kv"}, True),
    ({"greedy": True}, False), ({"top_k": 1}, False), ({"top_k": 10_000}, False), ({"top_p": 0.999}, False),
])
def test_tokens_that_were_not_drawn_from_the_policy_are_never_trained(changes, is_trainable):
    contract = dataclasses.replace(CONTRACT, **changes)

    class Sampled(ScriptedSampler):
        def step(self, num_steps):
            return [part._replace(contract=contract) for part in super().step(num_steps)]

    rollouts = Rollouts(Sampled({0: [say("ab", turn_over=False), say("c"), say("!")]}), Parrot, BYTES, max_length=100)
    rollouts.start(9, [0], seed=3)
    assert rollouts.partial()[0].contract is None  # nothing was sampled yet
    rollouts.step(1)
    [partial] = rollouts.partial()
    [finished] = [trajectory for _ in range(2) for trajectory in rollouts.step(1).finished]
    assert contract.is_trainable == is_trainable
    for trajectory, count in ((partial, 2), (finished, 4)):
        assert trajectory.contract == contract and trajectory.loss_mask.sum() == count * is_trainable
        assert (trajectory.policy_versions >= 0).sum() == count


def test_a_group_of_nothing_but_greedy_episodes_is_dropped():
    admission = Admission(1, 2, max_staleness=0, publish_every=1, stale_policy=StalePolicy.DROP)
    rollouts = Rollouts(ScriptedSampler({i: [say("!")] for i in range(2)}), Parrot, BYTES, max_length=100)
    admission.start(0, [0, 1])
    rollouts.start(0, [0, 1], seed=3, greedy=True)
    for trajectory in rollouts.step(1).finished:
        admission.finish(trajectory)
    assert admission.take(0) is None and admission.dropped[DropReason.UNTRAINABLE] == 1


@pytest.mark.parametrize("contract", [None, CONTRACT, SamplingContract(0.7, "bfloat16", "keep_kv", True, 5, 0.9)])
def test_a_trajectory_keeps_its_contract_in_a_file(contract):
    state = through_a_file(trajectory_of(contract).state())
    assert Trajectory.from_state(state).contract == contract


def test_an_episode_under_way_keeps_its_contract_in_a_file():
    scripts = {0: [say("ab", turn_over=False), say("!")]}
    sampler = ScriptedSampler(scripts)
    rollouts = Rollouts(sampler, Parrot, BYTES, max_length=100)
    rollouts.start(9, [0], seed=3, greedy=True)
    rollouts.step(1)
    restored = Rollouts(ScriptedSampler({}), Parrot, BYTES, max_length=100)
    restored.restore(through_a_file(rollouts.state()))
    [trajectory] = restored.partial()
    assert trajectory.contract == dataclasses.replace(CONTRACT, greedy=True) and not trajectory.loss_mask.any()


@pytest.fixture(scope="module")
def truncating():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return PolicyEngine(MODEL, mesh, slots=4, max_steps=4, temperature=0.7, top_k=3, top_p=0.9, seed=7)


@pytest.mark.parametrize("swap", Swap)
def test_tokens_say_how_they_were_sampled(truncating, swap):
    sampler = Sampler(truncating, lengths=(88,), refill_rows=4, swap=swap)
    sampler.publish(0, params_of(0))
    for i, greedy in enumerate((False, True)):
        sampler.submit(Request(i, 0, np.arange(9, dtype=np.int32), 9, greedy, deadline=2))
    contracts = [{part.request_id: (part.contract, part.expired) for part in sampler.step(2)} for _ in range(2)]
    for i, greedy in enumerate((False, True)):
        expected = SamplingContract(temperature=0.7, compute_dtype="float32", swap=swap.value, greedy=greedy, top_k=3, top_p=0.9)
        assert [spoken[i] for spoken in contracts] == [(expected, False), (expected, True)]


def test_an_episode_of_a_truncating_sampler_is_played_and_not_trained(truncating):
    sampler = Sampler(truncating, lengths=(88,), refill_rows=4, swap=Swap.REPREFILL)
    sampler.publish(0, params_of(0))
    rollouts = Rollouts(sampler, Parrot, BYTES, max_length=88)
    rollouts.start(0, [0, 1], seed=3)
    finished = []
    while rollouts.num_running:
        finished += rollouts.step(4).finished
    assert [trajectory.contract for trajectory in finished] == [sampler.contract] * 2
    assert all(trajectory.reward > 0 and not trajectory.loss_mask.any() for trajectory in finished)
    training, _ = training_of(dataclasses.replace(CONTRACT, temperature=0.7))
    with pytest.raises(ContractError, match="top_k 3, wanted 0; top_p 0.9, wanted 1.0"):
        training.assemble(finished, 1, 0, {})
