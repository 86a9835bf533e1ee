"""Objectives by paper: what a published method is, in the pieces of `rl/objective.py`.

Each function's docstring gives the source, the constants that the source uses and, where paper and public code disagree, which of
the two this is. Where nothing is said of the advantage it is relative to the group, as in GRPO: there is no critic. Where a
constant is not published, the docstring says that the one here is ours. Every preset runs on every old-logprob source; those
whose only ratio is to the sampler need none, and are cheapest with `--old-logprobs sampler`.

Left out, for their constants or kernels are not public: SAT (2607.18722), MISC (ERNIE 5.0, 2602.04705), COPC (2610.09597), KPop.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

from rl.advantages import AdvantageEstimator, AdvantageNormalization, AdvantageOptions
from rl.corrections import CorrectionOptions, Discrepancy
from rl.denominators import Denominator
from rl.gates import Band, BinaryKL, Clipped, Kernel, SignedBand, Tapered, TotalVariation, Truncated, Unweighted
from rl.objective import KlEstimator, Objective
from rl.ratios import Anchor, Level
from rl.surrogates import (
    Clip,
    CovarianceClip,
    CovariancePenalty,
    GeometricMean,
    GradientPreservingClip,
    Importance,
    Reinforce,
    SecondMomentClip,
    SoftGate,
)

_UNCORRECTED = CorrectionOptions(discrepancy=Discrepancy.NONE)
_plain = functools.partial(Objective, correction=_UNCORRECTED)
_of_sampler = functools.partial(_plain, ratio_anchor=Anchor.SAMPLER)
_CENTERED = AdvantageOptions(AdvantageEstimator.MEAN_CENTERED)
_CLIP_HIGHER = Clip(0.2, 0.28)


def _weighted(weight_cap: float = math.inf, **options) -> CorrectionOptions:
    return CorrectionOptions(discrepancy=Discrepancy.WEIGHT, weight_cap=weight_cap, **options)


# Two ratios.


def decoupled_ppo() -> Objective:
    """Decoupled PPO with a filter: arXiv 2605.12070, and arXiv 2110.00641.

    Clip 0.2 on the staleness ratio; tokens leave whose discrepancy ratio is outside [1/2, 2]. The paper does not state its bound,
    nor whether the ratio also weighs what it keeps: `--discrepancy both` does.
    """
    return Objective()


def ppo_ewma() -> Objective:
    """PPO-EWMA: arXiv 2110.00641 and its code; use with `--old-logprobs ewma`.

    The discrepancy ratio is a weight, and the total ratio is capped at 100 by lifting the sampler's logprob, so that a capped
    token keeps a gradient. Clip 0.2, mean over tokens.
    """
    return Objective(correction=_weighted(total_ratio_cap=100.0))


def tis() -> Objective:
    """TIS: verl, slime, NeMo: the discrepancy ratio of a token, at most 2, weighs what PPO's clip leaves.

    verl calls this its decoupled mode; TRL's default masks sequences instead, at 3. After the clip or before it is the same for a
    weight, unless there is a dual clip.
    """
    return Objective(correction=_weighted(2.0))


def sequence_mis() -> Objective:
    """MIS: verl, slime: masked importance sampling of whole sequences, where training and inference disagree.

    The weight is the product of a sequence's discrepancy ratios; sequences outside [1/2, 2] leave. Long sequences leave by chance
    alone: 1,000 tokens of a log ratio of 0.02 make a product that varies by a factor of two.
    """
    return Objective(correction=CorrectionOptions(
        discrepancy=Discrepancy.BOTH, discrepancy_level=Level.SEQUENCE, weight_cap=math.inf))  # fmt: skip


def geometric_mask() -> Objective:
    """Geometric rejection: verl, NeMo: rows leave whose geometric mean discrepancy ratio is outside [0.999, 1.001].

    NeMo goes to 1.002.
    """
    return Objective(correction=CorrectionOptions(
        discrepancy_level=Level.GEOMETRIC, discrepancy_low=0.999, discrepancy_bound=1.001))  # fmt: skip


def icepop() -> Objective:
    """IcePop: "Every Step Evolves", arXiv 2510.18855.

    The discrepancy ratio is a weight inside [1/2, 5] and drops the token outside. Mean over the tokens of a row, then over rows.
    Public code has the band [0.5, 5] (verl, slime, NeMo), a recipe for GLM-5.2 has [0.5, 2].
    """
    return Objective(denominator=Denominator.SEQUENCES, correction=CorrectionOptions(
        discrepancy=Discrepancy.BOTH, discrepancy_low=0.5, discrepancy_bound=5.0, weight_cap=math.inf))  # fmt: skip


# PPO's clip, and what replaces it.


def ppo() -> Objective:
    """PPO: arXiv 1707.06347, equation 7, with epsilon 0.2.

    The ratio is to the proximal policy and nothing is said of the sampler. The log ratio is clamped to 20 nats, as in verl.
    """
    return _plain(Clip())


def grpo() -> Objective:
    """GRPO: arXiv 2402.03300, section 4.1, with clip 0.2 and 0.04 of the k3 estimate of the KL divergence from the start.

    Advantages relative to the group, by its standard deviation; mean over the tokens of a row, then over rows. Code since then
    mostly leaves the KL penalty out: `--kl-coefficient 0`.
    """
    return _plain(denominator=Denominator.SEQUENCES, kl_coefficient=0.04)


def dr_grpo() -> Objective:
    """Dr. GRPO: arXiv 2503.20783, section 3.2: no standard deviation, and a constant in place of the length; clip 0.2.

    The sum over a row by the longest context, then the mean over rows, as verl; Stable-RL does not divide by the rows.
    """
    return _plain(advantage=_CENTERED, denominator=Denominator.SEQUENCE_SUMS)


def dapo() -> Objective:
    """DAPO: arXiv 2503.14476, section 3: clip 0.2 below and 0.28 above, mean over tokens, no KL penalty.

    Groups of equal rewards are replaced by others, and long answers lose up to 1 over the last fifth of the context. The paper
    gives -1 beyond the longest answer; here the line goes on, as in NeMo.
    """
    return _plain(_CLIP_HIGHER, dynamic_sampling=True, overlong_fraction=0.2)


def gspo() -> Objective:
    """GSPO: arXiv 2507.18071: the geometric mean of a row's ratios, clipped to [1 - 3e-4, 1 + 4e-4]; mean over rows.

    The gradient goes through the row's ratio, and all its tokens have one advantage. verl also caps the row's log ratio at 10.
    """
    return _plain(Clip(3e-4, 4e-4), ratio_level=Level.GEOMETRIC, token_gradient=False, denominator=Denominator.SEQUENCES)


def gspo_token() -> Objective:
    """GSPO-token: arXiv 2507.18071, section 4.3: the row's ratio as a number, times p / sg(p), so tokens may differ in advantage.

    With one advantage a row its gradient is GSPO's.
    """
    return dataclasses.replace(gspo(), token_gradient=True)


def gmpo() -> Objective:
    """GMPO: arXiv 2507.20673: the geometric mean of ratios clipped to [exp(-0.4), exp(0.4)]; mean over rows.

    verl's average counts empty rows, ours does not.
    """
    return _plain(GeometricMean(), denominator=Denominator.SEQUENCES)


def sapo() -> Objective:
    """SAPO: arXiv 2511.20347: a sigmoid of the ratio in place of the clip, temperatures 1 and 1.05; mean over rows."""
    return _plain(SoftGate(), denominator=Denominator.SEQUENCES)


def gppo() -> Objective:
    """GPPO of Klear-Reasoner: arXiv 2508.07629: clip 0.2 and 0.28, dual clip 3, and clipped tokens keep the bound's gradient.

    Bad tokens that have become unlikely are pushed on, too: on the quickstart it wants a third of its learning rate.
    """
    return _plain(GradientPreservingClip(0.2, 0.28, 3.0))


def m2po() -> Objective:
    """M2PO: arXiv 2510.01161, as its authors' code has it: budget 0.04, the band never tighter than [0.7, 1.5].

    The budget is on the squared log ratios of harmful tokens, which it cuts. The authors' old policy is the one that sampled;
    here that is the sampler, and `--ratio-anchor proximal` is the trainer's view of it. AReaL drops tokens instead (`m2po_drop`).
    """
    return _of_sampler(SecondMomentClip())


def m2po_drop() -> Objective:
    """M2PO: arXiv 2510.01161, as AReaL has it: tokens of the largest squared discrepancy leave until the mean is below 0.04.

    No clip on what is left. The band of the authors' code is `m2po`.
    """
    correction = CorrectionOptions(discrepancy=Discrepancy.NONE, second_moment_budget=0.04)
    return Objective(Importance(), correction=correction)


def clip_cov() -> Objective:
    """Clip-Cov: arXiv 2505.22617: tokens of a high covariance of advantage and logprob lose their gradient; clip 0.2.

    The paper draws a small share of those between 1 and 5 at random. Here all of them leave.
    """
    return _plain(CovarianceClip())


def kl_cov() -> Objective:
    """KL-Cov: arXiv 2505.22617: the 0.2 % of tokens of the largest covariance are held by |log ratio|, coefficient 1; no clip."""
    return _plain(CovariancePenalty())


# A detached weight on A log p.


def policy_gradient() -> Objective:
    """REINFORCE: Williams 1992: the policy gradient of whatever was sampled, less the group's mean; no ratio at all."""
    return _plain(Reinforce(), advantage=_CENTERED)


def rloo() -> Objective:
    """RLOO: arXiv 2402.14740: REINFORCE with the mean of the others as baseline; a row's sum by the longest context.

    On-policy in the paper: nothing corrects for staleness.
    """
    advantage = AdvantageOptions(AdvantageEstimator.LEAVE_ONE_OUT)
    return _plain(Reinforce(), advantage=advantage, denominator=Denominator.SEQUENCE_SUMS)


def reinforce_pp() -> Objective:
    """REINFORCE++: arXiv 2501.03262: rewards whitened over all tokens of the batch; clip 0.2.

    The paper takes 0.01 of a KL estimate (k1) off each token's reward, so that a token also answers for those after it; here the
    penalty is in the loss, by k2, and of each token alone.
    """
    advantage = AdvantageOptions(AdvantageEstimator.RAW, advantage_normalization=AdvantageNormalization.WHITEN)
    return _plain(advantage=advantage, kl_coefficient=0.01, kl_estimator=KlEstimator.K2)


def reinforce_pp_baseline() -> Objective:
    """REINFORCE++ with a baseline: arXiv 2501.03262: R minus the group's mean, whitened over the batch; clip 0.2, k2 penalty."""
    advantage = AdvantageOptions(AdvantageEstimator.MEAN_CENTERED, advantage_normalization=AdvantageNormalization.WHITEN)
    return dataclasses.replace(reinforce_pp(), advantage=advantage)


def opo() -> Objective:
    """OPO: arXiv 2505.23585: REINFORCE with the baseline of least variance, the group's mean by length; on-policy there."""
    return _plain(Reinforce(), advantage=AdvantageOptions(AdvantageEstimator.LENGTH_WEIGHTED))


def cispo() -> Objective:
    """CISPO of MiniMax-M1: arXiv 2506.13585: the ratio, at most 5, as a detached weight; no token loses its gradient.

    MiniMax tunes the upper bound and has no lower one; 5 is ScaleRL's and TRL's. verl, NeMo and tinker use both bounds. The ratio
    is to the proximal policy; `--ratio-anchor sampler` is the other reading.
    """
    return _plain(Reinforce(Clipped(1.0, 4.0)))


def topr() -> Objective:
    """TOPR: arXiv 2503.14286: good trajectories without a ratio, bad ones by min(ratio, 1), of whole sequences, to the sampler.

    ROLL and Trinity take each token's ratio: `--ratio-level token`. Good means of positive advantage.
    """
    return _of_sampler(Reinforce(Tapered()), ratio_level=Level.SEQUENCE, denominator=Denominator.SEQUENCE_SUMS)


def dis() -> Objective:
    """DIS of GLM-5: arXiv 2602.15763; SAO: arXiv 2607.07508: the ratio to the sampler as a weight inside [0.7, 6], 0 outside.

    The old policy is left out on purpose. For coding SAO takes [0.2, 4]: `--band-low 0.8 --band-high 3`. Its critic is not a part
    of this.
    """
    return _of_sampler(Reinforce(Truncated(), Band(0.3, 5.0)))


def dppo() -> Objective:
    """DPPO, divergence PPO: arXiv 2602.04879, binary total variation 0.15 to the sampler; the ratio as a weight, at most 20.

    Advantages without standard deviation, a row's sum by a constant and the number of rows, by which Stable-RL does not divide.
    The cap is 20 in verl, 10 in Stable-RL and 10,000 in the recipe. `--divergence-anchor proximal` is its "recompute" variant.
    """
    return _of_sampler(Reinforce(Truncated(20.0), TotalVariation()), advantage=_CENTERED, denominator=Denominator.SEQUENCE_SUMS)


def dppo_kl() -> Objective:
    """DPPO with the binary KL divergence, 0.05: arXiv 2602.04879. The rest as `dppo`."""
    return dataclasses.replace(dppo(), surrogate=Reinforce(Truncated(20.0), BinaryKL()))


def ipo() -> Objective:
    """IPO: prime-rl: r A where |p - q| <= 0.1, q the sampler's, and 0.002 of log(ratio)^2 / 2 on all tokens.

    Newer documents have 0.3. prime-rl's own default goes by the sign of the advantage, at 0.2: `--divergence-low 0.2
    --divergence-high 0.2 --no-both-sides`.
    """
    return _of_sampler(Importance(TotalVariation(0.1, 0.1, both_sides=True)), anchor_penalty=0.002)


def minirl() -> Objective:
    """MiniRL: "Stabilizing RL with LLMs", arXiv 2512.01374, in the form of Stable-RL's code.

    The ratio to the sampler is a weight, at most 10; a token leaves by PPO's bounds, 0.2 and 0.28, on the ratio to the proximal
    policy. Routing replay is for mixtures of experts and not here.
    """
    return _of_sampler(Reinforce(Truncated(10.0), SignedBand()))


def kimi() -> Objective:
    """Kimi K2.5: arXiv 2602.02276: A log p where the log ratio to the sampler is in a band, whatever the advantage.

    Its bounds and its scale of rewards are not published: [1/2, 2] and 1 are ours. Others report a squared penalty beside it,
    which the report's formula does not show: `--anchor-penalty`.
    """
    return _of_sampler(Reinforce(Unweighted(), Band(0.5, 1.0)), advantage=_CENTERED)


def vespo() -> Objective:
    """VESPO: arXiv 2602.10693: a kernel of the ratio of whole sequences, to the sampler; mean over tokens.

    The kernel's constants, (2, 3) and (3, 2), are those of the authors' code; its docstring has others.
    """
    return _of_sampler(Reinforce(Kernel()), ratio_level=Level.SEQUENCE)


def ipa() -> Objective:
    """IPA of ROME: arXiv 2512.24873: turns in place of tokens.

    Turns leave whose geometric mean discrepancy ratio is above 5; good trajectories count whole, bad ones by the geometric mean
    ratio of the turn, at most 1. The discount of turns is not published: 1 here, `--turn-discount` changes it.
    """
    correction = CorrectionOptions(discrepancy_level=Level.SEGMENT, discrepancy_low=0.0, discrepancy_bound=5.0)
    return Objective(Reinforce(Tapered()), ratio_level=Level.SEGMENT, correction=correction, advantage=_CENTERED)


def dro() -> Objective:
    """DRO: arXiv 2405.19107, as verl has it: A log p, less 1/4 of the squared log ratio to the proximal policy (beta 0.5)."""
    return _plain(Reinforce(), anchor_penalty=0.5, advantage=_CENTERED)


# A trust region beside the clip, and other advantages.


def estr() -> Objective:
    """Entropy-normalised trust regions: arXiv 2607.22186: PPO's clip on the ratio to the sampler, and a filter before it.

    A token leaves where log(ratio)^2 / (entropy + 0.01) is above a bound that is not published: 0.1 is ours. The paper takes the
    entropy of the behaviour policy at that token; the engine does not record it, so here it is the current policy's.
    """
    correction = dataclasses.replace(_UNCORRECTED, entropy_normalized_bound=0.1)
    return Objective(ratio_anchor=Anchor.SAMPLER, correction=correction)


def opsm() -> Objective:
    """GRPO with off-policy sequence masking of DeepSeek-V3.2: arXiv 2512.02556.

    Negative rows leave that have drifted from the sampler by more than 1e-4 nats a token: slime's default; the paper names none.
    """
    return dataclasses.replace(grpo(), correction=dataclasses.replace(_UNCORRECTED, off_policy_drift=1e-4))


def spo_pp() -> Objective:
    """SPO++: arXiv 2608.24870: advantages normalised under the measure of tokens; weights truncated at 2; clip 0.2 and 0.28, dual
    clip 2.

    Its baseline by prompt and time of the policy is the group's mean here.
    """
    advantage = AdvantageOptions(AdvantageEstimator.MEAN_CENTERED, advantage_normalization=AdvantageNormalization.TOKEN_MEASURE)
    return Objective(Clip(0.2, 0.28, 2.0), correction=_weighted(2.0), advantage=advantage)


def gigpo() -> Objective:
    """GiGPO: arXiv 2505.10978: GRPO, plus the advantage of a turn among the group's turns from the same state; weight 1.

    A turn's return is the outcome, discounted by 0.95 a turn; a KL penalty (k3) of 0.01. ROLL compares equal states of different
    prompts too; here they are compared within their prompt.
    """
    return dataclasses.replace(grpo(), advantage=AdvantageOptions(step_weight=1.0, step_discount=0.95), kl_coefficient=0.01)


PRESETS: dict[str, Callable[[], Objective]] = {preset.__name__: preset for preset in (
    decoupled_ppo, ppo_ewma, tis, sequence_mis, geometric_mask, icepop, ppo, grpo, dr_grpo, dapo, gspo, gspo_token, gmpo,
    sapo, gppo, m2po, m2po_drop, clip_cov, kl_cov, policy_gradient, rloo, reinforce_pp, reinforce_pp_baseline, opo, cispo, topr,
    dis, dppo, dppo_kl, ipo, minirl, kimi, vespo, ipa, dro, estr, opsm, spo_pp, gigpo,
)}  # fmt: skip
"""By name."""
