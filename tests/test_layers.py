"""The layers of the code, enforced: who may import what, and what may lie at the top of the repository.

    launch -> rl -> models          inside rl:  types <- cores <- shells <- loop

Each module is parsed, never imported, so the rules hold for imports inside functions too. A new module of `rl/` must be given a
layer in `LAYERS`. The rules are themselves tested, on small trees that break them.
"""

import ast
import fnmatch
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

LAYERS = {
    "types": ("types",),
    "cores": (
        "logprobs", "ratios", "advantages", "returns", "corrections", "gates", "surrogates", "denominators", "objective",
        "presets", "loss_metrics", "losses", "effective_bounds", "batching", "delta", "delta_record", "drawing",
        "sampling",
    ),
    "shells": (
        "environments", "admission", "engine", "sampling_programs", "requests", "sampler", "rollout", "snapshots",
        "snapshot_store", "host_copy", "version_chain", "trainable",
        "old_logprobs", "reference", "decomposition", "learner", "scorer", "exactness", "evaluation", "warmstart", "ledger",
        "auditing", "budget", "checkpoint", "metrics", "timeline", "processes", "rooms", "training", "reporting",
    ),
    "loop": ("loop", "threads"),
}  # fmt: skip
ORDER = tuple(LAYERS)
LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}
PACKAGES = ("models", "rl", "launch")  # each may import those before it, and itself

# A core computes: no threads, files, clock or randomness of the host.
CORE_LIBRARIES = {
    "jax", "numpy", "chex", "flax.struct", "__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools",
    "json", "math", "operator", "struct", "types", "typing", "zlib", "zstandard",
}  # fmt: skip
# The model itself is as pure as a core, so cores may compute with it; it must stay so.
PURE_MODELS = {"models.config", "models.attention", "models.transformer", "models.decode"}
CORE_FORBIDDEN = {"jax.jit", "jax.pmap", "numpy.random", "open", "print", "input"}

# library: the only modules that may import it
RESERVED_LIBRARIES = {
    "jetstream": ("rl.engine",),
    "orbax": ("rl.snapshot_store", "rl.checkpoint", "models.weights", "launch.benches.ring"),
    "tensorstore": ("rl.snapshot_store", "rl.checkpoint", "models.weights"),
}
# Flags and environment variables are read in launch/ only. importlib would hide an import from this test.
LAUNCH_ONLY = {"argparse", "tyro", "absl.flags", "importlib", "sys.argv", "os.environ", "os.getenv"}

TOP_LEVEL = {"README.md", "setup.py", "LICENSE", "CITATION.cff", "rl", "models", "launch", "tests", "notebooks"}


def is_within(name: str, parent: str) -> bool:
    """Whether the dotted `name` is `parent` or lies inside it."""
    return name == parent or name.startswith(parent + ".")


def is_in_any(name: str, parents) -> bool:
    return any(is_within(name, parent) for parent in parents)


def module_name(root: pathlib.Path, path: pathlib.Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, package: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, imported dotted name, local name). `from a import b` yields a.b: b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", alias.asname or alias.name


def references(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of everything used, with local names resolved through the imports."""
    origins = {}
    for _, name, local in imports(tree, package):
        # `import a.b` binds a; `import a.b as c` and `from a import b` bind the whole.
        origins[local] = local if name.startswith(local + ".") else name
    for node in ast.walk(tree):
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            yield node.lineno, ".".join([origins.get(node.id, node.id), *reversed(attributes)])


def layer_of(name: str) -> str | None:
    """The layer of a dotted module name inside rl; `rl` itself must stay as light as its lowest layer. None: no layer."""
    parts = name.split(".")
    return ORDER[0] if len(parts) == 1 else LAYER_OF.get(parts[1])


def import_faults(name: str, imported: str) -> Iterator[str]:
    """What is wrong with module `name` importing `imported`."""
    package, target = name.partition(".")[0], imported.partition(".")[0]
    if target in PACKAGES and PACKAGES.index(target) > PACKAGES.index(package):
        yield f"imports {imported}; imports go launch -> rl -> models"
    for library, owners in RESERVED_LIBRARIES.items():
        if is_within(imported, library) and name not in owners:
            yield f"imports {imported}; only {', '.join(owners)} may import {library}"
    if package != "rl":
        return
    layer = layer_of(name)
    if target == "rl" and layer_of(imported) and ORDER.index(layer_of(imported)) > ORDER.index(layer):
        yield f"is in layer {layer} and imports {imported} of layer {layer_of(imported)}; inside rl: {' <- '.join(ORDER)}"
    allowed = CORE_LIBRARIES | PURE_MODELS
    if layer in ("types", "cores") and target != "rl" and not is_in_any(imported, allowed):
        yield f"is in layer {layer} and imports {imported}; cores import only rl and {', '.join(sorted(allowed))}"


def module_faults(root: pathlib.Path, path: pathlib.Path) -> Iterator[str]:
    """Yields 'file:line: what is wrong' for one module."""
    name = module_name(root, path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    place = path.relative_to(root)
    if is_within(name, "rl") and layer_of(name) is None:
        yield f"{place}:1: {name} is in no layer; name it in LAYERS of tests/test_layers.py"
        return
    tree = ast.parse(path.read_text(), str(path))
    imported_names = [(line, imported) for line, imported, _ in imports(tree, package)]
    for line, imported in imported_names:
        for fault in import_faults(name, imported):
            yield f"{place}:{line}: {name} {fault}"
    used = sorted({*references(tree, package), *imported_names})
    if not is_within(name, "launch"):
        for line, reference in used:
            if is_in_any(reference, LAUNCH_ONLY):
                yield f"{place}:{line}: {name} uses {reference}; flags, environment variables and importlib belong to launch/"
    if name in PURE_MODELS or is_within(name, "rl") and layer_of(name) in ("types", "cores"):
        for line, reference in used:
            if is_in_any(reference, CORE_FORBIDDEN):
                yield f"{place}:{line}: {name} is pure and uses {reference}; leave that to a shell"


def layer_faults(root: pathlib.Path) -> list[str]:
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return [fault for path in paths for fault in module_faults(root, path)]


def top_level_faults(root: pathlib.Path) -> list[str]:
    lines = (root / ".gitignore").read_text().splitlines()
    ignored = [line.strip("/") for line in lines if line and not line.startswith("#")]
    names = sorted(path.name for path in root.iterdir())
    return [
        f"{name}: unexpected at the top of the repository; wanted only {', '.join(sorted(TOP_LEVEL))} and dot-files"
        for name in names
        if name not in TOP_LEVEL and not name.startswith(".") and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
    ]


def test_imports_follow_the_layers():
    faults = layer_faults(ROOT)
    assert not faults, "\n" + "\n".join(faults)


def test_every_top_level_entry_is_expected():
    faults = top_level_faults(ROOT)
    assert not faults, "\n" + "\n".join(faults)


def test_the_rules_name_only_real_standard_modules():
    third_party = {"jax", "numpy", "chex", "flax.struct", "zstandard"}
    assert CORE_LIBRARIES - third_party <= set(sys.stdlib_module_names) | {"__future__"}


def write_tree(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("models/a.py", "import numpy\nimport rl.types", "models/a.py:2: models.a imports rl.types; imports go"),
        ("rl/loop.py", "from launch import config", "rl/loop.py:1: rl.loop imports launch.config; imports go"),
        ("rl/losses.py", "def f():\n    from rl import sampler", "rl/losses.py:2: rl.losses is in layer cores and imports"),
        ("rl/losses.py", "from . import sampler", "rl/losses.py:1: rl.losses is in layer cores and imports rl.sampler"),
        ("rl/environments/a.py", "from ..loop import run", "rl/environments/a.py:1: rl.environments.a is in layer shells and"),
        ("rl/types.py", "from rl import losses", "rl/types.py:1: rl.types is in layer types and imports rl.losses"),
        ("rl/__init__.py", "from rl.loop import run", "rl/__init__.py:1: rl is in layer types and imports rl.loop.run"),
        ("rl/delta.py", "import threading", "rl/delta.py:1: rl.delta is in layer cores and imports threading"),
        ("rl/delta.py", "from flax import nnx", "rl/delta.py:1: rl.delta is in layer cores and imports flax.nnx"),
        ("rl/delta.py", "import jax\n@jax.jit\ndef f(): pass", "rl/delta.py:2: rl.delta is pure and uses jax.jit"),
        ("rl/delta.py", "from jax import jit as fast", "rl/delta.py:1: rl.delta is pure and uses jax.jit"),
        ("rl/delta.py", "import jax as j\nf = j.jit(abs)", "rl/delta.py:2: rl.delta is pure and uses jax.jit"),
        ("rl/delta.py", "import numpy as np\nx = np.random.rand()", "rl/delta.py:2: rl.delta is pure and uses numpy.random"),
        ("rl/delta.py", "def f(path):\n    return open(path)", "rl/delta.py:2: rl.delta is pure and uses open"),
        ("rl/delta.py", "from models import weights", "rl/delta.py:1: rl.delta is in layer cores and imports models.weights"),
        ("models/decode.py", "import jax\nf = jax.jit(abs)", "models/decode.py:2: models.decode is pure and uses jax.jit"),
        ("rl/sampler.py", "from jetstream.engine import engine_api", "rl/sampler.py:1: rl.sampler imports jetstream.engine"),
        ("launch/train.py", "import orbax.checkpoint", "launch/train.py:1: launch.train imports orbax.checkpoint; only"),
        ("rl/metrics.py", "import tensorstore as ts", "rl/metrics.py:1: rl.metrics imports tensorstore; only"),
        ("rl/metrics.py", "import os\nx = os.environ.get('A')", "rl/metrics.py:2: rl.metrics uses os.environ"),
        ("rl/metrics.py", "from os import getenv", "rl/metrics.py:1: rl.metrics uses os.getenv"),
        ("models/a.py", "import sys\nprint(sys.argv)", "models/a.py:2: models.a uses sys.argv"),
        ("models/a.py", "import tyro", "models/a.py:1: models.a uses tyro"),
        ("rl/novelty.py", "", "rl/novelty.py:1: rl.novelty is in no layer"),
    ],
)
def test_a_violation_is_named_by_file_and_line(tmp_path, file, text, expected):
    faults = layer_faults(write_tree(tmp_path, {file: text}))
    assert any(fault.startswith(expected) for fault in faults), faults


def test_a_lawful_tree_has_no_faults(tmp_path):
    files = {
        "models/weights.py": "import orbax.checkpoint as ocp\nimport tensorstore",
        "rl/__init__.py": "",
        "rl/types.py": "import dataclasses\nimport chex",
        "rl/losses.py": "import collections.abc\nimport jax.numpy as jnp\nfrom flax import struct\nfrom rl import types",
        "rl/logprobs.py": "from models.transformer import Model",
        "rl/engine.py": "import jax\nfrom jetstream.engine import engine_api\nfrom models import weights\nstep = jax.jit(abs)",
        "rl/environments/maze.py": "import threading\nfrom rl.losses import loss\nfrom . import chain",
        "rl/loop.py": "import os\nimport time\nfrom rl import engine, environments\nos.makedirs('x')",
        "launch/train.py": "import argparse, os, sys, tyro\nfrom rl import loop\nprint(sys.argv, os.environ)",
    }
    assert layer_faults(write_tree(tmp_path, files)) == []


def test_an_unexpected_top_level_entry_is_named(tmp_path):
    files = {".gitignore": "*.egg-info/\n/runs/\n", "README.md": "", ".ci/run": "", "exactor.egg-info/x": "", "runs/x": ""}
    write_tree(tmp_path, files)
    assert top_level_faults(tmp_path) == []
    write_tree(tmp_path, {"pyproject.toml": ""})
    assert [fault.partition(":")[0] for fault in top_level_faults(tmp_path)] == ["pyproject.toml"]


def test_a_process_without_a_sampler_never_imports_jetstream():
    """It brings TensorFlow: seconds and a gigabyte, which an audit, a help text or a learner need not pay."""
    commands = "launch.train, launch.audit, launch.evaluate, launch.plan"
    program = f"import sys, {commands}; print({{'jetstream', 'tensorflow'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
