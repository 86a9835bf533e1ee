"""A run whose programs take milliseconds, for benchmarks of what lies around them."""

from launch.config import Config, SamplerOptions, SnapshotOptions
from models.config import ModelConfig, Precision
from models.tokenizer import ByteTokenizer
from rl.environments import FrozenLakeOptions
from rl.learner import OptimizerOptions, StepOptions
from rl.loop import LoopOptions
from rl.objective import Objective
from rl.warmstart import WarmStartOptions

MAX_TURNS = 5
BATCHES_UNDER_WAY = 5


def small_config() -> Config:
    """Games of five turns of one token, which an untrained policy plays to their end; the slots hold five batches."""
    groups_per_step, group_size = 4, 2
    return Config(
        model=ModelConfig(
            vocab_size=ByteTokenizer.vocab_size,
            vocab_multiple=8,
            num_layers=1,
            d_model=16,
            d_ff=32,
            num_heads=2,
            num_kv_heads=2,
            head_dim=8,
            max_length=40,
        ),
        frozen_lake=FrozenLakeOptions(max_turns=MAX_TURNS),
        warm_start=WarmStartOptions(updates=0),
        optimizer=OptimizerOptions(learning_rate=3e-3),
        objective=Objective(entropy_coefficient=0.01),
        step=StepOptions(minibatches=1),
        loop=LoopOptions(
            groups_per_step=groups_per_step, group_size=group_size, max_staleness=2 * BATCHES_UNDER_WAY, decode_steps=1
        ),
        sampler=SamplerOptions(
            slots=BATCHES_UNDER_WAY * groups_per_step * group_size, decode_steps_per_call=1, refill_rows=8
        ),
        snapshots=SnapshotOptions(
            ring_capacity=16, persist_every=64, score_rows=4, publish_dtype=Precision.FLOAT32, exactness_every=0
        ),
    )
