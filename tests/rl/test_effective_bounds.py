"""Proposition 1: the bounds by hand, and the same active tokens as the two ratios give."""

import math

import jax
import numpy as np
import pytest

from rl.corrections import CorrectionOptions
from rl.effective_bounds import EffectiveBounds, Proxy, effective_bounds
from rl.losses import LossInputs, token_losses
from rl.objective import Objective
from rl.surrogates import Clip

OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "discrepancy_bound": 2.0}


@pytest.mark.parametrize(("proxy", "share", "bounds"), [
    (Proxy.LOG_LINEAR, 0.25, (0.4096, 2.0736, 0.39685, 2.51984)),
    (Proxy.LOG_LINEAR, 0.5, (0.64, 1.44, 0.25, 4)),
    (Proxy.LOG_LINEAR, 0.75, (0.74265, 1.27519, 0.0625, 16)),
    (Proxy.LINEAR, 0.25, (0.5, 3, 0.3333333, 2.3333333)),
    (Proxy.LINEAR, 0.5, (0.6666667, 1.5, 0, 3)),
    (Proxy.LINEAR, 0.75, (0.75, 1.2857143, 0, 5)),
    (Proxy.LINEAR, 0.1, (0.2857143, math.inf, 0.4444444, 2.1111111)),  # 0.9 * 1.2 > 1: never clipped above
    (Proxy.LINEAR, 1.0, (0.8, 1.2, 0, math.inf)),
    (Proxy.LOG_LINEAR, 1.0, (0.8, 1.2, 0, math.inf)),
    (Proxy.LINEAR, 0.0, (0, math.inf, 0.5, 2)),
    (Proxy.LOG_LINEAR, 0.0, (0, math.inf, 0.5, 2)),
    (Proxy.LOG_LINEAR, 1e-4, (0, math.inf, 0.49997, 2.00014)),  # 1.2^10,000 is more than a number can be
])  # fmt: skip
def test_bounds_by_hand(proxy, share, bounds):
    found = effective_bounds(proxy, sampler_share=share, **OPTIONS)
    np.testing.assert_allclose(list(found.__dict__.values()), bounds, rtol=2e-5)


@pytest.mark.parametrize("proxy", Proxy)
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
def test_the_active_tokens_are_those_of_the_two_ratios(proxy, share):
    """100,000 tokens, through the loss itself: what it masks and clips is what the bounds on one ratio say."""
    generator = np.random.default_rng(0)
    sampler = np.log(generator.uniform(1e-3, 1, (100, 1000)))
    current = np.minimum(sampler + generator.normal(0, 1.5, sampler.shape), -1e-6)
    if proxy is Proxy.LOG_LINEAR:
        proximal = share * sampler + (1 - share) * current
    else:
        proximal = np.log(share * np.exp(sampler) + (1 - share) * np.exp(current))
    advantages = generator.choice([-1.0, 1.0], sampler.shape)
    objective = Objective(Clip(0.2, 0.28), correction=CorrectionOptions(discrepancy_bound=1.5))
    with jax.enable_x64(True):
        found = token_losses(objective, LossInputs(current, proximal, sampler, advantages, np.ones(sampler.shape, bool)), None)
    bounds = effective_bounds(proxy, sampler_share=share, clip_low=0.2, clip_high=0.28, discrepancy_bound=1.5)
    ratio = np.exp(current - sampler)
    kept = (ratio >= bounds.mask_low) & (ratio <= bounds.mask_high)
    clipped = np.where(advantages > 0, ratio > bounds.clip_high, ratio < bounds.clip_low)
    ends = np.asarray([end for end in bounds.__dict__.values() if 0 < end < np.inf])
    clear = np.all(np.abs(ratio[..., None] - ends) > 1e-6, axis=-1)
    assert clear.mean() > 0.999 and 0.01 < clipped.mean() < 0.99 and 0.01 < kept.mean() < 1
    np.testing.assert_array_equal(np.asarray(found.correction.kept)[clear], kept[clear])
    np.testing.assert_array_equal(np.asarray(found.outcome.clipped)[clear], clipped[clear])


@pytest.mark.parametrize("proxy", Proxy)
def test_a_ratio_that_is_always_1_meets_no_bound(proxy):
    """Not even one at 1."""
    assert effective_bounds(proxy, sampler_share=0.0, clip_low=0.0, clip_high=0.0, discrepancy_bound=2.0).clip_high == math.inf
    bounds = effective_bounds(proxy, sampler_share=1.0, clip_low=0.2, clip_high=0.2, discrepancy_bound=1.0)
    assert (bounds.mask_low, bounds.mask_high) == (0, math.inf)


def test_arguments_out_of_range_are_refused():
    for wrong in ({"sampler_share": 1.5}, {"sampler_share": -0.1}, {"clip_low": 2.0}, {"discrepancy_bound": 0.5}):
        with pytest.raises(ValueError, match="wanted"):
            effective_bounds(Proxy.LINEAR, **{"sampler_share": 0.5, **OPTIONS, **wrong})
    assert isinstance(effective_bounds(Proxy.LINEAR, sampler_share=0.5, **OPTIONS), EffectiveBounds)
