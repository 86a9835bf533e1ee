"""Is a replay really exact? Asked of every run, and answered with a number.

While a version is live, `record` scores with it the trajectories that hold its tokens, finished or not. When they are trained,
`check` compares the ring's replay, whatever lies between: other versions, host copies, encodings, restarts.
"""

import math
from collections.abc import Iterable

import numpy as np

from models.transformer import Params
from rl.old_logprobs import Anchored, VersionScore, score_version
from rl.scorer import Bucket, Scorer
from rl.types import Trajectory


class ExactnessProbe:
    """Holds what was scored live until the replay comes.

    Args:
      scorer: the one that the old-logprob source uses.
      every: of the request ids, one in so many is followed; 0 follows none.
    """

    def __init__(self, scorer: Scorer, *, every: int):
        self._scorer, self._every = scorer, every
        self._live: dict[tuple[int, int], VersionScore] = {}  # by (request id, version)
        self._max_error = 0.0
        self.num_compared = 0  # tokens

    @property
    def is_on(self) -> bool:
        """Whether it follows any trajectory at all."""
        return self._every > 0

    @property
    def max_error(self) -> float:
        """The largest difference so far, in nats; NaN before anything was compared, for that is no zero."""
        return self._max_error if self.num_compared else math.nan

    def record(self, version: int, params: Params, trajectories: Iterable[Trajectory]) -> None:
        """Scores with the live parameters of `version`; call it just before the next version is published."""
        holders = [t for t in trajectories if self._follows(t.request_id) and version in t.versions]
        for trajectory, scored in zip(holders, score_version(self._scorer, params, version, holders), strict=True):
            self._live[trajectory.request_id, version] = scored

    def check(self, anchored: Anchored) -> float:
        """The largest difference, in nats, between exact old logprobs and what was recorded live; records are dropped.

        A trajectory trained before its last version was superseded has no record of that version yet: it was replayed live.
        """
        error = 0.0
        for trajectory, scored in zip(anchored.trajectories, anchored.buckets, strict=True):
            for version in trajectory.versions:
                live = self._live.pop((trajectory.request_id, version), None)
                if live is None or version not in scored:
                    continue
                replayed = trajectory.old_logprobs[trajectory.policy_versions == version]
                difference = np.abs(replayed.astype(np.float64) - live.logprobs)
                error = max(error, float(np.max(np.where(np.isnan(difference), np.inf, difference))))  # max() overlooks a NaN
                self.num_compared += len(replayed)
        self._max_error = max(self._max_error, error)
        return error

    def forget(self, trajectories: Iterable[Trajectory]) -> None:
        """Drops the records of trajectories that will not be trained."""
        for trajectory in trajectories:
            for version in trajectory.versions:
                self._live.pop((trajectory.request_id, version), None)

    def _follows(self, request_id: int) -> bool:
        return self.is_on and request_id % self._every == 0

    def state(self) -> dict:
        """Records and counters as plain arrays and JSON values."""
        return {"max_error": self._max_error, "num_compared": self.num_compared,
                "live": [{"request_id": request_id, "version": version, "logprobs": scored.logprobs, "bucket": [*scored.bucket]}
                         for (request_id, version), scored in self._live.items()]}

    def restore(self, state: dict) -> None:
        self._max_error, self.num_compared = state["max_error"], state["num_compared"]
        self._live = {(record["request_id"], record["version"]): VersionScore(record["logprobs"], Bucket(*record["bucket"]))
                      for record in state["live"]}
