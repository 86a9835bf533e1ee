"""The quickstart notebook, as a fresh kernel executes it."""

import pytest

from tests.notebooks.checks import execute_and_ask

FACTS = """
import json

is_stale = staleness > 0
print(json.dumps({
    "success": [summary["success_before"], summary["success_after"]],
    "replay": [summary["exactness"]["replay"], summary["exactness_max_error"], float(np.abs(replayed - old).max())],
    "tokens": len(old),
    "engine_max": float(np.abs(sampler - old).max()),
    "recompute_mean": [float(np.abs(recomputed - old)[is_stale == stale].mean()) for stale in (False, True)],
    "clipped": [float(column("clip_fraction", rows).mean()) for rows in (metrics[:12], varied)],
    "masked": [float(column("discrepancy_masked_fraction", rows).max()) for rows in (metrics[:12], varied)],
    "first_tokens": [rows[0]["tokens_trained"] for rows in (metrics, varied)],
}))
"""


@pytest.mark.slow
def test_a_fresh_kernel_learns_replays_exactly_and_sees_what_recompute_hides():
    facts = execute_and_ask("quickstart", FACTS)
    before, after = facts["success"]
    assert after >= 0.70 and after - before >= 0.50
    assert facts["replay"] == ["bitwise", 0.0, 0.0] and facts["tokens"] > 20_000
    assert facts["engine_max"] < 1e-4
    fresh, stale = facts["recompute_mean"]
    assert fresh < 1e-5 and stale > 0.01, "recompute is exact only where nothing is stale"
    assert facts["first_tokens"][0] == facts["first_tokens"][1]
    exact, varied = facts["clipped"]
    assert varied < 0.5 * exact, "the clip does not see the staleness"
    exact, varied = facts["masked"]
    assert exact == 0 and varied > 0.01, "the mask does"
