"""Real train steps on random weights, for benchmarks of what goes on beside them."""

import jax
import numpy as np

from launch.config import ConfigError
from models.config import ModelConfig, Precision
from models.transformer import Model, Params
from rl import presets
from rl.learner import Learner, OptimizerOptions, StepOptions
from rl.objective import Objective
from rl.types import Batch

SHAPES = {
    "smollm2_135m": ModelConfig(
        vocab_size=49152, num_layers=30, d_model=576, d_ff=1536, num_heads=9, num_kv_heads=3, head_dim=64, max_length=2048
    ),
    "small_3m": ModelConfig(
        vocab_size=4096, num_layers=4, d_model=192, d_ff=768, num_heads=4, num_kv_heads=2, head_dim=48, max_length=512
    ),
}

WEIGHT_SCALE = 0.04


def check_shape(name: str) -> None:
    if name not in SHAPES:
        raise ConfigError(f"--shape is {name!r}, wanted one of: {', '.join(SHAPES)}")


class Training:
    """Policy-gradient steps on tokens of no meaning, with random advantages: the noisiest gradients there are.

    Args:
      shape: a name of `SHAPES`.
      rows, length: of each step's batch.
      learning_rate: of AdamW.
      publish_dtype: what the policy is rounded to.
      seed: of weights and batches.
    """

    def __init__(self, shape: str, *, rows: int, length: int, learning_rate: float, publish_dtype: Precision, seed: int):
        self._model = Model(SHAPES[shape])
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
        self._optimizer, self._publish_dtype = OptimizerOptions(learning_rate=learning_rate), publish_dtype
        self._random, self._seed = np.random.default_rng(seed), seed
        self._shape, self._vocabulary = (rows, length), self._model.config.vocab_size
        self._learners: dict[Objective, Learner] = {}
        self._learner = self._of(presets.ppo())
        self._learner.start(_trained_scale(self._model.init(jax.random.key(seed)), seed))

    def change(self, objective: Objective) -> None:
        """The steps after this have another objective. There is one state of training, and the learners hand it on."""
        learner, previous = self._of(objective), self._learner
        state, previous.train_state = previous.train_state, None
        self._learner, learner.train_state = learner, state

    def step(self) -> None:
        shape = self._shape
        # A uniform policy's. That of random weights is near, so no method that looks at the sampler drops all of the batch.
        logprobs = np.full(shape, -np.log(self._vocabulary), np.float32)
        tokens = np.minimum(self._random.zipf(1.2, shape) - 1, self._vocabulary - 1).astype(np.int32)
        mask = np.ones(shape, bool)
        mask[:, 0] = False
        batch = Batch(tokens=tokens, valid=np.ones(shape, bool), loss_mask=mask, sampler_logprobs=logprobs,
                      proximal_logprobs=logprobs, policy_versions=np.zeros(shape, np.int32),
                      advantages=np.repeat(self._random.normal(size=(shape[0], 1)), shape[1], 1).astype(np.float32),
                      reference_logprobs=logprobs if self._learner.objective.needs_reference else None)  # fmt: skip
        jax.block_until_ready(self._learner.step(batch, version=0).step)
        jax.block_until_ready(self._learner.train_state)

    def published(self) -> Params:
        return jax.block_until_ready(self._learner.published())

    def _of(self, objective: Objective) -> Learner:
        """The learner of an objective, which keeps the step that it has compiled."""
        if objective not in self._learners:
            self._learners[objective] = Learner(
                self._model,
                self._mesh,
                optimizer=self._optimizer,
                objective=objective,
                step=StepOptions(),
                publish_dtype=self._publish_dtype,
                temperature=1.0,
                anchor=lambda logprobs, *_: logprobs,  # a ratio of one: plain policy gradient
                seed=self._seed,
            )
        return self._learners[objective]


def _trained_scale(params: Params, seed: int) -> Params:
    """Random matrices of one scale, as those of trained models are; initial ones differ."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    # What is constant at the start, such as a norm's scale, stays.
    return structure.unflatten([leaf if leaf.std() == 0 else WEIGHT_SCALE * jax.random.normal(key, leaf.shape, leaf.dtype)
                                for key, leaf in zip(keys, leaves, strict=True)])
