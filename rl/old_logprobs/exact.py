"""The exact sources: the three ways of arXiv 2605.12070 to score each token under the version that sampled it.

Snapshots are tracked, an old-logit model is set aside, or rollouts are interrupted. The sources differ in when and where they
score, never in what: the same prefix of the same trajectory under the same parameters in the same bucket. So with equally shaped
meshes their old logprobs are equal bit by bit.
"""

import collections
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from models.transformer import Params
from rl.old_logprobs.base import (
    Anchored,
    Cost,
    GonePolicy,
    ScoringSource,
    SourceName,
    VersionScore,
    score_version,
    start_version,
)
from rl.scorer import Bucket, Scorer
from rl.snapshots import SnapshotRing, VersionGone
from rl.types import NO_POLICY, Trajectory


class ExactSource(ScoringSource):
    """A source that puts the old logprobs together from the scores of each version, and will have nothing else in their place."""

    def __init__(self, scorer: Scorer, gone: GonePolicy = GonePolicy.ERROR):
        super().__init__(scorer)
        self._gone = gone

    def _stitch(self, trajectories: Sequence[Trajectory], scores: Sequence[Mapping[int, VersionScore]]) -> Anchored:
        """Old logprobs from the scores of each trajectory's versions.

        Raises:
          VersionGone: one is missing, and that is an error by policy.
        """
        anchored, rows = [], []
        for trajectory, by_version in zip(trajectories, scores, strict=True):
            row = np.full(len(trajectory), np.nan, np.float32)
            for version, score in by_version.items():
                row[trajectory.policy_versions == version] = score.logprobs
            rows.append(row)
            anchored.append(dataclasses.replace(trajectory, old_logprobs=row, loss_mask=self._known(trajectory, by_version)))
        buckets = [{version: score.bucket for version, score in sorted(by_version.items())} for by_version in scores]
        return Anchored(anchored, rows, buckets)

    def _known(self, trajectory: Trajectory, by_version: Mapping[int, VersionScore]) -> np.ndarray:
        """The loss mask that is left of a trajectory when only these versions are known; counts what is not."""
        is_gone = trajectory.loss_mask & ~np.isin(trajectory.policy_versions, list(by_version))
        if not is_gone.any():
            return trajectory.loss_mask
        if self._gone is GonePolicy.ERROR:
            raise VersionGone(
                f"trajectory {trajectory.request_id} holds trained tokens of versions "
                f"{np.unique(trajectory.policy_versions[is_gone]).tolist()}, which were let go before they were scored; pin "
                "versions as long as tokens wait, raise --ring-capacity, or choose what becomes of such tokens: --version-gone"
            )
        left = trajectory.loss_mask & ~is_gone & (self._gone is GonePolicy.MASK)
        self.spend(Cost(gone_trajectories=1, gone_tokens=int(trajectory.loss_mask.sum() - left.sum())))
        return left


class SnapshotSource(ExactSource):
    """Each version in the batch, newest first, scores the rows that hold it, up to their last token of it.

    While one version is scored the next is put on the devices, so that there are two at most.
    """

    name = SourceName.SNAPSHOT

    def __init__(self, ring: SnapshotRing, scorer: Scorer, gone: GonePolicy = GonePolicy.ERROR):
        super().__init__(scorer, gone)
        self._ring = ring

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        del version, params  # exactness is a matter of the ring's versions only
        scores: list[dict[int, VersionScore]] = [{} for _ in trajectories]

        def collect(version: int, holders: list[int], found: Callable[[], list[VersionScore]]) -> None:
            for index, score in zip(holders, found(), strict=True):
                scores[index][version] = score

        by_version: dict[int, list[int]] = collections.defaultdict(list)
        for index, trajectory in enumerate(trajectories):
            for version in trajectory.versions:
                by_version[version].append(index)
        collect_last = functools.partial(collect, NO_POLICY, [], list)  # of the version before: none yet
        with self._ring.walk():
            for version in self._ring.held_by_any(by_version.keys()):
                snapshot = self.timed("fetch", self._ring.get, version)
                collect_last()
                holders = by_version.get(version, [])
                found = start_version(self._scorer, snapshot, version, [trajectories[index] for index in holders])
                collect_last = functools.partial(collect, version, holders, found)
            collect_last()
        return self._stitch(trajectories, scores)


class InterruptSource(ExactSource):
    """Scores everything that a version sampled before the next one replaces it, so that no history is stored: a ring of one.

    What the learner takes is scored at its step; all else, finished or in flight, when the version is about to be replaced. The
    sampler pauses meanwhile, and that is the cost.
    """

    name = SourceName.INTERRUPT
    interrupts = True

    def __init__(self, scorer: Scorer, gone: GonePolicy = GonePolicy.ERROR):
        super().__init__(scorer, gone)
        self._scores: dict[int, dict[int, VersionScore]] = {}  # by request id and version
        self._lock = threading.Lock()  # the sampler's side forgets

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        self._record(version, params, trajectories)
        with self._lock:
            scores = [self._scores.pop(trajectory.request_id, {}) for trajectory in trajectories]
        return self._stitch(trajectories, scores)

    def superseding(self, version: int, params: Params, held: Sequence[Trajectory]) -> None:
        self.timed("stall", self._record, version, params, held)

    def forget(self, trajectories: Iterable[Trajectory]) -> None:
        with self._lock:
            for trajectory in trajectories:
                self._scores.pop(trajectory.request_id, None)

    def _record(self, version: int, params: Params, trajectories: Sequence[Trajectory]) -> None:
        with self._lock:
            holders = [trajectory for trajectory in trajectories if version in trajectory.versions]
        found = score_version(self._scorer, params, version, holders)
        with self._lock:
            for trajectory, score in zip(holders, found, strict=True):
                self._scores.setdefault(trajectory.request_id, {})[version] = score

    def state(self) -> dict:
        with self._lock:
            records = [
                {"request_id": request_id, "version": version, "logprobs": score.logprobs, "bucket": [*score.bucket]}
                for request_id, by_version in self._scores.items()
                for version, score in by_version.items()
            ]
        return {"shared": {}, "own": {"scores": records}}

    def restore(self, state: dict, params: Params) -> None:
        self._scores = {}
        for record in state["own"]["scores"]:
            score = VersionScore(record["logprobs"], Bucket(*record["bucket"]))
            self._scores.setdefault(record["request_id"], {})[record["version"]] = score


class DedicatedSource(ExactSource):
    """An old-logit model on devices of its own: a thread scores trajectories as they finish, while the learner trains.

    The learner waits for what is not ready, and that is the cost, beside the devices.

    Args:
      ring: of the versions; each goes from host memory to the scorer's devices when it is wanted there.
      scorer: on its own mesh.
    """

    name = SourceName.DEDICATED

    def __init__(self, ring: SnapshotRing, scorer: Scorer, gone: GonePolicy = GonePolicy.ERROR):
        super().__init__(scorer, gone)
        self._ring, self._shardings = ring, scorer.parameter_shardings
        self._waiting: queue.SimpleQueue[Trajectory | None] = queue.SimpleQueue()
        self._scores: dict[int, dict[int, VersionScore]] = {}  # by request id
        self._wanted: set[int] = set()  # request ids handed in, and neither taken nor forgotten
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._placed: tuple[int, Params] | None = None  # the version that lies on the scorer's devices

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        with self._changed:
            if self._thread is None:  # whichever side comes first
                self._thread = threading.Thread(target=self._work, name="scorer", daemon=True)
                self._thread.start()
            self._wanted |= {trajectory.request_id for trajectory in trajectories}
        for trajectory in trajectories:
            self._waiting.put(trajectory)

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        del version, params
        late = [trajectory for trajectory in trajectories if trajectory.request_id not in self._wanted]
        self.finished(late)
        request_ids = [trajectory.request_id for trajectory in trajectories]
        with self._changed:
            self.timed("stall", self._changed.wait_for, lambda: self._failure or self._scores.keys() >= set(request_ids))
            if self._failure is not None:
                raise self._failure
            scores = [self._scores.pop(request_id) for request_id in request_ids]
            self._wanted -= set(request_ids)
        # An evicted version is gone, whether or not the thread was faster: a run must not depend on that.
        in_ring = set(self._ring.versions)
        return self._stitch(trajectories, [{v: score for v, score in row.items() if v in in_ring} for row in scores])

    def forget(self, trajectories: Iterable[Trajectory]) -> None:
        with self._changed:
            for trajectory in trajectories:
                self._wanted.discard(trajectory.request_id)
                self._scores.pop(trajectory.request_id, None)

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        """The thread: all that waits, version by version, until told to end."""
        try:
            while (first := self._waiting.get()) is not None:
                batch = [first]
                while not self._waiting.empty():
                    batch.append(self._waiting.get())
                ends = None in batch
                self._score_all([trajectory for trajectory in batch if trajectory is not None])
                if ends:
                    return
        except BaseException as error:  # the learner raises it: a thread's own error reaches nobody
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _score_all(self, trajectories: list[Trajectory]) -> None:
        scores: dict[int, dict[int, VersionScore]] = {trajectory.request_id: {} for trajectory in trajectories}
        with self._ring.walk():
            for version in sorted({version for trajectory in trajectories for version in trajectory.versions}, reverse=True):
                holders = [trajectory for trajectory in self._still_wanted(trajectories) if version in trajectory.versions]
                if not holders:
                    continue
                try:
                    snapshot = self.timed("fetch", self._place, version)
                except VersionGone:
                    continue  # forgotten meanwhile, or missing when it is put together
                for trajectory, score in zip(holders, score_version(self._scorer, snapshot, version, holders), strict=True):
                    scores[trajectory.request_id][version] = score
        with self._changed:
            for trajectory in self._still_wanted(trajectories):
                self._scores[trajectory.request_id] = scores[trajectory.request_id]
            self._changed.notify_all()

    def _still_wanted(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        return [trajectory for trajectory in trajectories if trajectory.request_id in self._wanted]

    def _place(self, version: int) -> Params:
        if self._placed is None or self._placed[0] != version:
            self._placed = version, self._ring.get(version, self._shardings)
        return self._placed[1]
