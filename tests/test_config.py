"""config.json of every family becomes the core's configuration, or is refused by name.

Expected values are worked out by hand from the published configuration classes.
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import fixtures
import pytest
from fixtures import ABSENT, config_of

from kvcomm.config import FAMILIES, Config, parse_config, read_config
from kvcomm.errors import FormatError, UnsupportedError


def parsed(family: str, **changes: Any) -> Config:
    """The configuration of a tiny model; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return parse_config(config_of(family, **changes))


def test_tiny_llama() -> None:
    config = parsed("llama")
    assert config.core == {
        "n_layers": 4,
        "dim": 64,
        "hidden_dim": 128,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "norm_eps": 1e-6,
        "norm_offset": 0.0,
        "embed_scale": 1.0,
        "attention_scale": 0.25,
        "activation": "silu",
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "post_norms": False,
        "tied_head": False,
        "window": 0,
        "windowed": [False] * 4,
        "rope_of_layer": [0] * 4,
        "rope": [{"kind": "default", "theta": 10000.0, "rotary_dim": 16}],
    }
    assert (config.family, config.max_position, config.dtype, config.tie) == (
        "llama",
        2048,
        "f32",
        False,
    )


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("mistral", {"window": 8, "windowed": [True] * 4, "qkv_bias": False}),
        ("qwen2", {"qkv_bias": True, "o_bias": False, "window": 0, "windowed": [False] * 4}),
        ("qwen3", {"head_dim": 32, "qk_norm": True, "qkv_bias": False, "post_norms": False}),
        ("falcon3", {"head_dim": 32, "qk_norm": False}),
        (
            "gemma3",
            {
                "qk_norm": True,
                "post_norms": True,
                "norm_offset": 1.0,
                "embed_scale": 8.0,
                "activation": "gelu_tanh",
                "tied_head": True,
                "window": 8,
                "windowed": [True, True, True, True, True, False, True],
                "rope_of_layer": [1, 1, 1, 1, 1, 0, 1],
            },
        ),
    ],
)
def test_families_differ_by_fields(family: str, expected: dict[str, Any]) -> None:
    core = parsed(family).core
    assert {key: core[key] for key in expected} == expected


def test_attention_scales() -> None:
    assert parsed("qwen3").core["attention_scale"] == pytest.approx(1 / math.sqrt(32))
    gemma = parsed("gemma3", query_pre_attn_scalar=24).core["attention_scale"]
    assert gemma == pytest.approx(1 / math.sqrt(24))
    default = parsed("gemma3", query_pre_attn_scalar=ABSENT).core["attention_scale"]
    assert default == pytest.approx(1 / 16)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        # layers, dim, hidden_dim, heads, kv heads, head_dim, vocabulary, positions, window, tied
        ("llama", (32, 4096, 11008, 32, 32, 128, 32000, 2048, 0, False)),
        ("mistral", (32, 4096, 14336, 32, 8, 128, 32000, 131072, 4096, False)),
        ("qwen2", (32, 4096, 22016, 32, 32, 128, 151936, 32768, 0, False)),
        ("qwen3", (32, 4096, 22016, 32, 32, 128, 151936, 32768, 0, False)),
        ("gemma3_text", (26, 2304, 9216, 8, 4, 256, 262208, 131072, 4096, True)),
    ],
)
def test_class_defaults(family: str, sizes: tuple[Any, ...]) -> None:
    config = parse_config({"model_type": family})
    core = config.core
    assert sizes == (
        core["n_layers"],
        core["dim"],
        core["hidden_dim"],
        core["n_heads"],
        core["n_kv_heads"],
        core["head_dim"],
        core["vocab_size"],
        config.max_position,
        core["window"],
        config.tie,
    )
    assert core["norm_eps"] == 1e-6  # NU-119
    assert config.eos_ids is None
    assert config.dtype is None


def test_norm_eps_is_taken() -> None:
    assert parsed("llama", rms_norm_eps=0.5).core["norm_eps"] == 0.5
    with pytest.raises(FormatError, match="rms_norm_eps is 0"):
        parsed("llama", rms_norm_eps=0)


# ---- CF-038, CF-040: windows ----------------------------------------------------------------


def test_windows_of_qwen2() -> None:
    assert parsed("qwen2", use_sliding_window=False).core["window"] == 0
    on = parsed("qwen2", use_sliding_window=True).core  # max_window_layers is 2
    assert (on["window"], on["windowed"]) == (8, [False, False, True, True])
    null = parsed("qwen2", use_sliding_window=True, sliding_window=None).core
    assert (null["window"], null["windowed"]) == (0, [False] * 4)


def test_windows_of_mistral() -> None:
    assert parsed("mistral", sliding_window=None).core["windowed"] == [False] * 4
    assert parsed("mistral", sliding_window=ABSENT).core["window"] == 4096
    for bad in (0, -8, "8", 8.0):
        with pytest.raises(FormatError, match="sliding_window"):
            parsed("mistral", sliding_window=bad)


def test_layer_types_override_the_pattern() -> None:
    types = ["sliding_attention"] * 2 + ["full_attention"] * 5
    assert parsed("gemma3", layer_types=types).core["windowed"] == [True] * 2 + [False] * 5
    with pytest.raises(FormatError, match="layer_types has 6 entries, expected 7"):
        parsed("gemma3", layer_types=types[1:])
    with pytest.raises(UnsupportedError, match="linear_attention"):
        parsed("gemma3", layer_types=["linear_attention", *types[1:]])
    pattern = parsed("gemma3", sliding_window_pattern=ABSENT, _sliding_window_pattern=2).core
    assert pattern["windowed"] == [True, False, True, False, True, False, True]


def test_layer_types_that_the_architecture_cannot_have() -> None:
    types = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
    for family in ("llama", "mistral"):
        with pytest.raises(UnsupportedError, match="layer_types"):
            parsed(family, layer_types=types)
    with pytest.raises(FormatError, match="sliding_window is off"):
        parsed("qwen3", layer_types=types)
    with pytest.raises(FormatError, match="sliding_window is off"):
        parsed("gemma3", sliding_window=None)


def test_window_of_a_llama_warns() -> None:
    with pytest.warns(UserWarning, match="sliding_window is not used"):
        config = parse_config(config_of("llama", sliding_window=8))
    assert config.core["window"] == 0


# ---- CF-042 .. CF-045: heads, stop ids ------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "value", "expected"),
    [
        ("llama", None, 4),
        ("llama", ABSENT, 4),
        ("llama", 1, 1),
        ("mistral", None, 4),
        ("qwen2", None, 4),
        ("qwen3", None, 4),
        ("gemma3", None, 4),
        ("gemma3", ABSENT, 4),
    ],
)
def test_kv_heads(family: str, value: Any, expected: int) -> None:
    assert parsed(family, num_key_value_heads=value).core["n_kv_heads"] == expected


@pytest.mark.parametrize(
    ("family", "value", "message"),
    [
        ("llama", 3, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("mistral", ABSENT, "num_key_value_heads 8 .class default, the key is absent"),
        ("qwen2", ABSENT, "num_key_value_heads 32 .class default"),
        ("qwen3", ABSENT, "num_key_value_heads 32 .class default"),
        ("llama", 0, "num_key_value_heads is 0"),
        ("llama", True, "num_key_value_heads is true"),
    ],
)
def test_impossible_kv_heads(family: str, value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parsed(family, num_key_value_heads=value)


@pytest.mark.parametrize(
    ("family", "value", "expected"),
    [
        ("llama", None, 16),
        ("llama", ABSENT, 16),
        ("llama", 16, 16),
        ("llama", 24, 24),
        ("mistral", ABSENT, 16),
        ("qwen2", ABSENT, 16),
        ("qwen3", ABSENT, 128),
        ("qwen3", None, 16),
        ("gemma3", ABSENT, 256),
    ],
)
def test_head_dim(family: str, value: Any, expected: int) -> None:
    assert parsed(family, head_dim=value).core["head_dim"] == expected


def test_impossible_head_dim() -> None:
    with pytest.raises(FormatError, match="head_dim is 0"):
        parsed("llama", head_dim=0)
    with pytest.raises(FormatError, match="hidden_size 66 is not a multiple"):
        parsed("llama", head_dim=None, hidden_size=66)
    assert parsed("llama", head_dim=16, hidden_size=66).core["dim"] == 66


@pytest.mark.parametrize(
    ("generation", "stated", "expected"),
    [
        (None, [301, 302, 303], (301, 302, 303)),
        (None, 301, (301,)),
        (None, [], ()),
        (None, None, ()),
        (None, ABSENT, None),
        ({"eos_token_id": [301, 302]}, 5, (301, 302)),
        ({"eos_token_id": None}, 5, ()),
        ({"temperature": 0.7}, [5, 5, 6], (5, 6)),
    ],
)
def test_eos_ids(tmp_path: Path, generation: Any, stated: Any, expected: Any) -> None:
    config = config_of("llama", eos_token_id=stated)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_ids == expected


@pytest.mark.parametrize("bad", ["</s>", [1, "2"], [True], -1, [1.5]])
def test_eos_ids_that_are_none(bad: Any) -> None:
    with pytest.raises(FormatError, match=r"config.json: eos_token_id"):
        parsed("llama", eos_token_id=bad)
    with pytest.raises(FormatError, match=r"generation_config.json: eos_token_id"):
        parse_config(config_of("llama"), {"eos_token_id": bad})


# ---- CF-048, CF-049, CF-055, ST-017, ST-021 -------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "torch.bfloat16"}, "bf16"),
        ({"torch_dtype": ABSENT, "dtype": "float16"}, "f16"),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": ABSENT}, None),
        ({"torch_dtype": "float32", "dtype": "torch.float32"}, "f32"),
    ],
)
def test_dtype(changes: dict[str, Any], expected: str | None) -> None:
    assert parsed("llama", **changes).dtype == expected


def test_odd_dtypes() -> None:
    with pytest.warns(UserWarning, match="dtype and torch_dtype disagree"):
        config = parse_config(config_of("llama", torch_dtype="float32", dtype="bfloat16"))
    assert config.dtype == "bf16"
    for bad in ("float8_e4m3fn", "bf16", 32, ["float32"]):
        with pytest.raises(UnsupportedError, match="torch_dtype"):
            parsed("llama", torch_dtype=bad)


@pytest.mark.parametrize(
    ("family", "changes", "biases"),
    [
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("llama", {"attention_bias": None}, (False, False, False)),
        ("qwen2", {"attention_bias": False}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("gemma3", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases(family: str, changes: dict[str, Any], biases: tuple[bool, ...]) -> None:
    core = parsed(family, **changes).core
    assert (core["qkv_bias"], core["o_bias"], core["mlp_bias"]) == biases


@pytest.mark.parametrize("name", ["mixtral", "phi3", "gemma2", "llama4", "falcon", 3])
def test_other_architectures_are_refused_by_name(name: Any) -> None:
    message = f"{json.dumps(name)}.*supported: gemma3, gemma3_text, llama, mistral, qwen2, qwen3"
    with pytest.raises(UnsupportedError, match=message):
        parsed("llama", model_type=name)


def test_architectures() -> None:
    assert parsed("llama", architectures=ABSENT).family == "llama"
    assert parsed("qwen2", model_type=ABSENT).family == "qwen2"
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM"):
        parsed("llama", architectures=["MixtralForCausalLM"])
    with pytest.raises(UnsupportedError, match="LlamaForSequenceClassification"):
        parsed("llama", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedError, match="no architecture named"):
        parsed("llama", model_type=ABSENT, architectures=ABSENT)


@pytest.mark.parametrize("name", ["gelu", "relu", "gelu_fast", 1])
def test_other_activations_are_refused(name: Any) -> None:
    with pytest.raises(UnsupportedError, match="hidden_act"):
        parsed("llama", hidden_act=name)


def test_activation_is_honoured() -> None:
    assert parsed("llama", hidden_act="gelu_pytorch_tanh").core["activation"] == "gelu_tanh"
    assert parsed("gemma3", hidden_activation=ABSENT).core["activation"] == "gelu_tanh"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
        ("num_local_experts", 8),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ],
)
def test_what_changes_the_arithmetic_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=key):
        parsed("gemma3", **{key: value})


def test_nested_text_config() -> None:
    text = config_of("gemma3", tie_word_embeddings=ABSENT, architectures=ABSENT)
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    config = parse_config(outer | {"text_config": text})
    assert config.core == parsed("gemma3").core
    assert (config.family, config.eos_ids, config.dtype) == ("gemma3_text", (1, 106), "bf16")
    for level in ("outer", "inner"):
        untied = {"tie_word_embeddings": False}
        inner = text | (untied if level == "inner" else {})
        flags = untied if level == "outer" else {}
        assert parse_config(outer | flags | {"text_config": inner}).tie is False
    with pytest.raises(UnsupportedError, match="text_config has model_type"):
        parse_config(outer | {"text_config": text | {"model_type": "llama"}})


def test_tie_flag() -> None:
    assert parsed("llama", tie_word_embeddings=True).core["tied_head"] is True
    assert parsed("llama", tie_word_embeddings=ABSENT).tie is False
    assert parsed("gemma3", tie_word_embeddings=ABSENT).tie is True
    nested = {"tie_word_embeddings": True}
    assert parsed("llama", tie_word_embeddings=ABSENT, text_config=nested).tie is True
    with pytest.raises(FormatError, match="tie_word_embeddings"):
        parsed("llama", tie_word_embeddings="yes")


# ---- types and files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("bad", [0, -1, 1.5, "64", True, None, [64], 2**31])
def test_sizes_are_counts(key: str, bad: Any) -> None:
    with pytest.raises(FormatError, match=f"config.json: {key} is "):
        parsed("llama", **{key: bad})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b'{"model_type": "llama"', "not JSON, line 1"),
        (b"[]", "expected a JSON object, found list"),
        (b'{"model_type": "\xff"}', "not UTF-8"),
        (b"[" * 100000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
    ],
)
def test_broken_files(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(FormatError, match=f"config.json.*{message}"):
        read_config(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        read_config(tmp_path)


def test_byte_order_mark(tmp_path: Path) -> None:
    text = json.dumps(config_of("llama")).encode("utf-8-sig")
    (tmp_path / "config.json").write_bytes(text)
    assert read_config(tmp_path).core == parsed("llama").core


def test_every_family_of_the_fixtures_is_known() -> None:
    assert {fixtures.CONFIGS[f]["model_type"] for f in fixtures.FAMILIES} | {"gemma3"} == set(
        FAMILIES
    )
