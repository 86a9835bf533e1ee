"""Checkpoints: every bit of a state comes back, a half-written one is never chosen, a damaged one is named."""

import shutil

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from rl.checkpoint import LARGE, CheckpointCorrupt, RunCheckpoints, _pack, _unpack


def assert_same(first, second):
    assert type(first) is type(second), (type(first), type(second))
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for pair in zip(first, second, strict=True):
            assert_same(*pair)
    elif isinstance(first, np.ndarray):
        assert (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    else:
        assert first == second or first != first and second != second


STATE = {
    "step": 3,
    "rate": 0.1,
    "name": "ü",
    "nothing": None,
    "large": np.arange(LARGE, dtype=np.int64) + 2**40,
    "half": np.array([1.5, np.nan, -0.0], ml_dtypes.bfloat16),
    "rooms": [{"tokens": np.arange(5, dtype=np.int32), "mask": np.zeros(0, bool)}, {"rewards": np.array([0.1, np.nan])}, []],
    "scalar": np.array(7.0, np.float32),
}
DTYPES = st.sampled_from([np.float32, np.float64, np.int32, np.int64, bool, np.uint8])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_side=4))
VALUES = st.recursive(
    ARRAYS | st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text().filter(lambda key: key != "$array"), inner, max_size=3),
    max_leaves=12,
)


@hypothesis.given(st.dictionaries(st.text(min_size=1), VALUES, max_size=4))
def test_packing_keeps_every_bit(state):
    assert_same(_unpack(_pack(state)), state)


def test_a_state_comes_back_from_disk(tmp_path):
    checkpoints = RunCheckpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    checkpoints.save(3, STATE, {"mine": {**STATE, "half": None}})
    checkpoints.close()
    step, state, own = RunCheckpoints(tmp_path / "checkpoints").latest()
    assert step == 3
    assert_same(state, STATE)
    assert_same({"mine": {**STATE, "half": None}}, own)
    state["large"][0] = 1  # it is the caller's own


def test_the_newest_two_are_kept_and_one_step_can_be_saved_again(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    for step in (0, 4, 8):
        checkpoints.save(step, {"step": step}, {"own": step})
    checkpoints.save(8, {"step": "again"}, {"own": "again"})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "8"]
    assert RunCheckpoints(tmp_path).latest() == (8, {"step": "again"}, {"own": "again"})


def test_what_is_half_written_is_not_chosen_and_is_cleaned_away(tmp_path):
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(4, STATE, {})
    checkpoints.close()
    shutil.copytree(tmp_path / "4", tmp_path / "8.orbax-checkpoint-tmp")
    (tmp_path / "8.orbax-checkpoint-tmp" / "commit_success.txt").unlink(missing_ok=True)
    again = RunCheckpoints(tmp_path)
    assert again.latest()[0] == 4
    again.save(8, {"step": 8}, {})
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "8"]


DAMAGES = {
    "a value of an array by itself": lambda content: content.replace(STATE["large"][1000].tobytes(), bytes(8)),
    "a letter in the pack": lambda content: content.replace(b'"name"', b'"lame"'),
    "every file cut": lambda content: content[: len(content) // 2],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named(tmp_path, damage):
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(4, STATE, {})
    checkpoints.close()
    contents = {path: path.read_bytes() for path in (tmp_path / "4").rglob("*") if path.is_file()}
    damaged = {path: DAMAGES[damage](content) for path, content in contents.items()}
    assert damaged != contents
    for path, content in damaged.items():
        path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match="checkpoint 4 in .* cannot be read: .*delete its directory"):
        RunCheckpoints(tmp_path).latest()
