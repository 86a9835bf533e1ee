"""Arithmetic: the problems, their split, and what counts as right."""

import itertools

import numpy as np
import pytest

from rl import environments
from rl.environments import ArithmeticOptions, EnvironmentName, Operator, Split
from rl.environments.arithmetic import Problem


def make(split=Split.TRAIN, **options):
    return environments.make(EnvironmentName.ARITHMETIC, split, ArithmeticOptions(**options))


def on_problem(left, operator, right, **options):
    task = make(operators=tuple(Operator), **options)
    task.restore({"episode": {"turns_taken": 0, "instance": {"left": left, "operator": operator, "right": right}}})
    return task


@pytest.mark.parametrize(("left", "operator", "right", "action", "reward"), [
    (12, "+", 7, "19\n", 1.0),
    (0, "+", 0, "0\n", 1.0),
    (7, "-", 12, "-5\n", 1.0),
    (99, "*", 99, "9801\n", 1.0),
    (12, "+", 7, "20\n", 0.0),
    (12, "+", 7, "19", 0.0),  # unfinished
    (12, "+", 7, " 19\n", 0.0),
    (12, "+", 7, "19 \n", 0.0),
    (12, "+", 7, "019\n", 0.0),
    (12, "+", 7, "+19\n", 0.0),
    (12, "+", 7, "19\ufffd\n", 0.0),
    (12, "+", 7, "\n", 0.0),
    (12, "+", 7, "", 0.0),
    (7, "-", 7, "-0\n", 0.0),
    (12, "*", 7, "19\n", 0.0),
])
def test_right_and_wrong(left, operator, right, action, reward):
    assert on_problem(left, operator, right).step(action) == environments.Step("", reward, done=True, success=reward == 1.0)


def test_prompts_never_change():
    training, held_out = make(), make(Split.HELD_OUT)
    assert [training.reset(seed) for seed in range(6)] == ["56-3=", "77+13=", "1-4=", "1-1=", "89-94=", "35-14="]
    assert [held_out.reset(seed) for seed in range(6)] == ["55-97=", "2-33=", "0-6=", "62-0=", "6+62=", "12-52="]


@pytest.mark.parametrize("split", Split)
def test_the_expert_is_right(split):
    task = make(split, operators=tuple(Operator), max_digits=3)
    for seed in range(300):
        prompt = task.reset(seed)
        action = task.expert(np.random.default_rng(0))
        assert action == f"{eval(prompt.removesuffix('='))}\n"
        assert task.step(action).success


def test_every_operator_and_number_of_digits_is_asked():
    task = make(operators=(Operator.SUBTRACT, Operator.MULTIPLY), max_digits=3)
    seen = set()
    for seed in range(400):
        prompt = task.reset(seed)
        [operator] = set(prompt) & set("+-*")
        left, right = prompt.removesuffix("=").split(operator)
        seen.add((operator, len(left), len(right)))
    assert seen == set(itertools.product("-*", (1, 2, 3), (1, 2, 3)))


def test_operands_reach_both_ends():
    task = make(operators=(Operator.ADD,), max_digits=1)
    operands = set()
    for seed in range(300):
        operands.update(task.reset(seed).removesuffix("=").split("+"))
    assert operands == set("0123456789")


def test_training_never_meets_a_held_out_problem():
    training, held_out = make(max_digits=1), make(Split.HELD_OUT, max_digits=1)
    # Few problems and many seeds: both sides are drawn to the last one.
    training_prompts = {training.reset(seed) for seed in range(4000)}
    held_out_prompts = {held_out.reset(seed) for seed in range(1000)}
    assert not training_prompts & held_out_prompts
    assert len(training_prompts | held_out_prompts) == 200
    swapped = {f"{prompt[2]}+{prompt[0]}=" for prompt in held_out_prompts if prompt[1] == "+"}
    assert swapped and not training_prompts & swapped


@pytest.mark.parametrize("operator", Operator)
def test_one_problem_in_four_is_held_out(operator):
    problems = [Problem(left, operator, right) for left in range(100) for right in range(100)]
    assert np.mean([problem.split is Split.HELD_OUT for problem in problems]) == pytest.approx(1 / 4, abs=0.01)
    # The smallest task has 100 problems an operator: its share is a matter of luck, but both sides must be worth drawing from.
    one_digit = [problem for problem in problems if max(problem.left, problem.right) < 10]
    assert 10 <= sum(problem.split is Split.HELD_OUT for problem in one_digit) <= 40


@pytest.mark.parametrize(("operators", "max_digits", "observation_tokens", "turn_tokens"), [
    ((Operator.ADD,), 2, 6, 4),
    ((Operator.SUBTRACT,), 1, 4, 3),
    ((Operator.ADD, Operator.MULTIPLY), 2, 6, 5),
    ((Operator.MULTIPLY,), 1, 4, 3),
])
def test_token_bounds_are_tight(operators, max_digits, observation_tokens, turn_tokens):
    task = make(operators=operators, max_digits=max_digits)
    assert (task.max_observation_tokens, task.max_turn_tokens) == (observation_tokens, turn_tokens)
    assert task.max_episode_tokens == 1 + observation_tokens + turn_tokens
    largest = 10**max_digits - 1
    problems = [Problem(left, operator, largest) for operator in operators for left in (0, largest)]
    assert max(len(f"{problem.answer}\n") for problem in problems) == turn_tokens


def test_refusals():
    with pytest.raises(ValueError, match="operators is empty"):
        ArithmeticOptions(operators=())
    with pytest.raises(ValueError, match="max_digits is 10, wanted 1 to 9"):
        ArithmeticOptions(max_digits=10)
    task = make(operators=(Operator.ADD,), max_digits=2)
    for left, operator in ((100, "+"), (1, "*")):
        with pytest.raises(ValueError, match="restore into an environment with the options that made the state"):
            task.restore({"episode": {"turns_taken": 0, "instance": {"left": left, "operator": operator, "right": 1}}})
