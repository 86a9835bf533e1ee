"""reasoning-gym: its questions, its scores, our splits and limits."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer
from rl import environments
from rl.environments import EnvironmentName, ReasoningGymOptions, RunnerOptions, Split, Step, make_runner

factory = pytest.importorskip("reasoning_gym.factory", reason="pip install -e '.[reasoning-gym]', which wants a C compiler")
DATASETS = factory.DATASETS
WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
TASKS = ("chain_sum", "knights_knaves", "mini_sudoku", "needle_haystack", "rearc")
"""Names in numpy's strings, several lines, a long prompt, tuples that the scorer compares."""
SPACIOUS = {"max_prompt_bytes": 100_000, "max_answer_bytes": 20_000, "multiline": True}


def make(task="chain_sum", split=Split.TRAIN, config=None, **options):
    return environments.make(EnvironmentName.REASONING_GYM, split,
                             ReasoningGymOptions(task=task, config=json.dumps(config or {}), **options))


EVERY_SPLIT = pytest.mark.parametrize("split", Split)


def entry_of(environment):
    return environment.state()["episode"]["instance"]["entry"]


@pytest.mark.parametrize("task", TASKS)
@EVERY_SPLIT
def test_the_expert_s_answer_is_right_and_states_go_on_identically(task, split):
    first, second, restored = (make(task, split, **SPACIOUS) for _ in range(3))
    for seed in range(2):
        second.reset(seed + 1)
        prompt = first.reset(seed)
        assert prompt == second.reset(seed) and prompt.endswith("\nAnswer:\n")
        restored.reset(seed + 2)
        restored.restore(json.loads(json.dumps(first.state())))
        assert entry_of(restored) == entry_of(first)
        answer = first.expert(np.random.default_rng(0))
        assert answer == restored.expert(np.random.default_rng(0)) and answer.endswith(first.stop)
        assert restored.step(answer) == first.step(answer) == Step("", 1.0, done=True, success=True)


def test_the_reward_is_the_library_s_score():
    environment = make()
    for seed in range(20):
        environment.reset(seed)
        answer = environment.expert(np.random.default_rng(0)).strip()
        for said, reward in ((f"{answer}\n", 1.0), (f"  {answer} \n and more", 1.0), (f"{answer}0000\n", None), ("x\n", 0.0),
                             (answer, 0.0), ("", 0.0), ("\n", 0.0)):
            environment.reset(seed)
            step = environment.step(said)
            if reward is None:  # the right answer among others: the library gives a part
                assert 0 < step.reward == len(answer) / (len(answer) + 4) < 1 and not step.success
            else:
                assert step == Step("", reward, done=True, success=reward == 1.0)


@functools.cache
def shared(task):
    environment = make(task, **SPACIOUS)
    environment.reset(0)
    return environment, environment.state()


@pytest.mark.parametrize("task", ["chain_sum", "game_of_life", "prime_factorization", "boxnet", "countdown"])
@given(answer=st.text(max_size=20))
@example("{}")
@example("[[1, 2], [3]]")
@example("\ud800")
@example("None")
def test_arbitrary_text_never_raises(task, answer):
    """Some of these scorers do."""
    environment, state = shared(task)
    environment.restore(state)
    step = environment.step(f"{answer}\x04")
    assert step.done and 0 <= step.reward <= 1


@EVERY_SPLIT
def test_limits_hold_and_questions_that_do_not_fit_are_skipped_alike(split):
    environment, again = (make(split=split, max_prompt_bytes=95, max_answer_bytes=4) for _ in range(2))
    roomy = make(split=split)
    tokenizer = ByteTokenizer()
    num_skipped = 0
    for seed in range(40):
        prompt = environment.reset(seed)
        assert prompt == again.reset(seed)
        assert len(tokenizer.encode(prompt)) <= environment.max_observation_tokens == 95
        assert len(tokenizer.encode(environment.expert(np.random.default_rng(0)))) <= environment.max_turn_tokens == 4
        num_skipped += prompt != roomy.reset(seed)
    assert 0 < num_skipped < 40
    assert environment.max_episode_tokens == 1 + 95 + 4


def test_answers_of_several_lines_need_the_option():
    with pytest.raises(ValueError, match="none of 1000 questions of binary_matrix is .* set --reasoning-gym.multiline if"):
        make("binary_matrix", max_prompt_bytes=2000, max_answer_bytes=2000).reset(0)
    environment = make("binary_matrix", max_prompt_bytes=2000, max_answer_bytes=2000, multiline=True)
    environment.reset(0)
    answer = environment.expert(np.random.default_rng(0))
    assert "\n" in answer and environment.step(answer).success


def test_training_never_meets_a_held_out_question():
    """Few questions and many seeds: both sides are drawn to the last one."""
    config = {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2, "size": 2000}
    questions = {split: {environment.reset(seed) for seed in range(1500)}
                 for split, environment in ((split, make(split=split, config=config)) for split in Split)}
    assert not questions[Split.TRAIN] & questions[Split.HELD_OUT]
    assert 0.1 < len(questions[Split.HELD_OUT]) / sum(map(len, questions.values())) < 0.4
    assert sum(map(len, questions.values())) > 100


def test_questions_never_change():
    """Or old and new evaluations could not be compared."""
    prompts = [make(split=Split.HELD_OUT).reset(seed) for seed in range(4)]
    assert [prompt.split(":")[1].split("=")[0].strip() for prompt in prompts] == [
        "1 + 4 + 2", "37 + 41 + 68 - 56", "23 - 42 - 22 - 65 - 32 + 54", "785 - 680"]


def test_config_reaches_the_task():
    environment = make(config={"min_terms": 5, "max_terms": 5, "min_digits": 1, "max_digits": 1})
    assert environment.reset(3).count(" + ") + environment.reset(3).count(" - ") == 4
    few = make(config={"size": 3})
    assert len({few.reset(seed) for seed in range(60)}) <= 3
    composite = make("composite", config={"datasets": [{"name": "gcd"}, {"name": "lcm", "weight": 2}]})
    kinds = set()
    for seed in range(20):
        kinds.add("Greatest" in composite.reset(seed))
        assert composite.step(composite.expert(np.random.default_rng(0))).success
    assert kinds == {True, False}


def test_a_task_without_answers_has_no_expert():
    environment = make("rush_hour", max_prompt_bytes=2000)
    environment.reset(0)
    assert not environment.has_expert
    with pytest.raises(environments.NoExpert, match="no answer to the questions of rush_hour"):
        environment.expert(np.random.default_rng(0))
    assert environment.step("nonsense\n").reward < 0.1
    assert make().has_expert


@pytest.mark.slow
def test_it_plays_in_workers():
    """Though each worker's own hash seed makes other questions of the same numbers."""
    factory = functools.partial(environments.make, EnvironmentName.REASONING_GYM, Split.TRAIN,
                                ReasoningGymOptions(task="ransom_note", max_prompt_bytes=2000))
    runner = make_runner(factory, RunnerOptions(environment_workers=2), max_characters=3000)
    try:
        [prompt] = runner.start([([0, 1, 2], 5)])
        first, *others = runner.step([(episode, "True\n") for episode in range(3)])
        assert prompt.endswith("Answer in one line:\n") and others == [first] * 2
        assert first.reward in (0.0, 1.0)
    finally:
        runner.close()


def test_nobody_else_waits_for_the_import():
    program = "import sys, rl.environments; print({'reasoning_gym', 'sympy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(("options", "message"), [
    ({"max_answer_bytes": 1}, "max_answer_bytes 1, wanted at least 32 and 2"),
    ({"config": "{"}, "config is '{', which is no JSON"),
    ({"config": "[]"}, r"config is \[\], wanted a JSON object without a seed"),
    ({"config": '{"seed": 1}'}, "wanted a JSON object without a seed"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGymOptions(**options)


@pytest.mark.parametrize(("task", "config", "message"), [
    ("chain_sums", {}, "reasoning-gym has no task 'chain_sums'; wanted one of: ab, acre,"),
    ("chain_sum", {"terms": 3}, "task chain_sum does not take the config .*terms"),
    ("chain_sum", {"min_terms": 0}, "task chain_sum does not take the config .*min_terms"),
    ("composite", {"datasets": [{"task": "gcd"}]}, "task composite does not take the config .*task"),
])
def test_what_the_library_refuses_is_refused_by_name(task, config, message):
    with pytest.raises(ValueError, match=message):
        make(task, config=config)


def test_a_state_of_another_task_is_refused():
    first, second = make(), make("gcd")
    first.reset(0)
    with pytest.raises(ValueError, match="the state is of the task chain_sum, wanted gcd"):
        second.restore(first.state())


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(DATASETS.keys() - {"composite"}))
def test_every_task_can_be_played(task):
    environment, restored = (make(task, config={"size": 300}, **SPACIOUS) for _ in range(2))
    assert environment.has_expert == (task not in WITHOUT_ANSWERS)
    for seed in range(2):
        prompt = environment.reset(seed)
        assert len(prompt.encode()) <= environment.max_observation_tokens
        restored.restore(json.loads(json.dumps(environment.state())))
        if environment.has_expert:
            answer = environment.expert(np.random.default_rng(0))
            assert environment.step(answer) == restored.step(answer) == Step("", 1.0, done=True, success=True)
        else:
            assert environment.step("?\x04") == restored.step("?\x04")
