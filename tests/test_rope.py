"""Ropes as config.json states them: kinds, spellings, who wins. CF-031 to CF-039.

Frequencies are compared with the oracle in test_model.py.
"""

import math
import warnings
from typing import Any

import pytest
from fixtures import ABSENT, config_of

from kvcomm.config import Config, parse_config
from kvcomm.errors import FormatError, UnsupportedError


def parsed(family: str, **changes: Any) -> Config:
    """The configuration of a tiny model; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return parse_config(config_of(family, **changes))


def rope(family: str = "llama", **changes: Any) -> dict[str, Any]:
    (only,) = parsed(family, **changes).core["rope"]
    return only


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "linear", "type": "linear", "factor": 2},
    ],
)
def test_rope_type_in_either_spelling(scaling: dict[str, Any]) -> None:
    expected = {"kind": "linear", "theta": 10000.0, "rotary_dim": 16, "factor": 2.0}
    assert rope(rope_scaling=scaling) == expected


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling(scaling: Any) -> None:
    assert rope(rope_scaling=scaling)["kind"] == "default"


def test_conflicting_rope_types_warn_and_the_new_key_wins() -> None:
    scaling = {"rope_type": "linear", "type": "yarn", "factor": 2.0}
    with pytest.warns(UserWarning, match="rope_type"):
        config = parse_config(config_of("llama", rope_scaling=scaling))
    assert config.core["rope"][0]["kind"] == "linear"


def test_scaling_without_a_type_is_refused() -> None:
    with pytest.raises(FormatError, match="factor but neither rope_type nor type"):
        parsed("llama", rope_scaling={"factor": 2.0})


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional", "no"])
def test_unknown_rope_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f'"{kind}".*default, linear, llama3, yarn'):
        parsed("llama", rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("key", sorted(LLAMA3.keys() - {"rope_type"}))
def test_llama3_needs_every_key(key: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != key}
    with pytest.raises(FormatError, match=f"{key} is missing"):
        parsed("llama", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("key", "value"), [("factor", 0), ("factor", "8"), ("factor", None), ("high_freq_factor", 1.0)]
)
def test_impossible_llama3_values(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        parsed("llama", rope_scaling=LLAMA3 | {key: value})


def test_new_spelling_equals_old() -> None:
    old = parsed("llama", rope_theta=500000.0, rope_scaling=LLAMA3)
    new = parsed(
        "llama",
        rope_theta=ABSENT,
        rope_scaling=ABSENT,
        rope_parameters=LLAMA3 | {"rope_theta": 500000.0},
    )
    assert new.core == old.core
    assert old.core["rope"] == [
        {
            "kind": "llama3",
            "theta": 500000.0,
            "rotary_dim": 16,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_length": 8192.0,
        }
    ]


def test_base_is_found_wherever_it_stands() -> None:
    both = {"rope_scaling": ABSENT, "rope_theta": ABSENT}
    assert rope(**both, rope_parameters={"rope_theta": 5e5})["theta"] == 5e5
    assert rope(rope_theta=5e5, rope_parameters={"rope_type": "default"})["theta"] == 5e5
    inside = {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}
    assert rope(rope_theta=ABSENT, rope_scaling=inside)["theta"] == 5e5
    assert rope(**both)["theta"] == 1e4


def test_disagreeing_spellings_warn_and_the_new_one_wins() -> None:
    changes = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.warns(UserWarning, match="rope_theta 500000 disagrees with rope_theta 10000"):
        config = parse_config(config_of("llama", **changes))
    assert config.core["rope"][0]["theta"] == 5e5
    changes = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3}
    with pytest.warns(UserWarning, match="rope_parameters and rope_scaling disagree"):
        config = parse_config(config_of("llama", **changes))
    assert config.core["rope"][0]["kind"] == "llama3"


def test_gemma_ropes_by_layer_type() -> None:
    expected = [
        {"kind": "linear", "theta": 1e6, "rotary_dim": 16, "factor": 8.0},
        {"kind": "default", "theta": 1e4, "rotary_dim": 16},
    ]
    assert parsed("gemma3").core["rope"] == expected
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    absent = dict.fromkeys(("rope_theta", "rope_local_base_freq", "rope_scaling"), ABSENT)
    assert parsed("gemma3", **absent, rope_parameters=nested).core["rope"] == expected
    assert parsed("gemma3", **absent).core["rope"] == [
        {"kind": "default", "theta": 1e6, "rotary_dim": 16},
        {"kind": "default", "theta": 1e4, "rotary_dim": 16},
    ]


def test_nested_parameters_in_a_family_without_windows() -> None:
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    found = rope(rope_theta=ABSENT, rope_scaling=ABSENT, rope_parameters=nested)
    assert found == {"kind": "default", "theta": 5e5, "rotary_dim": 16}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"attention_factor": 0.1 * math.log(4) + 1, "beta_fast": 32.0, "beta_slow": 1.0}),
        ({"attention_factor": 1.0}, {"attention_factor": 1.0}),
        ({"attention_factor": None}, {"attention_factor": 0.1 * math.log(4) + 1}),
        ({"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 16.0, "beta_slow": 2.0}),
        ({"truncate": False}, {"truncate": False}),
        (
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            {"attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)},
        ),
        ({"mscale": 0, "mscale_all_dim": 0.5}, {"attention_factor": 0.1 * math.log(4) + 1}),
    ],
)
def test_yarn(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = rope(rope_scaling=YARN | changes, max_position_embeddings=256)
    assert (found["kind"], found["factor"], found["original_length"]) == ("yarn", 4.0, 64.0)
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_inconsistent_yarn_warns_and_keeps_the_factor() -> None:
    with pytest.warns(UserWarning, match=r"factor 4 but .* 64 / .* 64 = 1; factor 4 is used"):
        config = parse_config(config_of("llama", rope_scaling=YARN, max_position_embeddings=64))
    assert config.core["rope"][0]["factor"] == 4.0
    assert config.max_position == 64


@pytest.mark.parametrize(
    "changes", [{"factor": -1}, {"beta_fast": 0.5}, {"attention_factor": -1.0}, {"truncate": 1}]
)
def test_impossible_yarn_values(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=next(iter(changes))):
        parsed("llama", rope_scaling=YARN | changes, max_position_embeddings=256)


def test_unused_rope_key_warns() -> None:
    with pytest.warns(UserWarning, match="mrope_section is not used"):
        parse_config(config_of("llama", rope_scaling={"type": "default", "mrope_section": [1]}))


def test_partial_rotary() -> None:
    assert rope(partial_rotary_factor=0.5)["rotary_dim"] == 8
    assert rope(partial_rotary_factor=1.0)["rotary_dim"] == 16
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert rope(rope_parameters=inside)["rotary_dim"] == 8
    for factor in (0.3, 0, 1.5, -0.5, "half", 3 / 16):
        with pytest.raises(FormatError, match="partial_rotary_factor"):
            parsed("llama", partial_rotary_factor=factor)
