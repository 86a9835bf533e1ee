"""One learner step, from trajectories to an update: what is trained, anchored to what, and the proof of it.

    trajectories -> anchors, from the old-logprob source -> the probe compares them with what was scored live
                 -> rows in the ledger -> advantages by group -> a padded batch -> the learner's update

Everything here happens on the learner's side, one step after the other.
"""

import math

import jax
import numpy as np

from models.transformer import Params
from rl import processes
from rl.advantages import overlong_penalty, token_advantages
from rl.batching import bucket_length, make_batch
from rl.ledger import ScoredTrajectory
from rl.metrics import batch_metrics, staleness_metrics
from rl.old_logprobs import Anchored
from rl.rooms import Rooms
from rl.types import Batch, Trajectory, check_contract


class NonFiniteLoss(FloatingPointError):
    """Training broke down; the step is named."""


class Training:
    """Trains on trajectories.

    Args:
      rooms: the learner, and what anchors, checks and records its batches.
      num_rows: of this process's share of a batch.
      lengths: length buckets of the batch.
    """

    def __init__(self, rooms: Rooms, *, num_rows: int, lengths: tuple[int, ...]):
        self._rooms, self._num_rows, self._lengths = rooms, num_rows, lengths
        self._superseded: list[tuple[int, Params, list[Trajectory]]] = []  # versions to be scored live, and what holds them
        self._forgotten: list[Trajectory] = []  # will never be trained

    def note_superseded(self, version: int, params: Params, held: list[Trajectory]) -> None:
        """Notes what holds tokens of a version that writes no more of them. From any thread."""
        self._superseded.append((version, params, held))

    def note_forgotten(self, trajectories: list[Trajectory]) -> None:
        """Notes what will never be trained. From any thread."""
        self._forgotten += trajectories

    def settle_probe(self) -> None:
        """Scores what was noted: here, on the learner's side, where scoring belongs."""
        while self._superseded:
            self._rooms.probe.record(*self._superseded.pop(0))
        while self._forgotten:
            self._rooms.probe.forget([self._forgotten.pop(0)])

    def assemble(self, trajectories: list[Trajectory], step: int, version: int, live: Params) -> tuple[Batch, dict]:
        """From trajectories to a batch: anchors by the source, rows in the ledger, advantages as the objective has them.

        Args:
          trajectories: group by group.
          step: the learner step, counted from 1.
          version: of the learner.
          live: its published parameters.

        Returns:
          The batch, and metrics of what is in it.

        Raises:
          ContractError: a trajectory was sampled in another way than the learner takes it for.
        """
        rooms = self._rooms
        for trajectory in trajectories:
            check_contract(trajectory.request_id, trajectory.contract, rooms.contract)
        self.settle_probe()
        anchored = rooms.source.anchor(trajectories, version, live)
        if rooms.source.exact:
            rooms.probe.check(anchored)
        if rooms.decomposition.is_on:
            rooms.decomposition.begin(anchored, version, live)
        self._write_ledger(anchored, step, version)
        facts = {**batch_metrics(anchored.trajectories), **staleness_metrics(anchored.trajectories, version)}
        advantages = token_advantages(
            anchored.trajectories,
            rooms.learner.objective.advantage,
            total=processes.total,
            rewards=self._rewards(anchored.trajectories),
        )
        batch = make_batch(
            anchored.trajectories,
            proximal_logprobs=anchored.proximal_logprobs,
            advantages=advantages,
            reference_logprobs=rooms.reference.score(anchored.trajectories),
            num_rows=self._num_rows,
            length=bucket_length(int(processes.gather(max(map(len, trajectories))).max()), self._lengths),
        )
        return batch, facts

    def _rewards(self, trajectories: list[Trajectory]) -> np.ndarray:
        """Float64 [B], less what the objective takes off long episodes; any number where there is no reward."""
        rewards = np.asarray([trajectory.reward or 0.0 for trajectory in trajectories], np.float64)
        objective, longest = self._rooms.learner.objective, self._lengths[-1]
        if not objective.overlong_fraction:
            return rewards
        buffer = max(round(objective.overlong_fraction * longest), 1)
        return rewards + overlong_penalty(
            np.asarray([len(trajectory) for trajectory in trajectories]),
            max_length=longest,
            buffer=buffer,
            penalty=objective.overlong_penalty,
        )

    def _write_ledger(self, anchored: Anchored, step: int, version: int) -> None:
        scored = [
            ScoredTrajectory(trajectory, buckets)
            for trajectory, buckets in zip(anchored.trajectories, anchored.buckets, strict=True)
        ]
        self._rooms.ledger.record_step(step, version, self._rooms.source.name.value, scored, self._rooms.ring.digests)

    def update(self, batch: Batch, step: int, version: int) -> tuple[dict, dict]:
        """The learner's update; returns its metrics, and what this process knows of its own rows' ratios.

        Raises:
          NonFiniteLoss: the loss or its gradient is no number.
        """
        decomposition = self._rooms.decomposition
        watch = decomposition.before_update if decomposition.is_on else None
        result = self._rooms.learner.step(batch, version=version, before_update=watch)
        metrics = jax.device_get(result.step)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["gradient_norm"]):
            raise NonFiniteLoss(
                f"learner step {step}: loss {metrics['loss']}, gradient norm {metrics['gradient_norm']}; "
                "lower --learning-rate, or look at the rewards of this step's trajectories in ledger/"
            )
        self._rooms.source.trained(float(metrics["active_fraction"]))
        own = decomposition.finish(result.forwards) if decomposition.is_on else {}
        return {name: float(value) for name, value in metrics.items()}, own
