"""Any task of the reasoning-gym library in one turn: it asks, the policy answers, the library's own scorer is the reward.

The policy reads the question and a line that asks for the answer, and ends what it writes with `stop`. The reward is the
library's score, which for some tasks is partial; success is a score of 1. An answer without its end is unfinished, and earns
nothing.

The library makes the question of an index; a seed draws indices until one belongs to the split and fits. One question in four is
held out, by a hash of its text, so that a question asked in the evaluation was never trained on, whatever the indices. A question
does not fit, and is skipped, if it or its reference answer is longer than the options allow, or if the answer would contain
`stop`.

A handful of tasks (isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note, word_ladder) iterate over sets of
strings: their questions also depend on Python's hash seed. Set the environment variable PYTHONHASHSEED to repeat a run on them.
"""

import ast
import dataclasses
import functools
import hashlib
import json

import numpy as np

from rl.environments import base

HELD_OUT_ONE_IN = 4
NUM_QUESTIONS = 10_000  # unless the task's config has a `size`
MAX_DRAWS = 1_000
END_OF_LINE, END_OF_TEXT = "\n", "\x04"
REQUEST = {END_OF_LINE: "\nAnswer in one line:\n", END_OF_TEXT: "\nAnswer:\n"}


@dataclasses.dataclass(frozen=True)
class ReasoningGymOptions:
    """Which questions are asked.

    Raises:
      ValueError: a limit leaves no room, or the config is no JSON object.
    """

    task: str = "chain_sum"  # a name of the library's gallery
    config: str = "{}"  # JSON object: the task's own options; `size` is the number of different questions
    max_prompt_bytes: int = 512
    max_answer_bytes: int = 32  # what ends the answer included
    multiline: bool = False  # answers may hold several lines, and end with the byte 4 (end of transmission) instead of a newline

    def __post_init__(self):
        if self.max_prompt_bytes < 32 or self.max_answer_bytes < 2:
            raise ValueError(f"ReasoningGymOptions: max_prompt_bytes is {self.max_prompt_bytes} and max_answer_bytes "
                             f"{self.max_answer_bytes}, wanted at least 32 and 2")
        try:
            config = json.loads(self.config)
        except json.JSONDecodeError as error:
            raise ValueError(f"ReasoningGymOptions: config is {self.config!r}, which is no JSON: {error}") from error
        if not isinstance(config, dict) or "seed" in config:
            raise ValueError(f"ReasoningGymOptions: config is {self.config}, wanted a JSON object without a seed; "
                             "the run's seed decides which questions are asked")


@functools.cache
def dataset(task: str, config: str):
    """The library's data set; importing the library takes seconds, so whoever plays something else does without.

    Raises:
      ValueError: the library is not installed, there is no such task, or it does not take this config.
    """
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"the environment reasoning_gym needs the library of that name ({error}); "
                         "pip install 'exactor[reasoning-gym]'") from error
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; wanted one of: {', '.join(sorted(DATASETS))}")
    options = {"size": NUM_QUESTIONS, **json.loads(config), "seed": 0}
    try:
        if task == "composite":
            options["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **part}) for part in options.get("datasets", [])]
        return reasoning_gym.create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym's task {task} does not take the config {config}: {error}") from error


class ReasoningGym(base.Environment):
    """One question, one answer.

    Raises:
      ValueError: the task or its config is refused.
    """

    max_turns = 1

    def __init__(self, split: base.Split, options: ReasoningGymOptions):
        super().__init__()
        self.split = split
        self.options = options
        self.stop = END_OF_TEXT if options.multiline else END_OF_LINE
        self.max_observation_tokens = options.max_prompt_bytes
        self.max_turn_tokens = options.max_answer_bytes
        self._dataset = dataset(options.task, options.config)
        self._entry: dict  # of the running episode: question, answer, metadata

    @functools.cached_property
    def has_expert(self) -> bool:
        """Whether the library knows an answer to the task's questions; for some it only knows to score one."""
        return self._dataset[0]["answer"] is not None

    def _begin(self, seed: int) -> str:
        rng = np.random.default_rng(seed)
        for _ in range(MAX_DRAWS):
            self._entry = self._dataset[int(rng.integers(len(self._dataset)))]
            if _split_of(self._entry["question"]) is self.split and self._fits():
                return self._prompt()
        raise ValueError(f"ReasoningGym: none of {MAX_DRAWS} questions of {self.options.task} is of this split and fits into "
                         f"{self.options.max_prompt_bytes} bytes, with its answer in {self.options.max_answer_bytes}; raise "
                         "--reasoning-gym.max-prompt-bytes or --reasoning-gym.max-answer-bytes, set --reasoning-gym.multiline if "
                         "answers have several lines, or make the task easier by --reasoning-gym.config")

    def _prompt(self) -> str:
        return self._entry["question"].strip() + REQUEST[self.stop]

    def _fits(self) -> bool:
        answer = self._entry["answer"] or ""
        return (len(self._prompt().encode()) <= self.options.max_prompt_bytes and self.stop not in answer
                and len(f"{answer}{self.stop}".encode()) <= self.options.max_answer_bytes)

    def _advance(self, action: str) -> base.Step:
        answer, stop, _ = action.partition(self.stop)
        score = self._score(answer.strip()) if stop else 0.0
        return base.Step("", reward=score, done=True, success=score >= 1)

    def _score(self, answer: str) -> float:
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except Exception:  # some scorers stumble over nonsense, which earns nothing and is never an error
            return 0.0

    def _expert_action(self, rng: np.random.Generator) -> str:
        del rng
        if self._entry["answer"] is None:
            raise base.NoExpert(f"reasoning-gym knows no answer to the questions of {self.options.task}; choose another task, or "
                                "start without a warm start")
        return f"{self._entry['answer']}{self.stop}"

    def _instance_state(self) -> dict:
        # A literal: scorers tell tuples from lists, which JSON does not. The index would not do (see the module's last words).
        return {"task": self.options.task, "entry": repr(_plain(self._entry))}

    def _restore_instance(self, state: dict) -> None:
        if state["task"] != self.options.task:
            raise ValueError(f"ReasoningGym.restore: the state is of the task {state['task']}, wanted {self.options.task}; "
                             "restore into an environment with the options that made the state")
        self._entry = ast.literal_eval(state["entry"])


def _split_of(question: str) -> base.Split:
    return base.Split.HELD_OUT if hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_ONE_IN == 0 else base.Split.TRAIN


def _plain(value):
    """The same in Python's own types."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value
