"""Deltas: either version comes back from the other bit for bit, whatever the bits, the shards or the way; damage is refused."""

import functools
import itertools
import math
import struct
import zlib

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl import delta, delta_record
from rl.delta import Delta
from rl.delta_record import DeltaCorrupt, Kind, WrongBase

BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype("float32")
DTYPES = [BFLOAT16, FLOAT32, *map(np.dtype, ["float16", "int8", "bool", "uint32", "float64", "complex64"])]
SPECS = {P(): 1, P("a"): 2, P(None, "b"): 4, P("b", "a"): 8, P(("a", "b")): 8}  # and the distinct shards
HEADER_BYTES = 36  # with the checksum
FORMAT_BYTE = 8  # of a record, and of `Delta.to_bytes`

shapes = st.one_of(st.sampled_from([(), (0,), (3, 0, 2), (1,), (129,), (2049,), (33, 65)]),
                   hypothesis.extra.numpy.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=7))  # fmt: skip
fractions = st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.125, 0.2, 0.9, 1.0])
seeds = st.integers(0, 2**31)


def random_bits(seed, shape, dtype):
    """Each bit is as likely as not: NaN of any payload, infinities, subnormals, both zeros."""
    content = np.frombuffer(np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize), np.uint8)
    return (content & (1 if dtype.kind == "b" else 0xFF)).view(dtype).reshape(shape)


def changed(old, fraction, seed):
    """A version in which about that fraction of the elements is another one."""
    where = np.random.default_rng(seed).random(old.shape) < fraction
    return np.where(where, random_bits([seed, 1], old.shape, old.dtype), old)


def versions(shape, dtype, fraction, seed=0):
    """A new version and an old one."""
    old = random_bits([seed, 2], shape, dtype)
    return changed(old, fraction, seed), old


def stepped(array, places):
    """The next bfloat16 at these places, as after a small update."""
    words = array.view(np.uint16).copy()
    words.reshape(-1)[places] += np.uint16(1)
    return words.view(array.dtype)


def layer(seed):
    """Two versions of parameters, of which each array is written as a record of another kind."""
    master = np.random.default_rng(seed).normal(size=(40, 3)).astype(np.float32)
    pairs = [versions((9, 64), BFLOAT16, 0.02, seed), versions((5,), FLOAT32, 1, seed), (master * np.float32(1.0001), master)]
    return tuple({"layer": dict(zip(["kernel", "bias", "master"], arrays, strict=True))} for arrays in zip(*pairs, strict=True))


def bits(tree):
    return [(leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def record_of(new, old):
    (record,) = delta.encode(new, old).records.values()
    return record


def sharding_of(spec):
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b")), spec)


def assert_both_ways(new, old):
    encoded = delta.encode(new, old)
    again = Delta.from_bytes(encoded.to_bytes())
    assert again == encoded and again.nbytes == sum(map(len, encoded.records.values()))
    for base, wanted in ((new, old), (old, new)):
        decoded = delta.decode(again, base)
        assert bits(decoded) == bits(wanted) and jax.tree.structure(decoded) == jax.tree.structure(base)
        assert jax.tree.map(type, decoded) == jax.tree.map(type, base)
    return encoded


# Round trips.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis.given(shapes, fractions, seeds)
def test_either_version_gives_the_other_bit_for_bit(dtype, shape, fraction, seed):
    new, old = versions(shape, dtype, fraction, seed)
    encoded = assert_both_ways(new, old)
    words = [each.reshape(-1).view(f"u{dtype.itemsize}") for each in (new, old)]
    assert encoded.num_changed == np.count_nonzero(words[0] != words[1])
    assert encoded.nbytes <= HEADER_BYTES + 16 + new.nbytes


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
@pytest.mark.parametrize("every", [1, 17])
def test_every_pattern_of_sixteen_bits_and_its_opposite_survive(dtype, every):
    old = np.arange(2**16, dtype=np.uint16)
    new = old.copy()
    new[::every] ^= np.uint16(1 << 15)  # of 0.0 and -0.0 among others, which compare equal
    encoded = assert_both_ways(new.view(dtype), old.view(dtype))
    assert encoded.num_changed == len(old[::every])


@pytest.mark.parametrize("gap", [1, 255, 256, 65_535, 65_536, 2**20 - 1, 2**20, 2**20 + 1])
def test_any_gap_between_two_changes_is_written(gap):
    old = np.zeros(2**21 + 3, np.int8)
    for first in (0, 1, len(old) - 1 - gap):
        new = old.copy()
        new[[first, first + gap]] = [1, -1]
        record = record_of(new, old)
        assert delta_record.check(record).kind is Kind.SPARSE and delta_record.num_changed(record) == 2
        delta_record.apply(record, new)
        assert not new.any()


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_trees_and_single_arrays_come_back_as_they_were(convert):
    new, old = (jax.tree.map(convert, tree) for tree in layer(0))
    records = assert_both_ways(new, old).records.values()
    assert {delta_record.check(record).kind for record in records} == set(Kind)
    assert_both_ways([new, {"é/b": old}, ()], [old, {"é/b": new}, ()])
    assert_both_ways({1: new["layer"]["bias"]}, {1: old["layer"]["bias"]})
    assert_both_ways(new["layer"]["kernel"], old["layer"]["kernel"])
    assert_both_ways({}, {})


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("uint32"), np.dtype("bool")], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sharded_arrays_have_one_record_a_distinct_shard_and_their_sharding_again(spec, dtype):
    new, old = (jax.device_put(each, sharding_of(spec)) for each in versions((16, 24), dtype, 0.05))
    encoded = assert_both_ways(new, old)
    indices = {delta.shard_index(shard.index, new.shape) for shard in new.addressable_shards}
    assert {index for _, index in encoded.records} == indices and len(encoded.records) == SPECS[spec]
    decoded, before = delta.decode(encoded, new), bits([new, old])
    assert decoded.sharding == new.sharding
    for got, wanted in zip(decoded.addressable_shards, old.addressable_shards, strict=True):
        assert got.device == wanted.device and bits(got.data) == bits(wanted.data)
    inverted = jax.jit(lambda leaf: ~leaf if leaf.dtype != BFLOAT16 else -leaf, donate_argnums=0)(decoded)  # of every replica
    wanted = ~np.asarray(old) if dtype != BFLOAT16 else -np.asarray(old)
    assert all(bits(shard.data) == bits(wanted[shard.index]) for shard in inverted.addressable_shards)
    assert decoded.is_deleted() and bits([new, old]) == before


# Training.

STEPS = 50


@functools.cache
def training():
    """The versions of 50 steps of AdamW on 180 thousand float32 weights, in bfloat16, newest first; and their deltas."""
    generator = np.random.default_rng(0)
    params = [{"kernel": generator.normal(0, rows**-0.5, (rows, columns)).astype(np.float32),
               "bias": np.zeros((1, columns), np.float32)}
              for rows, columns in itertools.pairwise([64, 256, 512, 64])]  # fmt: skip
    optimizer = optax.adamw(3e-6)

    def loss_of(params, inputs):
        outputs = functools.reduce(lambda hidden, each: jnp.tanh(hidden @ each["kernel"] + each["bias"]), params, inputs)
        return jnp.mean((outputs - inputs) ** 2)

    @jax.jit
    def step(params, state, inputs):
        updates, state = optimizer.update(jax.grad(loss_of)(params, inputs), state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    state, trees = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # for optax
        for _ in range(STEPS + 1):
            params, state, tree = step(params, state, generator.normal(size=(16, 64)).astype(np.float32))
            trees.insert(0, tree)
    return trees, [delta.encode(new, old) for new, old in itertools.pairwise(trees)]


def test_fifty_steps_of_adamw_are_walked_back_and_forth_bit_for_bit():
    trees, deltas = training()
    assert len({str(bits(tree)) for tree in trees}) == STEPS + 1  # each step changed something
    params = trees[0]
    for each, wanted in [*zip(deltas, trees[1:], strict=True), *zip(deltas[::-1], trees[-2::-1], strict=True)]:
        params = delta.decode(each, params)
        assert bits(params) == bits(wanted)
    assert 20 * sum(each.nbytes for each in deltas) < STEPS * sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@hypothesis.settings(max_examples=12)
@hypothesis.given(st.data())
def test_any_run_of_deltas_in_any_grouping_composes_to_the_direct_one(data):
    trees, deltas = training()
    start, stop = sorted(data.draw(st.lists(st.integers(0, STEPS), min_size=2, max_size=2, unique=True)))
    run = deltas[start:stop]
    while len(run) > 1:
        at = data.draw(st.integers(0, len(run) - 2))
        run[at : at + 2] = [delta.compose(run[at], run[at + 1])]
    assert run[0] == delta.encode(trees[start], trees[stop])
    assert bits(delta.decode(run[0], trees[start])) == bits(trees[stop])
    assert bits(delta.decode(run[0], trees[stop])) == bits(trees[start])


@hypothesis.given(shapes, st.sampled_from(DTYPES), fractions, fractions, seeds)
def test_two_deltas_of_random_bits_compose_to_the_direct_one(shape, dtype, first, second, seed):
    between, oldest = versions(shape, dtype, first, seed)
    newest = changed(between, second, seed + 1)
    composed = delta.compose(delta.encode(newest, between), delta.encode(between, oldest))
    assert bits(delta.decode(composed, newest)) == bits(oldest) and bits(delta.decode(composed, oldest)) == bits(newest)
    assert composed.nbytes == delta.encode(newest, oldest).nbytes


@hypothesis.given(shapes, st.sampled_from(DTYPES), st.lists(fractions, min_size=1, max_size=4), st.booleans(), seeds)
def test_several_deltas_are_followed_at_once_and_a_gap_between_them_is_refused(shape, dtype, steps, in_place, seed):
    path = list(itertools.accumulate(range(len(steps)), lambda old, at: changed(old, steps[at], seed + at),
                                     initial=random_bits(seed, shape, dtype)))  # fmt: skip
    deltas, place = [delta.encode(new, old) for new, old in itertools.pairwise(path)], ((), tuple((0, size) for size in shape))
    source = path[-1].copy()
    target = source if in_place else random_bits(seed + 9, shape, dtype)
    before = bits([source, target])
    broken = Delta({place: deltas[0].records[place][:-1]})
    strange = delta.encode(*versions(shape, dtype, 1, seed + 99))
    for wrong, error in ((broken, DeltaCorrupt), (Delta({}), WrongBase), *([(strange, WrongBase)] if path[0].nbytes > 8 else [])):
        with pytest.raises(error):
            delta.follow([*deltas, wrong][::-1] if wrong is strange else [*deltas[::-1], wrong], place, source, target)
    assert bits([source, target]) == before
    delta.follow(deltas, place, path[0].copy(), target)
    assert bits(target) == bits(path[-1])
    delta.follow(deltas[::-1], place, *(2 * [target] if in_place else [path[-1], target]))
    assert bits(target) == bits(path[0]) and (in_place or bits(source) == before[:1])


# Kinds and sizes.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_changes_are_written_sparse_random_bits_as_they_are_and_no_changes_in_a_few_bytes(dtype):
    record = record_of(*versions((300, 100), dtype, 0.01))
    header, size = delta_record.check(record), 30_000 * dtype.itemsize
    assert header.kind is Kind.SPARSE and len(record) < size / (2 if dtype.itemsize == 1 else 8)
    for shape in ((), (0,), (7,), (1000, 1000)):
        record = record_of(*versions(shape, dtype, 0))
        header = delta_record.check(record)
        assert header.kind is Kind.SPARSE and header.num_places == 0 and len(record) < HEADER_BYTES + 16
    for shape in ((), (3,), (300, 100)) if dtype.kind != "b" else ():
        record = record_of(*versions(shape, dtype, 1))
        assert delta_record.check(record).kind is Kind.RAW and len(record) == HEADER_BYTES + math.prod(shape) * dtype.itemsize


def test_small_relative_updates_of_float32_are_written_in_planes():
    old, update = np.random.default_rng(0).normal(size=(2, 300, 100)).astype(np.float32)
    record = record_of(old * (1 + np.float32(1e-5) * update), old)
    assert delta_record.check(record).kind is Kind.PLANES and len(record) < 0.5 * old.nbytes


def test_where_six_weights_in_a_thousand_change_a_record_is_sixty_times_smaller_than_the_array():
    generator = np.random.default_rng(0)
    old = generator.normal(0, 0.02, (1024, 3000)).astype(BFLOAT16)
    new = stepped(old, generator.choice(old.size, int(0.006 * old.size), replace=False))
    encoded = assert_both_ways(new, old)
    assert encoded.num_changed == int(0.006 * old.size) and 60 * encoded.nbytes <= new.nbytes


# Damage and wrong bases.


def damaged(content):
    """Each byte changed in three ways, cut off anywhere, added to; and the first place that is no longer as it was."""
    for at, flips in itertools.product(range(len(content)), (0x01, 0x80, 0xFF)):
        yield at, content[:at] + bytes([content[at] ^ flips]) + content[at + 1 :]
    yield from ((at, content[:at]) for at in range(len(content)))
    yield from ((len(content), content + more) for more in (b"\0", b"\xff", 4 * b"\0", content))


@pytest.mark.parametrize("name", ["kernel", "bias", "master"])  # each of another kind
def test_a_damaged_record_is_refused_with_its_place_and_nothing_changes(name):
    new, old = (tree["layer"][name] for tree in layer(0))
    whole = delta.encode({"w": new}, {"w": old})
    ((place, record),) = whole.records.items()
    array, part, part_index = new.copy(), new[:2].copy(), ((0, 2), *place[1][1:])
    for _, content in damaged(record):
        broken = Delta({place: content})
        for use, *arguments in ((delta_record.apply, content, array),
                                (delta_record.apply_part, content, place[1], part, part_index),
                                (delta.compose, broken, whole), (delta.compose, whole, broken)):  # fmt: skip
            with pytest.raises(DeltaCorrupt, match="a record"):
                use(*arguments)
        with pytest.raises(DeltaCorrupt, match=r"^w\[0:.*\]: a record"):
            delta.decode(broken, {"w": array})
        assert bits([array, part]) == bits([new, new[:2]])


def test_a_damaged_delta_is_refused_and_the_record_that_is_hit_is_named():
    encoded = delta.encode(*layer(1))
    content = encoded.to_bytes()
    starts = list(itertools.accumulate(map(len, encoded.records.values()), initial=len(content) - encoded.nbytes))[:-1]
    for at, broken in damaged(content):
        with pytest.raises(DeltaCorrupt) as raised:
            Delta.from_bytes(broken)
        hit = [place for place, start in zip(encoded.records, starts, strict=True) if start <= at]
        if hit:
            expected = f"{delta.place_name(hit[-1])}: a record" if len(broken) == len(content) else "cut off or added to"
            assert expected in str(raised.value)


def test_another_format_is_refused_by_its_number():
    new, old = layer(0)[0]["layer"]["bias"], layer(0)[1]["layer"]["bias"]
    message = f"a delta of format 7, wanted {delta_record.FORMAT}; read it with the release that wrote it"
    content, record = bytearray(delta.encode(new, old).to_bytes()), bytearray(record_of(new, old))
    content[FORMAT_BYTE] = record[FORMAT_BYTE] = 7
    record[:4] = struct.pack("<I", zlib.crc32(record[4:]))
    with pytest.raises(DeltaCorrupt, match=message):
        Delta.from_bytes(bytes(content))
    with pytest.raises(DeltaCorrupt, match=message):
        delta_record.apply(bytes(record), new.copy())
    with pytest.raises(DeltaCorrupt, match="begins with b'XORD', got b'PK..'; give the bytes of a delta"):
        Delta.from_bytes(bytes(4) + b"PK.." + bytes(content[8:]))


def test_a_wrong_base_is_refused_and_nothing_changes():
    w, old = versions((16, 8), BFLOAT16, 0.05)
    other = random_bits(9, w.shape, w.dtype)
    encoded = delta.encode({"w": w}, {"w": old})
    other_version = r"^w\[0:16, 0:8\]: the delta is of two other versions of this array; give one of those it was made from"
    other_dtype = r"^w\[0:16, 0:8\]: the delta is of 128 elements of 2 bytes, got uint32\[16, 8\]; give an array of"
    nowhere = r"^the delta has no .*\[.*\], only w\[0:16, 0:8\]; give the parameters it was made from, sharded alike"
    one_shape, in_both = r"^w\[0:16, 0:8\]: .* wanted one shape and dtype; give", "in one version only, wanted in both; give"
    for base, decoding, encoding in [
        ({"w": other}, other_version, None),
        ({"w": stepped(w, [77])}, other_version, None),
        ({"w": other.view(np.float16)}, other_version, one_shape),
        ({"w": random_bits(9, w.shape, np.dtype("uint32"))}, other_dtype, one_shape),
        ({"w": w.T.copy()}, nowhere, in_both),
        ({"w": w[:8].copy()}, nowhere, in_both),
        ({"w": w.reshape(-1)}, nowhere, in_both),
        ({"w": jax.device_put(w, sharding_of(P("a")))}, nowhere, in_both),
        ({"v": w}, nowhere, in_both),
        ({"a": {"w": w}}, nowhere, in_both),
        ({"w": w, "v": w}, nowhere, in_both),
        (w, nowhere, in_both),
    ]:
        before = bits(base)
        with pytest.raises(WrongBase, match=decoding):
            delta.decode(encoded, base)
        if decoding is not nowhere:
            with pytest.raises(WrongBase, match=decoding):
                delta.apply_at(encoded, (("w",), ((0, 16), (0, 8))), base["w"])
        if encoding is not None:
            with pytest.raises(ValueError, match=encoding):
                delta.encode(base, {"w": old})
        assert bits(base) == before


def test_deltas_that_do_not_meet_or_are_of_other_arrays_do_not_compose():
    arrays = [random_bits(seed, (16, 8), BFLOAT16) for seed in range(4)]
    first, second, third = (delta.encode({"w": new}, {"w": old}) for new, old in itertools.pairwise(arrays))
    with pytest.raises(ValueError, match="do not meet in one version; give the newer one first"):
        delta.compose(first, third)
    with pytest.raises(ValueError, match="two deltas of different arrays, wanted of one model, sharded alike"):
        delta.compose(first, delta.encode({"v": arrays[1]}, {"v": arrays[2]}))
    with pytest.raises(ValueError, match="two records of different arrays"):
        delta.compose(first, delta.encode(*({"w": random_bits(seed, (16, 8), FLOAT32)} for seed in (1, 2))))
    assert delta.compose(first, second).records


# Parts.


def cut(array, index):
    return np.array(array[tuple(slice(*ends) for ends in index)])


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.data(), st.sampled_from(DTYPES), st.sampled_from([0.02, 0.3, 1.0]), seeds)
def test_records_of_any_partition_make_the_parts_of_any_other(data, dtype, fraction, seed):
    shape = data.draw(st.sampled_from([(), (9,), (1, 1), (12, 10), (31, 3), (4, 5, 6)]))
    ends = [[sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape] for _ in range(2)]
    sources, targets = (list(itertools.product(*map(itertools.pairwise, each))) for each in ends)  # rows, columns, blocks, whole
    new, old = versions(shape, dtype, fraction, seed)
    records = {index: delta_record.encode_array(cut(new, index), cut(old, index)) for index in sources}
    for index, (base, wanted) in itertools.product(targets, [(new, old), (old, new)]):
        got = cut(base, index)
        for source, record in records.items():
            delta_record.apply_part(record, source, got, index)
        assert bits(got) == bits(cut(wanted, index))


def test_a_record_of_another_part_or_dtype_is_not_applied():
    new, old = versions((8, 6), BFLOAT16, 1)
    rows, got, (whole, top) = delta_record.encode_array(new[:4], old[:4]), new.copy(), (((0, end), (0, 6)) for end in (8, 4))
    with pytest.raises(WrongBase, match="the delta is of 24 elements of 2 bytes, got bfloat16 at"):
        delta_record.apply_part(rows, ((0, 3), (0, 6)), got, whole)
    with pytest.raises(WrongBase, match="the delta is of 24 elements of 2 bytes, got uint32 at"):
        delta_record.apply_part(rows, top, random_bits(0, (8, 6), np.dtype("uint32")), whole)
    with pytest.raises(WrongBase, match="the delta is of two other versions"):
        delta_record.apply_part(rows, top, got[4:], top)
    delta_record.apply_part(rows, top, got[:2], ((6, 8), (0, 6)))  # nothing in common
    assert bits(got) == bits(new)


# What is given stays as it is.


@hypothesis.given(shapes, st.sampled_from(DTYPES), fractions, seeds)
def test_inputs_are_only_read_and_results_have_memory_of_their_own(shape, dtype, fraction, seed):
    new, old = versions(shape, dtype, fraction, seed)
    before = bits([new, old])
    there, back = delta.encode(new, old), delta.encode(old, new)
    records = there.to_bytes(), back.to_bytes()
    delta.compose(there, back)
    for array in (new, old):
        decoded = delta.decode(there, array)
        decoded.view(f"u{dtype.itemsize}")[...] = 1
    assert bits([new, old]) == before and (there.to_bytes(), back.to_bytes()) == records


@pytest.mark.parametrize("view", [np.transpose, np.flipud, lambda array: array[::2], lambda array: array[:, 2:7]])
def test_arrays_that_are_not_contiguous_are_refused_except_as_a_base_or_a_part(view):
    new, old = versions((12, 10), BFLOAT16, 0.05)
    array, message = new.copy(), "an array of strides .*, wanted a contiguous one; copy it first"
    for pair in ((view(new), view(old).copy()), (view(new).copy(), view(old))):
        with pytest.raises(ValueError, match=rf"^w\[.*\]: {message}"):
            delta.encode({"w": pair[0]}, {"w": pair[1]})
    encoded = delta.encode(view(new).copy(), view(old).copy())
    with pytest.raises(ValueError, match=message):
        delta_record.apply(*encoded.records.values(), view(array))
    assert bits(array) == bits(new) and bits(delta.decode(encoded, view(array))) == bits(view(old))
    delta_record.apply_part(record_of(new, old), ((0, 12), (0, 10)), array[3:, 2:7], ((3, 12), (2, 7)))
    assert bits(array[3:, 2:7]) == bits(old[3:, 2:7])
    array[3:, 2:7] = new[3:, 2:7]
    assert bits(array) == bits(new)


def test_steps_over_a_version_that_comes_again_compose():
    oldest, again, between = (np.array([value], BFLOAT16) for value in (4, 1, 2))
    back = delta.compose(delta.encode(again, between), delta.encode(between, again))
    composed = delta.compose(back, delta.encode(again, oldest))
    assert bits(delta.decode(composed, again)) == bits(oldest)


def test_a_base_that_lacks_an_array_is_refused():
    new, old = versions((5,), BFLOAT16, 1)
    with pytest.raises(WrongBase):
        delta.decode(delta.encode({"v": new, "w": new}, {"v": old, "w": old}), {"w": new})


def test_a_wrong_base_is_noticed_in_any_column():
    new, old, other = (np.full((1 << 14, 256), value, np.uint8) for value in (1, 2, 3))
    new[:, 0] = old[:, 0] = other[:, 0] = 0
    with pytest.raises(WrongBase):
        delta.decode(delta.encode(new, old), other)
