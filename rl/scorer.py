"""The one way to an undifferentiated training-side logprob: `score`, compiled once per bucket for a small fixed number of rows.

A bucket is (rows in a call, padded length). For the same parameters, bucket, mesh, sharding and types the same tokens get bitwise
the same logprobs, whatever the other rows and the padding hold, in another process too. That is what makes a replay exact,
and why nothing is ever scored in a program that also does something else, such as the forward inside a train step.
`self_test` establishes how much of this holds on the platform at hand.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.sharding import batch_sharding, num_batch_shards, parameter_shardings
from models.transformer import Model, Params
from rl import processes
from rl.batching import bucket_length, pad_rows
from rl.logprobs import score


class Bucket(NamedTuple):
    """The shape of a scored call: all devices' rows, and tokens a row."""

    rows: int
    length: int


class RowScore(NamedTuple):
    """One row's logprobs, float32 [T] nats, and the bucket they were computed in."""

    logprobs: np.ndarray
    bucket: Bucket


class Scorer:
    """Scores rows of tokens under any parameters of one model.

    Args:
      model: the decoder's structure.
      mesh: parameters are sharded over it as the learner shards them, rows over data and fsdp; as in the learner, weights are
        gathered to the rows.
      rows_per_device: rows in a call, for each device that holds rows. Several processes share a call, each with rows of its own.
      lengths: the length buckets.
      temperature: that of sampling.
    """

    def __init__(self, model: Model, mesh: jax.sharding.Mesh, *, rows_per_device: int, lengths: tuple[int, ...],
                 temperature: float):
        if rows_per_device < 1:
            raise ValueError(f"the scorer takes {rows_per_device} rows a device, wanted at least 1; change --score-rows")
        self.mesh = mesh
        self.rows = rows_per_device * num_batch_shards(mesh)
        self._own_rows = processes.share(self.rows, "rows of a scored call")
        self.lengths = lengths
        self._row_sharding = batch_sharding(mesh)
        self.parameter_shardings = parameter_shardings(model.axes, model.shapes, mesh)
        self._vocab_size = model.config.vocab_size
        model = dataclasses.replace(model, activation_sharding=self._row_sharding)
        self._program = functools.partial(score, model, temperature=temperature)
        self._score = self._compile()
        self._dispatching = threading.Lock()
        self.num_scored_tokens = 0
        self.num_padded_tokens = 0

    def score(self, params: Params, rows: Sequence[np.ndarray]) -> list[RowScore]:
        """Scores rows of int32 tokens [T], each in the smallest bucket that holds it. Collective, as `start` is."""
        return self.start(params, rows)()

    def start(self, params: Params, rows: Sequence[np.ndarray]) -> Callable[[], list[RowScore]]:
        """Sends rows to be scored, and returns the function that waits for their scores: the host can do other things meanwhile.

        Rows of one bucket share calls, ceil(rows / bucket rows) of them. With several processes this is collective: the one with
        the most rows decides about the number of calls.
        """
        by_length: dict[int, list[int]] = {length: [] for length in self.lengths}
        for index, row in enumerate(rows):
            by_length[bucket_length(len(row), self.lengths)].append(index)
        num_calls = processes.gather([-(-len(indices) // self._own_rows) for indices in by_length.values()]).max(axis=0)
        calls = [(length, indices[call * self._own_rows : (call + 1) * self._own_rows])
                 for (length, indices), count in zip(by_length.items(), num_calls, strict=True) for call in range(count)]
        # Programs of two threads reach all devices in one order, or their collectives would wait for each other.
        with self._dispatching:
            params = self.place(params)
            pending = [self._dispatch(self._score, params, [rows[index] for index in indices], length)
                       for length, indices in calls]
        return functools.partial(self._collect, rows, calls, pending)

    def _collect(
        self, rows: Sequence[np.ndarray], calls: list[tuple[int, list[int]]], pending: list[jax.Array]
    ) -> list[RowScore]:
        scores: list[RowScore | None] = [None] * len(rows)
        for (length, indices), logprobs in zip(calls, pending, strict=True):
            logprobs = processes.own_rows(logprobs)
            self.num_padded_tokens += self._own_rows * length
            for position, index in enumerate(indices):
                self.num_scored_tokens += len(rows[index])
                scores[index] = RowScore(logprobs[position, :len(rows[index])].copy(), Bucket(self.rows, length))
        return scores

    def lower(self, params: Params, length: int) -> jax.stages.Lowered:
        """The program of one length bucket, for parameters given as `jax.ShapeDtypeStruct`; nothing is placed or run."""
        def tokens(dtype):
            return jax.ShapeDtypeStruct((self.rows, length), dtype, sharding=self._row_sharding)

        return self._score.lower(params, tokens(jnp.int32), tokens(bool))

    def self_test(self, params: Params) -> dict:
        """What holds here: the same rows in another order with other padding, and in a program compiled again.

        Returns:
          JSON values: largest differences in nats, and whether replay is bitwise.
        """
        params = self.place(params)
        rng = np.random.default_rng(0)
        length = self.lengths[-1]
        rows = [rng.integers(self._vocab_size, size=length - index % 3).astype(np.int32) for index in range(self._own_rows)]
        order = rng.permutation(self._own_rows)
        first = processes.own_rows(self._dispatch(self._score, params, rows, length))
        permuted = processes.own_rows(self._dispatch(self._score, params, [rows[index] for index in order], length, fill=1))
        recompiled = processes.own_rows(self._dispatch(self._compile(), params, rows, length))
        errors = processes.gather([np.abs(permuted - first[order]).max(), np.abs(recompiled - first).max()]).max(axis=0)
        differences = {"permuted_rows_max_error": float(errors[0]), "recompiled_max_error": float(errors[1])}
        device = self.mesh.devices.flat[0]
        return {"replay": "bitwise" if not any(differences.values()) else "approximate", **differences,
                "platform": device.platform, "device_kind": device.device_kind, "num_devices": self.mesh.size,
                "rows": self.rows, "length": length}

    def place(self, params: Params) -> Params:
        """Parameters where `score` wants them, sent once for all calls; what lies in place already stays."""
        return jax.device_put(params, self.parameter_shardings)

    def _compile(self):
        # A fresh function object: jit shares compilations between equal ones.
        rows = self._row_sharding
        return jax.jit(lambda params, tokens, valid: self._program(params, tokens, valid).logprobs,
                       in_shardings=(self.parameter_shardings, rows, rows), out_shardings=rows)

    def _dispatch(self, program, params: Params, rows: Sequence[np.ndarray], length: int, fill: int = 0) -> jax.Array:
        rows = rows or [np.zeros(0, np.int32)]  # a process without rows takes part in the others' call
        tokens = pad_rows(rows, length, fill=fill, num_rows=self._own_rows)
        lengths = np.asarray([len(row) for row in rows] + [0] * (self._own_rows - len(rows)))
        valid = np.arange(length)[None, :] < lengths[:, None]
        return program(params, *processes.from_rows((tokens, valid), self._row_sharding))
