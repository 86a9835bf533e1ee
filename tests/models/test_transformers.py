"""What we write, read by Hugging Face's transformers, in an environment of its own: PyTorch is no dependency of ours."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from models.config import Precision
from models.families import model_config
from models.transformer import Model
from models.weights import export_folder, import_folder, read_config
from tests.golden_models import FOLDERS

PACKAGES = ["torch==2.13.0", "transformers==5.12.1"]
PROGRAM = """
import pathlib, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM

for folder in map(pathlib.Path, sys.argv[1:]):
    model, report = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(report.values()), report
    tokens = torch.tensor(np.load(folder.with_suffix(".tokens.npy")))
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits
    np.save(folder.with_suffix(".logits.npy"), logits.float().numpy())
    print(folder.name, model.dtype)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> pathlib.Path:
    """Of a virtual environment with transformers."""
    folder = tmp_path_factory.mktemp("transformers")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    installed = subprocess.run([folder / "bin" / "pip", "install", "-q", *PACKAGES], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip cannot install {' '.join(PACKAGES)}: {installed.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_transformers_load_what_is_exported_and_compute_the_same(python, tmp_path):
    """Every family, in one file and in several, and one of them in bfloat16; nothing missing, nothing unexpected.

    Of the original and of its export transformers compute the same bits; we compute the same up to rounding.
    """
    tokens = np.random.default_rng(0).integers(0, 64, size=(2, 24)).astype(np.int64)
    cases, arguments = {}, []
    for name, original in FOLDERS.items():
        raw = read_config(original)
        for precision in Precision if name == "qwen3_qknorm_tied" else (Precision.FLOAT32,):
            config = model_config(raw)
            params = import_folder(original, config, precision=precision)
            folder = tmp_path / f"{name}-{precision.value}"
            export_folder(folder, params, config, raw, max_shard_bytes=200_000 if name.startswith("llama") else 10**9)
            cases[folder] = original, precision, Model(config), params
            (tmp_path / f"original-{folder.name}").symlink_to(original)
            arguments += [folder, tmp_path / f"original-{folder.name}"]
    for folder in arguments:
        np.save(folder.with_suffix(".tokens.npy"), tokens)
    done = subprocess.run([python, "-c", PROGRAM, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, (_, precision, model, params) in cases.items():
        assert f"{folder.name} torch.{precision.value}" in done.stdout
        logits = np.load(folder.with_suffix(".logits.npy"))
        if precision is Precision.BFLOAT16:
            continue  # transformers then compute in bfloat16
        np.testing.assert_array_equal(logits, np.load(tmp_path / f"original-{folder.name}.logits.npy"))
        ours = jax.jit(lambda params, model=model: model.logits(params, model.hidden(params, tokens.astype(np.int32))))(params)
        np.testing.assert_allclose(logits, ours, rtol=1e-5, atol=2e-5)
