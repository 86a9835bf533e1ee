"""The exactness probe: a replay through the ring is bitwise what was scored live, and the probe would notice if it were not."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig, Precision
from models.sharding import parameter_shardings
from models.transformer import Model
from rl.exactness import ExactnessProbe
from rl.learner import publish_cast
from rl.old_logprobs import Anchored
from rl.old_logprobs.exact import SnapshotSource
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing
from rl.types import NO_POLICY, FinishReason, Trajectory

MODEL = Model(ModelConfig(vocab_size=32, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, head_dim=8,
                          max_length=16))
LENGTHS = (8, 16)
# The authors of the tokens of each trajectory, `.` for the environment. Scored up to its last token, a version may be in another
# bucket than the whole.
AUTHORS = {0: "..000011..22", 1: "...00..1122.2", 2: "....0.0", 3: "..222222222222", 4: "..0011112", 5: ".000000000000011"}


def mesh_of(data=1, fsdp=1, tensor=1):
    return Mesh(np.array(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def published(version, mesh, precision):
    """The parameters of a version, sharded and rounded as the learner publishes them."""
    rng = np.random.default_rng(version)
    params = jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(np.float32), MODEL.shapes)
    return publish_cast(jax.device_put(params, parameter_shardings(MODEL.axes, MODEL.shapes, mesh)), precision)


def trajectory(request_id, authors):
    """Tokens are a function of request and position, so that the start of a longer trajectory is a shorter one."""
    versions = np.array([NO_POLICY if author == "." else int(author) for author in authors], np.int32)
    sampled = versions != NO_POLICY
    tokens = np.random.default_rng(request_id).integers(32, size=16).astype(np.int32)[: len(authors)]
    return Trajectory(request_id=request_id, group_id=0, tokens=tokens, loss_mask=sampled,
                      sampler_logprobs=np.where(sampled, np.float32(-1), np.float32(np.nan)), policy_versions=versions,
                      context_versions=versions, turn_starts=np.array([], np.int32), reward=None, success=False,
                      finish_reason=FinishReason.LENGTH)


def until(version):
    """The trajectories as they stand when `version` is about to be superseded: nothing newer has been written."""
    cut = {}
    for request_id, authors in AUTHORS.items():
        newer = [index for index, author in enumerate(authors) if author != "." and int(author) > version]
        cut[request_id] = authors[: newer[0]] if newer else authors
    return [trajectory(request_id, authors) for request_id, authors in cut.items()]


WHOLE = until(9)
NUM_TOKENS = sum(author != "." for authors in AUTHORS.values() for author in authors)


class Run:
    """Three versions published, sampled with, recorded and put into a ring, as the loop does it."""

    def __init__(self, mesh=None, *, precision=Precision.FLOAT32, every=1, scorer=None):
        self.mesh = mesh or mesh_of()
        self.scorer = scorer or Scorer(MODEL, self.mesh, rows_per_device=1, lengths=LENGTHS, temperature=0.7)
        self.probe, self.ring = ExactnessProbe(self.scorer, every=every), SnapshotRing(4)
        for version in range(3):
            params = published(version, self.mesh, precision)
            self.ring.put(version, params)
            self.probe.record(version, params, until(version))
            jax.tree.map(lambda leaf: leaf.delete(), params)  # the ring's copy must be enough

    def replay(self, trajectories=None, ring=None):
        return SnapshotSource(ring or self.ring, self.scorer).anchor(WHOLE if trajectories is None else trajectories, 2, None)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(MODEL, mesh_of(), rows_per_device=1, lengths=LENGTHS, temperature=0.7)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("axes", [(1, 1, 1), (2, 2, 2)])
def test_replay_is_bitwise_what_was_scored_live(axes, precision):
    run = Run(mesh_of(*axes), precision=precision)
    anchored = run.replay()
    live = {(record["request_id"], record["version"]): record for record in run.probe.state()["live"]}
    assert len(live) == sum(len(t.versions) for t in WHOLE)
    for t, buckets in zip(anchored.trajectories, anchored.buckets, strict=True):
        for version in t.versions:
            record = live[t.request_id, version]
            assert record["logprobs"].tobytes() == t.old_logprobs[t.policy_versions == version].tobytes()
            assert tuple(record["bucket"]) == buckets[version]
    assert {bucket.length for bucket in anchored.buckets[0].values()} == {8, 16}  # one trajectory, two buckets
    assert run.probe.check(anchored) == run.probe.max_error == 0.0
    assert run.probe.num_compared == NUM_TOKENS


def part_of(anchored, wanted):
    """Some of the trajectories."""
    places = [place for place, t in enumerate(anchored.trajectories) if wanted(t)]
    return Anchored(*([column[place] for place in places] for column in vars(anchored).values()))


def test_a_perturbed_snapshot_is_noticed(scorer):
    run, ring = Run(scorer=scorer), SnapshotRing(4)
    for version in range(3):
        params = published(version, run.mesh, Precision.FLOAT32)
        if version == 1:
            params["embedding"] = params["embedding"].at[0, 0].multiply(1 + 1e-5)
        ring.put(version, params)
    anchored = run.replay(ring=ring)
    assert run.probe.check(part_of(anchored, lambda t: 1 not in t.versions)) == 0.0
    error = run.probe.check(part_of(anchored, lambda t: 1 in t.versions))
    assert 0 < error < 1e-3 and run.probe.max_error == error
    assert run.probe.check(anchored) == 0.0  # records are dropped
    assert run.probe.max_error == error and run.probe.num_compared == NUM_TOKENS


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_an_infinite_error(scorer, wrong):
    run = Run(scorer=scorer)
    anchored = run.replay()
    first = anchored.trajectories[0]
    first.old_logprobs[np.flatnonzero(first.loss_mask)[0]] = wrong
    assert run.probe.check(anchored) == run.probe.max_error == np.inf


def test_one_in_so_many_trajectories_is_followed(scorer):
    run = Run(scorer=scorer, every=2)
    assert {record["request_id"] for record in run.probe.state()["live"]} == {0, 2, 4}
    assert run.probe.check(run.replay()) == 0.0
    assert run.probe.num_compared == sum(len(AUTHORS[i].replace(".", "")) for i in (0, 2, 4))
    before = scorer.num_scored_tokens
    assert not Run(scorer=scorer, every=0).probe.state()["live"]
    assert scorer.num_scored_tokens == before  # and costs nothing


def test_a_version_that_was_not_superseded_has_no_record(scorer):
    probe, ring = ExactnessProbe(scorer, every=1), SnapshotRing(4)
    for version in range(3):
        params = published(version, mesh_of(), Precision.FLOAT32)
        ring.put(version, params)
        if version < 2:
            probe.record(version, params, until(version))
    assert probe.check(SnapshotSource(ring, scorer).anchor(WHOLE, 2, None)) == 0.0
    assert probe.num_compared == sum(author in "01" for authors in AUTHORS.values() for author in authors)


def test_what_will_not_be_trained_is_forgotten(scorer):
    run = Run(scorer=scorer)
    run.probe.forget(WHOLE[:4])
    run.probe.forget([trajectory(77, "..0")])  # never recorded
    assert {record["request_id"] for record in run.probe.state()["live"]} == {4, 5}
    run.probe.check(run.replay())
    assert run.probe.num_compared == sum(len(AUTHORS[i].replace(".", "")) for i in (4, 5))
    assert not run.probe.state()["live"]


def through_a_file(state):
    """Numbers as JSON, arrays as npz."""
    file = io.BytesIO()
    np.savez(file, *[record["logprobs"] for record in state["live"]])
    file.seek(0)
    arrays = np.load(file)
    state = json.loads(json.dumps({**state, "live": [{**record, "logprobs": None} for record in state["live"]]}))
    return {**state, "live": [{**record, "logprobs": arrays[f"arr_{index}"]} for index, record in enumerate(state["live"])]}


def test_a_restored_probe_goes_on(scorer):
    run = Run(scorer=scorer)
    anchored = run.replay()
    run.probe.check(part_of(anchored, lambda t: t.request_id in (0, 1)))
    restored = ExactnessProbe(scorer, every=1)
    restored.restore(through_a_file(run.probe.state()))
    assert restored.num_compared == run.probe.num_compared > 0
    assert restored.check(anchored) == run.probe.check(anchored) == 0.0
    assert restored.num_compared == run.probe.num_compared == NUM_TOKENS


def test_a_restored_probe_keeps_the_largest_error(scorer):
    run = Run(scorer=scorer)
    wrong = run.replay()
    wrong.trajectories[0].old_logprobs[:] += np.float32(0.5)
    assert run.probe.check(wrong) == pytest.approx(0.5, abs=1e-6)
    restored = ExactnessProbe(scorer, every=1)
    restored.restore(through_a_file(run.probe.state()))
    assert restored.max_error == run.probe.max_error
    assert jnp.isfinite(restored.max_error)
