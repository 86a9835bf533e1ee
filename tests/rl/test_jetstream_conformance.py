"""JetStream's own orchestrator, driving our engine, serves the tokens that our sampler samples.

As a script, this file is the server.
"""

import asyncio
import itertools
import json
import logging
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig
from models.tokenizer import ByteTokenizer
from models.transformer import Model
from rl.engine import PolicyEngine
from rl.sampler import Request, Sampler, Swap

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 120  # seconds to serve everything: what hangs fails

ROOM, SLOTS = 40, 3  # a room that is none of the lengths that JetStream pads to
MODEL = Model(ModelConfig(vocab_size=ByteTokenizer.vocab_size, vocab_multiple=8, num_layers=2, d_model=16, d_ff=24, num_heads=4,
                          num_kv_heads=2, head_dim=4, max_length=ROOM, tied_embeddings=False))
STOPS = (ByteTokenizer.eos, *range(0x60, 0x68))
# (prompt, most tokens to sample). Far more requests than slots, so that slots are used again for shorter and longer contexts.
# After the longest prompt JetStream adds a token that begins the context, and one more fills the slot.
REQUESTS = [(text, 12) for text in ("héllo", "?")] + [
    (np.random.default_rng(length).integers(256, size=length).tolist(), max_tokens)
    for length, max_tokens in ((30, 20), (1, 7), (ROOM - 2, 5), (5, 20), (15, 1), (16, 40), (23, 9), (2, 40), (31, 3), (9, 17))
]


def make_engine(kind=PolicyEngine, *, device=0):
    mesh = Mesh(np.array(jax.devices()[device:device + 1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return kind(MODEL, mesh, slots=SLOTS, max_steps=4, temperature=1.0, seed=3, stop_tokens=STOPS)


def make_params():
    """Large weights, so that each token depends on the whole context."""
    rng = np.random.default_rng(18)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.8, size=leaf.shape), leaf.dtype), MODEL.shapes)


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """What our own driver samples, in which each way of ending occurs."""
    sampler = Sampler(make_engine(), lengths=(ROOM,), refill_rows=SLOTS, swap=Swap.REPREFILL)
    sampler.publish(0, make_params())
    for number, (prompt, max_tokens) in enumerate(REQUESTS):
        tokens = ByteTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        context = np.array([ByteTokenizer.bos, *tokens], np.int32)
        sampler.submit(Request(number, number, context, max_tokens, greedy=True))
    answers = [[] for _ in REQUESTS]
    while sampler.num_running or sampler.num_waiting:
        for part in sampler.step(4):
            answers[part.request_id].extend(part.tokens.tolist())
            if part.turn_over:
                sampler.release(part.request_id)
    ends = set()
    for answer, (_, max_tokens) in zip(answers, REQUESTS, strict=True):
        ends.add(answer[-1] if answer[-1] == ByteTokenizer.eos else "stop" if answer[-1] in STOPS else len(answer) == max_tokens)
    assert ends == {ByteTokenizer.eos, "stop", True, False}  # False: the slot is full
    return answers


@pytest.mark.parametrize("mode", ["interleaved", "disaggregated"])
def test_jetstreams_orchestrator_serves_what_our_sampler_samples(mode, answers, tmp_path):
    path = tmp_path / "served.json"
    # A process of its own: a thread of JetStream's that fails kills its whole process.
    served = subprocess.run([sys.executable, __file__, mode, path], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT)
    assert served.returncode == 0, served.stdout[-5000:]
    for (prompt, _), answer, (tokens, text) in zip(REQUESTS, answers, json.loads(path.read_text()), strict=True):
        # JetStream keeps the end of a sequence for itself.
        kept = list(itertools.takewhile(lambda token: token not in STOPS, answer))
        assert tokens == kept, prompt
        if isinstance(prompt, str):
            assert text == ByteTokenizer().decode(np.array(kept))


# --- the script ---


class GreedyEngine(PolicyEngine):
    """JetStream's contract cannot ask for greedy decoding."""

    def prefill(self, **arguments):
        return super().prefill(**arguments, greedy=True)


def serve(mode: str, path: str) -> None:
    """Writes the tokens and the text that JetStream serves for each request.

    Three precautions: this process of its own, and the two below.
    """
    jax.tree_map = jax.tree.map  # JetStream 0.2.2 frees prefixes with it, and jax has dropped it
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2

    logging.getLogger().setLevel(logging.ERROR)  # the import makes the root logger print every step
    engines = [make_engine(GreedyEngine)]
    if mode == "disaggregated":
        engines.append(make_engine(GreedyEngine, device=1))
    policies = [engine.load_params(make_params(), 0) for engine in engines]

    async def ask(client, prompt, max_tokens):
        request = jetstream_pb2.DecodeRequest(max_tokens=max_tokens)
        if isinstance(prompt, str):
            request.text_content.text = prompt
        else:
            request.token_content.token_ids.extend(prompt)
        tokens, text = [], ""
        async for response in client.Decode(request):
            (sample,) = response.stream_content.samples
            tokens.extend(sample.token_ids)
            text += sample.text
        return tokens, text

    async def ask_all(driver):
        client = orchestrator.LLMOrchestrator(driver)
        served = await asyncio.gather(*(ask(client, *request) for request in REQUESTS))
        driver.stop()  # here, because its threads call this event loop to their end
        return served

    driver = orchestrator.Driver(prefill_engines=engines[:1], prefill_params=policies[:1], generate_engines=engines[-1:],
                                 generate_params=policies[-1:], interleaved_mode=mode == "interleaved")
    pathlib.Path(path).write_text(json.dumps(asyncio.run(ask_all(driver))))


if __name__ == "__main__":
    serve(*sys.argv[1:])
