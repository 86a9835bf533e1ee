"""How much memory an import takes, seen from outside: a process of its own, and what the system says of it."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from models.families import model_config, places
from tests.golden_models import FOLDERS

ROOT = pathlib.Path(__file__).resolve().parents[2]
RAW = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10240, "hidden_size": 512,
    "num_hidden_layers": 16, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
"""A stacked matrix of its feed-forward, 64 MiB, is three times its largest tensor."""

PROGRAM = """
import pathlib, sys
import jax, numpy as np
from models import sharding
from models.config import Precision
from models.families import model_config
from models.transformer import Model
from models.weights import import_folder, read_config

def memory(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

def load(folder):
    config = model_config(read_config(folder))
    model = Model(config)
    shardings = sharding.parameter_shardings(model.axes, model.shapes, mesh)
    return jax.block_until_ready(import_folder(folder, config, precision=Precision.FLOAT32, shardings=shardings))

tiny, folder, mesh = sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]]
mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(mesh), sharding.MESH_AXES)
load(tiny)  # code takes memory too, when it first runs
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
before = memory("VmRSS")
params = load(folder)
print(memory("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("big")
    (path / "config.json").write_text(json.dumps(RAW))
    tensors = {name: np.ones(place.shape, np.float32) for name, place in places(model_config(RAW))}
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak")
@pytest.mark.parametrize("mesh", [(1, 1, 1), pytest.param((1, 4, 2), marks=pytest.mark.slow)])
def test_an_import_takes_no_more_than_its_target_and_one_tensor(mesh, folder):
    flags = f"--xla_force_host_platform_device_count={np.prod(mesh)}"
    command = [sys.executable, "-c", PROGRAM, FOLDERS["llama_gqa_untied"], folder, *map(str, mesh)]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    peak, target = (int(number) for number in done.stdout.split())
    largest = 4 * RAW["vocab_size"] * RAW["hidden_size"]
    print(f"peak {peak / 2**20:.1f} MiB, target {target / 2**20:.1f}, largest tensor {largest / 2**20:.1f}")
    assert 0.95 * target < peak <= target + 1.2 * largest
