"""Where arrays go on a mesh, and how loudly it is said when they cannot."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from models import sharding
from models.config import ModelConfig
from models.transformer import Model

CONFIG = ModelConfig(vocab_size=16, num_layers=2, d_model=16, d_ff=24, num_heads=4, num_kv_heads=2, head_dim=4, max_length=8,
                     tied_embeddings=False, qkv_bias=True)
MODEL = Model(CONFIG)


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:data * fsdp * tensor]).reshape(data, fsdp, tensor), sharding.MESH_AXES)


def test_every_logical_axis_goes_where_the_table_says():
    shardings = sharding.parameter_shardings(MODEL.axes, MODEL.shapes, make_mesh(2, 2, 2))
    specs = jax.tree.map(lambda leaf: leaf.spec, shardings)
    assert specs["embedding"] == PartitionSpec("tensor", "fsdp")
    assert specs["head"]["kernel"] == PartitionSpec("fsdp", "tensor")
    assert specs["final_norm"]["scale"] == PartitionSpec("fsdp")
    assert specs["blocks"]["query"]["kernel"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert specs["blocks"]["query"]["bias"] == PartitionSpec(None, "tensor", None)
    assert specs["blocks"]["output"]["kernel"] == PartitionSpec(None, "tensor", None, "fsdp")
    assert specs["blocks"]["down"]["kernel"] == PartitionSpec(None, "tensor", "fsdp")


def test_for_decoding_nothing_is_sharded_over_fsdp():
    shardings = sharding.parameter_shardings(MODEL.axes, MODEL.shapes, make_mesh(2, 2, 2), sharding.DECODE_RULES)
    specs = [leaf.spec for leaf in jax.tree.leaves(shardings)]
    assert not any("fsdp" in spec for spec in specs)
    assert any("tensor" in spec for spec in specs)


@pytest.mark.parametrize(("changes", "mesh", "parts"), [
    ({"d_model": 12}, (1, 8, 1), ("'embed' has size 12", "8 devices of mesh axis 'fsdp'", "--fsdp")),
    ({"num_kv_heads": 1}, (1, 1, 2), ("blocks/key", "'kv_heads' has size 1", "2 devices of mesh axis 'tensor'", "--tensor")),
    ({"vocab_size": 15}, (2, 2, 2), ("embedding", "'vocab' has size 15", "2 devices of mesh axis 'tensor'", "--tensor")),
    ({"d_ff": 9}, (1, 4, 2), ("'mlp' has size 9", "2 devices of mesh axis 'tensor'", "--tensor")),
])
def test_an_axis_that_does_not_divide_is_named_with_sizes_and_option(changes, mesh, parts):
    model = Model(ModelConfig(**{**CONFIG.__dict__, **changes}))
    with pytest.raises(sharding.ShardingError) as caught:
        sharding.parameter_shardings(model.axes, model.shapes, make_mesh(*mesh))
    for part in parts:
        assert part in str(caught.value)


def test_rows_that_do_not_divide_are_named_with_sizes():
    mesh = make_mesh(2, 2, 2)
    sharding.check_rows("a batch", 8, mesh)
    with pytest.raises(sharding.ShardingError, match="a batch: 6 rows do not divide over data x fsdp = 2 x 2 = 4 dev"):
        sharding.check_rows("a batch", 6, mesh)
    assert isinstance(sharding.ShardingError("x"), ValueError)


def test_rows_spread_over_data_and_fsdp_only():
    mesh = make_mesh(2, 2, 2)
    rows = jax.device_put(np.arange(8), sharding.batch_sharding(mesh))
    assert sharding.num_batch_shards(mesh) == 4
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2,)}
    assert {tuple(np.asarray(shard.data)) for shard in rows.addressable_shards} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    whole = jax.device_put(np.arange(3), sharding.replicated(mesh))
    assert {shard.data.shape for shard in whole.addressable_shards} == {(3,)}


def test_initial_parameters_do_not_depend_on_the_mesh():
    mesh = make_mesh(2, 2, 2)
    shardings = sharding.parameter_shardings(MODEL.axes, MODEL.shapes, mesh)
    whole = jax.jit(MODEL.init)(jax.random.key(0))
    sharded = jax.jit(MODEL.init, out_shardings=shardings)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings
    assert sharded["embedding"].addressable_shards[0].data.shape == (8, 8)


def test_a_lookup_never_gathers_the_table():
    """Tokens travel to the columns of the table, and what was looked up travels back."""
    mesh = make_mesh(1, 4, 2)
    model = Model(ModelConfig(**{**CONFIG.__dict__, "vocab_size": 144}), activation_sharding=sharding.batch_sharding(mesh))
    shardings = sharding.parameter_shardings(model.axes, model.shapes, mesh)["embedding"]

    def hidden(embedding, tokens):
        return model.hidden({**zeros, "embedding": embedding}, tokens)

    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), model.shapes)
    program = jax.jit(hidden, in_shardings=(shardings, sharding.batch_sharding(mesh)))
    text = program.lower(model.shapes["embedding"], jax.ShapeDtypeStruct((4, 3), np.int32)).compile().as_text()
    assert "f32[72,4]" in text  # a device's part of the table: 144 rows over 2, 16 columns over 4
    assert "f32[72,16]" not in text and "f32[144,16]" not in text
    assert "s32[4,3" in text  # all tokens
