"""The switch of old-logprob sources: what each puts into the anchor, under which parameters, and what it says of itself."""

import dataclasses

import jax
import numpy as np
import pytest

from models.config import ModelConfig, Precision
from models.transformer import Model
from rl.logprobs import score
from rl.old_logprobs import EwmaOptions, GonePolicy, Interpolation, SourceName, make_source, score_version
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing, VersionGone
from rl.types import NO_POLICY, FinishReason, Trajectory
from tests.tiny import tiny_config, tiny_loop

MODEL = Model(ModelConfig(vocab_size=32, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, head_dim=8,
                          max_length=16))
TEMPERATURE = 0.7
EXACT = (SourceName.SNAPSHOT, SourceName.DEDICATED, SourceName.INTERRUPT)
AUTHORS = ("..000011..22", "...00..1122.2", "....0.0", "..222222222222", "..0011112")  # `.` is the environment


def params_of(version):
    rng = np.random.default_rng(version)
    return jax.tree.map(lambda leaf: jax.device_put(rng.normal(scale=0.4, size=leaf.shape).astype(np.float32)), MODEL.shapes)


def trajectory(request_id):
    authors = AUTHORS[request_id]
    rng = np.random.default_rng(request_id)
    versions = np.array([NO_POLICY if author == "." else int(author) for author in authors], np.int32)
    sampled = versions != NO_POLICY
    return Trajectory(request_id=request_id, group_id=0, tokens=rng.integers(32, size=len(authors)).astype(np.int32),
                      loss_mask=sampled, policy_versions=versions, context_versions=versions,
                      sampler_logprobs=np.where(sampled, -rng.uniform(size=len(authors)), np.nan).astype(np.float32),
                      turn_starts=np.array([], np.int32), reward=0.0, success=False, finish_reason=FinishReason.LENGTH)


TRAJECTORIES = [trajectory(request_id) for request_id in range(len(AUTHORS))]


class WatchedRing(SnapshotRing):
    """Remembers in which order versions were fetched."""

    def __init__(self):
        super().__init__(4)
        self.fetched = []
        for version in range(3):
            self.put(version, params_of(version))

    def get(self, version):
        self.fetched.append(version)
        return super().get(version)


def source_of(name, ring, scorer):
    return make_source(name, ring=ring, scorer=scorer, gone=GonePolicy.ERROR, interpolation=Interpolation.A3PO,
                       ewma=EwmaOptions(), max_staleness=4, precision=Precision.FLOAT32)


@pytest.fixture(scope="module")
def scorer():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return Scorer(MODEL, mesh, rows_per_device=2, lengths=(8, 16), temperature=TEMPERATURE)


@jax.jit
def score_row(params, row, valid):
    return score(MODEL, params, row, valid, temperature=TEMPERATURE).logprobs


def reference(version, tokens):
    """Scores the whole row by itself, in a length that is no bucket."""
    row = np.zeros((1, 14), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(score_row(params_of(version), row, np.arange(14)[None] < len(tokens)))[0, : len(tokens)]


def test_snapshot_scores_each_token_under_the_version_that_sampled_it(scorer):
    source = source_of(SourceName.SNAPSHOT, WatchedRing(), scorer)
    anchored = source.anchor(TRAJECTORIES, 3, params_of(99))
    for before, after, anchor in zip(TRAJECTORIES, anchored.trajectories, anchored.proximal_logprobs, strict=True):
        np.testing.assert_array_equal(after.old_logprobs, anchor)
        np.testing.assert_array_equal(np.isnan(anchor), before.policy_versions == NO_POLICY)
        for version in before.versions:
            where = before.policy_versions == version
            np.testing.assert_allclose(anchor[where], reference(version, before.tokens)[where], atol=1e-5)
    assert before.old_logprobs is None  # what was handed in is not written to


def test_snapshot_fetches_each_version_once_newest_first_and_scores_its_holders_only(scorer):
    ring, before = WatchedRing(), scorer.num_scored_tokens
    anchored = source_of(SourceName.SNAPSHOT, ring, scorer).anchor(TRAJECTORIES, 3, params_of(99))
    assert ring.fetched == [2, 1, 0]
    reaches = [authors.rindex(author) + 1 for authors in AUTHORS for author in set(authors) - {"."}]
    assert scorer.num_scored_tokens - before == sum(reaches)
    assert [sorted(buckets) for buckets in anchored.buckets] == [list(t.versions) for t in TRAJECTORIES]


def test_snapshot_says_which_version_it_lacks(scorer):
    ring = SnapshotRing(4)
    ring.put(2, params_of(2))
    with pytest.raises(VersionGone, match=r"trained tokens of versions \[0.*--version-gone"):
        source_of(SourceName.SNAPSHOT, ring, scorer).anchor(TRAJECTORIES, 3, params_of(99))


def test_a_version_reads_no_further_than_its_last_token(scorer):
    """So its bucket is the same while the trajectory is still being written."""
    whole = TRAJECTORIES[1]
    later = dataclasses.replace(whole, tokens=np.where(np.arange(len(whole)) < 5, whole.tokens, (whole.tokens + 1) % 32))
    first, second = (score_version(scorer, params_of(0), 0, [t])[0] for t in (whole, later))
    assert first.logprobs.tobytes() == second.logprobs.tobytes()
    assert first.bucket == second.bucket and first.bucket.length == 8


def test_recompute_scores_everything_under_the_learners_parameters(scorer):
    anchored = source_of(SourceName.RECOMPUTE, WatchedRing(), scorer).anchor(TRAJECTORIES, 3, params_of(99))
    for t, anchor in zip(TRAJECTORIES, anchored.proximal_logprobs, strict=True):
        sampled = t.policy_versions != NO_POLICY
        np.testing.assert_allclose(anchor[sampled], reference(99, t.tokens)[sampled], atol=1e-5)
        assert np.isnan(anchor[~sampled]).all()
    assert all(t.old_logprobs is None for t in anchored.trajectories)
    assert not any(anchored.buckets)


def test_sampler_takes_the_engines_word_without_scoring(scorer):
    before = scorer.num_scored_tokens
    source = source_of(SourceName.SAMPLER, WatchedRing(), scorer)
    anchored = source.anchor(TRAJECTORIES, 3, params_of(99))
    for t, anchor in zip(TRAJECTORIES, anchored.proximal_logprobs, strict=True):
        np.testing.assert_array_equal(anchor, t.sampler_logprobs)
    assert source.inside("logprobs", "sampler", "versions", "learner") == "sampler"
    assert all(t.old_logprobs is None for t in anchored.trajectories) and scorer.num_scored_tokens == before


@pytest.mark.parametrize("name", SourceName)
def test_each_source_knows_its_name_and_only_an_approximation_has_a_caveat(scorer, name):
    source = source_of(name, WatchedRing(), scorer)
    assert source.name is name
    assert source.exact == (source.caveat is None) == (name in EXACT)
    assert (source.inside is None) == (name not in (SourceName.SAMPLER, SourceName.INTERPOLATE))
    assert name.needs_ring == (name in (SourceName.SNAPSHOT, SourceName.DEDICATED))
    assert source.interrupts == (name is SourceName.INTERRUPT)


def first_minibatches(tmp_path, name):
    """Metrics of the first optimizer step of each learner step, with a policy that moves fast, and the loop."""
    config = tiny_config()
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-2),
        snapshots=dataclasses.replace(config.snapshots, old_logprobs=name),
    )
    loop = tiny_loop(tmp_path, config)
    step, firsts = loop._rooms.learner.step, []

    def watched(batch, **options):
        result = step(batch, **options)
        firsts.append({metric: float(value) for metric, value in result.updates[0].items()})
        return result

    loop._rooms.learner.step = watched
    loop.run(7)
    return firsts, loop


@pytest.mark.slow
def test_each_source_puts_five_versions_of_lag_where_its_caveat_says(tmp_path):
    compared = (SourceName.SNAPSHOT, SourceName.RECOMPUTE, SourceName.SAMPLER)
    runs = {name: first_minibatches(tmp_path / name.value, name) for name in compared}
    last = {name: firsts[-1] for name, (firsts, _) in runs.items()}
    exact, recompute, sampler = (last[name] for name in (SourceName.SNAPSHOT, SourceName.RECOMPUTE, SourceName.SAMPLER))
    # Exact: the lag is in the staleness ratio, and the discrepancy is that of the engine alone.
    assert exact["staleness_ratio_max"] > 1.01
    assert exact["discrepancy_ratio_max"] == pytest.approx(1, abs=1e-4)
    # Recomputed: the other way round, so the clip is off in the first minibatch.
    assert recompute["staleness_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert recompute["discrepancy_ratio_max"] > 1.01 and recompute["clip_fraction"] == 0
    # The sampler's own: no discrepancy whatever the engine did.
    assert sampler["staleness_ratio_max"] > 1.01
    assert sampler["discrepancy_ratio_max"] == sampler["discrepancy_ratio_min"] == 1
    probes = {name: loop.probe for name, (_, loop) in runs.items()}
    assert probes[SourceName.SNAPSHOT].max_error == 0.0
    for name in (SourceName.RECOMPUTE, SourceName.SAMPLER):
        assert np.isnan(probes[name].max_error) and probes[name].num_compared == 0  # nothing exact to compare
