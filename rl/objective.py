"""The objective of training, named piece by piece: what a method is, in this code base.

    a ratio         to which policy, at which level                            ratio_anchor, ratio_level     rl/ratios.py
    a surrogate     how ratio and advantage meet: a clip, a gate, a coefficient   surrogate                  rl/surrogates.py
    a correction    which tokens are dropped, what weighs the rest             correction                    rl/corrections.py
    an advantage    how a reward is compared with others                       advantage                     rl/advantages.py
    a denominator   what the sum is divided by                                 denominator                   rl/denominators.py

and what is added to it: penalties and the entropy bonus. `rl/presets.py` has the combinations that papers propose.
"""

import dataclasses
import enum
import math

from rl.advantages import AdvantageOptions
from rl.corrections import CorrectionOptions
from rl.denominators import CONSTANT_DENOMINATORS, Denominator
from rl.ratios import LOG_RATIO_LIMIT, Anchor, Level
from rl.surrogates import OF_THE_BATCH, Clip, Surrogate

LARGEST_LIMIT = 40.0
"""Nats to which log ratios may be clamped."""


class KlEstimator(enum.Enum):
    """How the KL divergence from a reference policy is estimated from one sample; d = current - reference logprob."""

    K1 = "k1"  # d
    K2 = "k2"  # d^2 / 2
    K3 = "k3"  # exp(-d) - 1 + d
    ABSOLUTE = "absolute"  # |d|


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is maximised. The default is decoupled PPO with a symmetric filter of the discrepancy ratio."""

    surrogate: Surrogate = Clip()
    ratio_anchor: Anchor = Anchor.PROXIMAL
    ratio_level: Level = Level.TOKEN
    token_gradient: bool = True  # above the token: sg(ratio) p / sg(p) and a token's own advantage, as GSPO-token; else the row's
    log_ratio_limit: float = LOG_RATIO_LIMIT  # nats; a token beyond it has a constant ratio
    correction: CorrectionOptions = CorrectionOptions()
    advantage: AdvantageOptions = AdvantageOptions()
    denominator: Denominator = Denominator.TOKENS
    denominator_constant: float | None = None  # of sequence_sums, by default the longest context, and of constant
    count_kept: bool = False  # the denominator counts the tokens that corrections keep, and not all trained ones
    anchor_penalty: float = 0.0  # of log(current / anchor)^2 / 2, on all trained tokens
    kl_coefficient: float = 0.0  # of the KL divergence from the policy that the run starts with
    kl_estimator: KlEstimator = KlEstimator.K3
    kl_k2_gradient: bool = False  # the estimator's value with the gradient of K2, which is that of the divergence
    entropy_coefficient: float = 0.0
    dynamic_sampling: bool = False  # groups of equal rewards are replaced by others (DAPO, arXiv 2503.14476, section 3.2)
    overlong_fraction: float = 0.0  # of the context: over its last part long episodes lose reward (the same, section 3.4)
    overlong_penalty: float = 1.0  # units of reward, where the context ends

    @property
    def surrogate_needs_batch(self) -> bool:
        """Whether its surrogate depends on the whole minibatch."""
        return isinstance(self.surrogate, OF_THE_BATCH)

    @property
    def needs_batch(self) -> bool:
        """Whether what a token counts depends on the whole minibatch, so that a step needs a forward before it."""
        return self.surrogate_needs_batch or self.correction.needs_batch or self.count_kept

    @property
    def needs_reference(self) -> bool:
        """Whether it wants logprobs of a reference policy."""
        return self.kl_coefficient != 0

    def check(self) -> None:
        """Refuses what has no meaning.

        Raises:
          ValueError: what, got, wanted, what to do.
        """
        self.surrogate.check()
        self.correction.check()
        if self.denominator_constant is not None and self.denominator not in CONSTANT_DENOMINATORS:
            raise ValueError(f"denominator {self.denominator.value!r} got constant {self.denominator_constant}; it takes none")
        if self.denominator is Denominator.CONSTANT and self.denominator_constant is None:
            raise ValueError("denominator 'constant' wants a constant above 0: give --denominator-constant")
        if not 0 < self.log_ratio_limit <= LARGEST_LIMIT:
            raise ValueError(f"log_ratio_limit is {self.log_ratio_limit}, wanted in (0, {LARGEST_LIMIT:g}] nats: beyond it "
                             "squares of ratios overflow")
        if self.denominator_constant is not None and not 0 < self.denominator_constant < math.inf:
            raise ValueError(f"denominator_constant is {self.denominator_constant}, wanted a finite number above 0")
        for name in ("kl_coefficient", "anchor_penalty", "overlong_penalty"):
            if not 0 <= self.__dict__[name] < math.inf:
                raise ValueError(f"{name} is {self.__dict__[name]}, wanted a finite number of at least 0")
        if not 0 <= self.overlong_fraction <= 1:
            raise ValueError(f"overlong_fraction is {self.overlong_fraction}, wanted in [0, 1]: a fraction of the context")
        if self.ratio_level in (Level.MAXIMUM, Level.MINIMUM):
            raise ValueError(f"ratio_level is {self.ratio_level.value!r}, wanted token, sequence, geometric or segment")
