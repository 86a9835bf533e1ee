"""Rollouts in a model's own template: it writes the context around the policy's turns, and the environment reads text."""

import re

import numpy as np
import pytest

from models.conversation import ChatConversation
from models.text_files import read_text_files
from rl.environments import Fault
from rl.rollout import Rollouts
from rl.types import FinishReason
from tests import chat
from tests.rl.test_rollout import Parrot, ScriptedSampler, run, say


def conversation_of(tmp_path, template=chat.CHATML, stop=None, system=None):
    return ChatConversation(read_text_files(chat.write_folder(tmp_path, template), vocab_size=400), stop, system)


def play(conversation, *turns, max_length=200, **options):
    environments = []

    def make():
        environments.append(Parrot())
        return environments[-1]

    sampler = ScriptedSampler({0: [say(turn) for turn in turns]})
    rollouts = Rollouts(sampler, make, conversation, max_length=max_length, **options)
    rollouts.start(0, [0], seed=3)
    return sampler, run(rollouts)[0], environments[-1]


def test_the_context_is_the_template_around_what_was_sampled(tmp_path):
    conversation = conversation_of(tmp_path, stop="\n", system="rules")
    encode = conversation.tokenizer.encode
    first, second = [*encode("ab").tolist(), chat.IM_END], encode("cd!").tolist()
    sampler, finished, environment = play(conversation, first, second, turn_tokens=7)
    prompt = encode("<|im_start|>system\nrules<|im_end|>\n<|im_start|>user\nsay 3:<|im_end|>\n<|im_start|>assistant\n").tolist()
    reply = encode("\n<|im_start|>user\n[1]<|im_end|>\n<|im_start|>assistant\n").tolist()
    assert sampler.submitted[0].prompt.tolist() == prompt and sampler.submitted[0].max_turn_tokens == 7
    assert finished[0].tokens.tolist() == [*prompt, *first, *reply, *second]
    assert finished[0].loss_mask.sum() == len(first) + len(second)
    assert environment.heard == ["ab\n", "cd!"]


def test_thoughts_are_trained_and_not_heard(tmp_path):
    conversation = conversation_of(tmp_path)
    turn = [*conversation.tokenizer.encode("<think>\nwin!\n</think>\n\nno").tolist(), chat.IM_END]
    _, finished, environment = play(conversation, turn, conversation.tokenizer.encode("!"))
    said = slice(finished[0].turn_starts[0], finished[0].turn_starts[0] + len(turn))
    assert finished[0].tokens[said].tolist() == turn and finished[0].loss_mask[said].all()
    assert environment.heard[0] == "no"


@pytest.mark.parametrize(("said", "heard"), [
    ("<think>\nIt is 42", ""), ("so</think>no", "no"), ("<think>a</think>\n\n<think>b</think>no", "no"),
    ("<think>a</think>no<think>\n42", "no"), ("a < think", "a < think"),
])  # fmt: skip
def test_a_thought_is_never_heard_cut_or_whole(tmp_path, said, heard):
    conversation = conversation_of(tmp_path, stop="\n")
    turn = conversation.tokenizer.encode(said)
    assert conversation.answer(turn) == heard
    assert conversation.answer(np.append(turn, chat.IM_END)) == heard + "\n"


def test_a_cut_turn_is_closed_before_the_reply(tmp_path):
    conversation = conversation_of(tmp_path)
    sampler, _, _ = play(conversation, [50, 51], conversation.tokenizer.encode("!"))
    assert sampler.extensions[0][1][0] == chat.IM_END
    assert conversation.reply("[1]", last_token=51).tolist() == sampler.extensions[0][1]


REFUSES_COLON = "{% if ':' in messages[0].content %}{{ raise_exception('no colons') }}{% endif %}" + chat.CHATML
REFUSES_BRACKET = "{% if '[' in messages[-1].content %}{{ raise_exception('no brackets') }}{% endif %}" + chat.CHATML


@pytest.mark.parametrize(("template", "message", "num_turns"), [
    (REFUSES_COLON, "a first observation that the chat template refuses: .*no colons", 0),
    (REFUSES_BRACKET, "an observation that the chat template refuses: .*no brackets", 1),
])  # fmt: skip
def test_what_the_template_refuses_costs_its_own_episode(tmp_path, template, message, num_turns):
    conversation = conversation_of(tmp_path, template)
    rollouts = Rollouts(ScriptedSampler({0: [say([50])]}), Parrot, conversation, max_length=200)
    rollouts.start(0, [0], seed=3)
    step = rollouts.step(1)
    [trajectory], [failure] = step.finished, step.failures
    assert trajectory.finish_reason is FinishReason.FAILED and len(trajectory.turn_starts) == num_turns
    assert failure.fault is Fault.INVALID
    assert re.search(message, str(failure))
    assert rollouts.num_running == 0


def test_a_prompt_that_leaves_no_room_costs_its_own_episode(tmp_path):
    conversation = conversation_of(tmp_path)
    length = len(conversation.first("say 3:"))
    for max_length, reason in ((length, FinishReason.FAILED), (length + 1, FinishReason.LENGTH)):
        _, finished, _ = play(conversation, [50], max_length=max_length)
        assert finished[0].finish_reason is reason
    np.testing.assert_array_equal(finished[0].tokens[:-1], conversation.first("say 3:"))
