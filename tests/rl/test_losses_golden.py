"""Every loss of the catalogue against golden vectors of the public code: loss, per-token terms and gradient.

The mapping from the options of a reference to an objective of ours is the point of each test. Both precisions in which the
references ran are compared with the same program of ours: float32 at 1e-5, float64 at 1e-9.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import gates, surrogates
from rl.corrections import CorrectionOptions, Discrepancy, Policies, Statistic, correct, off_policy_negatives
from rl.gates import Tokens
from rl.losses import LossInputs, kl_penalty, minibatch_statistics, token_losses
from rl.objective import KlEstimator, Objective
from rl.ratios import Anchor, Level
from tests.golden_cases import Case, assert_near, cases, cropped

LOSS_FILES = ("ppo_clip", "decoupled_areal", "decoupled_openai", "verl_family", "stable_rl_dppo_minirl", "m2po",
              "vespo_gppo_topr_tis_dis_prime_opsm")  # fmt: skip
UNCLAMPED = {"log_ratio_limit": 40.0}  # many references clamp no log ratio; no token here is so far off
NO_CORRECTION = CorrectionOptions(discrepancy=Discrepancy.NONE)
WEIGHTED = CorrectionOptions(discrepancy=Discrepancy.WEIGHT, weight_cap=math.inf)
# Of these the reference rounds to float32 inside, even where it ran in float64.
ROUGH = ("areal_decoupled", "skyrl_rollout_is", "skyrl_dppo", "m2po_authors")


def objective_of(case: Case) -> Objective:
    """The reference's options in our words."""
    plain = functools.partial(Objective, correction=NO_CORRECTION)
    return OBJECTIVES[case.function](case.options, plain)


def verl_ppo(options, plain):
    low, high = (options.get(f"clip_ratio_{end}", options["clip_ratio"]) for end in ("low", "high"))
    return plain(surrogates.Clip(low, high, options["clip_ratio_c"]))


def areal_decoupled(options, plain):
    """`mask` also weights the tokens that it keeps; with a ratio of sequences the weight is their geometric mean's."""
    correction, rejection = NO_CORRECTION, options["rejection_sampling"]
    if rejection is not None:
        low, high = rejection["lower"], rejection["upper"]
        is_sequence, by_ratio = rejection["level"] == "sequence", rejection["metric"] == "ratio"
        level = Level.GEOMETRIC if is_sequence else Level.TOKEN
        if by_ratio and rejection["action"] == "clamp":
            correction = dataclasses.replace(WEIGHTED, discrepancy_level=level, weight_cap=high, weight_floor=low or 0.0)
        elif by_ratio:
            correction = dataclasses.replace(WEIGHTED, discrepancy=Discrepancy.BOTH, discrepancy_level=level,
                                             discrepancy_bound=high, discrepancy_low=low or 0.0)  # fmt: skip
        else:
            statistics = {"kl_k1": Statistic.K1, "kl_k2": Statistic.K2, "kl_k3": Statistic.K3_REVERSED}
            correction = dataclasses.replace(WEIGHTED, rejection=statistics[rejection["metric"]], rejection_level=level,
                                             rejection_low=low, rejection_high=high)  # fmt: skip
    clip = surrogates.Clip(options["eps_clip"], options.get("eps_clip_higher", options["eps_clip"]), options.get("c_clip"))
    objective = Objective(clip, correction=correction, **UNCLAMPED)
    if options["importance_sampling_level"] == "sequence":
        return dataclasses.replace(objective, ratio_level=Level.GEOMETRIC, token_gradient=False)
    return objective


def openai_decoupled(options, plain):
    clip = options["clip_param"]
    cap = options["imp_samp_max"] or None
    return Objective(surrogates.Clip(clip, clip) if clip else surrogates.Importance(), anchor_penalty=options["kl_penalty"],
                     correction=dataclasses.replace(WEIGHTED, total_ratio_cap=cap), **UNCLAMPED)  # fmt: skip


def stable_rl(options, plain):
    low, high, mode = options["low"], options["high"], options["mode"]
    anchor = Anchor.PROXIMAL if mode.endswith("_recompute") else Anchor.SAMPLER
    of_modes = {
        "dppo_binary_tv": gates.TotalVariation(low, high, anchor),
        "dppo_binary_kl": gates.BinaryKL(low, high, anchor),
        "ppo": gates.SignedBand(low, high, anchor),
        "pg_no_mask": gates.Open(),
    }
    surrogate = surrogates.Reinforce(gates.Truncated(options["c"]), of_modes[mode.removesuffix("_recompute")])
    return plain(surrogate, ratio_anchor=Anchor.SAMPLER, **UNCLAMPED)


def reinforce(coefficient=gates.Unweighted(), gate=gates.Open(), plain=None, **ratio):  # noqa: B008
    return plain(surrogates.Reinforce(coefficient, gate), **ratio)


def skyrl_dppo(options, plain):
    of_types = {"binary_tv": gates.TotalVariation, "binary_kl": gates.BinaryKL}
    gate = of_types[options["type"]](options["low"], options["high"])
    return plain(surrogates.Importance(gate), ratio_anchor=Anchor.SAMPLER)


def prime(options, plain, **bounds):
    gate = gates.TotalVariation(**bounds)
    return plain(surrogates.Importance(gate), ratio_anchor=Anchor.SAMPLER, anchor_penalty=2 * options["kl_tau"], **UNCLAMPED)


SAMPLED = {"ratio_anchor": Anchor.SAMPLER}
OBJECTIVES = {
    "verl_ppo": verl_ppo,
    "areal_decoupled": areal_decoupled,
    "openai_decoupled": openai_decoupled,
    "stable_rl": stable_rl,
    "m2po_authors": lambda o, plain: plain(
        surrogates.SecondMomentClip(o["budget"], o["mini_low"] or 0.0, o["mini_high"] or 0.0), **UNCLAMPED),
    "verl_gspo": lambda o, plain: plain(
        surrogates.Clip(o["clip_ratio_low"], o["clip_ratio_high"]), ratio_level=Level.GEOMETRIC, **UNCLAMPED),
    "verl_sapo": lambda o, plain: plain(surrogates.SoftGate(o["tau_pos"], o["tau_neg"])),
    "verl_cispo": lambda o, plain: reinforce(gates.Clipped(o["clip_ratio_low"], o["clip_ratio_high"]), plain=plain),
    "verl_geo_mean": lambda o, plain: plain(
        surrogates.GeometricMean(o["clip_ratio_low"], o["clip_ratio_high"]), **UNCLAMPED),
    "verl_gpg": lambda o, plain: reinforce(plain=plain),
    "verl_dro": lambda o, plain: reinforce(plain=plain, anchor_penalty=o["policy_loss"]["dro_beta"], **UNCLAMPED),
    "verl_clip_cov": lambda o, plain: plain(
        surrogates.CovarianceClip(o["clip_ratio"], o["clip_ratio"], None, o["policy_loss"]["clip_cov_lb"],
                                  o["policy_loss"]["clip_cov_ub"]), **UNCLAMPED),
    "verl_kl_cov": lambda o, plain: plain(
        surrogates.CovariancePenalty(o["policy_loss"]["kl_cov_ratio"], o["policy_loss"]["ppo_kl_coef"]), **UNCLAMPED),
    "verl_dppo_tv": lambda o, plain: reinforce(
        gates.Truncated(o["clip_ratio_c"]), gates.TotalVariation(o["clip_ratio"], o["clip_ratio"]), plain, **SAMPLED),
    "verl_dppo_kl": lambda o, plain: reinforce(
        gates.Truncated(o["clip_ratio_c"]), gates.BinaryKL(o["clip_ratio"], o["clip_ratio"]), plain, **SAMPLED),
    "verl_reinforce_is": lambda o, plain: reinforce(gates.Truncated(o["cap"]), plain=plain, **SAMPLED),
    "vespo": lambda o, plain: reinforce(kernel(o), plain=plain, ratio_level=Level.SEQUENCE),
    "gppo": lambda o, plain: plain(surrogates.GradientPreservingClip(o["low"], o["high"], o["c"]), **UNCLAMPED),
    "roll_tis": lambda o, plain: reinforce(gates.Clipped(1 - o["tis_low"], o["tis_high"] - 1), plain=plain, **UNCLAMPED),
    "roll_topr": lambda o, plain: reinforce(gates.Tapered(), plain=plain, **UNCLAMPED),
    "roll_cispo": lambda o, plain: reinforce(gates.Clipped(o["cispo_low"], o["cispo_high"]), plain=plain),
    "roll_cispo_unified": lambda o, plain: reinforce(
        gates.Clipped(o["cispo_low"], o["cispo_high"]), gates.SignedBand(o["cispo_low"], o["cispo_high"]), plain),
    "roll_ppo_dual": lambda o, plain: plain(surrogates.Clip(o["pg_low"], o["pg_high"], 1 + 2 * o["pg_clip"])),
    "skyrl_rollout_is": lambda o, plain: reinforce(
        gates.Truncated(), gates.Band(o["low"], o["high"]), plain, **SAMPLED),
    "skyrl_dppo": skyrl_dppo,
    "prime_default": lambda o, plain: prime(
        o, plain, divergence_low=o["dppo_mask_low"], divergence_high=o["dppo_mask_high"]),
    "prime_ipo": lambda o, plain: prime(
        o, plain, divergence_low=o["ipo_threshold"], divergence_high=o["ipo_threshold"], both_sides=True),
}  # fmt: skip


def kernel(options):
    return gates.Kernel(options["k_pos"], options["lambda_pos"], options["k_neg"], options["lambda_neg"])


def token_weights(case: Case) -> np.ndarray:
    """float64 [datasets, 8]: what the reference multiplies each token of a row by before it sums; its 1e-8 included."""
    weights = []
    for mask, dataset in zip(case.mask, case.datasets, strict=True):
        num_rows, length = {"p0": (6, 24), "p1": (8, 32), "p2": (5, 16), "p3": (8, 24), "p4": (4, 16)}[dataset]
        counts = mask.sum(axis=1)
        filled = np.count_nonzero(counts)
        length = case.options.get("loss_scale_factor", length)
        ones, of_rows = np.ones(len(mask)), 1 / (counts + 1e-8)
        weights.append({
            "token-mean": ones / counts.sum(),
            "token-mean over the ORIGINAL mask": ones / counts.sum(),
            "sum over all tokens / global token count": ones / counts.sum(),
            "token-sum": ones,
            "seq-mean-token-mean": of_rows / filled,
            "seq-mean-token-sum": ones / filled,
            "seq-mean-token-sum-norm": ones / length / (1 if case.function == "stable_rl" else filled),
            "mean over ALL rows": of_rows / num_rows,
            "roll seq-mean-token-mean (sum of row means / (B+1e-8), B counts all-masked rows)": of_rows / (num_rows + 1e-8),
        }[case.aggregation] * (counts > 0))  # fmt: skip
    return np.stack(weights)


def evaluate(objective: Objective, inputs: LossInputs, weights):
    """Loss, per-token losses, gradient and what the minibatch decides, data set by data set."""

    def one(inputs, weights):
        statistics = minibatch_statistics(objective, inputs)

        def loss_of(logprobs):
            losses = token_losses(objective, inputs._replace(logprobs=logprobs), statistics)
            return jnp.sum(weights[:, None] * losses.losses), losses

        (loss, losses), gradient = jax.value_and_grad(loss_of, has_aux=True)(inputs.logprobs)
        return loss, losses, gradient, statistics

    return jax.device_get(jax.vmap(one)(inputs, weights))


def arrays_of(case: Case) -> LossInputs:
    """The inputs of all data sets in float64."""
    proximal = case.inputs(case.arguments.get("prox", case.arguments.get("old", "old_logp")))
    current, sampler, advantages = case.inputs("logp"), case.inputs("rollout_logp"), case.advantages
    if case.arguments.get("is_weights"):
        weights = case.private("rollout_is_weights")
        if case.function == "verl_ppo":
            advantages = np.float64(advantages) * weights  # w min(x, y) = min(w x, w y)
        else:  # VESPO's join the ratio of the row, which is not differentiated; each is clamped for itself
            ratios = (np.float64(current) - proximal, np.log(np.maximum(np.float64(weights), 1e-8)))
            of_tokens = sum(np.where(case.mask, np.clip(ratio, -20, 20), 0) for ratio in ratios)
            of_rows = of_tokens.sum(axis=2, keepdims=True) / np.maximum(case.mask.sum(axis=2, keepdims=True), 1)
            proximal = current - np.clip(of_rows, -20, 20)
    return LossInputs(current, proximal, sampler, advantages, case.mask)


def signs_of(case: Case) -> np.ndarray:
    """TOPR goes by the score of a trajectory and not by its advantage, in which it is linear: -1 where the two disagree."""
    if case.function != "roll_topr":
        return np.ones(case.mask.shape)
    return np.where((case.inputs("scores")[:, :, None] > 0) == (case.advantages > 0), 1.0, -1.0)


def tolerance_of(case: Case, precision: str) -> float:
    if precision == "f32":
        return 1e-5
    return 2e-5 if case.function in ROUGH else 1e-8 if case.function == "verl_geo_mean" else 1e-9  # GMPO: 1e-8 in an exponent


@pytest.mark.parametrize("precision", [pytest.param("f32", marks=pytest.mark.slow), "f64"])
@pytest.mark.parametrize("case", [case for file in LOSS_FILES for case in cases(f"losses/{file}") if case.has("loss")], ids=repr)
def test_loss_terms_and_gradient(case, precision):
    dtype, tolerance = {"f32": np.float32, "f64": np.float64}[precision], tolerance_of(case, precision)
    inputs, signs = arrays_of(case), signs_of(case)
    inputs = inputs._replace(advantages=inputs.advantages * signs)
    weights = token_weights(case).astype(dtype)
    with jax.enable_x64(precision == "f64"):
        arrays = LossInputs(*(array.astype(dtype) for array in inputs[:4]), inputs.mask)
        loss, tokens, gradient, statistics = evaluate(objective_of(case), arrays, weights)
    losses, gradient = tokens.losses * signs, gradient * signs
    loss = np.sum(weights[:, :, None] * losses, axis=(1, 2)) if case.function == "roll_topr" else loss
    terms = weights[:, :, None] * losses
    for mine, theirs, summands in zip(loss, case.expected("loss", precision), terms, strict=True):
        # A sum that cancels is as exact as its terms are.
        slack = {"f32": 1e-6, "f64": 1e-9}[precision] * np.abs(summands).sum()
        assert abs(mine - theirs) <= tolerance * abs(theirs) + slack, f"loss: {mine}, wanted {theirs}"
    compared = np.ones(gradient.shape, bool)
    if case.function == "m2po_authors":
        # The band ends on one token's own ratio, and whether that token is inside is decided by a rounding.
        ratio = np.exp(arrays.logprobs - arrays.proximal_logprobs)
        band = (1 - statistics.surrogate.clip_low, 1 + statistics.surrogate.clip_high)
        compared = np.all([np.abs(ratio - end) > 3e-6 for end in band], axis=0) | ~case.mask
    kept, outcome = tokens.correction.kept, tokens.outcome
    outputs = {
        "grad": gradient,
        "loss_mat": losses,
        # Of AReaL: where the clip acts, where the dual clip does, and what is kept with which weight.
        "clip_mask": kept & outcome.clipped,
        "dual_clip_mask": kept & outcome.dual_clipped,
        "behave_mask": kept & (tokens.correction.weights > 0),
        "behave_imp_weight": np.where(kept, tokens.correction.weights, 0),
    }
    for name in filter(case.has, outputs):
        are_compared = cropped(compared if name == "grad" else np.ones_like(compared), case.expected(name, precision))
        pairs = cropped(outputs[name], case.expected(name, precision))
        for dataset, (mine, theirs), (chosen, _) in zip(case.datasets, pairs, are_compared, strict=True):
            assert_near(np.where(chosen, mine, theirs), theirs, tolerance, f"{name} on {dataset}")


@pytest.mark.parametrize("case", cases("losses/stable_rl_dppo_minirl"), ids=repr)
def test_gates_of_stable_rl(case):
    """Of tokens with an advantage; without one it does not matter."""
    inputs = arrays_of(case)
    current, proximal, sampler, advantages = (np.where(case.mask, array, 0) for array in inputs[:4])
    tokens = Tokens(current, current - sampler, advantages, proximal, sampler, jnp.asarray(case.mask))
    is_open = np.where(advantages != 0, objective_of(case).surrogate.gate(tokens), -1)
    for mine, theirs in cropped(is_open, case.expected("keep_mask", "f32")):
        np.testing.assert_array_equal(mine[mine >= 0], theirs[mine >= 0])


@pytest.mark.parametrize("case", cases("losses/kl_estimators"), ids=repr)
@pytest.mark.parametrize("precision", ["f32", "f64"])
def test_kl_penalties(case, precision):
    kind = case.options["kind"]
    estimator = KlEstimator({"abs": "absolute"}.get(kind, kind.removesuffix("+")))
    weights = token_weights(case)[:, :, None]
    with jax.enable_x64(precision == "f64"):
        dtype = {"f32": np.float32, "f64": np.float64}[precision]
        logprobs, reference = (np.where(case.mask, case.inputs(name), 0).astype(dtype) for name in ("logp", "ref_logp"))

        def weighted(logprobs):
            penalty = kl_penalty(logprobs, reference, estimator=estimator, k2_gradient=kind.endswith("+"))
            return jnp.sum(jnp.asarray(weights, dtype) * jnp.where(case.mask, penalty, 0)), penalty

        (_, penalty), gradient = jax.value_and_grad(weighted, has_aux=True)(logprobs)
    # In float32 exp(-d) - 1 + d keeps few digits where d is small; theirs even fewer, so their float64 is the measure.
    eps = np.finfo(dtype).eps
    of_values, of_gradients = 4 * eps * np.abs(logprobs - reference), np.broadcast_to(eps * weights, case.mask.shape)
    for name, ours, slack in (("loss_mat", np.where(case.mask, penalty, 0), of_values), ("grad", gradient, of_gradients)):
        for (mine, theirs), (allowed, _) in zip(
            cropped(ours, case.expected(name, "f64")), cropped(slack, case.expected(name, "f64")), strict=True
        ):
            missing = np.sign(mine - theirs) * np.maximum(np.abs(mine - theirs) - allowed, 0)
            assert_near(theirs + missing, theirs, {"f32": 1e-5, "f64": 1e-9}[precision], name)


@pytest.mark.parametrize("case", [case for case in cases("losses/m2po") if case.function == "m2po_areal_mask"], ids=repr)
def test_second_moment_mask_of_areal(case):
    options = CorrectionOptions(discrepancy=Discrepancy.NONE, second_moment_budget=case.options["threshold"])
    for index, (mask, theirs) in enumerate(zip(case.mask, case.expected("keep_mask", "f32"), strict=True)):
        proximal, sampler = (np.where(mask, case.inputs(name)[index], 0) for name in ("old_logp", "rollout_logp"))
        policies = Policies(proximal, proximal, sampler, jnp.asarray(mask))
        kept = correct(policies, np.zeros(mask.shape, np.float32), np.zeros(mask.shape, np.float32), options).kept
        np.testing.assert_array_equal(kept[tuple(map(slice, theirs.shape))], theirs.astype(bool))


OTHERS = "losses/vespo_gppo_topr_tis_dis_prime_opsm"


@pytest.mark.parametrize("case", [case for case in cases(OTHERS) if case.function == "trl_opsm"], ids=repr)
def test_off_policy_sequences_of_trl(case):
    expected = [rows[:, 0].astype(bool) for rows in case.expected("keep_rows", "f32")]
    advantages = np.repeat(case.inputs("adv_seq", 0)[:, :, None], case.mask.shape[2], axis=2)
    for index, (mask, theirs) in enumerate(zip(case.mask, expected, strict=True)):
        current, sampler = (np.where(mask, case.inputs(name)[index], 0) for name in ("logp", "rollout_logp"))
        dropped = off_policy_negatives(current, sampler, advantages[index], jnp.asarray(mask), drift=case.options["threshold"])
        has_tokens, is_dropped = mask.any(axis=1)[: len(theirs)], np.any(dropped & mask, axis=1)[: len(theirs)]
        np.testing.assert_array_equal(~is_dropped[has_tokens], theirs[has_tokens])


@pytest.mark.parametrize("case", [case for case in cases(OTHERS) if case.function == "trl_vespo_phi"], ids=repr)
def test_kernel_of_trl(case):
    of_tokens = np.clip(case.inputs("logp") - case.inputs("old_logp"), -20, 20)
    log_ratios = np.where(case.mask, of_tokens, 0).sum(axis=2, keepdims=True)
    advantages = case.inputs("adv_seq", 0)[:, :, None]
    unused = np.zeros_like(advantages)
    # TRL clamps below at log 1e-8: -18.4 nats.
    log_ratios = np.maximum(np.clip(log_ratios, -20, 20), np.log(np.float32(1e-8)))
    tokens = Tokens(unused, log_ratios, advantages, unused, unused, advantages == advantages)
    phi, _ = kernel(case.options)(tokens)
    for mine, theirs in cropped(phi, case.expected("phi", "f32")):
        assert_near(mine, theirs, 1e-5, "phi")
