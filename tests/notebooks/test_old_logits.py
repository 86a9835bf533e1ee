"""The notebook on old logits, as a fresh kernel executes it."""

import pytest

from tests.notebooks.checks import execute_and_ask

FACTS = """
import json

distances = {name.value: np.abs(anchor - old) for name, anchor in anchors.items()}
print(json.dumps({
    "hand": {name: [*(np.round(found[key], 6).tolist() for key in ("discrepancy ratio", "staleness ratio")),
                    found["active"].tolist(), found["loss"], library[name][0]] for name, found in hand.items()},
    "tokens": [int(np.sum(staleness == age)) for age in range(5)],
    "engine": [float(np.abs(old - sampler).mean()), float(np.abs(old - sampler).max())],
    "exact": [name.value for name, source in sources.items() if source.exact],
    "largest": {name: float(distance.max()) for name, distance in distances.items()},
    "by_age": {name: [float(distance[staleness == age].mean()) for age in range(5)] for name, distance in distances.items()},
    "deviations": [float(deviation) for deviation in deviations.values()],
    "rarest": float(np.exp((sampler + curve(current - sampler, staleness, Interpolation.AREAL_LINEAR)[0]).min())),
    "exact_beside_the_curve": [float(np.abs(old - sampler - curve(current - sampler, staleness, form)[0])[staleness > 1].mean())
                               for form in (Interpolation.A3PO, Interpolation.AREAL_LINEAR)],
}))
"""


@pytest.mark.slow
def test_a_fresh_kernel_finds_the_hand_numbers_exact_sources_and_what_the_others_miss():
    facts = execute_and_ask("old_logits", FACTS)
    discrepancy, staleness, active, loss, library_loss = facts["hand"]["exact anchor"]
    assert discrepancy == [0.9, 1.1, 0.4, 1.025] and staleness == [1.333333, 0.681818, 1.25, 1.04878]
    assert active == [False, False, False, True]
    assert loss == pytest.approx(0.1621951, abs=1e-7) and library_loss == pytest.approx(loss, rel=1e-6)
    discrepancy, staleness, active, loss, library_loss = facts["hand"]["later anchor"]
    assert discrepancy == [1.04, 0.9, 0.45, 1.05] and staleness == [1.153846, 0.833333, 1.111111, 1.02381]
    assert active == [True, True, False, True]
    assert library_loss == pytest.approx(loss, rel=1e-6)

    assert min(facts["tokens"]) > 100, "every staleness occurs"
    mean, largest = facts["engine"]
    assert 1e-4 < mean and largest < 0.1, "the engine differs as bfloat16 programs do"

    exact = ["snapshot", "dedicated", "interrupt"]
    assert facts["exact"] == exact
    assert len(facts["largest"]) == 8
    assert {name for name, largest in facts["largest"].items() if largest == 0.0} == set(exact)
    by_age = facts["by_age"]
    assert by_age["recompute"][0] == 0.0 and min(by_age["recompute"][1:]) > 0.03, "right where nothing is stale"
    assert by_age["lagged"][1] == 0.0 and min(by_age["lagged"][2:]) > 0.03, "right one version ago"
    assert by_age["interpolate"][:2] == by_age["sampler"][:2] and min(by_age["interpolate"][2:]) > 0.03
    assert min(by_age["ewma"][1:]) > 0.03

    log_linear, linear = facts["deviations"]
    assert log_linear < 1e-5 and linear < 1e-5 + 1e-10 / facts["rarest"], "on their curves, but for what AReaL adds"
    assert min(facts["exact_beside_the_curve"]) > 0.03, "exact ones do not"
