"""Checkpoints of a whole run: written beside the run, whole or not at all, the newest few kept.

A run's state is a tree of dicts, lists, JSON values and numpy arrays (every room's `state()`). Orbax stores the large arrays as
they are. The many small ones, of what is under way, and the tree itself are packed into one: an entry each would take longer than
the rest. Several processes write one checkpoint: each packs all of what is its own. The pack has checksums of its own; those of
the arrays stored alone are in it.
"""

import hashlib
import io
import json
import math
import pathlib

import numpy as np
from orbax.checkpoint import v1 as ocp

from rl import processes

LARGE = 1 << 16
"""Bytes from which an array is stored by itself."""

PACKED, _OWN = "packed", "own"  # names of what is stored
_ARRAY = "$array"  # the key of what stands for an array in the tree


class CheckpointCorrupt(ValueError):
    """The newest checkpoint cannot be read."""


class RunCheckpoints:
    """The checkpoints of one run.

    Args:
      directory: theirs; made when the first one is saved.
      keep: how many of the newest ones.
    """

    def __init__(self, directory: pathlib.Path, *, keep: int = 2):
        self._directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._checkpointer: ocp.training.Checkpointer | None = None

    def save(self, step: int, shared: dict, own: dict) -> None:
        """Starts to write a state and returns; the arrays must not change before `wait`, or the next `save`, returns.

        Args:
          step: the learner step; a checkpoint of this step that is there already is replaced.
          shared: what all processes have alike.
          own: what each has for itself.
        """
        self.wait()
        packed = processes.gather_bytes(_pack(own, large=math.inf)[PACKED].tobytes())
        parts = {f"{_OWN}{index:06d}": np.frombuffer(content, np.uint8) for index, content in enumerate(packed)}
        self._open().save_async(step, {**_pack(shared), **parts}, overwrite=True)

    def wait(self) -> None:
        """Returns when what was saved is on disk; raises what made it fail."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Waits, and gives resources back."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def latest(self) -> tuple[int, dict, dict] | None:
        """The step, the shared and this process's own state of the newest whole checkpoint; None if there is none.

        Raises:
          CheckpointCorrupt: it is there but cannot be read, or other processes wrote it.
        """
        if not self._directory.is_dir():
            return None
        newest = self._open().latest
        if newest is None:
            return None
        try:
            stored = {name: np.asarray(array) for name, array in self._open().load(newest.step).items()}
            own = [stored.pop(name) for name in sorted(stored) if name.startswith(_OWN)]
            if len(own) != processes.num_processes():
                raise ValueError(f"{len(own)} processes wrote it, and now there are {processes.num_processes()}")
            return newest.step, _unpack(stored), _unpack({PACKED: own[processes.index()]})
        except Exception as error:  # whatever a damaged file makes of it
            raise CheckpointCorrupt(f"checkpoint {newest.step} in {self._directory} cannot be read: {error}; "
                                    "delete its directory to go on from the one before") from error

    def _open(self) -> ocp.training.Checkpointer:
        if self._checkpointer is None:
            context = ocp.Context()
            context.array.saving.use_compression = False  # parameters hardly shrink
            policy = ocp.training.preservation_policies.LatestN(self._keep)
            with context:
                self._checkpointer = ocp.training.Checkpointer(
                    self._directory, preservation_policy=policy, cleanup_tmp_directories=True,
                    save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1))
        return self._checkpointer


def _pack(state: dict, *, large: float = LARGE) -> dict[str, np.ndarray]:
    """The arrays that Orbax stores, by name: those of `large` bytes and more, and all else packed into one."""
    arrays: list[np.ndarray] = []

    def skeleton(value):
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {_ARRAY: len(arrays) - 1}
        if isinstance(value, dict):
            return {key: skeleton(item) for key, item in value.items()}
        return [skeleton(item) for item in value] if isinstance(value, (list, tuple)) else value

    tree = skeleton(state)
    # numpy's own format knows numpy's own types only.
    alone = {str(index): array for index, array in enumerate(arrays) if array.nbytes >= large or array.dtype.isbuiltin != 1}
    small = {str(index): array for index, array in enumerate(arrays) if str(index) not in alone}
    text = json.dumps({"tree": tree, "sha256": {name: _digest(array) for name, array in alone.items()}})
    packed = io.BytesIO()
    np.savez(packed, text=np.frombuffer(text.encode(), np.uint8), **small)
    return {PACKED: np.frombuffer(packed.getvalue(), np.uint8), **alone}


def _unpack(stored: dict[str, np.ndarray]) -> dict:
    """The inverse of `_pack`. ValueError, or what numpy's reader raises: a value is not what was packed."""
    with np.load(io.BytesIO(stored[PACKED].tobytes()), allow_pickle=False) as packed:
        arrays = {**{name: packed[name] for name in packed.files}, **stored}
    content = json.loads(arrays["text"].tobytes())
    for name, digest in content["sha256"].items():
        if _digest(stored[name]) != digest:
            raise ValueError(f"array {name} is not what was saved")

    def fill(value):
        if isinstance(value, dict):
            if value.keys() == {_ARRAY}:
                return np.array(arrays[str(value[_ARRAY])])  # the caller's own: writable
            return {key: fill(item) for key, item in value.items()}
        return [fill(item) for item in value] if isinstance(value, list) else value

    return fill(content["tree"])


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
