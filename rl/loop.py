"""The program: asynchronous reinforcement learning with exact old logits, from prompt to publish.

    admit     prompts become rollouts, as many as the credit allows
    collect   the sampler decodes, environments answer, finished groups queue up
    assemble  advantages; each token's anchor, from the old-logprob source; the ledger's rows
    train     one learner step of decoupled PPO
    publish   ring first, then sampler: rollouts under way go on under the new version

This is the `lockstep` schedule: one thread, a stated number of decode steps per learner step, and so a chosen staleness; the run
is a function of its configuration and seed, bit by bit. Asynchrony is real all the same: rollouts do not wait for the learner,
they cross versions, and what is trained was sampled some versions ago.
"""

import dataclasses
import enum
import math
import time
from collections.abc import Callable

import jax
import numpy as np

from models.transformer import Params
from rl.admission import Admission, DropReason, StalePolicy
from rl.advantages import AdvantageEstimator, group_advantages
from rl.batching import bucket_length, make_batch
from rl.exactness import ExactnessProbe
from rl.learner import Learner
from rl.ledger import Ledger, ScoredTrajectory
from rl.metrics import MetricsWriter, staleness_metrics
from rl.old_logprobs import Anchored, OldLogprobSource
from rl.rollout import Rollouts
from rl.sampler import Sampler
from rl.snapshot_store import SnapshotStore
from rl.snapshots import SnapshotRing
from rl.types import Batch, Trajectory


class RingFullPolicy(enum.Enum):
    """What happens to a publish when pinned versions fill the ring."""

    SKIP_PUBLISH = "skip_publish"  # the learner trains on and the version stays
    DROP_STALEST = "drop_stalest"  # groups holding the oldest version are dropped until there is room


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The schedule, and what is admitted to it."""

    groups_per_step: int = 8
    group_size: int = 8
    publish_every: int = 1  # learner steps
    max_staleness: int = 4  # versions
    decode_steps: int = 4  # decode steps between two learner steps
    stale_policy: StalePolicy = StalePolicy.DROP
    ring_full: RingFullPolicy = RingFullPolicy.SKIP_PUBLISH
    advantages: AdvantageEstimator = AdvantageEstimator.GROUP_RELATIVE


@dataclasses.dataclass
class Rooms:
    """What the loop conducts; each room has its own module and story."""

    learner: Learner
    ring: SnapshotRing
    store: SnapshotStore  # where the ring persists
    sampler: Sampler
    rollouts: Rollouts
    admission: Admission
    source: OldLogprobSource
    probe: ExactnessProbe
    ledger: Ledger
    metrics: MetricsWriter


class NonFiniteLoss(FloatingPointError):
    """Training broke down; the step is named."""


class Loop:
    """Conducts the rooms through learner steps.

    Args:
      rooms: ready to go; the learner holds the initial weights.
      options: the schedule.
      lengths: length buckets of the training batch.
      seed: of the instances.
    """

    def __init__(self, rooms: Rooms, options: LoopOptions, *, lengths: tuple[int, ...], seed: int):
        self._rooms, self._options, self._lengths, self._seed = rooms, options, lengths, seed
        self.step = 0
        self.version = 0
        self._next_group = 0
        self._counts = {"skipped_publishes": 0, "tokens_generated": 0}
        self._seconds = dict.fromkeys(("rollout", "replay", "train", "publish"), 0.0)
        self.live: Params | None = None  # published parameters of the present version, on the device

    def start(self, params: Params) -> None:
        """Gives the learner its weights and publishes them as version 0: the first token is sampled by what will be trained."""
        self._rooms.learner.start(params)
        self.live = self._rooms.learner.published()
        self._rooms.ring.put(0, self.live)
        self._rooms.sampler.publish(0, self.live)

    @property
    def probe(self) -> ExactnessProbe:
        """What is known of the run's exactness so far."""
        return self._rooms.probe

    @property
    def source(self) -> OldLogprobSource:
        """Where the anchors come from."""
        return self._rooms.source

    def run(self, num_steps: int, on_step: Callable[[dict], None] = lambda metrics: None) -> None:
        """Runs learner steps until `num_steps` are done in all; `on_step` is told each one's metrics."""
        while self.step < num_steps:
            groups = self._timed("rollout", self._collect)
            batch, facts = self._timed("replay", self._assemble, groups)
            facts |= self._timed("train", self._train, batch)
            self.step += 1
            if self.step % self._options.publish_every == 0:
                self._timed("publish", self._publish)
            on_step(self._record(facts))

    # --- admit, collect ---

    def _admit(self) -> None:
        """Starts as many groups as the credit allows."""
        for _ in range(self._rooms.admission.credit(self.step)):
            group_id, size = self._next_group, self._options.group_size
            request_ids = list(range(group_id * size, (group_id + 1) * size))
            self._rooms.admission.start(group_id, request_ids)
            self._rooms.rollouts.start(group_id, request_ids, seed=instance_seed(self._seed, group_id))
            self._next_group += 1

    def _collect(self) -> list[list[Trajectory]]:
        """Decodes the stated number of steps, and then on until a whole batch is ready."""
        admission, sampler = self._rooms.admission, self._rooms.sampler
        stop = sampler.num_decode_steps + self._options.decode_steps
        while sampler.num_decode_steps < stop and self._roll(stop - sampler.num_decode_steps):
            pass
        while (groups := admission.take(self.version)) is None:
            self._release(admission.discarded())
            if not self._roll(sampler.max_steps):
                raise RuntimeError(
                    f"learner step {self.step}: no rollout is running, none may start, and no batch is ready "
                    f"({admission.queued} groups queued, {self._options.groups_per_step} wanted); credit was lost"
                )
        self._release(admission.discarded())
        return groups

    def _roll(self, num_steps: int) -> bool:
        """Up to `num_steps` decode steps, in one device call; False if there is nothing to roll out."""
        self._admit()
        if not self._rooms.rollouts.num_running:
            return False
        before = self._rooms.sampler.num_sampled_tokens
        rolled = self._rooms.rollouts.step(num_steps)
        self._counts["tokens_generated"] += self._rooms.sampler.num_sampled_tokens - before
        self._rooms.ring.pin(rolled.new_versions)
        for trajectory in rolled.finished:
            self._rooms.admission.finish(trajectory)
        return True

    def _release(self, trajectories: list[Trajectory]) -> None:
        """Lets go of the versions of trajectories that nobody will score."""
        self._rooms.probe.forget(trajectories)
        for trajectory in trajectories:
            self._rooms.ring.release(trajectory.versions)

    # --- assemble, train ---

    def _assemble(self, groups: list[list[Trajectory]]) -> tuple[Batch, dict]:
        """From groups to a batch: advantages by group, anchors by the source, rows in the ledger."""
        rooms = self._rooms
        trajectories = [trajectory for group in groups for trajectory in group]
        anchored = rooms.source.anchor(trajectories, self.live)
        if rooms.source.exact:
            rooms.probe.check(anchored.trajectories)
        self._write_ledger(anchored)
        facts = {
            "version": self.version,
            **batch_metrics(anchored.trajectories),
            **staleness_metrics(anchored.trajectories, self.version),
        }
        for trajectory in trajectories:
            rooms.ring.release(trajectory.versions)
        has_reward = np.asarray([trajectory.reward is not None for trajectory in trajectories])
        advantages = group_advantages(
            np.asarray([trajectory.reward or 0.0 for trajectory in trajectories], np.float64),
            np.asarray([trajectory.group_id for trajectory in trajectories]),
            has_reward,
            estimator=self._options.advantages,
        )
        batch = make_batch(
            anchored.trajectories,
            proximal_logprobs=anchored.proximal_logprobs,
            advantages=advantages,
            num_rows=self._options.groups_per_step * self._options.group_size,
            length=bucket_length(max(map(len, trajectories)), self._lengths),
        )
        return batch, facts

    def _write_ledger(self, anchored: Anchored) -> None:
        scored = [
            ScoredTrajectory(trajectory, buckets)
            for trajectory, buckets in zip(anchored.trajectories, anchored.buckets, strict=True)
        ]
        versions = {version for trajectory in anchored.trajectories for version in trajectory.versions}
        digests = {version: self._rooms.ring.digest(version) for version in sorted(versions)}
        self._rooms.ledger.record_step(self.step + 1, self.version, self._rooms.source.name.value, scored, digests)

    def _train(self, batch: Batch) -> dict:
        metrics = jax.device_get(self._rooms.learner.step(batch, version=self.version).step)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["gradient_norm"]):
            raise NonFiniteLoss(
                f"learner step {self.step}: loss {metrics['loss']}, gradient norm {metrics['gradient_norm']}; "
                "lower --learning-rate, or look at the rewards of this step's trajectories in ledger/"
            )
        return {name: float(value) for name, value in metrics.items()}

    # --- publish ---

    def _publish(self) -> None:
        """Ring before sampler: no token can carry a version that the ring never held."""
        rooms = self._rooms
        if not rooms.ring.has_room() and self._options.ring_full is RingFullPolicy.DROP_STALEST:
            self._drop_stalest()
        if not rooms.ring.has_room():
            self._counts["skipped_publishes"] += 1
            return
        rooms.probe.record(self.version, self.live, [*rooms.rollouts.partial(), *rooms.admission.unscored()])
        self.version += 1
        self.live = rooms.learner.published()
        rooms.ring.put(self.version, self.live)
        rooms.sampler.publish(self.version, self.live)

    def _drop_stalest(self) -> None:
        """Drops the groups that hold pinned versions, oldest version first, until the ring has room."""
        rooms = self._rooms
        for version in sorted(rooms.ring.pins):
            if rooms.ring.has_room():
                return
            unscored = [*rooms.rollouts.partial(), *rooms.admission.unscored()]
            for group_id in sorted({trajectory.group_id for trajectory in unscored if version in trajectory.versions}):
                self._drop(group_id, DropReason.RING_FULL)

    def _drop(self, group_id: int, reason: DropReason) -> None:
        """Drops a group wherever it is, and lets go of its versions."""
        running = self._rooms.admission.drop(group_id, reason)
        self._release(self._rooms.rollouts.cancel(running))
        for request_id in running:
            self._rooms.admission.cancel(request_id)
        self._release(self._rooms.admission.discarded())

    def finish(self) -> None:
        """Ends the run: what is still under way is dropped and counted, and the last version is persisted."""
        for group_id in self._rooms.admission.group_ids:
            self._drop(group_id, DropReason.END_OF_RUN)
        rooms = self._rooms
        rooms.ring.persist(self.version)
        rooms.store.wait()
        self._record_snapshots(rooms.ring.persisted)
        rooms.ledger.close()
        rooms.metrics.close()

    # --- record ---

    def _timed(self, name: str, function: Callable, *arguments):
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self._seconds[name] += time.perf_counter() - started

    def _record(self, facts: dict) -> dict:
        rooms = self._rooms
        row = {
            **facts,
            **self._counts,
            **rooms.admission.metrics(),
            "exactness_error_max": rooms.probe.max_error,
            "ring_versions": len(rooms.ring.versions),
            "ring_bytes": rooms.ring.nbytes,
            **{f"seconds_{name}": seconds for name, seconds in self._seconds.items()},
        }
        self._record_snapshots(rooms.ring.persisted[:-1])
        self._counts["tokens_generated"] = 0
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        rooms.metrics.write(self.step, row)
        return {"step": self.step, **row}

    def _record_snapshots(self, versions: tuple[int, ...]) -> None:
        """Gives complete snapshots their rows. The newest waits for the next, so that no row depends on how fast a disk is."""
        for version in versions:
            if version not in self._rooms.ledger.snapshots:
                self._rooms.ledger.record_snapshot(version, self._rooms.store.digest(version), self._rooms.store.files(version))

    # --- state ---

    def state(self) -> dict:
        """The whole run as plain arrays and JSON values."""
        rooms = self._rooms
        return {
            "step": self.step,
            "version": self.version,
            "next_group": self._next_group,
            "counts": dict(self._counts),
            **{name: room.state() for name, room in self._stateful().items()},
            "ring": rooms.ring.state(),
            "rollouts": rooms.rollouts.state(),
            "sampler": rooms.sampler.state(),
        }

    def restore(self, state: dict) -> None:
        """Takes a `state` back into rooms built from the same configuration."""
        rooms = self._rooms
        self.step, self.version, self._next_group = state["step"], state["version"], state["next_group"]
        self._counts = dict(state["counts"])
        rooms.ring.restore(state["ring"], rooms.learner.published_shapes)
        rooms.store.discard_after(self.version)
        for name, room in self._stateful().items():
            room.restore(state[name])
        self.live = rooms.ring.get(self.version)
        rooms.sampler.restore(state["sampler"], self.live)
        rooms.rollouts.restore(state["rollouts"])

    def _stateful(self) -> dict:
        """The rooms that need nothing but their own state."""
        rooms = self._rooms
        return {
            "learner": rooms.learner,
            "admission": rooms.admission,
            "probe": rooms.probe,
            "ledger": rooms.ledger,
            "metrics": rooms.metrics,
        }


def instance_seed(seed: int, group_id: int) -> int:
    """The environment seed of a group: independent of when and by whom it is played."""
    return int(np.random.SeedSequence((seed, group_id)).generate_state(1)[0])


def batch_metrics(trajectories: list[Trajectory]) -> dict:
    """What a batch's trajectories say of themselves; engine numerics, in nats, where old logprobs are known."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    facts = {
        "reward_mean": float(np.mean(rewards)),
        "success_mean": float(np.mean([trajectory.success for trajectory in trajectories])),
        "trajectories": len(trajectories),
        "trajectory_tokens_mean": float(np.mean([len(trajectory) for trajectory in trajectories])),
        "tokens_trained": int(sum(trajectory.loss_mask.sum() for trajectory in trajectories)),
    }
    if all(trajectory.old_logprobs is not None for trajectory in trajectories):
        differences = np.concatenate([np.abs(t.old_logprobs - t.sampler_logprobs)[t.loss_mask] for t in trajectories])
        if len(differences):
            facts |= {"engine_numerics": float(differences.mean()), "engine_numerics_max": float(differences.max())}
    return facts
