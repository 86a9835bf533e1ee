"""Qwen3-4B from a local folder: 4.02 billion parameters, in the schedule of qwen3_8b.

    python -m launch.train qwen3_4b --model-path Qwen3-4B
    python -m launch.plan qwen3_4b --topology v5e:4x8     fits: at most 9.77 of 15.75 GiB a chip, in the learner step

Hardware: 32 chips of 16 GB. Not run on any yet.
"""

import dataclasses

from launch.config import Config
from launch.configs import qwen3_8b


def config() -> Config:
    larger = qwen3_8b.config()
    model = dataclasses.replace(larger.model, d_model=2560, d_ff=9728, tied_embeddings=True)
    return dataclasses.replace(larger, model=model)
