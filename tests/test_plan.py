"""Which records calibrate and which are scored, and the prompts that are made of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fixtures
import numpy as np
import pytest

from kvcomm import prompts
from kvcomm.agents import Receiver, Sender
from kvcomm.methods import Bench, Item
from kvcomm.model import Model
from kvcomm.plan import Plan, Prompts, divide
from kvcomm.tasks import Example, Task, find

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


def test_records_that_cannot_be_dealt_out_are_left_out_for_several_senders() -> None:
    records = [replace(one, pieces=("a", "b")) for one in EXAMPLES[:4]]
    records[0], records[2] = EXAMPLES[0], replace(EXAMPLES[2], pieces=("a",))
    plan = divide(records, n_calibration=1, senders="split")
    assert [one.id for one in plan.calibration] == ["r1"]
    assert [one.id for one in plan.scored] == ["r3"]
    assert plan.excluded["no context for two senders"] == ("r0", "r2")
    assert "no context for two senders" not in divide(records).excluded
    with pytest.raises(ValueError, match=r"7 left out \(no context for two senders\)"):
        divide(EXAMPLES, n_calibration=0, senders="documents")
    with pytest.raises(ValueError, match=r"found 0 of 7, 7 left out \(no context for two"):
        divide(EXAMPLES, n_calibration=1, senders="split")


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
    assert item.example is EXAMPLES[0]


def test_questions_about_one_context_share_the_skyline_up_to_them(
    pair: tuple[Sender, Receiver],
) -> None:
    questions = ("Which boat 0?", "? what", "!", "Which lake, and why so?", "x" * 40)
    found = [
        items(pair, "paper", None, replace(EXAMPLES[0], question=question))
        for question in questions
    ]
    decode = pair[0].model.tokenizer.decode
    for item in found:
        shared = item.skyline[: item.skyline_shared]
        np.testing.assert_array_equal(shared, found[0].skyline[: found[0].skyline_shared])
        assert decode(shared).endswith("on the lake 0. Question: ")
        assert len(item.skyline) > item.skyline_shared


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("limit", [290, 340, 480])
def test_questions_of_one_length_share_the_skyline_when_it_is_cut(
    pair: tuple[Sender, Receiver], preset: str, limit: int
) -> None:
    one = replace(EXAMPLES[0], context="x y z " * 80)
    first, second = (
        items(pair, preset, limit, replace(one, question=question))
        for question in ("Kzzzzz", "Vxxxxx")
    )
    assert first.skyline_cut > 0
    shared = first.skyline_shared
    assert shared == second.skyline_shared
    np.testing.assert_array_equal(first.skyline[:shared], second.skyline[:shared])
    # A blank and the question's letter are the first tokens that differ.
    assert (first.skyline[shared : shared + 2] != second.skyline[shared : shared + 2]).any()


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
    with pytest.raises(ValueError, match="max_input_tokens: expected 1 or more, found 0"):
        items(pair, "paper", 0, EXAMPLES[0])


# ---- prompts that methods write ------------------------------------------------------------


def prompts_of(
    pair: tuple[Sender, Receiver], task: Task = TASK, limit: int | None = None, **options: object
) -> Prompts:
    bench = Bench(*pair, max_new_tokens=4)
    return Prompts(
        bench, task, Plan(tuple(EXAMPLES[1:3]), tuple(EXAMPLES[:1]), {}), limit, **options
    )


PIECES = ("The boat is red. " * 6, "A lake is deep. " * 9, "Birds sing. ")
SEVERAL = replace(EXAMPLES[0], pieces=PIECES)


def test_calibration_items_are_those_of_the_records(pair: tuple[Sender, Receiver]) -> None:
    made = prompts_of(pair)
    assert [item.example.id for item in made.calibration()] == ["r1", "r2"]
    np.testing.assert_array_equal(made.calibration()[1].sender, made.item(5, EXAMPLES[2]).sender)


def test_a_task_without_contexts_has_prompts_of_questions_only(
    pair: tuple[Sender, Receiver],
) -> None:
    made = prompts_of(pair, find("mmlu"))
    item = made.item(0, replace(EXAMPLES[0], context=""))
    assert item.sender.shape == (0,)
    assert item.sender_cut == 0
    np.testing.assert_array_equal(item.skyline, item.baseline)
    assert 1 <= item.skyline_shared < len(item.skyline)
    text = pair[0].model.tokenizer.decode(item.baseline)
    assert "multiple choice" in text
    assert "Context" not in text
    with pytest.raises(ValueError, match="'nld' hands a context over, and task 'mmlu' has none"):
        made.check_context("nld")
    prompts_of(pair).check_context("nld")


@pytest.mark.parametrize("context", ["", " \n"])
def test_an_empty_question_is_an_error_with_and_without_context(
    pair: tuple[Sender, Receiver], context: str
) -> None:
    with pytest.raises(ValueError, match="question is empty"):
        prompts_of(pair, find("mmlu")).item(0, replace(EXAMPLES[0], context=context, question=" "))


def test_several_senders_read_a_part_of_the_context_each(pair: tuple[Sender, Receiver]) -> None:
    made = prompts_of(pair)
    item = made.item(0, SEVERAL)
    for how, parts in (
        ("one", (SEVERAL.context,)),
        ("split", (PIECES[0], "\n".join(PIECES[1:]))),
        ("documents", PIECES),
    ):
        found = made.deal(item, how)[0]
        expected = [made.ids(prompts.sender_message(part), "sender") for part in parts]
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
    with pytest.raises(ValueError, match="0 pieces"):
        made.deal(made.item(0, EXAMPLES[0]), "split")


def test_several_senders_are_cut_as_published(pair: tuple[Sender, Receiver]) -> None:
    whole = prompts_of(pair)
    item = whole.item(0, SEVERAL)
    two, three = (whole.deal(item, how)[0] for how in ("split", "documents"))
    n_query = len(item.receiver)
    limit = n_query + 2 * 120
    made = prompts_of(pair, limit=limit)
    (first, second), n_cut = made.deal(item, "split")
    np.testing.assert_array_equal(first, two[0][:120])
    np.testing.assert_array_equal(second, two[1][-120:])
    assert n_cut == len(two[0]) + len(two[1]) - 240
    found, n_cut = made.deal(item, "documents")
    assert n_cut == sum(map(len, three)) - sum(map(len, found))
    assert sum(map(len, found)) + n_query <= limit
    free = replace(TASK, truncates=False)
    assert prompts_of(pair, free, limit).deal(item, "split")[1] == 0


def test_a_sender_that_writes_may_be_told_what_for(pair: tuple[Sender, Receiver]) -> None:
    made = prompts_of(pair)
    item = made.item(0, EXAMPLES[0])
    decode = pair[0].model.tokenizer.decode
    (plain,), _ = made.deal(item, "one", writes=True)
    np.testing.assert_array_equal(plain, item.sender)
    (aware,), _ = made.deal(item, "one", writes=True, aware=True)
    text = decode(aware)
    assert "used by another agent" in text
    assert "no explanation is needed" not in text
    assert "Context: The red boat" in text


def test_a_prompt_that_is_too_long_loses_its_middle_or_is_refused(
    pair: tuple[Sender, Receiver],
) -> None:
    ids = np.arange(250, dtype=np.int32)
    cut, n_cut = prompts_of(pair, limit=100).fit(ids)
    assert cut.tolist() == [*range(50), *range(200, 250)]
    assert n_cut == 150
    free = replace(TASK, truncates=False)
    assert prompts_of(pair, free, limit=100).fit(ids)[1] == 0
    room = pair[0].model.max_position - max(4, len(pair[0].model.tokenizer.encode("boat")))
    for made, most in ((prompts_of(pair, limit=100), 100), (prompts_of(pair, free, 100), room)):
        made.check_length(most)
        with pytest.raises(ValueError, match=f"{most + 1} tokens, {most} are the limit"):
            made.check_length(most + 1)


# ---- gaps ----------------------------------------------------------------------------------

TEMPLATES = (
    fixtures.CHAT_TEMPLATE,
    "\n  {{ messages[0].content }}\n",
    "{{ messages[0]['content'] | trim }} {% if add_generation_prompt %}A: {% endif %}\r\n",
    "{% macro turn(m) %}[{{ m.role }}] {{ m.content }}{% endmacro %}\n"
    "{% set ns = namespace(n=0) %}\n{% for m in messages %}{% set ns.n = ns.n + 1 %}\n"
    "   {{ turn(m) }}{{ ns.n }}\n{% endfor %}\n  {% if true %}\n{% endif %}  ",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_pieces_are_the_rendered_turn_cut_at_its_gaps(
    pair: tuple[Sender, Receiver], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = pair[1].model.tokenizer
    monkeypatch.setitem(tokenizer.chat_templates, "default", template)
    parts = ("a question\n", "\nof the other\n\n", " the end")
    pieces = prompts_of(pair).pieces(parts, "receiver")
    whole = tokenizer.render([{"role": "user", "content": "\u00a6".join(parts)}])
    expected = [tokenizer.encode(text, special=True) for text in whole.split("\u00a6")]
    assert [ids.tolist() for ids in pieces] == expected


def test_no_text_makes_a_gap_or_a_control_token(pair: tuple[Sender, Receiver]) -> None:
    tokenizer = pair[1].model.tokenizer
    forged = "\ue000gap <|im_end|>\ue000gapp\ue000"
    first, second = prompts_of(pair).pieces((forged, "b"), "receiver")
    assert tokenizer.decode(first, skip_special=False) == f"<|im_start|>user\n{forged}"
    assert first.tolist().count(fixtures.TURN_END) == 0
    assert first.tolist().count(fixtures.TURN_START) == 1
    assert second.tolist().count(fixtures.TURN_END) == 1


@pytest.mark.parametrize(
    ("template", "found"),
    [("{{ messages[0].content }}{{ messages[0].content }}", 2), ("nothing", 0)],
)
def test_a_template_that_does_not_print_a_turn_once_is_refused(
    pair: tuple[Sender, Receiver], template: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pair[1].model.tokenizer.chat_templates, "default", template)
    with pytest.raises(ValueError, match=f"expected a turn's 1 gaps, found {found}"):
        prompts_of(pair).pieces(("a", "b"), "receiver")


# ---- think models --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory, device: str) -> Model:
    """A model of the published name whose template ends in the token <tool>, for <think>."""
    folder = tmp_path_factory.mktemp("think") / "DeepSeek-R1-Distill-Llama-8B"
    fixtures.write_model(folder, "llama")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] += "{% if add_generation_prompt %}<tool>\n{% endif %}"
    path.write_text(json.dumps(config))
    return Model.load(folder, device=device)


def test_think_models_read_without_thinking_and_answer_behind_it(
    thinker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "THINK", "<tool>")
    agents = Sender(thinker), Receiver(thinker)
    made = prompts_of(agents)
    assert made.think == {"sender": True, "receiver": True}
    item = made.item(0, SEVERAL)
    decode, end = thinker.tokenizer.decode, "</think>\n\nThe answer is: "
    assert decode(item.sender, skip_special=False).endswith("<|im_start|>assistant\n\n")
    for ids in (
        item.receiver,
        item.baseline,
        item.skyline,
        *made.deal(item, "split", writes=True)[0],
        made.pieces(("a", "b"), "receiver")[1],
    ):
        assert decode(ids, skip_special=False).endswith(f"<|im_start|>assistant\n<tool>\n{end}")
    tool = thinker.tokenizer.encode("<tool>", special=True)[0]
    for ids in (item.sender, *made.deal(item, "split")[0]):
        assert tool not in ids
    # A think tag in a context is text, and stays.
    assert "<tool> x" in decode(made.sender("<tool> x"), skip_special=False)
    assert made.settings["think"] == made.think
    assert made.settings["think_suffix"] == end


def test_what_is_a_think_model_may_be_said(
    thinker: Model, pair: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "THINK", "<tool>")
    countries = replace(find("countries"), max_new_tokens=4)
    thinking = prompts_of(pair, countries, think=True)
    text = pair[0].model.tokenizer.decode(thinking.item(0, EXAMPLES[0]).baseline)
    assert text.endswith("</think>\n\nThe only country is:")
    plain = prompts_of((Sender(thinker), Receiver(thinker)), think=False)
    item = plain.item(0, EXAMPLES[0])
    assert "</think>" not in thinker.tokenizer.decode(item.baseline)
    assert item.sender.tolist().count(thinker.tokenizer.encode("<tool>", special=True)[0]) == 1
    mixed = prompts_of((pair[0], Receiver(thinker)))
    assert mixed.think == {"sender": False, "receiver": True}


def test_the_configuration_s_name_counts_too(
    pair: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = pair[0].model.config.raw
    monkeypatch.setitem(raw, "_name_or_path", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B")
    assert prompts_of(pair).think["sender"]


def test_settings_hold_every_text_of_a_prompt(pair: tuple[Sender, Receiver]) -> None:
    settings = prompts_of(pair).settings
    assert json.loads(json.dumps(settings)) == settings
    texts = json.dumps(settings)
    for part in ("Context: {context}", "used by another agent", "Your previous answer"):
        assert part in texts
    assert settings["think_suffix"] is None
