"""The nouns of an asynchronous run: trajectories on the host, batches on the device.

Index t of every per-token array speaks of token t. A token was written either by one policy version (0, 1, 2, ...) or by the
environment (`NO_POLICY`); a maximal run of tokens with one author is a segment. A partial rollout, interrupted by publishes, is
therefore nothing special: it is a trajectory with several segments.
"""

import dataclasses
import enum
import math

import chex
import jax
import numpy as np

NO_POLICY = -1
"""The policy version of a token that no policy sampled: prompt and environment."""


class FinishReason(enum.Enum):
    """Why an episode ended."""

    ENVIRONMENT = "environment"  # the environment said it is over
    LENGTH = "length"  # out of turns or out of context: truncated, not finished
    FAILED = "failed"  # the environment broke; there may be no reward
    CANCELLED = "cancelled"  # too late or too old: cut off where it was, without a reward


@dataclasses.dataclass(frozen=True)
class SamplingContract:
    """What the logprobs and versions of sampled tokens mean. It travels with them, and a learner refuses what it does not match.

    Each token carries the version of the weights whose call sampled it, and its logprob under softmax(logits / temperature).
    """

    temperature: float
    compute_dtype: str
    swap: str  # what a publish did to the contexts under way: a value of `rl.requests.Swap`
    greedy: bool = False  # the likeliest token each time
    top_k: int = 0  # 0: no such truncation
    top_p: float = 1.0

    @property
    def is_trainable(self) -> bool:
        """Whether the tokens were drawn from the distribution that a ratio is about."""
        return not self.greedy and not self.top_k and self.top_p == 1.0


class ContractError(ValueError):
    """Tokens that were sampled in another way than the learner takes them for."""


def check_contract(request_id: int, contract: SamplingContract | None, wanted: SamplingContract) -> None:
    """Refuses tokens whose ratios would not mean what the learner takes them for.

    Raises:
      ContractError: what differs, got, wanted, what to do.
    """
    if contract is None:
        raise ContractError(f"trajectory {request_id} does not say how it was sampled; wanted {wanted}: "
                            "give it the contract that the sampler's results carry")
    different = [f"{field.name} {getattr(contract, field.name)!r}, wanted {getattr(wanted, field.name)!r}"
                 for field in dataclasses.fields(contract) if getattr(contract, field.name) != getattr(wanted, field.name)]
    if different:
        raise ContractError(f"trajectory {request_id} was sampled with {'; '.join(different)}: its ratios would mean something "
                            "else; sample it as the learner scores, or set the learner up for it")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens [start, stop) with one author; `version` is `NO_POLICY` for the environment."""

    start: int
    stop: int
    version: int


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode, in numpy. All arrays have shape [T].

    Raises:
      ValueError: lengths differ, the first token is trained, a trained token lacks a version or a finite sampler logprob, or the
        reward is not finite.
    """

    request_id: int
    group_id: int
    tokens: np.ndarray  # int32
    loss_mask: np.ndarray  # bool: sampled, and counts in the loss
    sampler_logprobs: np.ndarray  # float32 nats; NaN where no policy sampled, so that "missing" is never taken for 0
    policy_versions: np.ndarray  # int32: the version that sampled the token, or NO_POLICY
    context_versions: np.ndarray  # int32: the oldest version in the KV cache the token was sampled from, or NO_POLICY
    turn_starts: np.ndarray  # int32 [turns]: where each turn of the policy begins
    reward: float | None  # None: the episode failed before it earned one
    success: bool
    finish_reason: FinishReason
    old_logprobs: np.ndarray | None = None  # float32 nats, exact or absent; NaN where no policy sampled
    contract: SamplingContract | None = None  # of the sampled tokens; None: it is not known

    def __post_init__(self):
        length = len(self.tokens)
        for name in ("loss_mask", "sampler_logprobs", "policy_versions", "context_versions"):
            array = self.__dict__[name]
            if array.shape != (length,):
                raise ValueError(f"trajectory {self.request_id}: {name} has shape {array.shape}, wanted ({length},) like tokens")
        if length and self.loss_mask[0]:
            raise ValueError(f"trajectory {self.request_id}: token 0 has no context and cannot be trained; give a prompt")
        if np.any(self.loss_mask & (self.policy_versions < 0)):
            raise ValueError(f"trajectory {self.request_id}: a trained token has no policy version; mask it or record one")
        if not np.all(np.isfinite(self.sampler_logprobs[self.loss_mask])):
            raise ValueError(f"trajectory {self.request_id}: a trained token has no finite sampler logprob; "
                             "the engine must report the logprob of every token it samples")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"trajectory {self.request_id}: reward is {self.reward}, wanted a finite number; "
                             "check the environment")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def segments(self) -> list[Segment]:
        """The maximal runs of tokens with one author, in order."""
        if not len(self.tokens):
            return []
        starts = np.flatnonzero(np.diff(self.policy_versions, prepend=self.policy_versions[0] - 1))
        stops = np.append(starts[1:], len(self.tokens))
        return [
            Segment(int(start), int(stop), int(self.policy_versions[start])) for start, stop in zip(starts, stops, strict=True)
        ]

    @property
    def versions(self) -> tuple[int, ...]:
        """The distinct policy versions in it, oldest first."""
        return tuple(int(version) for version in np.unique(self.policy_versions) if version != NO_POLICY)

    def staleness(self, learner_version: int) -> int:
        """Learner version minus the oldest policy version in it: the maximum over its tokens. 0 without sampled tokens."""
        return learner_version - min(self.versions, default=learner_version)

    def state(self) -> dict:
        """Plain arrays and JSON values, from which `from_state` makes an equal trajectory."""
        contract = None if self.contract is None else dict(self.contract.__dict__)
        return {**self.__dict__, "finish_reason": self.finish_reason.value, "contract": contract}

    @classmethod
    def from_state(cls, state: dict) -> "Trajectory":
        contract = state["contract"] and SamplingContract(**state["contract"])
        return cls(**{**state, "finish_reason": FinishReason(state["finish_reason"]), "contract": contract})


@chex.dataclass(frozen=True)
class Batch:
    """One learner step's trajectories, padded to one length. Every field has shape [B, T].

    Where `loss_mask` is False the logprobs and advantages hold any value at all, NaN included, and must not matter.
    """

    tokens: jax.Array  # int32
    valid: jax.Array  # bool: the token exists (rows are padded on the right)
    loss_mask: jax.Array  # bool: the token is trained
    sampler_logprobs: jax.Array  # float32 nats
    proximal_logprobs: jax.Array  # float32 nats: the anchor, from an old-logprob source
    advantages: jax.Array  # float32
    policy_versions: jax.Array  # int32
    reference_logprobs: jax.Array | None = None  # float32 nats: the policy that a KL penalty holds on to, where there is one
