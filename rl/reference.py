"""The reference policy of a KL penalty: the policy that the run starts with, held on to until it ends.

Its published parameters stay on the devices that score, one version more than without it, and score every batch by the same
`score` that old logprobs come from.
"""

from collections.abc import Sequence

import jax
import numpy as np

from models.transformer import Params
from rl import processes
from rl.scorer import Scorer
from rl.types import Trajectory


class ReferencePolicy:
    """Scores batches under the parameters it was given first.

    Args:
      scorer: that of the run.
      is_on: whether the objective asks for it; otherwise nothing is kept.
    """

    def __init__(self, scorer: Scorer, *, is_on: bool):
        self.is_on = is_on
        self._scorer = scorer
        self._params: Params | None = None

    def hold(self, params: Params) -> None:
        """Takes published parameters, in buffers that nobody donates, and keeps them where they are scored."""
        if self.is_on:
            self._params = self._scorer.place(params)

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray] | None:
        """Float32 nats, one array [T] a trajectory; None where no reference is asked for. Collective."""
        if not self.is_on:
            return None
        return [row.logprobs for row in self._scorer.score(self._params, [each.tokens for each in trajectories])]

    def state(self) -> list[np.ndarray]:
        """Its parameters as numpy arrays in a fixed order. Collective."""
        return [processes.whole(leaf) for leaf in jax.tree.leaves(self._params)]

    def restore(self, state: Sequence[np.ndarray], shapes: Params) -> None:
        """Takes a `state` back, placed like `shapes`."""
        if self.is_on:
            leaves, structure = jax.tree.flatten(shapes)
            placed = processes.from_whole(list(state), [leaf.sharding for leaf in leaves])
            self.hold(structure.unflatten(placed))
