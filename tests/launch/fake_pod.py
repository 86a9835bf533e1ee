"""A clone with the pod script in it, and a gcloud that writes down what it is told and plays the pod."""

import os
import pathlib
import shlex
import shutil
import subprocess

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "tpu" / "pod.sh"
PLACE = ["--project", "my-project", "--zone", "us-west4-a"]
AWKWARD = ["it's", 'a "b" $(c) `d` $e', "", "two\nlines ", "*", "\\", "~", "é;", "-x", "a=b c", "&& exit 1 #", "''", "!!"]

# Plays the pod: states come from a file, the last one stays; with a worker's home, its files are copied and its lines executed.
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\0' "$#" "$@" >>"$CALLS"
[[ -z ${FAILS:-} || "$*" != *"$FAILS"* ]] || exit 3
case "$*" in
  *queued-resources\ describe*)
    state=$(head -n 1 "$STATES")
    (($(wc -l <"$STATES") == 1)) || sed -i 1d "$STATES"
    [[ $state != unreachable ]] && echo "$state" ;;
  *tpu-vm\ scp*) [[ -z ${WORKER:-} ]] || cp "$5" "$WORKER/${6#*:}" ;;
  *tpu-vm\ ssh*)
    if [[ -n ${WORKER:-} ]]; then
      for word; do [[ $word != --command=* ]] || line=${word#--command=}; done
      cd "$WORKER" && HOME=$WORKER bash -c "$line"
    fi ;;
esac
"""


def git(directory, *arguments) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    done = subprocess.run(["git", "-C", directory, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_tool(path: pathlib.Path, text: str) -> None:
    path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


class Pod:
    """A clone with the script in it, and a gcloud that answers `states` one after the other."""

    def __init__(self, directory: pathlib.Path):
        self.directory, self.repository = directory, directory / "my repository"
        self.script = self.repository / "launch" / "tpu" / "pod.sh"
        self.script.parent.mkdir(parents=True)
        shutil.copy(SCRIPT, self.script)
        (self.repository / ".gitignore").write_text("/build/\n.venv/\n")
        git(self.repository, "init", "-q", "--template=")
        self.commit("first")
        (directory / "bin").mkdir()
        write_tool(directory / "bin" / "gcloud", GCLOUD)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("EXACTOR_", "GIT_", "TMUX"))}
        self.environment |= {
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(directory / "calls"),
            "STATES": str(directory / "states"),
        }
        self.states("ACTIVE")

    def commit(self, message: str) -> None:
        git(self.repository, "add", "--all")
        git(self.repository, "commit", "-q", "-m", message)

    def states(self, *states: str) -> None:
        (self.directory / "states").write_text("".join(f"{state}\n" for state in states))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return self.bash([str(self.script), *arguments], **environment)

    def bash(self, arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", *arguments], env=self.environment | environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=30, check=False,
        )  # fmt: skip

    def take_calls(self) -> list[list[str]]:
        """The argument lists that gcloud got since the last time."""
        path = self.directory / "calls"
        words = path.read_text().split("\0")[:-1] if path.exists() else []
        path.unlink(missing_ok=True)
        calls = []
        while words:
            count = int(words.pop(0))
            calls.append([words.pop(0) for _ in range(count)])
        return calls


def lines(text: str) -> list[list[str]]:
    """Each printed line as the words that a shell would make of it, comments left out."""
    return [words for words in (shlex.split(line, comments=True) for line in text.splitlines()) if words]


def told_to_worker(call: list[str]) -> str:
    (line,) = [word.removeprefix("--command=") for word in call if word.startswith("--command=")]
    return line


def train_words(line: str) -> list[str]:
    """The words of the training command inside a worker's line: ... tmux new-session -d -s exactor bash -c '...'."""
    words = shlex.split(line)
    assert words[-7:-1] == ["new-session", "-d", "-s", "exactor", "bash", "-c"]
    session = shlex.split(words[-1])
    (start,) = [i for i, word in enumerate(session) if word == "-m"]
    return session[start + 2 :]
