"""The pod script as a user meets it: real bash, and a gcloud that plays the pod.

`--dry-run` is held to what a real run does: its lines, pasted into a shell, make the same calls.
"""

import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.launch.fake_pod import AWKWARD, PLACE, SCRIPT, Pod, git, lines, told_to_worker, train_words

RUN = [*PLACE, "--run-dir", "/mnt/shared/run", "--", "quickstart", "--seed", "1"]
ALL = [*PLACE, "--topology", "v5e:8x8", "--bucket", "my-runs", "--", "quickstart"]

@pytest.fixture(scope="module")
def shared_pod(tmp_path_factory):
    return Pod(tmp_path_factory.mktemp("pod"))


@pytest.fixture
def pod(shared_pod):
    shared_pod.states("ACTIVE")
    shared_pod.take_calls()
    shutil.rmtree(shared_pod.repository / "build", ignore_errors=True)
    return shared_pod


@pytest.mark.parametrize(
    "arguments",
    [
        ["create", *PLACE, "--topology", "v5p:2x2x4"],
        ["create", *PLACE, "--topology=v6e:4x4", "--spot", "--name=other"],
        ["wait", *PLACE],
        ["setup", *PLACE],
        ["setup", *PLACE, "--bucket", "my-runs"],
        ["run", *RUN],
        ["follow", *PLACE],
        ["follow", *PLACE, "--worker", "all"],
        ["stop", *PLACE],
        ["resume", *RUN],
        ["delete", *PLACE, "--yes"],
        ["all", *ALL],
    ],
    ids=" ".join,
)
def test_the_dry_run_pasted_into_a_shell_makes_the_calls_of_the_real_run(pod, arguments):
    dry = pod.run("--dry-run", *arguments)
    assert (dry.returncode, dry.stderr, pod.take_calls()) == (0, "", [])
    assert not (pod.repository / "build").exists()
    real = pod.run(*arguments)
    assert real.returncode == 0, real.stderr
    calls = pod.take_calls()
    assert calls == [words[1:] for words in lines(dry.stdout) if words[0] == "gcloud"]
    pasted = pod.bash(["-euc", dry.stdout])
    assert pasted.returncode == 0, pasted.stderr
    assert pod.take_calls() == calls


def test_the_steps_of_all_come_in_order(pod):
    done = pod.run("--dry-run", "all", *ALL)
    steps = [words[3 if words[0] == "git" else 0 :][:5] for words in lines(done.stdout)]
    tpus = ["gcloud", "compute", "tpus"]
    assert [step for step in steps if step[0] != "mkdir"] == [
        [*tpus, "queued-resources", "create"],
        [*tpus, "queued-resources", "describe"],
        ["bundle", "create", str(pod.repository / "build" / "exactor.bundle"), "HEAD"],
        [*tpus, "tpu-vm", "scp"],
        [*tpus, "tpu-vm", "ssh"],
        [*tpus, "tpu-vm", "ssh"],
    ]
    setup, start = [told_to_worker(words) for words in lines(done.stdout)[-2:]]
    assert "uv pip install -q -e '.[tpu]'" in setup
    assert train_words(start)[:4] == ["quickstart", "--run-dir", "/mnt/my-runs/exactor", "--distributed;"]
    assert all("gcsfuse" in line and "my-runs /mnt/my-runs" in line for line in (setup, start))


@pytest.mark.parametrize(
    ("topology", "accelerator_type", "runtime_version"),
    [
        ("v5e:1x1", "v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("v5e:8x8", "v5litepod-64", "v2-alpha-tpuv5-lite"),
        ("v6e:16x16", "v6e-256", "v2-alpha-tpuv6e"),
        ("v4:2x2x1", "v4-8", "tpu-ubuntu2204-base"),
        ("v5p:2x4x4", "v5p-64", "v2-alpha-tpuv5"),
        ("v5p:8x8x16", "v5p-2048", "v2-alpha-tpuv5"),
    ],
)
def test_a_topology_becomes_an_accelerator_type(pod, topology, accelerator_type, runtime_version):
    """v5e and v6e count chips, v4 and v5p count TensorCores, two a chip."""
    (words,) = lines(pod.run("create", "--dry-run", *PLACE, "--topology", topology).stdout)
    assert f"--accelerator-type={accelerator_type}" in words
    assert f"--runtime-version={runtime_version}" in words
    assert "--spot" not in words


def test_spot_is_asked_for_only_when_wanted(pod):
    (words,) = lines(pod.run("create", "--dry-run", *PLACE, "--topology", "v5e:8x8", "--spot").stdout)
    assert "--spot" in words


def test_environment_variables_stand_in_for_options(pod):
    variables = {"PROJECT": "my-project", "ZONE": "us-west4-a", "TOPOLOGY": "v5e:8x8", "BUCKET": "my-runs", "NAME": "mine"}
    variables = {f"EXACTOR_{key}": value for key, value in variables.items()}
    by_variables = pod.run("--dry-run", "all", "--", "quickstart", **variables)
    by_options = pod.run("--dry-run", "all", "--name", "mine", *ALL)
    assert by_variables.returncode == 0
    assert by_variables.stdout == by_options.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["command", "create"]),
        (["launch", *PLACE], ["launch", "create"]),
        (["create", *PLACE, "v5e:8x8"], ["v5e:8x8", "options"]),
        (["create", "--zone", "us-west4-a", "--topology", "v5e:8x8"], ["--project is missing", "EXACTOR_PROJECT"]),
        (["delete", "--project", "my-project"], ["--zone is missing", "EXACTOR_ZONE"]),
        (["delete", "--project", "my-project", "--zone", "us-west4"], ["--zone", "us-west4'", "us-west4-a"]),
        (["create", *PLACE], ["--topology is missing", "v5e:8x8"]),
        (["create", *PLACE, "--topology", "v5e:3x3"], ["v5e:3x3", "2x4"]),
        (["create", *PLACE, "--topology", "v5e:18x8"], ["v5e:18x8", "2x4"]),
        (["create", *PLACE, "--topology", "v5p:8x8"], ["v5p:8x8", "4x4x4"]),
        (["create", *PLACE, "--topology", "v5e:8x8 2"], ["v5e:8x8 2", "2x4"]),
        (["create", *PLACE, "--topology", "v5e"], ["--topology", "v5e"]),
        (["create", *PLACE, "--topology", "h100:8"], ["h100:8", "v5e"]),
        (["all", *PLACE, "--topology", "v5e:8x8", "--", "quickstart"], ["--run-dir is missing", "--bucket"]),
        (["run", *PLACE, "--run-dir", "runs/mine", "--", "quickstart"], ["runs/mine", "absolute"]),
        (["run", *PLACE, "--run-dir", "/mnt/run"], ["CONFIG"]),
        (["run", *PLACE, "--run-dir", "/mnt/run", "--", "--seed", "1"], ["CONFIG"]),
        (["run", *RUN, "--run_dir=/mnt/other"], ["--run_dir", "before --"]),
        (["run", *RUN, "--resume"], ["--resume", "run"]),
        (["run", *PLACE, "--bucket", "gs://my-runs", "--", "quickstart"], ["--bucket", "gs://my-runs", "bare"]),
        (["delete", *PLACE, "--name", "--force"], ["--name", "--force"]),
        (["follow", *PLACE, "--worker", "first"], ["--worker", "first", "all"]),
        (["wait", *PLACE, "--timeout", "2h"], ["--timeout", "2h", "seconds"]),
        (["create", *PLACE, "--sopt"], ["--sopt", "--help"]),
        (["create", "--sopt", "yes", *PLACE], ["--sopt", "--help"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_cannot_be_is_refused_by_name_before_anything_is_printed_or_run(pod, arguments, words):
    for mode in ([], ["--dry-run"]):
        refused = pod.run(*mode, *arguments)
        assert (refused.returncode, refused.stdout, pod.take_calls()) == (2, "", [])
        assert refused.stderr.startswith("error: ")
        for word in words:
            assert word in refused.stderr


def test_gcloud_is_needed_only_to_run(tmp_path):
    pod = Pod(tmp_path)
    (pod.directory / "bin" / "gcloud").unlink()
    for tool in ("bash", "dirname", "git", "cat"):
        (pod.directory / "bin" / tool).symlink_to(shutil.which(tool))
    path = str(pod.directory / "bin")
    assert pod.run("--dry-run", "all", *ALL, PATH=path).returncode == 0
    refused = pod.run("all", *ALL, PATH=path)
    assert refused.returncode == 2
    assert "gcloud is not installed" in refused.stderr


def test_code_that_would_stay_behind_is_refused(tmp_path):
    pod = Pod(tmp_path)
    (pod.repository / "launch" / "mine.py").write_text("")
    refused = pod.run("all", *ALL)
    assert (refused.returncode, pod.take_calls()) == (2, [])
    assert "launch/mine.py" in refused.stderr
    assert pod.run("--dry-run", "all", *ALL).returncode == 0
    pod.commit("mine")
    origin = pod.repository.rename(pod.directory / "origin")
    git(pod.directory, "clone", "-q", "--depth", "1", origin.as_uri(), pod.repository)
    refused = pod.run("setup", *PLACE)
    assert (refused.returncode, pod.take_calls()) == (2, [])
    assert f"git -C '{pod.repository}' fetch --unshallow" in refused.stderr


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=4))
@example(AWKWARD)
def test_values_reach_the_worker_as_they_were_typed(values):
    """Through the printed line, gcloud's --command, and tmux's bash -c: three shells read them."""
    typed = ["run", *PLACE, "--run-dir", "/mnt/my share/it's", "--", "quickstart", *values]
    done = subprocess.run(["bash", SCRIPT, "--dry-run", *typed], capture_output=True, check=True)
    (call,) = [shlex.split(done.stdout.decode().removesuffix("\n"))]
    assert train_words(told_to_worker(call))[: len(values) + 4] == [
        "quickstart", *values, "--run-dir", "/mnt/my share/it's", "--distributed;",
    ]  # fmt: skip


def test_waiting_shows_each_state_once_and_ends_when_active(pod):
    pod.states("WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "unreachable", "PROVISIONING", "ACTIVE")
    done = pod.run("wait", *PLACE, "--interval", "0")
    assert done.returncode == 0
    shown = [line.split()[-1] for line in done.stderr.splitlines() if " s  " in line]
    assert shown == ["WAITING_FOR_RESOURCES", "UNANSWERED", "PROVISIONING", "ACTIVE"]
    assert len(pod.take_calls()) == 5


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDING", "SUSPENDED", "DELETING"])
def test_a_request_that_will_never_be_active_ends_the_waiting(pod, state):
    pod.states("WAITING_FOR_RESOURCES", state)
    done = pod.run("all", *ALL[:4], "--interval", "0", *ALL[4:])
    assert done.returncode == 1
    assert f"exactor is {state}" in done.stderr
    assert [call[3] for call in pod.take_calls()] == ["create", "describe", "describe"]


def test_waiting_is_bounded(pod):
    pod.states("WAITING_FOR_RESOURCES")
    done = pod.run("wait", *PLACE, "--timeout", "1", "--interval", "1")
    assert done.returncode == 1
    assert "exactor is WAITING_FOR_RESOURCES after" in done.stderr
    assert 1 <= len(pod.take_calls()) <= 3


def test_waiting_ends_when_gcloud_keeps_failing(pod):
    pod.states("unreachable")
    done = pod.run("wait", *PLACE, "--interval", "0")
    assert (done.returncode, len(pod.take_calls())) == (1, 3)
    assert "three times" in done.stderr


def test_a_failed_step_is_the_last(pod):
    done = pod.run("all", *ALL, FAILS="tpu-vm scp")
    assert done.returncode == 1
    assert "ended with status 3" in done.stderr
    assert [call[3] for call in pod.take_calls()] == ["create", "describe", "scp"]


# Where the tests themselves run in the background, interrupts are ignored, and a child would inherit that.
HEEDING_INTERRUPTS = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"


def test_an_interrupt_ends_the_waiting_and_says_what_goes_on(pod):
    pod.states("WAITING_FOR_RESOURCES")
    waiting = subprocess.Popen(
        [sys.executable, "-c", HEEDING_INTERRUPTS, "bash", pod.script, "wait", *PLACE],
        env=pod.environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert any("WAITING_FOR_RESOURCES" in line for line in waiting.stderr)
    for _ in range(40):  # bash loses an interrupt that comes just when it starts a command, and one would press again
        os.killpg(waiting.pid, signal.SIGINT)
        try:
            _, said = waiting.communicate(timeout=0.25)
            break
        except subprocess.TimeoutExpired:
            pass
    else:
        os.killpg(waiting.pid, signal.SIGKILL)
        pytest.fail("forty interrupts did not end the waiting")
    assert waiting.returncode == 130
    assert "interrupted; the pod exactor" in said


@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("", 1), ("y", 0)])
def test_deleting_asks_on_a_terminal(pod, answer, status):
    terminal, process_side = pty.openpty()
    os.write(terminal, f"{answer}\n".encode())
    done = subprocess.run(
        ["bash", pod.script, "delete", *PLACE],
        env=pod.environment,
        stdin=process_side,
        capture_output=True,
        timeout=10,
        check=False,
    )
    os.close(terminal)
    os.close(process_side)
    assert done.returncode == status
    assert [call[3:7] for call in pod.take_calls()] == ([["delete", "exactor", "--force", "--quiet"]] if status == 0 else [])


def test_the_help_holds_a_session_that_can_be_run(pod):
    done = pod.run("--help")
    assert done.returncode == 0
    session = done.stdout.split("A whole session")[1].replace("\\\n", "")
    exports = [line for line in lines(session) if line[0] == "export"]
    variables = dict(word.split("=") for word in exports[0][1:])
    commands = [line[1:] for line in lines(session) if line[0] == "launch/tpu/pod.sh"]
    assert [command[0] for command in commands] == ["all", "follow", "delete"]
    for command in commands:
        assert pod.run("--dry-run", *command, **variables).returncode == 0


def test_the_script_is_executable_and_clean():
    assert os.access(SCRIPT, os.X_OK)
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "--enable=check-set-e-suppressed", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
