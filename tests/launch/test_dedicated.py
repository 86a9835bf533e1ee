"""A dedicated scorer on as many devices as the learner, in processes of its own: JAX makes its threads when it starts."""

import json
import os
import subprocess
import sys

import pytest

from rl.snapshot_store import SnapshotStore
from tests.tiny import TINY_OPTIONS


@pytest.mark.slow
def test_with_equal_meshes_it_is_the_run_of_snapshot_bit_by_bit(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "launch.train", "quickstart", *TINY_OPTIONS, "--fsdp", "4", "--persist-every", "1"]
    found = {}
    for source, options in {"snapshot": [], "dedicated": ["--scorer-devices", "4"]}.items():
        run_dir = tmp_path / source
        options = [*options, "--old-logprobs", source, "--run-dir", str(run_dir)]
        subprocess.run([*command, *options], env={**environment, "NPROC": "32"}, check=True, timeout=600)
        rows = [json.loads(line) for line in (run_dir / "ledger" / "segments.jsonl").read_text().splitlines()]
        names = ("request_id", "start", "stop", "version", "old_logprobs_digest", "bucket")
        segments = [[row[name] for name in names] for row in rows if row["kind"] == "segment"]
        store = SnapshotStore(run_dir / "snapshots")
        found[source] = segments, {version: store.digest(version) for version in store.versions()}
    assert found["snapshot"] == found["dedicated"] and len(found["snapshot"][1]) == 9
    # The number of threads is no part of what a replay depends on.
    command = [sys.executable, "-m", "launch.audit", str(tmp_path / "dedicated"), "--replay", "20"]
    subprocess.run(command, env=environment, check=True, timeout=600)
