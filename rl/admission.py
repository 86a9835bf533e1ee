"""Admission: which prompts may start, which trajectories may train, and where every other one went.

Two rules bound the staleness of an asynchronous run, and they are kept apart:

  1. Numbers. In whole groups, and at all times,

         in flight + queued + trained <= (max_staleness + learner_steps // publish_every + 1) * groups_per_step * publish_every.

     What is missing to the bound is the credit: so many groups may start now. A group that is dropped, for whatever reason, stops
     counting, so its credit comes back and a run that drops much still never starves. With `publish_every` 1 this is the capacity
     of AReaL (https://arxiv.org/abs/2505.24298 section 5.1), counted in groups.

  2. Age. When a learner step takes its groups, whatever is older than `max_staleness` publishes leaves the loss: the whole
     trajectory (`StalePolicy.DROP`) or only its old tokens (`StalePolicy.MASK`). It is counted, in tokens too: it is the long
     episodes that grow old, and a run must not lose them silently.

A member that leaves the loss keeps its reward in the group's baseline. A member without a reward is in neither. A group with
fewer than two rewards has no baseline and is dropped.

The room is passive: it calls nobody. Trajectories that will never train wait in `discarded()`, for the loop to release the
versions they pin. One thread owns it.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import numpy as np

from rl.types import FinishReason, Trajectory


class StalePolicy(enum.Enum):
    """What becomes of a trajectory that is too old when it would train."""

    DROP = "drop"  # all of it leaves the loss
    MASK = "mask"  # only its tokens older than the bound leave the loss


class DropReason(enum.Enum):
    """Why a whole group never trains."""

    STALE = "stale"  # no token of it is fresh enough
    UNIFORM = "uniform"  # all rewards equal: every advantage would be zero
    TOO_FEW_REWARDS = "too_few_rewards"  # fewer than two: no baseline
    UNTRAINABLE = "untrainable"  # no token of it was sampled for the loss
    RING_FULL = "ring_full"  # the caller needs the room of the versions it pins
    TIMEOUT = "timeout"  # the caller would not wait for it
    END_OF_RUN = "end_of_run"  # left over when data or steps ended


@dataclasses.dataclass
class Counts:
    """What did not train, since the start of the run."""

    dropped_stale: int = 0  # trajectories that left the loss whole, for their age
    dropped_stale_tokens: int = 0  # their trained tokens; divided by `dropped_stale`: are the long ones lost?
    masked_stale_tokens: int = 0  # tokens that left the loss one by one, for their age
    failed_members: int = 0  # members that failed or were given up
    cancelled_members: int = 0  # members cut off under way: too old already, or past their deadline


@dataclasses.dataclass
class _Group:
    """A group in flight: its request ids in order without the cancelled ones, and the trajectories that are in, by request id."""

    members: list[int]
    finished: dict[int, Trajectory]

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(member for member in self.members if member not in self.finished)


class Admission:
    """The queue between sampler and learner, and the credit that lets prompts in.

    Args:
      groups_per_step: groups that one learner step trains on.
      group_size: members of a group, at least 2.
      max_staleness: the bound of both rules, in publishes; 0 is synchronous.
      publish_every: learner steps between two publishes.
      stale_policy: what becomes of what is too old.
      drop_uniform: drop groups whose rewards are all equal (dynamic sampling of DAPO, https://arxiv.org/abs/2503.14476, section
        3.2). While every group is uniform no step is ever ready: watch `dropped`.

    Attributes:
      trained: groups handed to the learner since the start of the run.
      dropped: groups dropped since the start of the run, by reason.
      counts: members and tokens that did not train.

    Raises:
      ValueError: a number is out of range.
    """

    def __init__(self, groups_per_step: int, group_size: int, *, max_staleness: int, publish_every: int,
                 stale_policy: StalePolicy, drop_uniform: bool = False):
        minima = {"groups_per_step": (groups_per_step, 1), "group_size": (group_size, 2), "max_staleness": (max_staleness, 0),
                  "publish_every": (publish_every, 1)}
        for name, (value, minimum) in minima.items():
            if value < minimum:
                raise ValueError(f"admission: {name} is {value}, wanted at least {minimum}")
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._max_staleness = max_staleness
        self._publish_every = publish_every
        self._stale_policy = stale_policy
        self._drop_uniform = drop_uniform
        self._groups: dict[int, _Group] = {}  # in flight, by group id
        self._group_of: dict[int, int] = {}  # the group id of every missing member
        self._abandoned: set[int] = set()  # requests that still run for a dropped group
        self._queue: dict[int, list[Trajectory]] = {}  # by group id, first completed first
        self._discarded: list[Trajectory] = []
        self._bound = self._bound_at(0)
        self.trained = 0
        self.dropped = dict.fromkeys(DropReason, 0)
        self.counts = Counts()

    @property
    def in_flight(self) -> int:
        """Groups with a member still missing."""
        return len(self._groups)

    @property
    def queued(self) -> int:
        """Groups complete and not yet taken."""
        return len(self._queue)

    @property
    def group_ids(self) -> tuple[int, ...]:
        """The groups that can still be dropped: those in flight, then those queued, oldest first."""
        return (*self._groups, *self._queue)

    def credit(self, learner_steps: int) -> int:
        """The number of groups that may start after `learner_steps` finished learner steps.

        Raises:
          ValueError: more groups are out than the bound allows, or more were trained than taken. Both mean that learner and
            admission are not at the same moment of the same run; going on would block for ever, or open the bound.
        """
        bound, should_have_trained = self._bound_at(learner_steps), learner_steps * self._groups_per_step
        if self._occupied > bound or should_have_trained > self.trained:
            raise ValueError(
                f"admission: after {learner_steps} learner steps got {self.in_flight} groups in flight, {self.queued} queued, "
                f"{self.trained} trained; wanted {should_have_trained} trained and {bound} altogether. Restore learner and "
                "admission from the same checkpoint, with the same max_staleness, publish_every and groups_per_step")
        self._bound = bound
        return bound - self._occupied

    def start(self, group_id: int, members: Sequence[int]) -> None:
        """Opens a group of `members` (request ids), against one credit.

        Raises:
          ValueError: there is no credit, the size is wrong, or an id is in use.
        """
        if self._occupied >= self._bound:
            raise ValueError(f"group {group_id}: no credit; {self._occupied} in flight, queued or trained, wanted less than "
                             f"{self._bound}; start at most credit(learner_steps) groups")
        if len(members) != self._group_size or len(set(members)) != len(members):
            raise ValueError(f"group {group_id}: got members {list(members)}, wanted {self._group_size} different request ids")
        running = [member for member in members if member in self._group_of or member in self._abandoned]
        if running or group_id in self.group_ids:
            raise ValueError(f"group {group_id}: the group or its requests {running} are already in flight; ids must be new")
        self._groups[group_id] = _Group(list(members), {})
        self._group_of.update(dict.fromkeys(members, group_id))

    def finish(self, trajectory: Trajectory) -> None:
        """Takes in a finished member; the last one moves its group to the queue. A late member of a dropped group is discarded.

        Raises:
          ValueError: nobody started this request in this group, or it is already in.
        """
        request_id, group_id = trajectory.request_id, trajectory.group_id
        if request_id in self._abandoned:
            self._abandoned.remove(request_id)
            self._discarded.append(trajectory)
            return
        if self._group_of.get(request_id) != group_id:
            raise ValueError(f"request {request_id} finished, but group {group_id} does not wait for it; "
                             "start it once in that group, then finish or cancel it once")
        if trajectory.finish_reason is FinishReason.CANCELLED:
            self.counts.cancelled_members += 1
        elif trajectory.finish_reason is FinishReason.FAILED or trajectory.reward is None:
            self.counts.failed_members += 1
        self._groups[group_id].finished[request_id] = trajectory
        del self._group_of[request_id]
        self._close_if_complete(group_id)

    def cancel(self, request_id: int) -> None:
        """Gives up a member that will never finish: it counts as failed, and its group goes on without it.

        Raises:
          ValueError: the request is not running.
        """
        if request_id in self._abandoned:
            self._abandoned.remove(request_id)
            return
        if request_id not in self._group_of:
            raise ValueError(f"request {request_id} cannot be cancelled: it is not running; it has finished or was never started")
        self.counts.failed_members += 1
        group_id = self._group_of.pop(request_id)
        self._groups[group_id].members.remove(request_id)
        self._close_if_complete(group_id)

    def drop(self, group_id: int, reason: DropReason) -> tuple[int, ...]:
        """Drops a group, in flight or queued, and gives its credit back.

        Returns:
          The requests that still run for it. They may be cancelled, or left to finish: then they are discarded.

        Raises:
          ValueError: the group is neither in flight nor queued.
        """
        if group_id in self._queue:
            self._discard(self._queue.pop(group_id), reason)
            return ()
        if group_id not in self._groups:
            raise ValueError(f"group {group_id} cannot be dropped: wanted one in flight or queued, which are {self.group_ids}")
        group = self._groups.pop(group_id)
        for request_id in group.missing:
            del self._group_of[request_id]
        self._abandoned.update(group.missing)
        self._discard(list(group.finished.values()), reason)
        return group.missing

    def take(self, learner_version: int) -> list[list[Trajectory]] | None:
        """The groups of the next learner step, oldest first, with what is too old at `learner_version` masked out of the loss.

        Returns:
          Exactly `groups_per_step` groups, or None when fewer are ready. Every member has a reward; at least one member of each
          group has a trained token. A masked member keeps its versions, which the caller releases like the others'.
        """
        for group_id, members in list(self._queue.items()):
            if not any(self._fresh(member, learner_version).any() for member in members):
                aged = [int(member.loss_mask.sum()) for member in members if member.loss_mask.any()]
                self.counts.dropped_stale += len(aged)
                self.counts.dropped_stale_tokens += sum(aged)
                self.drop(group_id, DropReason.STALE)
        if self.queued < self._groups_per_step:
            return None
        taken = [self._queue.pop(group_id) for group_id in list(self._queue)[: self._groups_per_step]]
        self.trained += len(taken)
        return [[self._freshen(member, learner_version) for member in members] for members in taken]

    def unscored(self) -> list[Trajectory]:
        """The finished trajectories that wait here, for their group or for the learner."""
        waiting = [trajectory for group in self._groups.values() for trajectory in group.finished.values()]
        return waiting + [trajectory for members in self._queue.values() for trajectory in members]

    def discarded(self) -> list[Trajectory]:
        """The trajectories that will never train, since the last call. Nobody needs their versions any more."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def metrics(self) -> dict[str, int]:
        """All counts under flat names; groups dropped are dropped_groups_<reason>."""
        groups = {"groups_in_flight": self.in_flight, "groups_queued": self.queued, "groups_trained": self.trained}
        dropped = {f"dropped_groups_{reason.value}": count for reason, count in self.dropped.items()}
        return {**groups, **dropped, **dataclasses.asdict(self.counts)}

    def state(self) -> dict:
        """All of it as plain arrays and JSON values; `restore` goes on from there identically."""
        return {
            "groups": [{"group_id": group_id, "members": list(group.members), "finished": _states(group.finished.values())}
                       for group_id, group in self._groups.items()],
            "queue": [{"group_id": group_id, "members": _states(members)} for group_id, members in self._queue.items()],
            "abandoned": sorted(self._abandoned),
            "discarded": _states(self._discarded),
            "bound": self._bound,
            "trained": self.trained,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "counts": dataclasses.asdict(self.counts),
        }

    def restore(self, state: dict) -> None:
        """Becomes what `state()` described."""
        self._groups = {}
        for group in state["groups"]:
            finished = {member.request_id: member for member in _restored(group["finished"])}
            self._groups[group["group_id"]] = _Group(list(group["members"]), finished)
        self._group_of = {member: group_id for group_id, group in self._groups.items() for member in group.missing}
        self._queue = {group["group_id"]: _restored(group["members"]) for group in state["queue"]}
        self._abandoned = set(state["abandoned"])
        self._discarded = _restored(state["discarded"])
        self._bound, self.trained = state["bound"], state["trained"]
        self.dropped = {reason: state["dropped"][reason.value] for reason in DropReason}
        self.counts = Counts(**state["counts"])

    @property
    def _occupied(self) -> int:
        return self.in_flight + self.queued + self.trained

    def _bound_at(self, learner_steps: int) -> int:
        version = learner_steps // self._publish_every
        return (self._max_staleness + version + 1) * self._groups_per_step * self._publish_every

    def _close_if_complete(self, group_id: int) -> None:
        """Queues a group that misses no member, or drops it when it can teach nothing."""
        group = self._groups[group_id]
        if group.missing:
            return
        del self._groups[group_id]
        # In the order in which they were started, so that a batch does not depend on which member finished first.
        members = [group.finished[request_id] for request_id in group.members]
        rewarded = [_out_of_loss(member) if member.finish_reason is FinishReason.FAILED else member
                    for member in members if member.reward is not None]
        if len(rewarded) < 2:
            self._discard(members, DropReason.TOO_FEW_REWARDS)
        elif self._drop_uniform and len({member.reward for member in rewarded}) == 1:
            self._discard(members, DropReason.UNIFORM)
        elif not any(member.loss_mask.any() for member in rewarded):
            self._discard(members, DropReason.UNTRAINABLE)
        else:
            self._discarded += [member for member in members if member.reward is None]
            self._queue[group_id] = rewarded

    def _discard(self, members: list[Trajectory], reason: DropReason) -> None:
        self.dropped[reason] += 1
        self._discarded += members

    def _fresh(self, member: Trajectory, learner_version: int) -> np.ndarray:
        """The loss mask that the age rule leaves, bool [T]."""
        if self._stale_policy is StalePolicy.MASK:
            return member.loss_mask & (learner_version - member.policy_versions <= self._max_staleness)
        return member.loss_mask & (member.staleness(learner_version) <= self._max_staleness)

    def _freshen(self, member: Trajectory, learner_version: int) -> Trajectory:
        """Applies the age rule to a member that is taken, and counts."""
        loss_mask = self._fresh(member, learner_version)
        num_stale = int(member.loss_mask.sum() - loss_mask.sum())
        if not num_stale:
            return member
        if self._stale_policy is StalePolicy.MASK:
            self.counts.masked_stale_tokens += num_stale
        else:
            self.counts.dropped_stale += 1
            self.counts.dropped_stale_tokens += num_stale
        return dataclasses.replace(member, loss_mask=loss_mask)


def _out_of_loss(member: Trajectory) -> Trajectory:
    return dataclasses.replace(member, loss_mask=np.zeros_like(member.loss_mask))


def _states(trajectories: Iterable[Trajectory]) -> list[dict]:
    return [trajectory.state() for trajectory in trajectories]


def _restored(states: Iterable[dict]) -> list[Trajectory]:
    return [Trajectory.from_state(state) for state in states]
