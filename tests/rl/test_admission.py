"""Admission: the bound holds, credit always comes back, nobody is lost, and age is judged when a step is taken."""

import json
import pathlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rl.admission import Admission, Counts, DropReason, StalePolicy
from rl.types import NO_POLICY, FinishReason, Trajectory

CAPACITY = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "admission_capacity.json").read_text())


def make_trajectory(request_id, group_id, versions=(0,), *, reward=1.0, failed=False, trained=True) -> Trajectory:
    """A prompt token, then one sampled token per version."""
    policy_versions = np.array([NO_POLICY, *versions], np.int32)
    return Trajectory(
        request_id=request_id, group_id=group_id, tokens=np.arange(len(policy_versions), dtype=np.int32),
        loss_mask=(policy_versions >= 0) & trained,
        sampler_logprobs=np.where(policy_versions >= 0, -1.0, np.nan).astype(np.float32), policy_versions=policy_versions,
        context_versions=policy_versions, turn_starts=np.array([1], np.int32), reward=reward, success=bool(reward),
        finish_reason=FinishReason.FAILED if failed else FinishReason.ENVIRONMENT,
    )  # fmt: skip


def make_admission(groups_per_step=2, group_size=2, **options) -> Admission:
    defaults = {"max_staleness": 1, "publish_every": 1, "stale_policy": StalePolicy.DROP}
    return Admission(groups_per_step, group_size, **{**defaults, **options})


def members_of(group_id, group_size=2):
    return [group_id * group_size + member for member in range(group_size)]


def run_group(admission, group_id, versions=(0,), *, group_size=2, rewards=None):
    """Starts a group and finishes all of it; rewards default to 0, 1, 2..."""
    members = members_of(group_id, group_size)
    admission.start(group_id, members)
    for index, request_id in enumerate(members):
        reward = float(index) if rewards is None else rewards[index]
        admission.finish(make_trajectory(request_id, group_id, versions, reward=reward))


def ids(groups):
    return [[member.request_id for member in members] for members in groups]


def plain(value):
    """A state with arrays as lists, to compare two of them; NaN equals NaN as text."""
    return json.dumps(value, default=lambda array: array.tolist(), sort_keys=True)


# Numbers.


@pytest.mark.parametrize("trace", CAPACITY["traces"], ids=lambda trace: f"batch{trace['batch']}-stale{trace['max_staleness']}")
def test_credit_equals_areal_capacity(trace):
    # AReaL also caps what runs at once, which is the sampler's business here.
    admission = make_admission(trace["batch"], max_staleness=trace["max_staleness"])
    next_group, in_flight, version = 0, [], 0
    for event, _, running, accepted, _, capacity in trace["events"]:
        if event == "submit":
            admission.start(next_group, members_of(next_group))
            in_flight.append(next_group)
            next_group += 1
        elif event == "accept":
            group_id = in_flight.pop(0)
            for index, request_id in enumerate(members_of(group_id)):
                admission.finish(make_trajectory(request_id, group_id, [version], reward=float(index)))
        elif event == "reject":
            admission.drop(in_flight.pop(0), DropReason.TIMEOUT)
        else:
            assert admission.take(version) is not None
            version += 1
        assert (admission.in_flight, admission.queued + admission.trained) == (running, accepted)
        assert min(trace["max_concurrent"] - running, admission.credit(version)) == capacity


@pytest.mark.parametrize(
    ("max_staleness", "publish_every", "learner_steps", "expected"),
    # (max_staleness + learner_steps // publish_every + 1) * 2 groups * publish_every - 2 groups * learner_steps
    [(0, 1, 0, 2), (0, 1, 3, 2), (2, 1, 0, 6), (2, 1, 3, 6), (1, 4, 0, 16), (1, 4, 3, 10), (1, 4, 4, 16), (0, 4, 3, 2)],
)
def test_credit_by_hand(max_staleness, publish_every, learner_steps, expected):
    admission = make_admission(max_staleness=max_staleness, publish_every=publish_every)
    for step in range(learner_steps):
        assert admission.credit(step) >= 2
        for group_id in (2 * step, 2 * step + 1):
            run_group(admission, group_id, [step // publish_every])
        assert admission.take(step // publish_every) is not None
    assert admission.credit(learner_steps) == expected


def test_a_start_without_credit_is_refused():
    admission = make_admission(max_staleness=0)
    run_group(admission, 0)
    admission.start(1, members_of(1))
    assert admission.credit(0) == 0
    with pytest.raises(ValueError, match="no credit; 2 in flight, queued or trained"):
        admission.start(2, members_of(2))


@pytest.mark.parametrize("reason", [reason for reason in DropReason if reason is not DropReason.STALE])
def test_dropping_everything_for_ever_starves_nothing(reason):
    # More than (max_staleness + 1) * batch trajectories, which is all the credit there is without refunds.
    admission = make_admission(max_staleness=1, drop_uniform=True)
    for group_id in range(40):
        assert admission.credit(0) == 4
        if reason is DropReason.UNIFORM:
            run_group(admission, group_id, rewards=[1.0, 1.0])
        elif reason is DropReason.TOO_FEW_REWARDS:
            run_group(admission, group_id, rewards=[1.0, None])
        elif reason is DropReason.UNTRAINABLE:
            admission.start(group_id, members_of(group_id))
            for index, request_id in enumerate(members_of(group_id)):
                admission.finish(make_trajectory(request_id, group_id, reward=float(index), trained=False))
        else:
            run_group(admission, group_id)
            admission.drop(group_id, reason)
    assert admission.dropped == {**dict.fromkeys(DropReason, 0), reason: 40}
    assert len(admission.discarded()) == 80 and admission.credit(0) == 4
    run_group(admission, 100)
    run_group(admission, 101)
    assert ids(admission.take(0)) == [[200, 201], [202, 203]]


def test_stale_groups_give_their_credit_back():
    admission = make_admission(max_staleness=1)
    for group_id in range(40):
        run_group(admission, group_id, [0])
        assert admission.take(learner_version=2) is None
        assert admission.credit(0) == 4
    assert admission.dropped[DropReason.STALE] == 40
    assert (admission.counts.dropped_stale, admission.counts.dropped_stale_tokens) == (80, 80)


@pytest.mark.parametrize("learner_steps", [0, 3])
def test_a_learner_from_another_moment_is_an_error_not_a_deadlock(learner_steps):
    # Two steps are taken and the queue is full: a learner restarted at 0 would wait for ever, one that counts 3 opens the bound.
    admission = make_admission(max_staleness=0)
    for step in range(2):
        assert admission.credit(step) == 2
        run_group(admission, 2 * step)
        run_group(admission, 2 * step + 1)
        admission.take(0)
    with pytest.raises(ValueError, match="Restore learner and admission from the same checkpoint"):
        admission.credit(learner_steps)
    assert admission.credit(2) == 2


def test_rollouts_of_a_version_ahead_of_the_learner_are_fresh():
    # A learner resumed from an older checkpoint meets trajectories of versions it has not reached again.
    admission = make_admission(max_staleness=0)
    run_group(admission, 0, [5])
    run_group(admission, 1, [5])
    groups = admission.take(learner_version=4)
    assert ids(groups) == [[0, 1], [2, 3]] and all(member.loss_mask[1] for members in groups for member in members)


# Groups.


def test_groups_leave_in_the_order_in_which_they_completed_and_members_in_the_order_in_which_they_started():
    admission = make_admission()
    admission.start(7, [70, 71])
    admission.start(8, [80, 81])
    for request_id, group_id in [(71, 7), (81, 8), (80, 8), (70, 7)]:
        assert admission.take(0) is None
        admission.finish(make_trajectory(request_id, group_id))
    assert (admission.in_flight, admission.queued) == (0, 2)
    assert ids(admission.take(0)) == [[80, 81], [70, 71]]
    assert (admission.queued, admission.trained) == (0, 2)
    assert admission.take(0) is None


def test_take_returns_exactly_one_step():
    admission = make_admission(max_staleness=3)
    for group_id in range(5):
        run_group(admission, group_id)
    assert ids(admission.take(0)) == [[0, 1], [2, 3]]
    assert ids(admission.take(0)) == [[4, 5], [6, 7]]
    assert admission.take(0) is None and admission.queued == 1


def test_a_failed_member_without_reward_is_excluded_and_with_reward_stays_in_the_baseline():
    admission = make_admission(1, 3)
    admission.start(0, [0, 1, 2])
    admission.finish(make_trajectory(0, 0, reward=None, failed=True))
    admission.finish(make_trajectory(1, 0, reward=0.5, failed=True))
    admission.finish(make_trajectory(2, 0, reward=1.0))
    ((half, whole),) = admission.take(0)
    assert (half.request_id, half.reward, half.loss_mask.any()) == (1, 0.5, False)
    assert half.versions == (0,), "its pins can still be released"
    assert (whole.request_id, whole.loss_mask.tolist()) == (2, [False, True])
    assert [member.request_id for member in admission.discarded()] == [0]
    assert admission.counts.failed_members == 2


def test_a_group_with_one_reward_is_dropped():
    admission = make_admission(1, 3)
    admission.start(0, [0, 1, 2])
    admission.finish(make_trajectory(0, 0, reward=None, failed=True))
    admission.finish(make_trajectory(1, 0))
    admission.cancel(2)
    assert admission.take(0) is None
    assert admission.dropped[DropReason.TOO_FEW_REWARDS] == 1 and admission.counts.failed_members == 2
    assert [member.request_id for member in admission.discarded()] == [0, 1]


def test_a_straggler_that_is_cancelled_no_longer_holds_its_group():
    admission = make_admission(1, 3)
    admission.start(0, [0, 1, 2])
    admission.finish(make_trajectory(2, 0))
    admission.finish(make_trajectory(0, 0, reward=0.0))
    assert admission.take(0) is None
    admission.cancel(1)
    assert ids(admission.take(0)) == [[0, 2]]
    with pytest.raises(ValueError, match="request 1 cannot be cancelled"):
        admission.cancel(1)


def test_the_late_members_of_a_dropped_group_are_discarded_once():
    admission = make_admission(1, 3)
    admission.start(0, [0, 1, 2])
    admission.finish(make_trajectory(1, 0))
    assert admission.drop(0, DropReason.RING_FULL) == (0, 2)
    assert admission.in_flight == 0 and admission.group_ids == ()
    with pytest.raises(ValueError, match=r"its requests \[2\] are already in flight"):
        admission.start(1, [2, 3, 4])
    admission.finish(make_trajectory(2, 0))
    admission.cancel(0)
    assert [member.request_id for member in admission.discarded()] == [1, 2]
    assert admission.discarded() == []
    for request_id in (0, 2):
        with pytest.raises(ValueError, match=f"request {request_id} finished, but group 0 does not wait for it"):
            admission.finish(make_trajectory(request_id, 0))


def test_the_remainder_at_the_end_of_the_data_can_be_dropped_and_is_reported():
    # Five prompts, two a step, bound 1.
    admission = make_admission(max_staleness=1)
    waiting, steps, trained = list(range(5)), 0, []
    while waiting or admission.queued >= 2:
        for _ in range(min(admission.credit(steps), len(waiting))):
            run_group(admission, waiting.pop(0), [steps])
        trained += admission.take(steps)
        steps += 1
    assert steps == 2 and admission.group_ids == (4,)
    for group_id in admission.group_ids:
        admission.drop(group_id, DropReason.END_OF_RUN)
    assert [member.request_id for member in admission.discarded()] == [8, 9]
    assert admission.metrics()["dropped_groups_end_of_run"] == 1


# Age.


def test_drop_takes_a_stale_member_out_of_the_loss_and_keeps_it_in_the_baseline():
    admission = make_admission(1, 2)
    admission.start(0, [0, 1])
    admission.finish(make_trajectory(0, 0, [1, 2, 3], reward=0.0))
    admission.finish(make_trajectory(1, 0, [2, 3], reward=1.0))
    ((stale, fresh),) = admission.take(learner_version=3)
    assert (stale.reward, stale.loss_mask.tolist()) == (0.0, [False] * 4)
    assert fresh.loss_mask.tolist() == [False, True, True]
    assert admission.counts == Counts(dropped_stale=1, dropped_stale_tokens=3)
    assert admission.discarded() == []


def test_mask_takes_only_the_old_tokens_out_of_the_loss():
    admission = make_admission(1, 2, stale_policy=StalePolicy.MASK)
    admission.start(0, [0, 1])
    admission.finish(make_trajectory(0, 0, [0, 1, 2, 3], reward=0.0))
    admission.finish(make_trajectory(1, 0, [1], reward=1.0))
    ((long, short),) = admission.take(learner_version=3)
    assert long.loss_mask.tolist() == [False, False, False, True, True]
    assert short.loss_mask.tolist() == [False, False] and short.reward == 1.0
    assert (admission.counts.dropped_stale, admission.counts.masked_stale_tokens) == (0, 3)


@pytest.mark.parametrize("stale_policy", StalePolicy)
def test_a_group_that_is_stale_altogether_is_dropped_and_the_next_ones_move_up(stale_policy):
    admission = make_admission(stale_policy=stale_policy)
    run_group(admission, 0, [0, 0])
    run_group(admission, 1, [2])
    assert admission.take(learner_version=2) is None
    assert (admission.dropped[DropReason.STALE], admission.queued) == (1, 1)
    run_group(admission, 2, [1])
    assert ids(admission.take(learner_version=2)) == [[2, 3], [4, 5]]
    assert [member.request_id for member in admission.discarded()] == [0, 1]
    assert (admission.counts.dropped_stale, admission.counts.dropped_stale_tokens) == (2, 4)


def test_a_member_that_was_never_trained_is_not_counted_as_stale():
    admission = make_admission(1)
    admission.start(0, [0, 1])
    admission.finish(make_trajectory(0, 0, [0], trained=False))
    admission.finish(make_trajectory(1, 0, [0, 0]))
    assert admission.take(learner_version=2) is None
    assert admission.counts == Counts(dropped_stale=1, dropped_stale_tokens=2)


@pytest.mark.parametrize("stale_policy", StalePolicy)
def test_age_counts_once_however_often_a_step_is_tried(stale_policy):
    admission = make_admission(stale_policy=stale_policy)
    admission.start(0, [0, 1])
    admission.finish(make_trajectory(0, 0, [0], reward=0.0))
    admission.finish(make_trajectory(1, 0, [3]))
    for _ in range(3):
        assert admission.take(learner_version=3) is None
    run_group(admission, 1, [3])
    assert admission.take(learner_version=3) is not None
    assert admission.counts.dropped_stale + admission.counts.masked_stale_tokens == 1


def test_uniform_groups_train_unless_they_are_filtered():
    for drop_uniform, queued in ((False, 1), (True, 0)):
        admission = make_admission(drop_uniform=drop_uniform)
        run_group(admission, 0, rewards=[0.5, 0.5])
        assert (admission.queued, admission.dropped[DropReason.UNIFORM]) == (queued, 1 - queued)


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step is 0, wanted at least 1"),
        ({"group_size": 1}, "group_size is 1, wanted at least 2"),
        ({"max_staleness": -1}, "max_staleness is -1, wanted at least 0"),
        ({"publish_every": 0}, "publish_every is 0, wanted at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_admission(**options)


def test_misuse_is_refused_and_changes_nothing():
    admission = make_admission()
    admission.start(0, [0, 1])
    admission.finish(make_trajectory(0, 0))
    before = plain(admission.state())
    for call, message in [
        (lambda: admission.start(1, [2]), r"got members \[2\], wanted 2 different"),
        (lambda: admission.start(1, [2, 2]), r"got members \[2, 2\], wanted 2 different"),
        (lambda: admission.start(0, [2, 3]), "already in flight; ids must be new"),
        (lambda: admission.start(1, [1, 3]), r"its requests \[1\] are already in flight"),
        (lambda: admission.finish(make_trajectory(0, 0)), "request 0 finished, but group 0 does not wait for it"),
        (lambda: admission.finish(make_trajectory(1, 9)), "request 1 finished, but group 9 does not wait for it"),
        (lambda: admission.finish(make_trajectory(9, 9)), "request 9 finished, but group 9 does not wait for it"),
        (lambda: admission.cancel(0), "request 0 cannot be cancelled"),
        (lambda: admission.drop(9, DropReason.TIMEOUT), "group 9 cannot be dropped"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
        assert plain(admission.state()) == before


# Everything at once.

GROUP_SIZE = 3


class AdmissionMachine(RuleBasedStateMachine):
    """Random runs, in which the learner goes on as it likes; the model only remembers where each request is."""

    stale_policy = StalePolicy.DROP

    def __init__(self):
        super().__init__()
        self.admission = self.make()
        self.steps, self.next_group = 0, 0
        self.running: dict[int, int] = {}  # request id -> group id
        self.cancelled, self.trained, self.discarded = set(), [], []

    def make(self) -> Admission:
        return make_admission(2, GROUP_SIZE, max_staleness=1, publish_every=2, stale_policy=self.stale_policy, drop_uniform=True)

    @property
    def version(self) -> int:
        return self.steps // 2

    @rule(wanted=st.integers(1, 6))
    def start_groups(self, wanted):
        for _ in range(min(wanted, self.admission.credit(self.steps))):
            members = members_of(self.next_group, GROUP_SIZE)
            self.admission.start(self.next_group, members)
            self.running.update(dict.fromkeys(members, self.next_group))
            self.next_group += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, 1.0, None]), failed=st.booleans(), ages=st.lists(st.integers(0, 2)))
    def finish(self, data, reward, failed, ages):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        versions = sorted(max(0, self.version - age) for age in ages)
        trajectory = make_trajectory(request_id, self.running.pop(request_id), versions, reward=reward, failed=failed)
        self.admission.finish(trajectory)

    @precondition(lambda self: len(self.running) >= GROUP_SIZE)
    @rule(data=st.data(), count=st.integers(1, 12))
    def finish_many(self, data, count):
        for request_id in data.draw(st.permutations(sorted(self.running)))[:count]:
            versions = [self.version, self.version]
            reward = float(request_id % 2)
            self.admission.finish(make_trajectory(request_id, self.running.pop(request_id), versions, reward=reward))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request_id]
        self.admission.cancel(request_id)
        self.cancelled.add(request_id)

    @precondition(lambda self: self.admission.group_ids)
    @rule(data=st.data(), reason=st.sampled_from([DropReason.RING_FULL, DropReason.TIMEOUT]))
    def drop(self, data, reason):
        group_id = data.draw(st.sampled_from(self.admission.group_ids))
        before = self.admission.credit(self.steps)
        still_running = self.admission.drop(group_id, reason)
        assert set(still_running) == {request for request, group in self.running.items() if group == group_id}
        assert self.admission.credit(self.steps) == before + 1

    @rule()
    def learn(self):
        groups = self.admission.take(self.version)
        if groups is None:
            assert self.admission.queued < 2
            return
        assert len(groups) == 2
        for members in groups:
            assert len(members) >= 2 and all(member.reward is not None for member in members)
            assert any(member.loss_mask.any() for member in members)
            for member in members:
                assert np.all(self.version - member.policy_versions[member.loss_mask] <= 1)
                assert not (member.loss_mask.any() and member.finish_reason is FinishReason.FAILED)
        self.trained += [member.request_id for members in groups for member in members]
        self.steps += 1

    @rule()
    def release(self):
        self.discarded += [member.request_id for member in self.admission.discarded()]

    @rule()
    def stop_and_resume(self):
        state = self.admission.state()
        self.admission = self.make()
        self.admission.restore(state)
        assert plain(self.admission.state()) == plain(state)

    @invariant()
    def the_bound_holds(self):
        out = self.admission.in_flight + self.admission.queued + self.admission.trained
        assert out <= (1 + self.steps // 2 + 1) * 2 * 2
        assert self.admission.trained == 2 * self.steps

    @invariant()
    def every_group_is_somewhere(self):
        out = self.admission.in_flight + self.admission.queued + self.admission.trained
        assert out + sum(self.admission.dropped.values()) == self.next_group

    def teardown(self):
        for request_id, group_id in list(self.running.items()):
            self.admission.finish(make_trajectory(request_id, group_id, reward=float(request_id % 2)))
        for group_id in self.admission.group_ids:
            assert self.admission.drop(group_id, DropReason.END_OF_RUN) == ()
        self.release()
        ends = self.trained + self.discarded + list(self.cancelled)
        assert sorted(ends) == list(range(self.next_group * GROUP_SIZE))
        # All credit but that of trained groups is back.
        assert self.admission.credit(self.steps) == (1 + self.version + 1) * 4 - 2 * self.steps


class MaskingMachine(AdmissionMachine):
    stale_policy = StalePolicy.MASK


TestAdmissionMachine = AdmissionMachine.TestCase
TestMaskingMachine = MaskingMachine.TestCase
TestAdmissionMachine.settings = TestMaskingMachine.settings = settings(max_examples=40, stateful_step_count=40)


def test_a_resumed_run_goes_on_identically():
    """Saved with groups in flight, late, queued and discarded; the straight run and the resumed one then see the same events."""
    straight = make_admission(2, 3, max_staleness=2, stale_policy=StalePolicy.MASK)
    for group_id in range(5):
        straight.start(group_id, members_of(group_id, 3))
    for request_id in (5, 3, 4, 0, 12, 14):
        straight.finish(make_trajectory(request_id, request_id // 3, [0, 1], reward=float(request_id % 2)))
    straight.finish(make_trajectory(13, 4, reward=None, failed=True))
    straight.cancel(1)
    straight.drop(2, DropReason.RING_FULL)
    state = straight.state()
    resumed = make_admission(2, 3, max_staleness=2, stale_policy=StalePolicy.MASK)
    resumed.restore(state)
    # Taken from the run, not shared with it: what happens next must not reach into the saved state.
    saved = plain(state)

    outcomes = []
    for admission in (straight, resumed):
        admission.finish(make_trajectory(7, 2))
        admission.finish(make_trajectory(2, 0, [1], reward=1.0))
        admission.cancel(9)
        groups = [[member.state() for member in members] for members in admission.take(3)]
        discarded = [member.state() for member in admission.discarded()]
        still_running = admission.drop(3, DropReason.TIMEOUT)
        outcomes.append(plain([groups, discarded, still_running, admission.credit(1), admission.metrics(), admission.state()]))
    assert outcomes[0] == outcomes[1]
    assert plain(state) == saved
    assert resumed.counts == Counts(masked_stale_tokens=5, failed_members=3)
