"""Integer arithmetic in one turn: the policy reads `12+7=` and is to write `19` and a newline.

The smallest task there is: it needs no map and no memory, so it shows whether a run learns at all. The problems are split by a
hash of their content, so a problem asked in the evaluation, or the same one with its operands swapped, was never trained on.
"""

import dataclasses
import enum
import hashlib

import numpy as np

from rl.environments import base

HELD_OUT_ONE_IN = 4


class Operator(enum.Enum):
    """An operator as the prompt shows it."""

    ADD = "+"
    SUBTRACT = "-"
    MULTIPLY = "*"


@dataclasses.dataclass(frozen=True)
class ArithmeticOptions:
    """Which problems are asked.

    Raises:
      ValueError: no operator, or a number of digits outside 1 to 9.
    """

    operators: tuple[Operator, ...] = (Operator.ADD, Operator.SUBTRACT)
    max_digits: int = 2  # of an operand

    def __post_init__(self):
        if not self.operators:
            raise ValueError("ArithmeticOptions: operators is empty, wanted at least one; choose among "
                             f"{[operator.value for operator in Operator]}")
        if not 1 <= self.max_digits <= 9:
            raise ValueError(f"ArithmeticOptions: max_digits is {self.max_digits}, wanted 1 to 9; choose a value in that range")


@dataclasses.dataclass(frozen=True)
class Problem:
    """`left operator right`."""

    left: int
    operator: Operator
    right: int

    @property
    def answer(self) -> int:
        match self.operator:
            case Operator.ADD:
                return self.left + self.right
            case Operator.SUBTRACT:
                return self.left - self.right
            case Operator.MULTIPLY:
                return self.left * self.right

    @property
    def split(self) -> base.Split:
        """One problem in four is held out, for ever, by a hash of its text. `7+12` is on the side of `12+7`."""
        operands = [self.left, self.right] if self.operator is Operator.SUBTRACT else sorted([self.left, self.right])
        # Python's own hash of a string differs from process to process.
        digest = hashlib.sha256(f"{operands[0]}{self.operator.value}{operands[1]}".encode()).digest()
        return base.Split.HELD_OUT if digest[0] % HELD_OUT_ONE_IN == 0 else base.Split.TRAIN


class Arithmetic(base.Environment):
    """One problem, one answer: reward 1 when the text before the newline is exactly the right number, else 0.

    An answer without a newline is unfinished, and wrong. Spaces, leading zeros and a plus sign are wrong too: each problem has
    one right answer.
    """

    stop = "\n"
    max_turns = 1
    has_expert = True

    def __init__(self, split: base.Split, options: ArithmeticOptions):
        super().__init__()
        self.split = split
        self.options = options
        self.max_observation_tokens = 2 * options.max_digits + len("+=")
        longest_answer = 2 * options.max_digits if Operator.MULTIPLY in options.operators else options.max_digits + 1
        self.max_turn_tokens = longest_answer + len(self.stop)
        self._problem: Problem  # of the running episode

    def _begin(self, seed: int) -> str:
        rng = np.random.default_rng(seed)
        self._problem = self._draw(rng)
        while self._problem.split is not self.split:
            self._problem = self._draw(rng)
        return f"{self._problem.left}{self._problem.operator.value}{self._problem.right}="

    def _draw(self, rng: np.random.Generator) -> Problem:
        operator = self.options.operators[rng.integers(len(self.options.operators))]
        return Problem(self._draw_operand(rng), operator, self._draw_operand(rng))

    def _draw_operand(self, rng: np.random.Generator) -> int:
        """Uniform over the numbers of digits, then over the numbers with so many: else nearly all would have the most digits."""
        num_digits = int(rng.integers(1, self.options.max_digits + 1))
        return int(rng.integers(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits))

    def _advance(self, action: str) -> base.Step:
        text, stop, _ = action.partition(self.stop)
        success = stop == self.stop and text == str(self._problem.answer)
        return base.Step("", reward=float(success), done=True, success=success)

    def _expert_action(self, rng: np.random.Generator) -> str:
        return f"{self._problem.answer}{self.stop}"

    def _instance_state(self) -> dict:
        return {"left": self._problem.left, "operator": self._problem.operator.value, "right": self._problem.right}

    def _restore_instance(self, state: dict) -> None:
        problem = Problem(state["left"], Operator(state["operator"]), state["right"])
        if problem.operator not in self.options.operators or max(problem.left, problem.right) >= 10**self.options.max_digits:
            raise ValueError(f"Arithmetic.restore: the state's problem is {problem}, wanted one that {self.options} allow; "
                             "restore into an environment with the options that made the state")
        self._problem = problem
