"""Message texts against the published ones, and the truncation rules."""

import json

import numpy as np
import pytest

from kvcomm import prompts

FIELDS = {
    "qa": {"context": "{context}", "question": "{question}"},
    "math": {"context": "{hint}", "question": "{question}"},
    "summary": {"context": "{content_part_1}", "question": "{content_part_2}"},
}


def test_texts_equal_the_published_ones(shared):
    published = json.loads((shared / "reference" / "prompts.json").read_text())["families"]
    assert set(prompts.FAMILIES) == {*FIELDS, "choice"}
    for family, fields in FIELDS.items():
        expected = published[family]

        def fill(part, expected=expected):
            return expected[part].replace("{instruction}", expected["instruction"])

        context, question = fields["context"], fields["question"]
        assert prompts.sender_message(context, family) == fill("sender")
        assert prompts.receiver_message(question, family) == fill("receiver")
        assert prompts.baseline_message(question, family) == fill("baseline")
        assert prompts.skyline_message(context, question, family) == fill("skyline")
        aware = fill("sender").replace(
            expected["instruction"], expected["sender_aware_instruction"]
        )
        assert prompts.sender_message(context, family, aware=True) == aware


def test_refine_texts_equal_the_published_ones(shared):
    published = json.loads((shared / "reference" / "prompts.json").read_text())["refine"]
    for name, others in (("one_sender", ("{others}",)), ("two_senders", ("{a}", "{b}"))):
        expected = published[name].replace("{others_A1}", "{a}").replace("{others_A2}", "{b}")
        assert prompts.refine_message("{prompt}", "{self_answer}", others) == expected


def test_refine_parts_are_the_texts_around_the_answers():
    parts = prompts.refine_parts("Q", 3)
    assert len(parts) == 5
    own, *others = ("mine", "", "{0}\n")
    whole = parts[0] + own + parts[1] + others[0] + parts[2] + others[1] + parts[3] + parts[4]
    assert prompts.refine_message("Q", own, [*others, ""]) == whole


def test_a_choice_is_answered_with_a_letter():
    text = prompts.receiver_message("2 + 2?\nA. 3\nB. 4\nAnswer:", "choice")
    assert "multiple choice" in text
    assert "letter" in text
    assert text.endswith(" Question: 2 + 2?\nA. 3\nB. 4\nAnswer:")
    assert prompts.baseline_message("2 + 2?", "choice") == prompts.receiver_message(
        "2 + 2?", "choice"
    )


def test_think_models_and_suffixes_are_the_published_ones(shared):
    published = json.loads((shared / "reference" / "prompts.json").read_text())["think_models"]
    assert list(prompts.THINK_MODELS) == published["names"]
    suffixes = published["all_other_prompts_suffix"]
    for task in ("countries", "tipsheets"):
        assert prompts.think_suffix(task) == suffixes[task]
    for task in ("hotpotqa", "tmath", "mmlu"):
        assert prompts.think_suffix(task) == suffixes["every other task"]


@pytest.mark.parametrize(
    ("names", "thinks"),
    [
        (["deepseek-ai/DeepSeek-R1-Distill-Llama-8B"], True),
        (["a-folder", "/models/DeepSeek-R1-Distill-Llama-8B/"], True),
        (["DeepSeek-R1-Distill-Llama-8B"], True),
        (["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None], False),
        (["DeepSeek-R1-Distill-Llama-8B-more", ""], False),
        ([None, 3], False),
        ([], False),
    ],
)
def test_think_models_are_known_by_name(names, thinks):
    assert prompts.is_think_model(names) is thinks


def test_texts_are_filled_as_they_are():
    text = prompts.skyline_message("{question} {0}\n", " {context}?", "qa")
    assert text == (
        "Instruction: Directly answer the question based on the context passage, no explanation "
        "is needed. Context: {question} {0}\n Question:  {context}?"
    )


def test_unknown_family_is_refused():
    with pytest.raises(ValueError, match="'poetry', expected one of qa, math, summary"):
        prompts.sender_message("x", "poetry")


def test_cut_middle_keeps_both_ends():
    ids = list(range(100))
    assert prompts.cut_middle(ids, 40) == [*range(20), *range(80, 100)]
    assert prompts.cut_middle(ids, 41) == [*range(20), *range(80, 100)]  # int(41 / 2) each
    assert prompts.cut_middle(ids, 100) == ids
    assert prompts.cut_middle(ids, 99) == [*range(49), *range(51, 100)]
    assert prompts.cut_middle([1, 2, 3], 2) == [1, 3]
    with pytest.raises(ValueError, match="keep: 1 tokens"):
        prompts.cut_middle([1, 2, 3], 1)


def test_cut_middle_of_an_array_is_an_array():
    kept = prompts.cut_middle(np.arange(9, dtype=np.int32), 4)
    assert kept.dtype == np.int32
    assert kept.tolist() == [0, 1, 7, 8]


@pytest.mark.parametrize(("n", "limit", "left"), [(10, 10, 10), (11, 10, 10), (11, 9, 8)])
def test_cut_prompt_counts_what_is_gone(n, limit, left):
    kept, gone = prompts.cut_prompt(list(range(n)), limit)
    assert (len(kept), gone) == (left, n - left)


def test_cut_sender_leaves_room_for_the_query():
    ids = list(range(30))
    assert prompts.cut_sender(ids, 10, 40) == (ids, 0)
    # int((39 - 10) / 2) = 14 at each end
    assert prompts.cut_sender(ids, 10, 39) == ([*range(14), *range(16, 30)], 2)
    with pytest.raises(ValueError, match="question: 10 tokens leave no room"):
        prompts.cut_sender(ids, 10, 11)
    assert prompts.cut_sender([], 10, 10) == ([], 0)


def test_cut_senders_keeps_the_head_of_one_and_the_tail_of_the_other():
    first, second = list(range(20)), list(range(50, 70))
    assert prompts.cut_senders(first, second, 5, 45) == ((first, 0), (second, 0))
    # int((25 - 5) / 2) = 10 of each
    assert prompts.cut_senders(first, second, 5, 25) == (
        (list(range(10)), 10),
        (list(range(60, 70)), 10),
    )
    assert prompts.cut_senders(first, second[:3], 5, 25) == ((list(range(10)), 10), (second[:3], 0))


def test_one_and_two_contexts_are_cut_as_published():
    first, second = list(range(20)), list(range(50, 70))
    assert prompts.cut_contexts([first], 5, 15) == [prompts.cut_sender(first, 5, 15)]
    expected = prompts.cut_senders(first, second, 5, 25)
    assert prompts.cut_contexts([first, second], 5, 25) == list(expected)


def test_three_contexts_share_the_room():
    short, long, longer = list(range(4)), list(range(100, 120)), list(range(200, 240))
    parts = [longer, short, long]
    assert prompts.cut_contexts(parts, 6, 70) == [(longer, 0), (short, 0), (long, 0)]
    # 30 - 6 = 24 tokens: 4 for the short one, 10 for each of the others.
    assert prompts.cut_contexts(parts, 6, 30) == [
        ([*longer[:5], *longer[-5:]], 30),
        (short, 0),
        ([*long[:5], *long[-5:]], 10),
    ]
    # 6 tokens: 2 for each.
    assert [len(ids) for ids, _ in prompts.cut_contexts(parts, 6, 12)] == [2, 2, 2]
    with pytest.raises(ValueError, match="6 tokens leave no room for 3 contexts within 11 tokens"):
        prompts.cut_contexts(parts, 6, 11)


@pytest.mark.parametrize("name", ["oracle_smollm2", "oracle_qwen05"])
def test_recorded_cuts(shared, name):
    # The recorded qasper prompts were cut to 1024 tokens by the published code. Their uncut ids
    # are not recorded, but any longer prompt is cut to the same length, and the heads of the
    # sender's and the skyline's prompt are the same tokens.
    task = json.loads((shared / "reference" / f"{name}.json").read_text())["items"]["qasper"]
    item, limit = task["items"][0], task["max_input_length"]
    sender, skyline = item["sender"]["ids"], item["skyline"]["ids"]
    head, tail = sender[: len(sender) // 2], sender[len(sender) // 2 :]
    uncut = head + [0] * 4000 + tail
    assert prompts.cut_sender(uncut, item["receiver"]["n"], limit) == (sender, 4000)
    head, tail = skyline[: len(skyline) // 2], skyline[len(skyline) // 2 :]
    assert prompts.cut_prompt(head + [0] * 4000 + tail, limit) == (skyline, 4000)
    assert sender[: len(sender) // 2] == skyline[: len(sender) // 2]
