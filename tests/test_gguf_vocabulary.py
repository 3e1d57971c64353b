"""Tokenizers rebuilt from GGUF metadata; expected ids and words are put together by hand."""

from typing import Any

import fixtures
import pytest
from fixtures import BOS, TURN_END
from tokenizer_fixtures import streamed, tiny
from tokenizers import Tokenizer as LibraryTokenizer

from kvcomm import gguf_vocabulary
from kvcomm.errors import FormatError, UnsupportedError
from kvcomm.tokenizer import Tokenizer

TOOL = 297


def metadata(**changes: Any) -> dict[str, Any]:
    """The tiny tokenizer as the metadata of a GGUF file."""
    tokens = list(fixtures.tokenizer_json()["model"]["vocab"])
    tokens += [text for text, _ in fixtures.ADDED_TOKENS.values()] + ["[PAD300]", "[PAD301]"]
    kinds = [3 if special else 4 for _, special in fixtures.ADDED_TOKENS.values()]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * 292 + kinds + [5, 5],
        "merges": [" ".join(pair) for pair in fixtures.MERGES],
        "bos_token_id": BOS,
        "eos_token_id": TURN_END,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["a", " ", "1", "2", "3", " b"]),
        ("qwen2", ["a", " ", "1", "2", "3", " b"]),
        ("llama-bpe", ["a", " ", "123", " b"]),
    ],
)
def test_rebuilt_digit_rules(pre: str, words: list[str]) -> None:
    """The known difference of the three kinds: how digits part, and a blank before them."""
    content, _ = gguf_vocabulary.rebuild(metadata(pre=pre))
    split = LibraryTokenizer.from_str(content).pre_tokenizer.pre_tokenize_str("a 123 b")
    assert [word.replace("Ġ", " ") for word, _ in split] == words


def test_rebuilt_byte_level() -> None:
    content, config = gguf_vocabulary.rebuild(metadata())
    tokenizer = Tokenizer(content, config=config)
    text = "the other thing <tool>, 42 x!"
    assert tokenizer.encode(text.replace("42", "")) == tiny().encode(text.replace("42", ""))
    assert tokenizer.encode("<tool>", special=True) == [TOOL]
    assert len(tokenizer) == 300  # the padding rows have no entry
    assert config["eos_token"] == "<|im_end|>"
    assert config["clean_up_tokenization_spaces"] is False
    assert tokenizer.encode("q", add_special_tokens=True) == [ord("q")]
    with_bos = Tokenizer(gguf_vocabulary.rebuild(metadata(add_bos_token=True))[0])
    assert with_bos.encode("q", add_special_tokens=True) == [BOS, ord("q")]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    # Pieces of better scores go first: "▁ab" is reached by "ab" (-1), then "▁" + "ab" (-3).
    pieces = {"▁": -10.0, "a": -11.0, "b": -12.0, "c": -13.0, "ab": -1.0, "bc": -2.0, "▁ab": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 259 + list(pieces.values()),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def test_rebuilt_sentencepiece() -> None:
    content, config = gguf_vocabulary.rebuild(sentencepiece_metadata())
    tokenizer = Tokenizer(content, config=config)
    blank, a, b, c, ab, bc, blank_ab = range(259, 266)
    assert tokenizer.encode("abc") == [blank_ab, c]  # "ab" beats "bc"
    assert tokenizer.encode("bc abab") == [blank, bc, blank_ab, ab]
    assert tokenizer.encode("aé") == [blank, a, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("ab", add_special_tokens=True) == [1, blank_ab]
    assert tokenizer.encode("</s>", special=True) == [2]
    assert 2 not in tokenizer.encode("</s>")
    for text in ("bc abab", "aé", "日 b", "  a"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert "".join(streamed(tokenizer, ids)) == text
    assert b not in tokenizer.encode("ab")
    bare = Tokenizer(gguf_vocabulary.rebuild(sentencepiece_metadata(add_space_prefix=False))[0])
    assert bare.encode("ab ab") == [ab, blank_ab]
    assert bare.decode(bare.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedError, "'bert' is not supported; known are gpt2 and llama"),
        ({"pre": "gpt-4o"}, UnsupportedError, "pre: 'gpt-4o' is not supported; known are smollm"),
        ({"pre": None}, UnsupportedError, "pre: None is not supported"),
        ({"model": None}, FormatError, "tokenizer.ggml.model: missing"),
        ({"tokens": None}, FormatError, "tokenizer.ggml.tokens: missing"),
        ({"merges": None}, FormatError, "tokenizer.ggml.merges: missing"),
        ({"merges": ["t h", "q zz"]}, FormatError, "tokenizer.ggml.merges: merge 1 "),
        ({"token_type": [1]}, FormatError, "token_type: 1 entries for 302 tokens"),
        ({"eos_token_id": 999}, FormatError, "eos_token_id: 999 is outside of 302 tokens"),
        ({"tokens": ["a"] * 302}, FormatError, "'a' stands at 0 and at 1"),
    ],
)
def test_metadata_that_cannot_be_rebuilt(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gguf_vocabulary.rebuild(metadata(**changes))
