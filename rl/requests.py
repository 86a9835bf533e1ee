"""What a sampler is asked for, what it answers, and what it remembers of a request in a slot."""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np

from rl.types import SamplingContract


class Swap(enum.Enum):
    """What a publish does to the KV caches of running contexts."""

    REPREFILL = "reprefill"  # recomputed: the behaviour policy of each token is exactly one version
    KEEP_KV = "keep_kv"  # kept, as PipelineRL does (arXiv 2509.19128): tokens see keys and values of older versions


@dataclasses.dataclass(frozen=True)
class Request:
    """An episode to sample. Requests of one group with one prompt share its prefill.

    `request_id` names the sampling noise, so it must be unique in a run. A deadline is counted in decode steps of the sampler and
    not in seconds: what a run samples must not depend on how fast its machine is.

    Raises:
      ValueError: an empty prompt, or a limit below 1.
    """

    request_id: int
    group_id: int
    prompt: np.ndarray  # int32 [n]
    max_turn_tokens: int
    greedy: bool = False
    max_tokens: int | None = None  # to be sampled over all turns
    deadline: int | None = None  # decode steps from its submission to its end, wherever it is then

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError(f"request {self.request_id} has an empty prompt; wanted at least one token to sample after")
        if self.max_turn_tokens < 1:
            raise ValueError(f"request {self.request_id} may sample {self.max_turn_tokens} tokens a turn, wanted at least 1; "
                             "look at --turn-tokens or the environment's max_turn_tokens")
        for name in ("max_tokens", "deadline"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"request {self.request_id}: {name} is {limit}, wanted at least 1, or None for no limit")


class SampledTokens(NamedTuple):
    """New tokens of one request; arrays [n]."""

    request_id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    context_versions: np.ndarray  # the oldest version in the cache that each token was sampled from
    turn_over: bool
    contract: SamplingContract
    expired: bool = False  # its deadline has come: this is its last word, and its slot is free


@dataclasses.dataclass
class Row:
    """A request in a slot."""

    request: Request
    submitted: int  # the sampler's count of decode steps then
    context: list[int]
    context_version: int
    remaining: int  # tokens this turn may still sample; 0: waiting for its environment
    num_sampled: int = 0  # over all turns
    is_stale: bool = True  # the cache must be computed before the row may decode
    is_filled: bool = True  # False while its prompt is being prefilled
    pending: np.ndarray | None = None  # tokens at the end of the context that the engine has not seen yet

    @property
    def is_running(self) -> bool:
        """Whether the next decode step samples a token for it."""
        return self.remaining > 0 and self.is_filled and self.pending is None

    def begin_turn(self, room: int, max_turn_tokens: int | None = None) -> None:
        """Allows as many tokens as turn, by default the request's, request and slot still do."""
        left = room - len(self.context)
        if self.request.max_tokens is not None:
            left = min(left, self.request.max_tokens - self.num_sampled)
        self.remaining = min(self.request.max_turn_tokens if max_turn_tokens is None else max_turn_tokens, left)

    def state(self) -> dict:
        """Plain arrays and JSON values, for `from_state`. The cache is not among them: what comes back is stale."""
        return {"request": dict(self.request.__dict__), "submitted": self.submitted,
                "context": np.asarray(self.context, np.int32), "context_version": self.context_version,
                "remaining": self.remaining, "num_sampled": self.num_sampled}

    @classmethod
    def from_state(cls, state: dict) -> "Row":
        return cls(**{**state, "request": Request(**state["request"]), "context": state["context"].tolist()})
