"""FrozenLake on generated 4x4 maps, from a walker that avoids holes to one that arrives.

    python -m launch.train quickstart --seed 0

Hardware: two CPU cores, minutes. Expect greedy held-out success to go from about 0 to 0.8 and more, with nine in ten trajectories
crossing versions and an exactness error of 0. The imitator must have learned to avoid holes (a loss near 1.27 nats, and as many
kv heads as there are neighbour cells to look at): from a poorer one too few games are won for rewards to teach anything.
"""

from launch.config import Config, SamplerOptions, SnapshotOptions
from models.config import ModelConfig, Precision
from models.tokenizer import ByteTokenizer
from rl.environments import FrozenLakeOptions
from rl.learner import OptimizerOptions, StepOptions
from rl.loop import LoopOptions
from rl.objective import Objective
from rl.warmstart import WarmStartOptions


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=ByteTokenizer.vocab_size,
            vocab_multiple=8,
            num_layers=2,
            d_model=64,
            d_ff=160,
            num_heads=4,
            num_kv_heads=4,
            head_dim=16,
            max_length=88,
        ),
        frozen_lake=FrozenLakeOptions(expert_noise=0.05),
        warm_start=WarmStartOptions(episodes=2_000, updates=160, rows=32, microbatches=2, learning_rate=5e-3),
        optimizer=OptimizerOptions(learning_rate=1e-3, decay_updates=128, final_rate_fraction=0.1),
        objective=Objective(entropy_coefficient=0.001),
        step=StepOptions(minibatches=2, microbatches=2),
        loop=LoopOptions(groups_per_step=8, group_size=8, max_staleness=4, decode_steps=3),
        sampler=SamplerOptions(slots=128, decode_steps_per_call=1, refill_rows=16),
        snapshots=SnapshotOptions(ring_capacity=8, score_rows=32, publish_dtype=Precision.FLOAT32),
        length_buckets=2,
        steps=64,
    )
