"""Thousands of requests that come, go on, are aborted and run out of time, through publishes and pauses: nothing is lost."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rl.engine import PolicyEngine
from rl.requests import Request, Swap
from rl.sampler import Sampler
from tests.rl.test_sampler import MAX_STEPS, MODEL, ROOM, STOP, TEMPERATURE, params_of, score_row

SLOTS, NUM_PARAMS = 8, 4


@dataclasses.dataclass
class Episode:
    """What the world knows of a request."""

    request: Request
    submitted: int  # the sampler's count of decode steps
    context: list[int]
    positions: list[int] = dataclasses.field(default_factory=list)  # one entry a sampled token, as below
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    turn: int = 0  # tokens of the present one
    ending: str | None = None


class World:
    """Environments and a learner that do whatever a generator of random numbers says."""

    def __init__(self, sampler, num_requests, seed):
        self.sampler, self.num_requests = sampler, num_requests
        self.rng = np.random.default_rng(seed)
        self.episodes: dict[int, Episode] = {}
        self.alive: dict[int, None] = {}  # request ids, in order
        self.over: set[int] = set()  # whose environment is to answer

    def chance(self, probability):
        return self.rng.random() < probability

    def submit(self):
        """A group of up to three with one prompt."""
        prompt = self.rng.integers(30, size=self.rng.integers(1, ROOM - 8)).astype(np.int32)
        group = len(self.episodes)
        for request_id in range(group, min(group + self.rng.integers(1, 4), self.num_requests)):
            request = Request(request_id, group, prompt, int(self.rng.integers(1, 9)), greedy=self.chance(0.1),
                              max_tokens=int(self.rng.integers(1, 12)) if self.chance(0.4) else None,
                              deadline=int(self.rng.integers(1, 40)) if self.chance(0.3) else None)
            self.episodes[request_id] = Episode(request, self.sampler.num_decode_steps, prompt.tolist())
            self.alive[request_id] = None
            self.sampler.submit(request)

    def end(self, request_id, ending):
        episode = self.episodes[request_id]
        assert episode.ending is None, f"request {request_id} ended twice: {episode.ending}, {ending}"
        episode.ending = ending
        del self.alive[request_id]
        self.over.discard(request_id)
        if ending != "expired":
            self.sampler.release(request_id)
        if self.chance(0.3):
            self.sampler.release(request_id)  # once more, as who does not keep books would

    def answer(self):
        """Environments take their time; some write a line, others end the episode."""
        for request_id in sorted(self.over):
            if not self.chance(0.6):
                continue
            episode = self.episodes[request_id]
            line = self.rng.integers(30, size=self.rng.integers(1, 9)).astype(np.int32)
            is_spent = len(episode.positions) == episode.request.max_tokens
            if is_spent or len(episode.context) + len(line) >= ROOM or self.chance(0.4):
                self.end(request_id, "finished")
                continue
            self.sampler.extend(request_id, line)
            episode.context += line.tolist()
            self.over.remove(request_id)

    def hear(self, part):
        episode = self.episodes[part.request_id]
        assert episode.ending is None and part.request_id not in self.over or part.expired
        if part.expired:
            assert not len(part.tokens) and not part.turn_over
            assert self.sampler.num_decode_steps >= episode.submitted + episode.request.deadline
            self.end(part.request_id, "expired")
            return
        first, count = len(episode.context), len(part.tokens)
        assert count and count == len(part.logprobs) == len(part.policy_versions) == len(part.context_versions)
        assert np.isfinite(part.logprobs).all() and (part.logprobs <= 0).all()
        assert (part.policy_versions == self.sampler.version).all() and part.contract.greedy == episode.request.greedy
        assert (part.context_versions <= part.policy_versions).all() and (part.context_versions >= 0).all()
        if part.contract.swap == Swap.REPREFILL.value:
            assert (part.context_versions == part.policy_versions).all()
        episode.context += part.tokens.tolist()
        episode.positions += range(first, first + count)
        episode.logprobs += part.logprobs.tolist()
        episode.versions += part.policy_versions.tolist()
        episode.turn += count
        assert len(episode.context) <= ROOM and episode.turn <= episode.request.max_turn_tokens
        assert len(episode.positions) <= (episode.request.max_tokens or ROOM)
        if episode.request.deadline is not None:
            assert self.sampler.num_decode_steps - episode.submitted <= episode.request.deadline
        if part.turn_over:
            is_full = len(episode.context) == ROOM or len(episode.positions) == episode.request.max_tokens
            assert is_full or episode.turn == episode.request.max_turn_tokens or episode.context[-1] == STOP
            episode.turn = 0
            self.over.add(part.request_id)

    def run(self):
        sampler = self.sampler
        while len(self.episodes) < self.num_requests or self.alive:
            while len(self.episodes) < self.num_requests and sampler.num_waiting < 6:
                self.submit()
            if self.chance(0.15) and self.alive:
                self.end(int(self.rng.choice(list(self.alive))), "aborted")
            if self.chance(0.04):
                sampler.pause()
                assert sampler.step(MAX_STEPS) == []
            if self.chance(0.08):
                sampler.publish(sampler.version + 1, params_of((sampler.version + 1) % NUM_PARAMS))
            sampler.resume()
            heard = [part.request_id for part in sampler.step(int(self.rng.integers(1, MAX_STEPS + 1))) if not self.hear(part)]
            assert len(heard) == len(set(heard))
            self.answer()
            assert sampler.num_running <= SLOTS and sampler.num_running + sampler.num_waiting == len(self.alive)


@pytest.fixture(scope="module")
def engine():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return PolicyEngine(MODEL, mesh, slots=SLOTS, max_steps=MAX_STEPS, temperature=TEMPERATURE, seed=7, stop_tokens=(STOP,))


@pytest.mark.parametrize(("num_requests", "swap", "prefill_chunk"), [
    (100, Swap.REPREFILL, 8),
    pytest.param(10_000, Swap.REPREFILL, 8, marks=pytest.mark.slow),
    pytest.param(1000, Swap.KEEP_KV, None, marks=pytest.mark.slow),
])
def test_every_request_ends_once_and_leaves_nothing_behind(engine, num_requests, swap, prefill_chunk):
    sampler = Sampler(engine, lengths=(ROOM,), refill_rows=4, swap=swap, prefill_chunk=prefill_chunk)
    sampler.publish(0, params_of(0))
    world = World(sampler, num_requests, seed=11)
    world.run()

    episodes = world.episodes.values()
    endings = [episode.ending for episode in episodes]
    assert len(endings) == num_requests and set(endings) == {"finished", "aborted", "expired"}
    assert min(endings.count(ending) for ending in set(endings)) > num_requests / 50
    assert (sampler.num_running, sampler.num_waiting) == (0, 0) and not sampler._prefills
    assert not np.asarray(sampler._state.remaining).any()
    assert sampler.step(MAX_STEPS) == []
    assert sampler.num_sampled_tokens == sum(len(episode.positions) for episode in episodes) > num_requests
    for episode in episodes:
        assert np.all(np.diff(episode.versions) >= 0)
    several = [episode for episode in episodes if len(set(episode.versions)) > 1]
    assert len(several) > num_requests / 50

    # Those who saw most publishes are scored, each token under the version that it names.
    several.sort(key=lambda episode: len(set(episode.versions)))
    gaps = {True: [], False: []}  # whether the version is the first in its context
    for episode in several[-20:]:
        temperature = 1.0 if episode.request.greedy else TEMPERATURE
        scores = {version: score_row(params_of(version % NUM_PARAMS), episode.context, temperature)
                  for version in set(episode.versions)}
        for position, logprob, version in zip(episode.positions, episode.logprobs, episode.versions, strict=True):
            gaps[version == episode.versions[0]].append(abs(logprob - scores[version][position]))
    assert max(gaps[True]) < 1e-4
    assert max(gaps[False]) < 1e-4 if swap is Swap.REPREFILL else max(gaps[False]) > 1e-3
