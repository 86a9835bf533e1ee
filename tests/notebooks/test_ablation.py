"""The ablation notebook, as a fresh kernel executes it: what is exact, what is not, and what that does to clip and mask."""

import pytest

from tests.notebooks.checks import execute_and_ask

FACTS = """
print(json.dumps({
    "figures": figures,
    "snapshot": snapshot,
    "cells": [dataclasses.asdict(result) for result in results],
    "resets": metrics["ewma"][-1]["ewma_resets"],
}))
"""


@pytest.mark.slow
def test_a_fresh_kernel_finds_the_exact_sources_exact_and_the_others_not():
    facts = execute_and_ask("ablation", FACTS)
    ages = (0, 1, 2, 4, 8)
    figures = facts["figures"]
    engine = [figures[f"engine_numerics/{age}"] for age in ages]
    errors = {
        source: [figures[f"error_mean/{source}/{age}"] for age in ages]
        for source in ("snapshot", "dedicated", "interrupt", "ewma", "interpolate", "lagged", "recompute", "sampler", "ewma_w0")
    }
    assert all(0 < difference < 1e-5 for difference in engine)
    for source in ("snapshot", "dedicated", "interrupt"):
        assert [figures[f"error_max/{source}/{age}"] for age in ages] == [0.0] * len(ages)
    recompute = errors["recompute"]
    assert recompute[0] == 0.0 and recompute[1] > 1e-3 and recompute == sorted(set(recompute))
    assert errors["ewma_w0"] == recompute
    assert errors["lagged"][1] == 0.0 and min(error for age, error in zip(ages, errors["lagged"], strict=True) if age != 1) > 1e-3
    assert errors["interpolate"][:2] == pytest.approx(engine[:2], rel=1e-6) and min(errors["interpolate"][2:]) > 1e-3
    assert errors["sampler"] == pytest.approx(engine, rel=1e-6)
    middle = ages.index(2)
    assert min(errors["ewma"]) == errors["ewma"][middle] > 1e-3
    assert errors["ewma"][middle] < min(errors[source][middle] for source in ("interpolate", "lagged", "recompute"))
    assert 1 <= figures["padded_over_scored"] <= 1.3

    assert facts["snapshot"]["exactness_max_error"] == 0.0 and facts["snapshot"]["exactness_compared_tokens"] > 10_000
    cells = {cell["source"]: cell["figures"] for cell in facts["cells"]}
    assert list(cells) == ["snapshot", "ewma", "recompute"]
    for cell in facts["cells"]:
        assert cell["diverged"] is None and len(cell["rewards"]) == 32 and cell["figures"]["staleness_mean"] > 3
    error, clipped, masked = (
        [cells[source][name] for source in ("snapshot", "ewma", "recompute")]
        for name in ("approximation_error_mean", "clip_fraction", "discrepancy_masked_fraction")
    )
    assert error[0] == 0.0 and 0.01 < error[1] < error[2], "the average is nearer than the present policy"
    assert masked[0] == 0.0 and 0 < masked[1] < masked[2] and masked[2] > 0.02, "the mask sees the staleness instead"
    assert clipped[0] > 3 * clipped[2] and clipped[1] < clipped[0], "the clip does not"
    assert facts["resets"] > 0
