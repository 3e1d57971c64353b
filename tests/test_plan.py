"""Which records calibrate and which are scored, and the prompts that are made of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Item
from kvcomm.model import Model
from kvcomm.plan import Plan, Prompts, divide
from kvcomm.tasks import Example, find

TASK = replace(find("hotpotqa"), max_new_tokens=4)


def example(number: int) -> Example:
    context, question = f"The red boat is on the lake {number}.", f"Which boat {number}?"
    return Example(f"r{number}", number, context, question, ("boat",))


EXAMPLES = [example(n) for n in range(7)]


@pytest.fixture(scope="module")
def pair(tiny: Callable[..., Path], device: str) -> tuple[Sender, Receiver]:
    model = Model.load(tiny("llama"), device=device)
    return Sender(model), Receiver(model)


# ---- which records do what -----------------------------------------------------------------


def test_the_first_records_calibrate_and_are_not_scored() -> None:
    plan = divide(EXAMPLES, n_calibration=2, limit=3)
    assert [one.id for one in plan.calibration] == ["r0", "r1"]
    assert [one.id for one in plan.scored] == ["r2", "r3", "r4"]
    assert plan.excluded["calibration"] == ("r0", "r1")


def test_a_record_of_the_calibration_file_is_not_scored_under_another_id() -> None:
    other = [replace(EXAMPLES[3], id="elsewhere"), example(100)]
    plan = divide(EXAMPLES, calibration=other, n_calibration=2)
    assert "r3" not in [one.id for one in plan.scored]
    assert len(plan.scored) == 6


def test_the_published_protocol_scores_its_calibration_records_too() -> None:
    plan = divide(EXAMPLES, n_calibration=1, published=True)
    assert plan.calibration[0].id == plan.scored[0].id == "r0"


def test_records_without_a_gold_answer_are_left_out_and_counted() -> None:
    records = [*EXAMPLES[:2], replace(EXAMPLES[2], answers=()), replace(EXAMPLES[3], answers=("",))]
    plan = divide(records, n_calibration=0)
    assert [one.id for one in plan.scored] == ["r0", "r1"]
    assert plan.excluded["no gold answer"] == ("r2", "r3")


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="no record to score"):
        divide(EXAMPLES[:1], n_calibration=1)
    with pytest.raises(ValueError, match="expected 3, found 2"):
        divide(EXAMPLES[:2], n_calibration=3)
    with pytest.raises(ValueError, match="limit"):
        divide(EXAMPLES, limit=0)


# ---- prompts -------------------------------------------------------------------------------


def items(pair: tuple[Sender, Receiver], preset: str, limit: int | None, one: Example) -> Item:
    bench = Bench(*pair, preset=preset, max_new_tokens=4)
    return Prompts(bench, TASK, Plan((), (one,), {}), limit).item(0, one)


def test_prompts_are_the_published_texts_in_the_chat_template(
    pair: tuple[Sender, Receiver],
) -> None:
    item = items(pair, "paper", None, EXAMPLES[0])
    decode = pair[0].model.tokenizer.decode
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    instruction = (
        "Instruction: Directly answer the question based on the context passage, no explanation is "
        "needed. "
    )
    context, question = "Context: The red boat is on the lake 0.", "Question: Which boat 0?"
    for ids, text in (
        (item.sender, context),
        (item.receiver, question),
        (item.baseline, question),
        (item.skyline, f"{context} {question}"),
    ):
        assert decode(ids, skip_special=False) == start + instruction + text + end
    assert [decode(ids) for ids in item.gold] == ["boat"]
    assert item.sender_cut == item.skyline_cut == 0


@pytest.mark.parametrize("room", [260, 261, 300])
def test_a_long_context_loses_its_middle_and_all_methods_lose_the_same(
    pair: tuple[Sender, Receiver], room: int
) -> None:
    one = replace(EXAMPLES[0], context="HEAD " + "x y z " * 60 + "TAIL")
    whole = items(pair, "paper", None, one)
    limit = len(whole.receiver) + room
    item = items(pair, "paper", limit, one)
    half = (limit - len(item.receiver)) // 2
    np.testing.assert_array_equal(item.sender[:half], whole.sender[:half])
    np.testing.assert_array_equal(item.sender[half:], whole.sender[-half:])
    assert len(item.sender) + item.sender_cut == len(whole.sender)
    assert len(item.sender) + len(item.receiver) <= limit
    np.testing.assert_array_equal(item.receiver, whole.receiver)
    # The skyline: what is left of the context is what the sender has left, the question is whole.
    decode = pair[0].model.tokenizer.decode
    sender, skyline = decode(item.sender), decode(item.skyline)
    kept = sender[sender.index("Context: ") : sender.index("TAIL")]
    assert kept.startswith("Context: HEAD x y")
    assert kept in skyline
    assert "Question: Which boat 0?" in skyline
    assert item.skyline_cut == item.sender_cut
    assert len(item.skyline) <= limit


def test_preset_reference_cuts_the_middle_of_the_whole_skyline_prompt(
    pair: tuple[Sender, Receiver],
) -> None:
    one = replace(EXAMPLES[0], context="x y z " * 60)
    whole, item = items(pair, "reference", None, one), items(pair, "reference", 151, one)
    np.testing.assert_array_equal(item.skyline[:75], whole.skyline[:75])
    np.testing.assert_array_equal(item.skyline[75:], whole.skyline[-75:])


def test_a_question_that_leaves_no_room_is_an_error(pair: tuple[Sender, Receiver]) -> None:
    with pytest.raises(ValueError, match="no room for a context"):
        items(pair, "paper", 60, EXAMPLES[0])
    with pytest.raises(ValueError, match="context is empty"):
        items(pair, "paper", None, replace(EXAMPLES[0], context="  "))
