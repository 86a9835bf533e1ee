"""Plans: sums, verdicts and refusals on devices that are there; and, where libtpu is installed, for TPUs that are not."""

import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from rich.console import Console

from launch import plan
from launch.build import Foundation
from launch.config import MeshOptions
from launch.display import Display
from launch.plan import LIVE_VERSIONS, Moment, Plan, Work, compile_work, figures, make_plan, show, verdict
from launch.topology import HbmExceeded, ProgramMemory
from rl.budget import AnchorBytes
from rl.old_logprobs import SourceName
from tests.tiny import tiny_config

GIB = 2**30
ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")

ANCHORS = AnchorBytes(
    held=0, replay=GIB, host=9 * GIB, differences=7 * GIB, most_differences=7 * GIB, disk=5 * GIB, keyframes=GIB
)


def planned(moments: list[Moment]) -> Plan:
    chip = {"parameters": GIB, "optimizer": 2 * GIB, "published": GIB, "weights": GIB, "cache": GIB}
    return Plan(16 * GIB, chip, chip, moments, ANCHORS)


def moment(name: str, peak: float, beside: float) -> Moment:
    memory = ProgramMemory(arguments=GIB, temporary=int(peak * GIB) - GIB, peak=int(peak * GIB))
    return Moment(name, memory, int(beside * GIB), "change --something")


def test_a_plan_fits_when_every_sum_does():
    fitting = planned([moment("learner step", 10, 6), moment("score", 2, 8)])
    assert not fitting.too_large
    assert verdict(fitting) == ("fits: at most 16.00 of a chip's 16.00 GiB are in use (learner step), 0.00 are free")


def test_a_plan_that_does_not_fit_says_where_and_by_how_much():
    over = planned([moment("learner step", 10, 6.25), moment("score", 2, 8), moment("refill", 17, 2)])
    assert verdict(over).splitlines() == [
        "does not fit into a chip's 16.00 GiB",
        "  learner step: 0.25 GiB too much; change --something",
        "  refill: 3.00 GiB too much; change --something",
    ]


class Lowered:
    def __init__(self, message: str):
        self._message = message

    def compile(self):
        raise HbmExceeded(self._message)


@pytest.mark.parametrize(
    ("message", "arguments", "peak"),
    [
        ("(20.00G) exceeds available HBM (15.75G)", 3 * GIB, 20 * GIB),
        ("no number", 3 * GIB, 16 * GIB + 1),  # more than the chip has
        ("no number", 40 * GIB, 40 * GIB),  # by arithmetic
    ],
)
def test_a_refused_program_takes_what_the_compiler_says_or_else_what_arithmetic_does(message, arguments, peak):
    found = compile_work(Work("learner step", lambda: Lowered(message), arguments, beside=0, remedy=""), hbm=16 * GIB)
    assert found.total == found.memory.peak == found.memory.arguments + found.memory.temporary == peak
    assert planned([found]).too_large == [found]


@pytest.fixture(scope="module", params=["shared", "disjoint", "dedicated", "ewma"])
def tiny_plan(request):
    """Of devices that are there: every program is lowered, and only the compiler's part is left out."""
    config = tiny_config(mesh=MeshOptions(fsdp=2, tensor=2))
    changes = {
        "shared": {},
        "disjoint": {"sampler": dataclasses.replace(config.sampler, sampler_devices=4)},
        "dedicated": {"snapshots": dataclasses.replace(config.snapshots, old_logprobs=SourceName.DEDICATED, scorer_devices=4)},
        "ewma": {"snapshots": dataclasses.replace(config.snapshots, old_logprobs=SourceName.EWMA, decompose_every=0)},
    }
    foundation = Foundation.of(dataclasses.replace(config, **changes[request.param]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "hbm_bytes", lambda device: 2**24)
        patch.setattr(plan, "compile_program", lambda name, lowered: ProgramMemory(2**20, 2**21, 3 * 2**20))
        patch.setattr(plan, "by_itself", lambda mesh, topology: mesh)
        return foundation, make_plan(foundation, "cpu:8", Display(0, Console(file=io.StringIO())))


def test_beside_a_program_lies_what_it_does_not_hold_itself(tiny_plan):
    foundation, made = tiny_plan
    state, sampling = ("parameters", "optimizer", "published"), ("weights", "cache", "prompts")
    is_ewma, version = made.anchors.held > 0, made.learner["published"] // LIVE_VERSIONS
    if is_ewma:
        state = (*state, "anchor_held")
    if foundation.sampler_mesh is foundation.mesh:
        assert set(made.learner) == set(made.sampler) == {*state, *sampling}
    else:
        assert set(made.learner) == set(state) and set(made.sampler) == set(sampling)
    by_name = {moment.name: moment for moment in made.moments}
    assert list(by_name) == ["learner step", "score", "decode", "refill", "new policy"]
    chip = made.learner
    assert by_name["learner step"].beside == sum(chip.values()) - chip["parameters"] - chip["optimizer"]
    if foundation.config.snapshots.scorer_devices:
        assert by_name["score"].beside == version  # the next one
    else:  # what is scored is one of two versions that are replayed; or the average, which is held anyhow
        assert by_name["score"].beside == sum(chip.values()) + (-version if is_ewma else version)
    chip = made.sampler
    assert by_name["new policy"].beside == sum(chip.values())
    assert by_name["decode"].beside == sum(chip.values()) + chip["prompts"]
    assert by_name["refill"].beside == sum(chip.values()) - chip["weights"] - chip["cache"]


def test_the_tables_are_aligned_and_within_80_columns(tiny_plan):
    foundation, made = tiny_plan
    file = io.StringIO()
    with Display(0, Console(file=file, width=80)) as display:
        show(made, foundation, display)
    text = file.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("parameters, float32", "KV cache, 40 slots of 40 tokens", "MiB", "learner step", "host memory of a process"):
        assert words in text
    start = next(index for index, line in enumerate(text.splitlines()) if "arguments" in line)
    assert len({len(line.rstrip()) for line in text.splitlines()[start : start + 6]}) == 1


def test_the_figures_are_one_flat_object(tiny_plan):
    foundation, made = tiny_plan
    found = json.loads(json.dumps(figures(made, foundation)))
    assert all(not isinstance(value, (dict, list)) for value in found.values())
    assert found["fits"] and found["over_bytes"] == 0
    assert found["parameters_bytes"] + found["optimizer_bytes"] == pytest.approx(12 * found["num_parameters"] / 4, rel=0.1)
    assert found["learner_step_total_bytes"] == found["learner_step_peak_bytes"] + found["learner_step_beside_bytes"]
    assert found["sampler_chips"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nosuch", "--topology", "v5e:1x1"], ["nosuch", "qwen3_8b"]),
        (["quickstart", "--topology", "v5e:1x1", "--steps", "0"], ["--steps", "0"]),
        (["quickstart", "--topology", "v5e:1x1", "--json", "no/such/place.json"], ["--json", "no/such"]),
    ],
)
def test_bad_input_is_refused(capsys, options, words):
    assert plan.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words)


def test_a_topology_is_required(capsys):
    with pytest.raises(SystemExit) as exit_info:
        plan.main(["quickstart"])
    assert exit_info.value.code == 2
    assert "topology" in capsys.readouterr().err


# --- with the TPU's compiler, as a user runs it ---


def run(*options: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "launch.plan", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x1", "v5e:2x2"])
def test_the_quickstart_fits_a_tpu(tmp_path, topology):
    done = run("quickstart", "--topology", topology, "--fsdp", "-1", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("fits: ")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] and found["hbm_bytes"] == 15.75 * GIB
    assert found["chips"] == found["learner_chips"] == {"v5e:1x1": 1, "v5e:2x2": 4}[topology]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topology", "v9:2x2"], ["--topology", "v9:2x2", "v5e:8x8"]),
        (["--topology", "v5e:2x2", "--fsdp", "8"], ["8", "4"]),
        (["--topology", "v5e:2x2", "--fsdp", "3"], ["3", "rectangle"]),
        (["--topology", "v5e:4x4", "--tensor", "8"], ["8", "kv_heads"]),
    ],
)
def test_what_no_tpu_can_run_is_refused(options, words):
    done = run("quickstart", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and all(word in done.stderr for word in words), done.stderr


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("place", ["README.md", "launch/tpu/pod.sh"])
def test_the_pod_command_that_we_print_fits_its_pod(place):
    (found,) = re.findall(r"pod.sh all --topology (\S+) --spot -- (.*?)(?: +#.*)?\n", (ROOT / place).read_text())
    done = run(*found[1].split(), "--topology", found[0])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_libtpu
@pytest.mark.slow
def test_a_sampler_of_its_own_is_planned_on_a_topology_of_its_chips(tmp_path):
    path = tmp_path / "plan.json"
    done = run("quickstart", "--topology", "v5e:4x4", "--fsdp", "8", "--sampler-devices", "2", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert (found["learner_chips"], found["sampler_chips"], found["processes"]) == (8, 2, 4)
    assert found["gathered_bytes"] == pytest.approx(found["published_bytes"] / LIVE_VERSIONS * 8 / 2, rel=0.05)


@needs_libtpu
@pytest.mark.slow
def test_eight_billion_parameters_on_64_chips_and_not_on_16(tmp_path):
    pytest.importorskip("reasoning_gym")
    path: pathlib.Path = tmp_path / "plan.json"
    done = run("qwen3_8b", "--topology", "v5e:8x8", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    arithmetic = 12 * found["num_parameters"] / 64
    assert found["parameters_bytes"] + found["optimizer_bytes"] == pytest.approx(arithmetic, rel=0.02)
    assert found["learner_step_arguments_bytes"] == pytest.approx(arithmetic, rel=0.02)
    assert found["processes"] == 16
    assert found["anchor_host_bytes"] == pytest.approx((5 + 7) * 2 * found["num_parameters"] / 16, rel=0.02)
    done = run("qwen3_8b", "--topology", "v5e:4x4", "--json", str(path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not fit into a chip's 15.75 GiB\n  learner step: " in done.stdout and "Traceback" not in done.stderr
    assert json.loads(path.read_text())["over_bytes"] > GIB
