"""Which arrays training changes: only those are kept version by version, and the others once.

An adapter's versions are small; the model it sits on is not, and no version changes it. What is frozen is identified by its
digest.
"""

from collections.abc import Callable

import jax
import numpy as np

from rl.delta import array_shards
from rl.host_copy import HostCopy, LeafDigest, flatten, from_numpy, host_copy

Path = tuple[str, ...]


class Trainable:
    """Divides parameters into those that training changes and those that it does not, and puts them together again.

    Args:
      is_trained: says it of an array, by its path in the tree.
    """

    def __init__(self, is_trained: Callable[[Path], bool]):
        self._is_trained = is_trained
        self._copy: HostCopy | None = None  # of the frozen arrays, as they were first seen
        self._arrays: dict[Path, jax.Array] = {}  # the same on the devices
        self.digests: tuple[LeafDigest, ...] = ()

    def trained(self, params: dict) -> dict:
        """The part of the parameters that training changes.

        Raises:
          ValueError: nothing is trained, or an array that should be frozen is not what it was.
        """
        frozen = self._frozen_arrays(params)
        if self._copy is None:
            self._take(host_copy(_tree(frozen)), frozen)
        if frozen.keys() != self._arrays.keys():
            path = sorted(frozen.keys() ^ self._arrays.keys())[0]
            raise ValueError(f"{'/'.join(path)} is frozen in one version only; give versions of one model")
        for leaf in self._copy.leaves:
            array = frozen[leaf.path]
            if array is self._arrays[leaf.path]:
                continue
            shards = array_shards(array)
            if array.dtype != leaf.dtype or shards.keys() != leaf.shards.keys() or not all(
                np.array_equal(_bytes(shard), _bytes(leaf.shards[index])) for index, shard in shards.items()
            ):
                raise ValueError(f"{'/'.join(leaf.path)} has changed, or lies elsewhere, but it is not trained; let "
                                 "`trainable` name it")
        return self.like(params)

    def like(self, tree: dict) -> dict:
        """The same part of any tree of that structure, such as one of shapes or shardings.

        Raises:
          ValueError: nothing is trained.
        """
        trained = {path: leaf for path, leaf in flatten(tree)[0] if self._is_trained(path)}
        if not trained:
            raise ValueError("`trainable` names no array of the parameters, wanted at least one; look at its paths")
        return _tree(trained)

    def whole(self, trained: dict, shardings: dict | None = None) -> dict:
        """The parameters: the trained ones given, and the frozen ones, where they lay or with these shardings."""
        if any(array.is_deleted() for array in self._arrays.values()):
            self._arrays = dict(flatten(self._copy.to_device())[0])
        frozen = self._arrays
        if shardings is not None:
            frozen = {path: jax.device_put(frozen[path], sharding) for path, sharding in flatten(shardings)[0] if path in frozen}
        return _tree({**dict(flatten(trained)[0]), **frozen})

    def state(self) -> dict:
        """The frozen arrays, global, in numpy. A collective where several processes hold them."""
        return {} if self._copy is None else self._copy.to_numpy()

    def restore(self, state: dict, like: dict) -> None:
        """Takes a `state` back; `like` is of the whole parameters."""
        if state:
            copy = from_numpy(state, _tree(self._frozen_arrays(like)))
            self._take(copy, dict(flatten(copy.to_device())[0]))

    def _frozen_arrays(self, tree: dict) -> dict:
        return {path: leaf for path, leaf in flatten(tree)[0] if not self._is_trained(path)}

    def _take(self, copy: HostCopy, arrays: dict[Path, jax.Array]) -> None:
        self._copy, self._arrays = copy, arrays
        self.digests = tuple(leaf.digest() for leaf in copy.leaves)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _tree(leaves: dict[Path, object]) -> dict:
    """The nested dict with these leaves."""
    tree: dict = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
