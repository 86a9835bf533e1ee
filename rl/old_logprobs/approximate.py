"""The approximate sources: what to anchor to when the old logits are gone. Each says what it confuses."""

import dataclasses
import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from models.config import Precision
from models.transformer import Params
from rl import processes
from rl.learner import AnchorFunction, publish_cast
from rl.old_logprobs import interpolation
from rl.old_logprobs.base import Anchored, OldLogprobSource, ScoringSource, SourceName
from rl.scorer import Scorer
from rl.types import Trajectory


class RecomputeSource(ScoringSource):
    """What most systems call old: the parameters at the start of the learner step. The policy has moved on since."""

    name = SourceName.RECOMPUTE
    caveat = "all staleness counts as discrepancy, and the clip sees none of it in the first minibatch"

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        return self._score_whole(params, trajectories)


class LaggedSource(ScoringSource):
    """The version before the present one, whatever sampled the tokens: slime's and miles' `--keep-old-actor`.

    Exact for tokens of that very version, and for no other ones.
    """

    name = SourceName.LAGGED
    caveat = "right for tokens that are one version old; older ones count as discrepancy, fresh ones as negative staleness"

    def __init__(self, scorer: Scorer):
        super().__init__(scorer)
        self._previous: Params | None = None
        self._present: Params | None = None

    def published(self, version: int, params: Params, master: Params) -> None:
        self._previous, self._present = params if self._present is None else self._present, params

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        return self._score_whole(self._previous, trajectories)

    def state(self) -> dict:
        return {"shared": {"leaves": [processes.whole(leaf) for leaf in jax.tree.leaves(self._previous)]}, "own": {}}

    def restore(self, state: dict, params: Params) -> None:
        leaves, structure = jax.tree.flatten(params)
        shardings = [leaf.sharding for leaf in leaves]
        self._previous = jax.tree.unflatten(structure, processes.from_whole(state["shared"]["leaves"], shardings))
        self._present = params


class EwmaAverage(enum.Enum):
    """What the moving average is of."""

    PUBLISHED = "published"  # the policies that sampled
    MASTER = "master"  # the float32 weights behind them


@dataclasses.dataclass(frozen=True)
class EwmaOptions:
    """The anchor of PPO-EWMA: the revised one (arXiv 2605.12070); with a fixed decay and no reset the original (2110.00641)."""

    window: int | None = None  # W, the staleness window in publishes, for a decay of W / (W + 2); default: --max-staleness
    decay: float | None = None  # fixed, in place of the window's
    reset_below: float = 0.9  # tau: begin anew when a smaller fraction of a learner step's tokens is active; 0: never
    average: EwmaAverage = EwmaAverage.PUBLISHED

    def check(self) -> None:
        """Raises ValueError when something is out of range."""
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"--ewma.decay is {self.decay}, wanted in [0, 1)")
        if self.window is not None and self.window < 0:
            raise ValueError(f"--ewma.window is {self.window}, wanted at least 0 publishes")
        if not 0 <= self.reset_below <= 1:
            raise ValueError(f"--ewma.reset-below is {self.reset_below}, wanted a fraction in [0, 1]")

    def decay_for(self, max_staleness: int) -> float:
        """beta = W / (W + 2), whose centre of mass beta / (1 - beta) = W / 2 is the middle of the window."""
        window = max_staleness if self.window is None else self.window
        return window / (window + 2) if self.decay is None else self.decay


class EwmaSource(ScoringSource):
    """Revised PPO-EWMA (arXiv 2605.12070, after arXiv 2110.00641): the anchor is a policy that lags in the middle of the window.

        theta_prox(t) = sum_k beta^(t-k) theta(k) / sum_k beta^(t-k)         over the publishes k = 0 .. t since the last reset

    in float32, for bfloat16 cannot hold what one step changes, and cast as a policy is before it scores. When the active fraction
    of a learner step (tokens neither masked by the discrepancy nor clipped, of all that are trained) falls below tau, the history
    is dropped: the average begins anew at the next publish. The paper leaves open whether t counts optimizer steps; here it
    counts publishes, as the window does.
    """

    name = SourceName.EWMA
    caveat = "an average of policies is none that sampled: what it misses of the staleness counts as discrepancy"

    def __init__(self, scorer: Scorer, options: EwmaOptions, *, max_staleness: int, precision: Precision):
        super().__init__(scorer)
        options.check()
        self._options = options
        average = optax.ema(options.decay_for(max_staleness), debias=True, accumulator_dtype=jnp.float32)

        def update(state, params):
            with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int count
                mean, state = average.update(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), state)
            return publish_cast(mean, precision), state

        self._init, self._update = jax.jit(average.init), jax.jit(update)
        self._state: optax.EmaState | None = None
        self._anchor: Params | None = None
        self._is_reset_due = False
        self._num_resets = 0

    def published(self, version: int, params: Params, master: Params) -> None:
        theta = params if self._options.average is EwmaAverage.PUBLISHED else master
        if self._state is None or self._is_reset_due:
            self._state = self._init(theta)
        self._is_reset_due = False
        self._anchor, self._state = self._update(self._state, theta)

    def trained(self, active_fraction: float) -> None:
        if active_fraction < self._options.reset_below:
            self._num_resets += not self._is_reset_due
            self._is_reset_due = True

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        return self._score_whole(self._anchor, trajectories)

    def metrics(self) -> dict[str, float]:
        return {"ewma_resets": self._num_resets, "ewma_publishes": int(self._state.count)}

    def state(self) -> dict:
        leaves = [processes.whole(leaf) for leaf in jax.tree.leaves((self._anchor, self._state))]
        own = {"is_reset_due": self._is_reset_due, "num_resets": self._num_resets}
        return {"shared": {"leaves": leaves}, "own": own}

    def restore(self, state: dict, params: Params) -> None:
        anchor, like = self._update(self._init(params), params)  # for its structure and shardings
        leaves, structure = jax.tree.flatten((anchor, like))
        shardings = [leaf.sharding for leaf in leaves]
        self._anchor, self._state = jax.tree.unflatten(structure, processes.from_whole(state["shared"]["leaves"], shardings))
        self._is_reset_due, self._num_resets = state["own"]["is_reset_due"], state["own"]["num_resets"]


class InsideSource(OldLogprobSource):
    """A source that acts inside the step, so that nothing is scored before it; the batch carries the sampler's logprobs."""

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        rows = [trajectory.sampler_logprobs for trajectory in trajectories]
        return Anchored(list(trajectories), rows, [{} for _ in trajectories])


class SamplerSource(InsideSource):
    """The discrepancy ratio is 1 and the staleness ratio carries the engine's numerics too."""

    name = SourceName.SAMPLER
    caveat = "the engine's numerics count as staleness, and no discrepancy is seen"
    inside: AnchorFunction = staticmethod(interpolation.sampler)


class InterpolateSource(InsideSource):
    """Between the sampler's logprobs and the current ones, by the age of the token; no pass and no copy."""

    name = SourceName.INTERPOLATE
    caveat = "it knows nothing of the old policy: it only moves the bounds on the one ratio of current to sampler (Proposition 1)"

    def __init__(self, form: interpolation.Interpolation):
        super().__init__()
        self.inside = functools.partial(interpolation.interpolate, form=form)
