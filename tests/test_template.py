"""Chat templates: what they may call, what they yield, and how a refusal reads."""

from typing import Any

import pytest
from fixtures import TURN_END, TURN_START
from tokenizer_fixtures import tiny, user

from kvcomm.errors import FormatError


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ tools | tojson(indent=4) }}", '[\n    {\n        "é": "<日>"\n    }\n]'),
        ("{{ tools | tojson }}", '[{"é": "<日>"}]'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in 'abc' %}{% if i == 'b' %}{% continue %}{% endif %}{{ i }}{% endfor %}", "ac"),
        ("a\n  {%- if true -%}\n  b\n{%- endif %}", "ab"),
        ("{% if true %}\nb\n   {% endif %}\nc", "b\nc"),  # trim_blocks, lstrip_blocks
        ("{{ ' a,b '.strip().split(',')[1:] | join }}", "b"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('y') }}", "<y>"),
        ("{% set n = namespace(k=1) %}{% for i in [1, 2] %}{% set n.k = n.k + i %}{% endfor %}"
         "{{ n.k }}", "4"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abxc"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ missing }}|", "|"),
    ],
)  # fmt: skip
def test_template_functions(source: str, expected: str) -> None:  # TK-060
    assert tiny(chat_template=source).render(user("x"), tools=[{"é": "<日>"}]) == expected


def test_template_date() -> None:  # TK-060
    text = tiny(chat_template="{{ strftime_now('%d %b %Y') }}").render(user("x"))
    day, month, year = text.split(" ")
    assert day.isdigit()
    assert len(month) == 3
    assert int(year) >= 2024


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{{ raise_exception('only plain text') }}", ValueError, "message 0: .*only plain text"),
        ("{{ conjure() }}", FormatError, "'conjure' is undefined"),
        ("{{ 'x' | conjure }}", FormatError, "No filter named 'conjure'"),
        ("{% if %}", FormatError, "chat template: line 1: "),
        ("{{ ''.__class__.mro() }}", FormatError, "chat template: .*unsafe"),
        ("{% set x = messages.append(1) %}", FormatError, "chat template: .*append.* unsafe"),
    ],
)  # fmt: skip
def test_template_errors(source: str, error: type[Exception], message: str) -> None:  # TK-060
    with pytest.raises(error, match=message):
        tiny(chat_template=source).chat(user("x"))


DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>You are T.<|im_end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_default_system_prompt() -> None:  # TK-062
    tokenizer = tiny(chat_template=DEFAULT_SYSTEM)

    def rendered(*system: str) -> str:
        return tokenizer.render([{"role": "system", "content": s} for s in system] + user("q"))

    assert rendered() == "<|im_start|>You are T.<|im_end|><|im_start|>q<|im_end|>"
    assert rendered("") == "<|im_start|><|im_end|><|im_start|>q<|im_end|>"
    assert rendered("S") == "<|im_start|>S<|im_end|><|im_start|>q<|im_end|>"


ALTERNATE = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role + ':' + m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([{"role": "system", "content": "s"}, *user("q")], ValueError, "message 0: .*alternate"),
        (user("a", "b"), ValueError, "message 1: .*alternate"),
        ([{"role": "assistant", "content": "a"}], ValueError, "message 0: .*alternate"),
        ([], ValueError, "messages: the list is empty"),
        (user(None), ValueError, "message 0: content is missing or null"),
        (user([{"type": "text", "text": "q"}]), ValueError, "message 0: "),
        ([{"content": "q"}], ValueError, "message 0: role is missing"),
        ("hi", TypeError, "messages: expected a list of dicts, found str"),
        (["hi"], TypeError, "message 0: expected a dict, found str"),
        (user(b"q"), TypeError, r"messages\[0\].content: .* found bytes"),
    ],
)
def test_role_rules(messages: Any, error: type[Exception], message: str) -> None:  # TK-063
    tokenizer = tiny(chat_template=ALTERNATE)
    with pytest.raises(error, match=message):
        tokenizer.chat(messages)
    assert tokenizer.render(user("q")) == "user:q"


def test_parts_that_a_template_would_print_as_a_list() -> None:  # TK-063
    tokenizer = tiny(chat_template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="message 0: content is a list of parts"):
        tokenizer.chat(user([{"type": "text", "text": "q"}]))


def test_generation_prompt() -> None:  # TK-064
    tokenizer = tiny()
    without = tokenizer.chat(user("q"), add_generation_prompt=False)
    whole = tokenizer.chat(user("q"))
    assert whole == [*without, TURN_START, *tokenizer.encode("assistant\n")]
    assert without[-2:] == [TURN_END, ord("\n")]
    ignores = tiny(chat_template="{{ messages[0].content }}")
    assert ignores.chat(user("q")) == ignores.chat(user("q"), add_generation_prompt=False)


THINK = (
    "{{ messages[0].content }}{% if add_generation_prompt %}{{ 'A:' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}"
)


def test_think_flag_is_passed_through() -> None:  # TK-078
    tokenizer = tiny(chat_template=THINK)
    counts = [
        tokenizer.render(user("q"), add_generation_prompt=prompt, **flag).count("<think>")
        for prompt in (True, False)
        for flag in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert counts == [0, 0, 1, 0, 0, 0]
