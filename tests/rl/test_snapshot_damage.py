"""Snapshots on disk are complete and right, or refused by name; what a stopped save left behind is in nobody's way."""

import concurrent.futures
import hashlib
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from rl import delta, snapshot_store
from rl.snapshot_store import Difference, SnapshotCorrupt, SnapshotStore
from tests.params import arrays, bits, put

CHAINED = range(4, 7)
"""Versions of which the first is a keyframe, but has a difference too, and the others are told from it."""


def done(result):
    future = concurrent.futures.Future()
    future.set_result(result)
    return future


def save(store, *versions):
    """Each told from the one before, if that is there."""
    for version in versions:
        store.wait()
        told = None
        if version - 1 in store.versions():
            told = Difference(version - 1, done(delta.encode(put(arrays(version)), put(arrays(version - 1)))))
        store.save(version, put(arrays(version)), told)
    store.wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Versions 0 to 8; 0, 4 and 8 are keyframes. Tests that change it copy it first."""
    store = SnapshotStore(tmp_path_factory.mktemp("store"), keyframe_every=4)
    save(store, *range(9))
    return store


@pytest.fixture
def own(saved, tmp_path):
    shutil.copytree(saved.directory, tmp_path / "copy")
    return SnapshotStore(tmp_path / "copy", keyframe_every=4)


def load(store, version):
    """The bits of a version."""
    return bits(store.load(version, put(arrays())))


def check_loads(store, versions):
    assert store.versions() == tuple(versions)
    for version in versions:
        assert load(store, version) == bits(arrays(version))


def files_of(store, version):
    return sorted(path for path in store.path(version).rglob("*") if path.is_file())


def flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


# --- damage ---


def test_files_names_and_digests_every_file(saved):
    for version in (0, 4, 5):
        files = saved.files(version)
        on_disk = {path.relative_to(saved.path(version)).as_posix(): path for path in files_of(saved, version)}
        del on_disk["manifest.json"]
        assert files == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in on_disk.items()}
        assert files == saved.files_now(version) and saved.files_now(9) == {}
    assert "keyframe/commit_success.txt" in saved.files(4) and any(name.startswith("keyframe/state/") for name in saved.files(4))
    assert "difference-00000.bin" in saved.files(4) and list(saved.files(5)) == ["difference-00000.bin"]
    with pytest.raises(SnapshotCorrupt, match="snapshot version 9 at .*version-000009 is missing"):
        saved.files(9)


@pytest.mark.parametrize("damaged", CHAINED)
def test_a_damaged_byte_is_named_for_every_version_that_needs_it(own, damaged):
    for path in files_of(own, damaged):
        content = path.read_bytes()
        if not content:
            path.write_bytes(b"\0")
        for position in {0, len(content) // 2, len(content) - 1} if content else [None]:
            if content:
                flip(path, position)
            name = path.relative_to(own.path(damaged)).as_posix()
            what = "manifest.json is not the one" if name == "manifest.json" else f"{name} changed"
            message = f"snapshot version {damaged} at {own.path(damaged)} is damaged: {what}"
            for version in range(damaged, CHAINED.stop):
                with pytest.raises(SnapshotCorrupt, match=message):
                    load(own, version)
            with pytest.raises(SnapshotCorrupt, match=message):
                own.read(CHAINED[-1], ("step",))
            path.write_bytes(content)
    flip(own.path(damaged) / "difference-00000.bin", 99)
    with pytest.raises(SnapshotCorrupt, match=f"snapshot version {damaged} at .* is damaged: difference-00000.bin changed"):
        own.difference(damaged)
    for version in {0, 3, 8} | set(range(4, damaged)):  # the others are what they were
        assert load(own, version) == bits(arrays(version))


def test_a_file_that_is_cut_off_added_to_or_lost_is_named_and_nothing_is_loaded(own):
    for path in [*files_of(own, 4), *files_of(own, 5)]:
        if path.name == "manifest.json":
            continue
        content, root = path.read_bytes(), own.path(4 if own.path(4) in path.parents else 5)
        for damaged in (None, content[: len(content) // 2], content + b"\0"):
            if damaged == content:
                continue
            path.unlink() if damaged is None else path.write_bytes(damaged)
            message = f"at {root} is damaged: {path.relative_to(root).as_posix()} changed"
            with pytest.raises(SnapshotCorrupt, match=message):
                load(own, 5)
            with pytest.raises(SnapshotCorrupt, match=message):
                own.abstract(5, SingleDeviceSharding(jax.devices()[0]))
            path.write_bytes(content)
    (own.path(4) / "keyframe" / "stray").touch()
    with pytest.raises(SnapshotCorrupt, match="keyframe/stray changed, vanished or appeared"):
        load(own, 5)


def test_every_byte_of_the_manifest_counts(own):
    path = own.path(5) / "manifest.json"
    content = path.read_bytes()
    for position in [*range(0, len(content), 11), len(content) - 1]:
        flip(path, position, 1 << position % 7)
        with pytest.raises(SnapshotCorrupt, match=rf"version 5 at {own.path(5)} is damaged: manifest.json is not"):
            own.files(5)
        path.write_bytes(content)
    for other in (b"3", b"[]", b"{}", b"", b"\xff"):
        path.write_bytes(other)
        with pytest.raises(SnapshotCorrupt, match="manifest.json is not"):
            own.digest(5)


def test_a_snapshot_under_another_number_is_refused(own):
    shutil.copytree(own.path(3), own.path(9))
    with pytest.raises(SnapshotCorrupt, match="version 9 at .* manifest.json is not the one that was written with it"):
        own.digest(9)


def test_a_base_that_is_lost_or_another_one_is_named(own, tmp_path):
    shutil.rmtree(own.path(4))
    for version in CHAINED[1:]:
        with pytest.raises(SnapshotCorrupt, match=f"version 4 at {own.path(4)} is missing or incomplete"):
            load(own, version)
    with pytest.raises(SnapshotCorrupt, match="version 4 at .* is missing or incomplete"):
        own.save(20, put(arrays(20)), Difference(4, done(delta.encode(put(arrays(20)), put(arrays(4))))))
    another = SnapshotStore(tmp_path / "another")
    another.save(4, put(arrays(40)))
    another.wait()
    shutil.copytree(another.path(4), own.path(4))  # an intact snapshot, but not the one
    assert load(own, 4) == bits(arrays(40))
    for version in CHAINED[1:]:
        with pytest.raises(SnapshotCorrupt, match=f"snapshot version 5 at {own.path(5)} "):
            load(own, version)
    with pytest.raises(SnapshotCorrupt, match=f"snapshot version 5 at {own.path(5)} "):
        own.read(6, ("block", "kernel"), ((0, 3), (0, 3)))


def test_values_that_differ_from_the_digest_are_refused(own):
    wrong = done(delta.encode(put(arrays(9)), put(arrays(8))))
    own.save(10, put(arrays(10)), Difference(8, wrong))
    own.wait()
    with pytest.raises(SnapshotCorrupt, match=rf"snapshot version 10 at {own.path(10)} gave values of digest"):
        load(own, 10)


# --- what a stopped save left behind ---


def leave(store):
    """What a save may have written of a version when it was killed: every stage. Returns the names."""
    numbered = store.directory / "version-000009", store.directory / "version-000011", store.directory / "version-000012"
    shutil.copytree(store.path(4), numbered[0])  # complete but for the manifest
    (numbered[0] / "manifest.json").rename(numbered[0] / "manifest.json.tmp")
    shutil.copytree(store.path(4) / "keyframe", numbered[1] / "keyframe.orbax-checkpoint-tmp")
    numbered[2].mkdir()
    (numbered[2] / "difference-00000.bin.tmp").write_bytes(b"half")
    (store.directory / "version-000013").mkdir()
    (store.directory / "version-000002" / "manifest.json").unlink()
    (store.directory / "version-x").mkdir()
    return ["version-000002", *(path.name for path in numbered), "version-000013", "version-x"]


def test_half_written_snapshots_are_named_and_never_listed(own):
    assert own.incomplete() == []
    left = leave(own)
    assert own.incomplete() == left
    assert own.versions() == (0, 1, 3, 4, 5, 6, 7, 8)
    for version in (2, 9, 11, 12, 13, 14):
        with pytest.raises(SnapshotCorrupt, match=rf"snapshot version {version} at {own.path(version)} is missing or incomplete"):
            load(own, version)
        assert not own.settled(version)
    with pytest.raises(SnapshotCorrupt, match="snapshot version 2 at .* is missing or incomplete"):
        load(own, 3)  # it is told from version 2


@pytest.mark.parametrize("version", [9, 11, 12, 13])
def test_what_a_stopped_save_left_behind_is_in_nobodys_way(own, version):
    leave(own)
    own.save(version, put(arrays(version)))
    own.wait()
    assert load(own, version) == bits(arrays(version))
    assert all(name.startswith("keyframe/") for name in own.files(version))  # and nothing of it stays
    own.save(version + 10, put(arrays(version + 10)),
             Difference(version, done(delta.encode(put(arrays(version + 10)), put(arrays(version))))))
    own.wait()
    assert load(own, version + 10) == bits(arrays(version + 10))


def test_a_difference_is_saved_over_what_a_stopped_save_left_behind(own):
    leave(own)
    save(own, 9)
    assert list(own.files(9)) == ["difference-00000.bin"] and load(own, 9) == bits(arrays(9))


def test_discard_after_goes_back_and_says_what_was_left_behind(own):
    left = leave(own)
    assert own.discard_after(6) == left  # and not versions 7 and 8, which were complete
    assert own.versions() == (0, 1, 3, 4, 5, 6) and own.incomplete() == []
    assert {path.name for path in own.directory.iterdir()} == {f"version-00000{version}" for version in own.versions()}
    save(own, 7, 8)
    for version in (4, 5, 6, 7, 8):
        assert load(own, version) == bits(arrays(version))
    assert own.discard_after(8) == [] == own.discard_after(100)
    assert own.versions() == (0, 1, 3, 4, 5, 6, 7, 8)
    assert own.discard_after(-1) == [] and own.versions() == ()


def test_after_going_back_another_history_is_told(own):
    """What was discarded plays no part in what is saved in its place."""
    own.discard_after(5)
    other = put(arrays(50))
    own.save(6, other, Difference(5, done(delta.encode(other, put(arrays(5))))))
    own.save(7, put(arrays(7)), Difference(6, done(delta.encode(put(arrays(7)), other))))
    own.wait()
    assert load(own, 6) == bits(arrays(50)) and load(own, 7) == bits(arrays(7))


@pytest.mark.parametrize("stop", range(5))
def test_discard_after_may_stop_anywhere(own, monkeypatch, stop):
    rmtree, removed = shutil.rmtree, []

    def stopping(path):
        if len(removed) == stop:
            raise KeyboardInterrupt
        removed.append(path)
        rmtree(path)

    monkeypatch.setattr(snapshot_store.shutil, "rmtree", stopping)
    with pytest.raises(KeyboardInterrupt):
        own.discard_after(2)
    monkeypatch.undo()
    check_loads(own, range(max(own.versions()) + 1))  # no version is listed without those that it is told from
    own.discard_after(2)
    check_loads(own, range(3))


def test_a_number_with_more_digits_is_a_version_too(tmp_path):
    store = SnapshotStore(tmp_path)
    store.save(1234567, {"w": jnp.ones(3)})
    store.save(5, {"w": jnp.ones(3)})
    store.wait()
    assert store.versions() == (5, 1234567) and store.incomplete() == []
