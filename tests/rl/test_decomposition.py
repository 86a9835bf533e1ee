"""The log ratio taken apart: the terms add up, each is where it belongs, and an anchor's error is its distance from exact."""

import dataclasses
import functools

import numpy as np
import pytest

from rl.decomposition import TERMS
from rl.old_logprobs import EwmaOptions, SourceName
from tests.tiny import rows_of, tiny_config, tiny_loop


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs with a policy that moves fast, and returns the metrics and the loop; equal runs are run once."""

    @functools.cache
    def run(name, *, minibatches=2, every=1, steps=7, ewma=None):
        config = tiny_config()
        config = dataclasses.replace(
            config,
            optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-2),
            step=dataclasses.replace(config.step, minibatches=minibatches),
            ewma=ewma or EwmaOptions(),
            snapshots=dataclasses.replace(config.snapshots, old_logprobs=name, decompose_every=every),
        )
        directory = tmp_path_factory.mktemp(name.value)
        loop = tiny_loop(directory, config)
        loop.run(steps)
        return rows_of(directory), loop

    return run


def test_the_terms_of_every_token_add_up_to_its_whole_log_ratio(tmp_path):
    config = tiny_config()
    loop = tiny_loop(tmp_path, dataclasses.replace(config, snapshots=dataclasses.replace(config.snapshots, decompose_every=1)))
    decomposition, seen = loop._rooms.decomposition, []
    terms_of = decomposition._terms

    def watched(row, forward):
        terms, trajectory = terms_of(row, forward), row.trajectory
        total = (forward[: len(trajectory)] - trajectory.sampler_logprobs)[trajectory.loss_mask]
        np.testing.assert_allclose(sum(terms[name] for name in TERMS), total, atol=1e-5)
        seen.append(len(total))
        return terms

    decomposition._terms = watched
    loop.run(6)
    decomposed, trained = (sum(row[name] for row in rows_of(tmp_path)) for name in ("decomposed_tokens", "tokens"))
    assert sum(seen) == decomposed == trained


def test_each_term_is_where_it_belongs(run):
    rows, _ = run(SourceName.SNAPSHOT)
    first, last = rows[0], rows[-1]
    assert first["staleness_max"] == 0 and first["policy_lag"] == 0.0  # `score` twice under one version, in one bucket
    assert last["policy_lag"] > 1e-2 and last["optimizer_step"] > 1e-3
    for row in rows:  # two programs at equal parameters, in float32
        assert 0 < row["engine_numerics"] < 1e-5 and 0 <= row["program_numerics"] < 1e-5
        assert row["approximation_error_max"] == 0.0
    rows, _ = run(SourceName.SNAPSHOT, minibatches=1, steps=3)
    assert {row["optimizer_step"] for row in rows} == {0.0}


@pytest.mark.parametrize(
    ("name", "term"),
    [(SourceName.RECOMPUTE, "policy_lag"), (SourceName.SAMPLER, "engine_numerics")],
)
def test_the_error_of_an_approximation_is_the_term_that_it_confuses(run, name, term):
    rows, loop = run(name)
    assert loop._rooms.ring.pins  # compared with exact ones, from the ring
    for row in rows:
        assert row["approximation_error_mean"] == pytest.approx(row[term], rel=1e-6)
    assert rows[-1]["approximation_error_max"] >= rows[-1]["approximation_error_mean"] > 0


@pytest.mark.slow
def test_errors_without_staleness_are_those_of_the_definitions(run):
    """The first step trains what the learner's own version sampled."""
    first = {name: run(name)[0][0] for name in SourceName if name is not SourceName.DEDICATED}
    engine = first[SourceName.SNAPSHOT]["engine_numerics"]
    for name in (SourceName.SNAPSHOT, SourceName.INTERRUPT, SourceName.RECOMPUTE, SourceName.LAGGED):
        assert first[name]["approximation_error_max"] == 0.0, name
    for name in (SourceName.SAMPLER, SourceName.INTERPOLATE):
        assert first[name]["approximation_error_mean"] == pytest.approx(engine, rel=1e-6), name
    assert first[SourceName.EWMA]["approximation_error_max"] < 1e-5  # an average of one, after a division


def test_ewma_without_a_window_is_recompute(run):
    recompute, _ = run(SourceName.RECOMPUTE)
    ewma, _ = run(SourceName.EWMA, ewma=EwmaOptions(window=0))
    for ours, theirs in zip(ewma, recompute, strict=True):
        assert ours["approximation_error_mean"] == theirs["approximation_error_mean"]


def test_an_interpolation_s_error_grows_with_lag(run):
    rows, _ = run(SourceName.INTERPOLATE)
    assert rows[0]["approximation_error_mean"] < 1e-5 < 1e-3 < rows[-1]["approximation_error_mean"]


def test_a_sample_costs_less_and_none_costs_nothing(run):
    (all_rows, _), (some, _), (none, loop) = (run(SourceName.SNAPSHOT, **options) for options in ({}, {"every": 4}, {"every": 0}))
    assert [row["decomposed_tokens"] for row in all_rows] == [row["tokens"] for row in all_rows]
    assert 0 < sum(row["decomposed_tokens"] for row in some) < sum(row["decomposed_tokens"] for row in all_rows) / 2
    assert not loop._rooms.decomposition.is_on and all("policy_lag" not in row for row in none)
    for ours, theirs in zip(all_rows, none, strict=True):  # looking changes nothing
        assert (ours["loss"], ours["gradient_norm"]) == (theirs["loss"], theirs["gradient_norm"])
