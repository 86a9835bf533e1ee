"""Qwen3-8B from a local folder: 8.19 billion parameters.

    python -m launch.train qwen3_8b --model-path Qwen3-8B
    python -m launch.plan qwen3_8b --topology v5e:8x8     fits: at most 14.90 of 15.75 GiB a chip, when a new policy arrives
    python -m launch.plan qwen3_8b --topology v5e:4x4     does not: the learner step alone asks for 19.51 GiB

Hardware to plan: two CPU cores and 2 GB of memory, for five minutes of processor time (three of two idle cores), half of it for
the learner step. Hardware planned for: 64 chips of 16 GB; the learner spans them, and each process of four samples on its own.

Expect 1.43 GiB of parameters and optimizer a chip (12 bytes a parameter, over 64 chips). The learner step takes 4.86 GiB at 64
rows of 4,096 tokens in 4 microbatches, and 11.5 GiB without microbatches: the layers' inputs that rematerialisation keeps
(1.1 GiB for each row of a chip), attention logits in float32 (0.5 GiB, twice), the gradient of the head before it is divided
(0.6 GiB). The sampler's weights are divided over the four chips of a process (3.8 GiB), and three times there while a new policy
arrives.
The plan wants no weights. The task is one of reasoning-gym's, with room to think before the answer: choose your own by
--reasoning-gym.task.
"""

from launch.config import Config, MeshOptions, SamplerOptions, SnapshotOptions
from launch.pretrained import PretrainedOptions
from models.config import ModelConfig, Precision
from rl.environments import EnvironmentName
from rl.learner import OptimizerOptions, StepOptions
from rl.loop import LoopOptions
from rl.warmstart import WarmStartOptions


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=151_936,
            num_layers=36,
            d_model=4096,
            d_ff=12_288,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_length=4096,
            rope_theta=1_000_000.0,
            qk_norm=True,
            tied_embeddings=False,
            compute_dtype=Precision.BFLOAT16,
        ),
        pretrained=PretrainedOptions(turn_tokens=3072),
        environment=EnvironmentName.REASONING_GYM,
        mesh=MeshOptions(fsdp=-1, tensor=4),
        warm_start=WarmStartOptions(updates=0),
        optimizer=OptimizerOptions(learning_rate=1e-6),
        step=StepOptions(microbatches=4, remat=True),
        loop=LoopOptions(groups_per_step=16, group_size=4, max_staleness=4),
        sampler=SamplerOptions(slots=4, sampler_tensor=4, decode_steps_per_call=16, refill_rows=4),
        snapshots=SnapshotOptions(ring_capacity=8, publish_dtype=Precision.BFLOAT16),
        steps=64,
    )
