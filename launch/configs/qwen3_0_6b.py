"""Qwen3-0.6B from a local folder: 0.60 billion parameters, in the schedule of qwen3_8b.

    python -m launch.train qwen3_0_6b --model-path Qwen3-0.6B
    python -m launch.plan qwen3_0_6b --topology v5e:2x4     fits: at most 9.19 of 15.75 GiB a chip, in the learner step

Hardware: eight chips of 16 GB. Not run on any yet.
"""

import dataclasses

from launch.config import Config
from launch.configs import qwen3_8b


def config() -> Config:
    larger = qwen3_8b.config()
    model = dataclasses.replace(larger.model, num_layers=28, d_model=1024, d_ff=3072, num_heads=16, tied_embeddings=True)
    return dataclasses.replace(larger, model=model)
