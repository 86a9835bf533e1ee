"""The objectives that `launch.train --objective NAME` knows, as a table: which ratio, gate, weight and denominator make each.

    python -m launch.objectives
"""

import inspect
import re
import sys

from rl import gates, surrogates
from rl.corrections import CorrectionOptions, Discrepancy
from rl.denominators import Denominator
from rl.objective import Objective
from rl.presets import PRESETS
from rl.ratios import Level

COLUMNS = ("method", "ratio to", "level", "clip or gate", "weight", "denominator", "source")

_LEVELS = {
    Level.TOKEN: "token",
    Level.SEQUENCE: "row",
    Level.GEOMETRIC: "row, geometric mean",
    Level.SEGMENT: "turn, geometric mean",
}
_OF_LEVEL = {Level.TOKEN: "d", Level.SEQUENCE: "d of row", Level.GEOMETRIC: "mean d of row", Level.SEGMENT: "mean d of turn"}
_DENOMINATORS = {
    Denominator.TOKENS: "tokens",
    Denominator.SEQUENCES: "row lengths, rows",
    Denominator.SEQUENCE_SUMS: "longest, rows",
    Denominator.CONSTANT: "a constant",
}


def main(arguments: list[str]) -> int:
    if arguments:
        print("error: launch.objectives takes no options; wanted: python -m launch.objectives", file=sys.stderr)
        return 2
    print(markdown())
    return 0


def markdown() -> str:
    """The table."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(row(name) for name in PRESETS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(name: str) -> tuple[str, ...]:
    """The cells of one objective."""
    objective = PRESETS[name]()
    return (
        f"`{name}`",
        objective.ratio_anchor.value if _has_ratio(objective) else "none",
        _LEVELS[objective.ratio_level],
        _gate(objective.surrogate) + _extras(objective),
        " × ".join(filter(None, (_correction(objective.correction), _coefficient(objective.surrogate)))) or "1",
        _DENOMINATORS[objective.denominator],
        _source(name),
    )


def _source(name: str) -> str:
    """Of the first line of the preset's docstring, which reads "name: source: what": the papers, or who else is named."""
    first = inspect.getdoc(PRESETS[name]).splitlines()[0]
    papers = re.findall(r"\d{4}\.\d{5}", first)
    return ", ".join(papers) or first.split(":")[1].strip()


def _has_ratio(objective: Objective) -> bool:
    plain = surrogates.Reinforce(gates.Unweighted(), gates.Open())
    return objective.surrogate != plain or objective.anchor_penalty != 0


def _gate(surrogate: surrogates.Surrogate) -> str:
    match surrogate:
        case surrogates.CovarianceClip():
            return f"clip {_band(surrogate)}, covariance {surrogate.covariance_low:g} to {surrogate.covariance_high:g} left out"
        case surrogates.GradientPreservingClip():
            return f"clip {_band(surrogate)} that keeps a gradient{_dual(surrogate)}"
        case surrogates.Clip():
            return f"clip {_band(surrogate)}{_dual(surrogate)}"
        case surrogates.SecondMomentClip(budget, low, high):
            return f"clip by a second moment of {budget:g}, at least [{1 - low:g}, {1 + high:g}]"
        case surrogates.SoftGate(positive, negative):
            return f"sigmoid, temperatures {positive:g} and {negative:g}"
        case surrogates.GeometricMean(low, high):
            return f"clip of logs [-{low:g}, {high:g}], geometric mean of the row"
        case surrogates.CovariancePenalty(fraction, coefficient):
            return f"abs(log r) × {coefficient:g} on the {fraction:.1%} of highest covariance"
        case surrogates.Importance(gate) | surrogates.Reinforce(_, gate):
            return _open(gate)


def _open(gate: gates.Gate) -> str:
    match gate:
        case gates.Open():
            return "none"
        case gates.SignedBand(low, high, anchor):
            return f"[{1 - low:g}, {1 + high:g}] of the ratio to {anchor.value}, by sign of A"
        case gates.Band(low, high):
            return f"[{1 - low:g}, {1 + high:g}], either sign"
        case gates.TotalVariation(low, high, anchor, both):
            return f"p − {anchor.value} in [-{low:g}, {high:g}]{'' if both else ', by sign of A'}"
        case gates.BinaryKL(_, high, anchor):
            return f"binary KL to {anchor.value} ≤ {high:g}, by sign of A"


def _band(clip: surrogates.Clip) -> str:
    return f"[{1 - clip.clip_low:g}, {1 + clip.clip_high:g}]"


def _dual(clip: surrogates.Clip) -> str:
    return "" if clip.dual_clip is None else f", dual {clip.dual_clip:g}"


def _coefficient(surrogate: surrogates.Surrogate) -> str:
    if not isinstance(surrogate, surrogates.Reinforce):
        return ""
    match surrogate.coefficient:
        case gates.Unweighted():
            return ""
        case gates.Truncated(cap):
            return f"sg min(r, {cap:g})" if cap < float("inf") else "sg r"
        case gates.Clipped(low, high):
            return f"sg clip(r, {1 - low:g}, {1 + high:g})"
        case gates.Tapered():
            return "1 if A > 0, else sg min(r, 1)"
        case gates.Kernel(k, slope, k_negative, slope_negative):
            return f"sg kernel(r; {k:g}, {slope:g} / {k_negative:g}, {slope_negative:g})"


def _correction(options: CorrectionOptions) -> str:
    """Of the discrepancy ratio d, and what else is dropped."""
    low = 1 / options.discrepancy_bound if options.discrepancy_low is None else options.discrepancy_low
    band = f"1[{_OF_LEVEL[options.discrepancy_level]} in [{low:g}, {options.discrepancy_bound:g}]]"
    discrepancy = _OF_LEVEL[options.discrepancy_level]
    weight = discrepancy if options.weight_cap == float("inf") else f"min({discrepancy}, {options.weight_cap:g})"
    parts = []
    if options.discrepancy in (Discrepancy.MASK, Discrepancy.BOTH):
        parts.append(band)
    if options.discrepancy in (Discrepancy.WEIGHT, Discrepancy.BOTH):
        parts.append(weight if options.total_ratio_cap is None else f"d, d r ≤ {options.total_ratio_cap:g}")
    if options.off_policy_drift is not None:
        parts.append(f"1[A ≥ 0 or drift ≤ {options.off_policy_drift:g}]")
    if options.entropy_normalized_bound is not None:
        parts.append(f"1[log² / (H + 0.01) ≤ {options.entropy_normalized_bound:g}]")
    if options.second_moment_budget is not None:
        parts.append(f"1[among log d² of mean < {options.second_moment_budget:g}]")
    return " × ".join(parts)


def _extras(objective: Objective) -> str:
    """Penalties, where there are any."""
    extras = ""
    if objective.kl_coefficient:
        extras += f"; {objective.kl_coefficient:g} × KL ({objective.kl_estimator.value})"
    if objective.anchor_penalty:
        extras += f"; {objective.anchor_penalty:g} × log² / 2"
    return extras


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
