"""The program: asynchronous reinforcement learning with exact old logits, from prompt to publish.

    the sampler's side                                      the learner's side

    begin_round  a newer policy is taken up; prompts        take      a batch of finished groups
                 become rollouts, as the credit allows      learn     advantages; each token's anchor, from the old-logprob
    roll         the sampler decodes, environments answer             source; the ledger's rows; one step of decoupled PPO
    end_round    versions are pinned, finished groups       end_step  versions are released, there is credit again
                 queue up                                   publish   into the ring, then offered to the sampler

Rollouts do not wait for the learner: they cross versions, and what is trained was sampled some versions ago. The two sides meet
only in the short operations (all but `roll`, `learn` and `snapshot`), and these in some order: the *interleaving*. A run is a
function of configuration, seed and interleaving, bit by bit. `run` below is the `lockstep` schedule, in which a stated
number of decode steps comes with each learner step; `rl.threads` runs both sides at once, and again in the order it recorded.
"""

import dataclasses
import enum
import json
import time
from collections.abc import Callable, Iterable

import numpy as np

from models.transformer import Params
from rl import processes
from rl.admission import DropReason, StalePolicy
from rl.environments import Fault
from rl.exactness import ExactnessProbe
from rl.metrics import combine
from rl.old_logprobs import COSTLY, OldLogprobSource
from rl.rollout import RolloutStep
from rl.rooms import Rooms
from rl.training import Training
from rl.types import Trajectory

STAGES = ("rollout", "replay", "train", "publish", "sampler_wait", "learner_wait")
"""What takes time, and is measured."""


class Schedule(enum.Enum):
    """Who moves when."""

    LOCKSTEP = "lockstep"  # one thread, a stated number of decode steps for each learner step
    THREADS = "threads"  # sampler and learner at once


class RingFullPolicy(enum.Enum):
    """What happens when pinned versions fill the ring at a publish. The learner trains on, whatever it is.

    Where the ring holds more than `max_staleness` versions, what is evicted is too old to train on, and nothing misses it.
    """

    SKIP_PUBLISH = "skip_publish"  # nothing else
    DROP_STALEST = "drop_stalest"  # groups holding the oldest versions are dropped, so that the next publish finds room
    EVICT = "evict"  # the oldest version leaves, and what holds tokens of it finds it gone


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The schedule, and what is admitted to it."""

    schedule: Schedule = Schedule.LOCKSTEP
    groups_per_step: int = 8
    group_size: int = 8
    publish_every: int = 1  # learner steps
    max_staleness: int = 4  # versions
    decode_steps: int = 4  # decode steps between two learner steps, in lockstep
    stale_policy: StalePolicy = StalePolicy.DROP
    ring_full: RingFullPolicy = RingFullPolicy.SKIP_PUBLISH


class Loop:
    """Conducts the rooms through learner steps.

    Args:
      rooms: ready to go; the learner holds the initial weights.
      options: the schedule.
      lengths: length buckets of the training batch.
      seed: of the instances.
      serving_shardings: see `processes.own_copy`.
    """

    def __init__(
        self,
        rooms: Rooms,
        options: LoopOptions,
        *,
        lengths: tuple[int, ...],
        seed: int,
        serving_shardings: Params | None = None,
    ):
        self._rooms, self._options, self._seed, self._serving_shardings = rooms, options, seed, serving_shardings
        self._num_groups = processes.share(options.groups_per_step, "--groups-per-step")
        self.step = 0
        self.version = 0  # of the learner; the sampler's follows
        self._next_group = 0
        self._skipped_publishes = 0
        self._evicted_versions = 0
        self._tokens_generated = 0  # since the last row of metrics
        self._failures = dict.fromkeys(Fault, 0)  # of environments
        self._last_failure: str | None = None
        self._wants_room = False  # the ring was full, and the policy is to drop the stalest groups
        self._training = Training(rooms, num_rows=self._num_groups * options.group_size, lengths=lengths)
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._recorded = time.perf_counter()  # the last row of metrics
        self.half_written = ""  # snapshots that a stopped run left behind, by name; cleaned away when it is resumed
        self.live: Params | None = None  # published parameters of the present version, on the learner's devices
        self._news: Params | None = None  # the same, where the sampler can get at them, until it has taken them up
        self._sampling: Params | None = None  # `live` of the sampler's version

    def start(self, params: Params) -> None:
        """Gives the learner its weights and publishes them as version 0: the first token is sampled by what will be trained."""
        self._rooms.learner.start(params)
        self.live = self._rooms.learner.published()
        self._rooms.reference.hold(self.live)
        self._news = self.own_live()
        self._put(0, self.live)
        self._serve()

    def own_live(self) -> Params:
        """The present version where a sampler of this process can get at it. Collective."""
        return processes.own_copy(self.live, self._serving_shardings)

    @property
    def rooms(self) -> Rooms:
        """What it conducts, for whoever looks on."""
        return self._rooms

    @property
    def probe(self) -> ExactnessProbe:
        """What is known of the run's exactness so far."""
        return self._rooms.probe

    @property
    def source(self) -> OldLogprobSource:
        """Where the anchors come from."""
        return self._rooms.source

    @property
    def has_batch(self) -> bool:
        """Whether enough groups are queued for a learner step, unless some of them have grown too old."""
        return self._rooms.admission.queued >= self._num_groups

    @property
    def max_decode_steps(self) -> int:
        """Most decode steps in one `roll`."""
        return self._rooms.sampler.max_steps

    def run(self, num_steps: int, on_step: Callable[[dict], None] = lambda metrics: None,
            stop: Callable[[], bool] = lambda: False) -> None:
        """Lockstep: runs learner steps until `num_steps` are done in all, or `stop` says so before one.

        `on_step` is told each one's metrics.
        """
        sampler = self._rooms.sampler
        while self.step < num_steps and not stop():
            last = sampler.num_decode_steps + self._options.decode_steps
            while sampler.num_decode_steps < last and self.begin_round():
                self.end_round(self.roll(last - sampler.num_decode_steps))
            while (groups := self.take()) is None:
                if not self.begin_round():
                    raise RuntimeError(self.stuck())
                self.end_round(self.roll(self.max_decode_steps))
            facts = self.learn(groups)
            self.publish(self.end_step(groups))
            on_step(self.record(facts))

    # --- the sampler's side ---

    def begin_round(self) -> bool:
        """Takes up a newer policy and starts as many groups as the credit allows; False if there is nothing to roll."""
        if self._wants_room:
            self._drop_stalest()
            self._wants_room = False
        if self._news is not None:
            self._supersede()
            self._cancel_outdated()
            self._serve()
        for _ in range(self._rooms.admission.credit(self.step)):
            # Each process has its own groups, numbered without a gap over all.
            group_id, size = self._next_group * processes.num_processes() + processes.index(), self._options.group_size
            request_ids = list(range(group_id * size, (group_id + 1) * size))
            self._rooms.admission.start(group_id, request_ids)
            self._rooms.rollouts.start(group_id, request_ids, seed=instance_seed(self._seed, group_id))
            self._next_group += 1
        return self._rooms.rollouts.num_running > 0

    def roll(self, num_steps: int) -> RolloutStep:
        """Up to `num_steps` decode steps, in one device call, and the environments' answers."""
        return self.timed("rollout", self._rooms.rollouts.step, num_steps)

    def end_round(self, rolled: RolloutStep) -> None:
        """Pins the versions of new tokens, and hands in what has finished."""
        self._tokens_generated += rolled.num_tokens
        self._pin(rolled.new_versions)
        for failure in rolled.failures:
            self._failures[failure.fault] += 1
            self._last_failure = str(failure)
        for trajectory in rolled.finished:
            self._rooms.admission.finish(trajectory)
        self._rooms.source.finished(rolled.finished)
        self._release(self._rooms.admission.discarded())

    def _supersede(self) -> None:
        """Notes who holds tokens of the sampler's version, now that there will be no more of them."""
        rooms = self._rooms
        if rooms.probe.is_on:
            self._training.note_superseded(rooms.sampler.version, self._sampling, self._unscored())

    def _serve(self) -> None:
        """Makes the newest version the sampler's. The ring keeps it as long as the sampler may write tokens with it."""
        rooms = self._rooms
        before = rooms.sampler.version
        self._pin([self.version])
        rooms.sampler.publish(self.version, self._news)
        self._sampling, self._news = self.live, None
        if before >= 0:
            self._unpin([before])

    def _cancel_outdated(self) -> None:
        """Ends the episodes that are too old to be trained already, before their contexts are computed for the new policy."""
        if self._options.stale_policy is not StalePolicy.DROP:
            return
        rooms = self._rooms
        for trajectory in rooms.rollouts.cancel(rooms.rollouts.outdated(self.version - self._options.max_staleness)):
            rooms.admission.finish(trajectory)
        self._release(rooms.admission.discarded())

    def _drop_stalest(self) -> None:
        """Drops the groups that hold pinned versions, oldest version first, until the ring has room."""
        rooms = self._rooms
        for version in sorted(rooms.ring.pins):
            if rooms.ring.has_room():
                return
            for group_id in sorted({held.group_id for held in self._unscored() if version in held.versions}):
                self._drop(group_id, DropReason.RING_FULL)

    def _unscored(self) -> list[Trajectory]:
        """What is not trained yet, in flight or finished."""
        return [*self._rooms.rollouts.partial(), *self._rooms.admission.unscored()]

    def _drop(self, group_id: int, reason: DropReason) -> None:
        """Drops a group wherever it is, and lets go of its versions."""
        running = self._rooms.admission.drop(group_id, reason)
        self._release(self._rooms.rollouts.cancel(running))
        for request_id in running:
            self._rooms.admission.cancel(request_id)
        self._release(self._rooms.admission.discarded())

    def _release(self, trajectories: list[Trajectory]) -> None:
        """Lets go of the versions of trajectories that nobody will score."""
        self._training.note_forgotten(trajectories)
        self._rooms.source.forget(trajectories)
        for trajectory in trajectories:
            self._unpin(trajectory.versions)

    def _pin(self, versions: Iterable[int]) -> None:
        if self._rooms.needs_ring:
            self._rooms.ring.pin(versions)

    def _unpin(self, versions: Iterable[int]) -> None:
        if self._rooms.needs_ring:
            self._rooms.ring.release(versions)

    # --- the learner's side ---

    def take(self) -> list[list[Trajectory]] | None:
        """The groups of the next learner step; None while there are not enough."""
        groups = self._rooms.admission.take(self.version)
        self._release(self._rooms.admission.discarded())
        return groups

    def stuck(self) -> str:
        """Why nothing can go on, in words."""
        return (f"learner step {self.step}: no rollout is running, none may start, and no batch is ready "
                f"({self._rooms.admission.queued} groups queued, {self._num_groups} wanted); credit was lost")

    def learn(self, groups: list[list[Trajectory]]) -> dict:
        """One learner step on groups that were taken; returns its metrics."""
        trajectories = [trajectory for group in groups for trajectory in group]
        training = self._training
        ring_bytes = self._rooms.ring.nbytes  # here and not after a publish, which would have to wait until it is encoded
        batch, own = self.timed("replay", training.assemble, trajectories, self.step + 1, self.version, self.live)
        metrics, decomposed = self.timed("train", training.update, batch, self.step + 1, self.version)
        return {"version": self.version, **metrics, "ring_bytes": ring_bytes, "own": {**own, **decomposed}}

    def end_step(self, groups: list[list[Trajectory]]) -> bool:
        """Counts the step and lets go of what it trained on; returns whether a publish is due and the ring has room for it."""
        for group in groups:
            for trajectory in group:
                self._unpin(trajectory.versions)
        self.step += 1
        if self.step % self._options.publish_every:
            return False
        rooms = self._rooms
        if rooms.ring.make_room():
            return True
        if self._options.ring_full is RingFullPolicy.EVICT and rooms.ring.evict(keep=rooms.sampler.version):
            self._evicted_versions += 1
            return True
        self._skipped_publishes += 1
        self._wants_room = self._options.ring_full is RingFullPolicy.DROP_STALEST
        return False

    def publish(self, due: bool) -> None:
        """Ring before sampler: no token can carry a version that the ring never held."""
        if due:
            self.offer(self.snapshot())

    def snapshot(self) -> tuple[Params, Params]:
        """Puts the learner's policy into the ring as the next version, and returns it for `offer`."""
        return self.timed("publish", self._snapshot)

    def _snapshot(self) -> tuple[Params, Params]:
        rooms = self._rooms
        if self.source.interrupts:
            rooms.source.superseding(self.version, self.live, self._unscored())
        live = rooms.learner.published()
        self._put(self.version + 1, live)
        return live, processes.own_copy(live, self._serving_shardings)

    def _put(self, version: int, live: Params) -> None:
        """A version comes into the ring, and whoever wants to know is told."""
        rooms = self._rooms
        rooms.ring.put(version, live)
        rooms.source.published(version, live, rooms.learner.train_state.params)
        if rooms.source.exact:  # only exact anchors name their snapshot in the ledger
            rooms.ring.digest_later(version)  # the ring may have let it go when its tokens are trained

    def offer(self, snapshot: tuple[Params, Params]) -> None:
        """Makes what was put into the ring the present version; the sampler takes it up when its next round begins."""
        self.version += 1
        self.live, self._news = snapshot

    def record(self, facts: dict) -> dict:
        """Writes the step's row of metrics, and returns it. What each process knows of its own share is combined."""
        rooms, elapsed = self._rooms, time.perf_counter() - self._recorded
        failures = {f"environment_{fault.value}": count for fault, count in self._failures.items()}
        cost = rooms.source.take_cost()
        for name in COSTLY:
            self._seconds[name] = cost.seconds[name]
        own = {
            **facts.pop("own"),
            **cost.counts(),
            "tokens_generated": self._tokens_generated,
            **failures,
            **rooms.admission.metrics(),
        }
        row = {
            **facts,
            **combine([json.loads(content) for content in processes.gather_bytes(json.dumps(own).encode())]),
            "environment_last_failure": self._last_failure,
            "skipped_publishes": self._skipped_publishes,
            "evicted_versions": self._evicted_versions,
            "exactness_error_max": rooms.probe.max_error,
            **rooms.source.metrics(),
            "ring_versions": len(rooms.ring.versions),
            **{f"anchor_{tier}_bytes": size for tier, size in dataclasses.asdict(rooms.anchor_bytes).items()},
            **{f"seconds_{name}": seconds for name, seconds in self._seconds.items()},
            "seconds_step": elapsed,
        }
        self._record_snapshots(rooms.ring.persisted[:-1])
        self._tokens_generated = 0
        self._seconds, self._recorded = dict.fromkeys(STAGES, 0.0), self._recorded + elapsed
        rooms.metrics.write(self.step, row)
        rooms.timeline.flush(self.step)
        return {"step": self.step, **row}

    def _record_snapshots(self, versions: tuple[int, ...]) -> None:
        """Gives complete snapshots their rows. The newest waits for the next, so that no row depends on how fast a disk is."""
        for version in versions if processes.is_first() else ():
            if version not in self._rooms.ledger.snapshots:
                self._rooms.ledger.record_snapshot(version, self._rooms.store.digest(version))

    def finish(self) -> None:
        """Ends the run: what is still under way is dropped and counted, and the last version is persisted."""
        rooms = self._rooms
        for group_id in rooms.admission.group_ids:
            self._drop(group_id, DropReason.END_OF_RUN)
        self.close()
        self._unpin([rooms.sampler.version])
        rooms.ring.persist(self.version)
        rooms.store.wait()
        self._record_snapshots(rooms.ring.persisted)
        rooms.ledger.close()
        rooms.metrics.close()

    def close(self) -> None:
        """Leaves no process of an environment behind; `finish` does it, and so must whoever gives up before."""
        self._rooms.rollouts.close()
        self._rooms.source.close()

    def timed(self, name: str, function: Callable, *arguments):
        """Calls, and counts the time it takes."""
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            stopped = time.perf_counter()
            self._seconds[name] += stopped - started
            self._rooms.timeline.span(name, started, stopped)

    # --- state ---

    def state(self) -> dict:
        """The whole run as plain arrays and JSON values, between two rounds and two learner steps.

        `shared` is what several processes have alike, the large part; `own` what each has for itself. Collective.

        The sampler's caches become stale, and its policy the newest: a checkpoint is a version boundary, whether or not the run
        goes on from it.
        """
        rooms = self._rooms
        if self._news is not None:
            self._supersede()
            self._serve()
        self._training.settle_probe()
        ring = rooms.ring.state()
        source = rooms.source.state()
        shared = {"learner": rooms.learner.state(), "snapshots": ring.pop("params"), "source": source["shared"],
                  "reference": rooms.reference.state()}  # fmt: skip
        if processes.num_processes() == 1:  # among what is stored array by array
            shared["chain"] = ring.pop("chain")
        own = {
            "step": self.step,
            "version": self.version,
            "next_group": self._next_group,
            "skipped_publishes": self._skipped_publishes,
            "evicted_versions": self._evicted_versions,
            "tokens_generated": self._tokens_generated,
            "failures": {fault.value: count for fault, count in self._failures.items()},
            "last_failure": self._last_failure,
            "wants_room": self._wants_room,
            **{name: room.state() for name, room in self._stateful().items()},
            "ring": ring,
            "source": source["own"],
            "rollouts": rooms.rollouts.state(),
            "sampler": rooms.sampler.state(),
        }
        return {"shared": shared, "own": own}

    def restore(self, state: dict) -> None:
        """Takes a `state` back into rooms built from the same configuration."""
        rooms, shared, state = self._rooms, state["shared"], state["own"]
        self.step, self.version, self._next_group = state["step"], state["version"], state["next_group"]
        self._skipped_publishes, self._tokens_generated = state["skipped_publishes"], state["tokens_generated"]
        self._failures = {fault: state["failures"][fault.value] for fault in Fault}
        self._last_failure, self._evicted_versions = state["last_failure"], state["evicted_versions"]
        self._wants_room = state["wants_room"]
        self._news = None
        rooms.learner.restore(shared["learner"])
        ring = {"chain": shared.get("chain"), **state["ring"], "params": shared["snapshots"]}
        rooms.ring.restore(ring, rooms.learner.published_shapes)
        self.half_written = processes.first_does(lambda: ", ".join(rooms.store.discard_after(self.version)))
        for name, room in self._stateful().items():
            room.restore(state[name])
        self.live = self._sampling = rooms.ring.get(self.version)
        rooms.source.restore({"shared": shared["source"], "own": state["source"]}, self.live)
        rooms.reference.restore(shared["reference"], rooms.learner.published_shapes)
        rooms.sampler.restore(state["sampler"], self.own_live())
        rooms.rollouts.restore(state["rollouts"])

    def _stateful(self) -> dict:
        """The rooms that need nothing but their own state."""
        rooms = self._rooms
        return {
            "admission": rooms.admission,
            "probe": rooms.probe,
            "ledger": rooms.ledger,
            "metrics": rooms.metrics,
            "timeline": rooms.timeline,
        }


def instance_seed(seed: int, group_id: int) -> int:
    """The environment seed of a group: independent of when and by whom it is played."""
    return int(np.random.SeedSequence((seed, group_id)).generate_state(1)[0])
