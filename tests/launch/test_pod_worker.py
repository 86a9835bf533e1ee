"""What the pod script tells the workers, executed: a shell, a tmux and a home directory of its own stand for a worker.

So the code arrives, what reaches launch.train is what was typed, and a run outlives the connection that started it.
"""

import os
import shutil
import subprocess
import tempfile
import time

import pytest

from tests.launch.fake_pod import AWKWARD, PLACE, SCRIPT, Pod, git, write_tool

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")

# What a worker has, reduced to what shows that it was used; the training takes Ctrl-C for a checkpoint, as launch.train does.
WORKER_TOOLS = {
    "sudo": 'exec "$@"',
    "apt-get": "",
    "lsb_release": "echo jammy",
    "tee": "cat >/dev/null",
    "mkdir": '[[ $2 == /mnt/* ]] || exec /bin/mkdir "$@"',
    "chown": "",
    "mountpoint": '[[ -e $HOME/mounted ]]',
    "gcsfuse": 'printf "%s\\n" "$*" >>"$HOME/mounted"',
    "curl": r"""[[ $* != *astral* ]] || echo 'mkdir -p ~/.local/bin && cp "$(command -v uv)" ~/.local/bin/'""",
    "uv": r"""printf '%s\n' "$*" >>~/uv
[[ $1 != venv ]] || { mkdir -p .venv/bin && cp "$(command -v training)" .venv/bin/python; }""",
    "training": r"""printf '%s\0' "$@" >>~/trained
echo "step 1"
trap 'echo "checkpoint written"; exit 0' INT
for ((i = 0; i < 400; i++)); do [[ ! -e ~/finish ]] || exit 5; sleep 0.05; done""",
}


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path)


@pytest.fixture
def worker(pod):
    """A worker's home directory; the pod's gcloud copies to it and executes there."""
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    home, tools = pod.directory / "home", pod.directory / "worker bin"
    home.mkdir()
    tools.mkdir()
    for name, text in WORKER_TOOLS.items():
        write_tool(tools / name, text)
    sockets = tempfile.mkdtemp(prefix="tmux-")  # a socket's path has to be short
    pod.environment |= {"WORKER": str(home), "TMUX_TMPDIR": sockets, "PATH": f"{tools}:{pod.environment['PATH']}"}
    yield home
    subprocess.run(["tmux", "kill-server"], env=pod.environment, capture_output=True, check=False)
    shutil.rmtree(sockets)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_on_a_worker_from_setup_to_resume(pod, worker):
    options = [*PLACE, "--bucket", "my-runs", "--", "quickstart", *AWKWARD]
    log, trained = worker / "exactor.log", worker / "trained"
    done = pod.run("setup", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == git(pod.repository, "rev-parse", "HEAD")
    assert (worker / "exactor" / "launch" / "tpu" / "pod.sh").read_bytes() == SCRIPT.read_bytes()
    assert (worker / "uv").read_text().splitlines()[-1] == "pip install -q -e .[tpu]"
    assert (worker / "mounted").read_text().split()[-2:] == ["my-runs", "/mnt/my-runs"]

    done = pod.run("run", *options)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: log.exists() and "step 1" in log.read_text())
    expected = ["-u", "-m", "launch.train", "quickstart", *AWKWARD, "--run-dir", "/mnt/my-runs/exactor", "--distributed"]
    assert trained.read_text().split("\0")[:-1] == expected
    assert len((worker / "mounted").read_text().splitlines()) == 1  # it was mounted already

    second = pod.run("run", *options)
    assert second.returncode == 1
    assert "duplicate session" in second.stderr

    following = subprocess.Popen(
        ["bash", pod.script, "follow", *PLACE], env=pod.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert following.stdout.readline() == "step 1\n"
    assert pod.run("stop", *options).returncode == 0
    followed, _ = following.communicate(timeout=10)  # returns because the run ends
    assert followed.splitlines() == ["checkpoint written", "launch.train ended with status 0"]

    trained.unlink()
    (worker / "mounted").unlink()  # as after a restart of the worker
    (worker / "finish").touch()
    assert pod.run("resume", *options).returncode == 0
    wait_until(lambda: "status 5" in log.read_text())
    assert trained.read_text().split("\0")[:-1] == [*expected, "--resume"]
    assert (worker / "mounted").exists()
    followed = pod.run("follow", *PLACE, "--worker", "all")
    assert followed.stdout.splitlines()[-1] == f"{os.uname().nodename}: launch.train ended with status 5"


def test_setup_again_brings_the_next_commit_and_removes_what_it_deleted(pod, worker):
    (pod.repository / "launch" / "old.py").write_text("")
    pod.commit("second")
    assert pod.run("setup", *PLACE).returncode == 0
    (worker / "exactor" / "launch" / "tpu" / "pod.sh").write_text("changed by hand")
    (pod.repository / "launch" / "old.py").unlink()
    pod.commit("third")
    done = pod.run("setup", *PLACE)
    assert done.stdout.splitlines()[-1] == git(pod.repository, "rev-parse", "HEAD")
    assert git(worker / "exactor", "status", "--porcelain") == ""
    assert not (worker / "exactor" / "launch" / "old.py").exists()


def test_a_worker_that_fails_in_setup_ends_it(pod, worker):
    write_tool(pod.directory / "worker bin" / "curl", "exit 22")
    done = pod.run("setup", *PLACE, "--bucket", "my-runs")
    assert done.returncode == 1
    assert "ended with status 22" in done.stderr
    assert not (worker / "mounted").exists()
