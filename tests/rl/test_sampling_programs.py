"""The programs that a plan compiles are those that the engine runs, and the arrays it counts are those that the engine holds."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from models import decode
from models.config import ModelConfig
from models.parameters import by_path
from models.sharding import MESH_AXES, ShardingError
from models.transformer import Model
from rl.engine import PolicyEngine
from rl.sampling_programs import SamplingPrograms

MODEL = Model(ModelConfig(vocab_size=60, vocab_multiple=8, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2,
                          head_dim=4, max_length=32))
OPTIONS = {"slots": 8, "max_steps": 4, "temperature": 0.7, "top_k": 0, "top_p": 1.0}


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:np.prod(sizes)]).reshape(sizes), MESH_AXES)


@pytest.fixture(scope="module", params=[(1, 1, 1), (2, 2, 2)], ids=["1 device", "8 devices"])
def engine(request):
    return PolicyEngine(MODEL, mesh_of(*request.param), **OPTIONS, seed=0)


@pytest.fixture(scope="module")
def policy(engine):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), MODEL.shapes)
    return engine.load_params(params, 3)


def record(monkeypatch, engine, name: str) -> list[str]:
    """The text of each program of that name, as it is called; it is not run."""
    program, texts = engine._programs.__dict__[name], []
    monkeypatch.setattr(engine._programs, name, lambda *args, **kwargs: texts.append(program.lower(*args, **kwargs).as_text()))
    return texts


def test_decode_is_known_beforehand(engine, policy, monkeypatch):
    expected = engine._programs.lower_decode().as_text()
    texts = record(monkeypatch, engine, "decode")
    engine.decode(policy, engine.init_decode_state(), 2)
    assert texts == [expected]


def test_refill_is_known_beforehand(engine, policy, monkeypatch):
    expected = engine._programs.lower_refill(3, 16).as_text()
    texts = record(monkeypatch, engine, "refill")
    numbers = np.ones(3, np.int32)
    engine.refill(policy, engine.init_decode_state(), numbers, contexts=np.ones((3, 16), np.int32), counts=numbers,
                  request_ids=numbers, remaining=numbers, greedy=np.zeros(3, bool))
    assert texts == [expected]


def test_weights_and_caches_are_known_beforehand(engine, policy):
    for shapes, arrays in ((engine._programs.weights, policy.weights), (engine._programs.state, engine.init_decode_state())):
        for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True):
            assert (shape.shape, shape.dtype, shape.sharding) == (array.shape, array.dtype, array.sharding)


def test_a_layer_is_divided_as_the_stack_was(engine):
    programs = engine._programs
    stack = jax.tree.map(lambda shape, sharding: sharding.shard_shape(shape.shape), MODEL.shapes, programs.parameter_shardings)
    trees = (MODEL.axes, decode.decoding(MODEL).axes, stack)
    axes, axes_of_layers, stack = (by_path(tree["blocks"], lambda node: isinstance(node, tuple)) for tree in trees)
    for layer in programs.weights["blocks"]:
        for path, leaf in by_path(layer).items():
            wanted = dict(zip(axes[path], stack[path], strict=True))
            del wanted["layers"]
            # The axes may lie in another order, but each is divided as it was.
            assert dict(zip(axes_of_layers[path][1:], leaf.sharding.shard_shape(leaf.shape), strict=True)) == wanted


def test_what_does_not_divide_is_refused():
    with pytest.raises(ShardingError, match="sampler slots: 6 rows do not divide"):
        SamplingPrograms(MODEL, mesh_of(2, 2, 2), **{**OPTIONS, "slots": 6})
    with pytest.raises(ShardingError, match="'kv_heads' has size 2"):
        SamplingPrograms(MODEL, mesh_of(1, 1, 4), **OPTIONS)
