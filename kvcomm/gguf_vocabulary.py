"""A tokenizer rebuilt from the metadata of a GGUF file.

Owns: the rules that the names in `tokenizer.ggml.model` and `tokenizer.ggml.pre` stand for, and
the form of a vocabulary's merges. The result is the text of a tokenizer.json; reading one is
tokenizer.py's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvcomm.errors import FormatError, UnsupportedError

# Kinds of tokens in `tokenizer.ggml.token_type`; 6 is a byte of the sentencepiece kind.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_SMOLLM = (
    None,
    [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    False,
)
_QWEN2 = (
    {"type": "NFC"},
    [_split(_CONTRACTIONS + _WORDS % ""), _byte_level(use_regex=False)],
    False,
)
_LLAMA3 = (
    None,
    [_split(_CONTRACTIONS + _WORDS % "{1,3}"), _byte_level(use_regex=False)],
    True,
)

# `tokenizer.ggml.pre` -> (normaliser, pre-tokenizers, a whole word found in the vocabulary is
# taken as it is). The digit rule is the difference between qwen2 and llama-bpe.
_BYTE_LEVEL_KINDS = {
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
}


def rebuild(metadata: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Make a Hugging Face tokenizer from the metadata of a GGUF file.

    Parameters
    ----------
    metadata
        The fields of the file by name, as plain Python values.

    Returns
    -------
    tuple of str and dict
        The text of ``tokenizer.json`` and the content of ``tokenizer_config.json``.

    Raises
    ------
    FormatError
        A field is missing, or the lists do not fit each other.
    UnsupportedError
        The kind of tokenizer, or its pre-tokenizer, is not one of the known ones.

    Notes
    -----
    Tokens marked unused are rows of padding: they get no entry, so the tokenizer is smaller
    than the model's vocabulary.
    """
    kind = _metadata_field(metadata, "tokenizer.ggml.model")
    tokens = _metadata_field(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise FormatError(
            f"tokenizer.ggml.token_type: {len(types)} entries for {len(tokens)} tokens"
        )
    vocab: dict[str, int] = {}
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type != UNUSED and vocab.setdefault(token, i) != i:
            raise FormatError(
                f"tokenizer.ggml.tokens: {token!r} stands at {vocab[token]} and at {i}"
            )
    if kind == "gpt2":
        parts = _byte_level_parts(metadata, vocab)
        add_bos = _BYTE_LEVEL_KINDS[metadata["tokenizer.ggml.pre"]] is _LLAMA3
    elif kind == "llama":
        parts = _sentencepiece_parts(metadata, vocab, types)
        add_bos = True
    else:
        raise UnsupportedError(
            f"tokenizer.ggml.model: {kind!r} is not supported; known are gpt2 and llama"
        )
    add_bos = add_bos and "tokenizer.ggml.bos_token_id" in metadata
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type != USER_DEFINED,
        }
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": False,
    }
    for name in ("bos", "eos", "unknown", "padding"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is None:
            continue
        if not 0 <= i < len(tokens):
            raise FormatError(
                f"tokenizer.ggml.{name}_token_id: {i} is outside of {len(tokens)} tokens"
            )
        config[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[i]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "post_processor": _bos_processor(config, vocab) if add_bos else None,
    }
    return json.dumps(content, ensure_ascii=False), config


def _metadata_field(metadata: Mapping[str, Any], name: str) -> Any:
    try:
        return metadata[name]
    except KeyError:
        raise FormatError(f"{name}: missing from the metadata") from None


def _byte_level_parts(metadata: Mapping[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _BYTE_LEVEL_KINDS:
        raise UnsupportedError(
            f"tokenizer.ggml.pre: {pre!r} is not supported; known are "
            + ", ".join(_BYTE_LEVEL_KINDS)
        )
    normalizer, pre_tokenizers, ignore_merges = _BYTE_LEVEL_KINDS[pre]
    merges = [m.split(" ") for m in _metadata_field(metadata, "tokenizer.ggml.merges")]
    check_merges(merges, vocab, "tokenizer.ggml.merges")
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(vocab, merges, ignore_merges=ignore_merges),
    }


def _sentencepiece_parts(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int]
) -> dict[str, Any]:
    """Byte-pair encoding in the manner of sentencepiece: blanks are U+2581, and what has no
    piece is spelt in byte tokens. The file has scores in place of merges."""
    scores = _metadata_field(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(types):
        raise FormatError(f"tokenizer.ggml.scores: {len(scores)} entries for {len(types)} tokens")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": "\u2581"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    names = {i: token for token, i in vocab.items()}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            vocab,
            _merges_of_scores(vocab, scores, types),
            unk_token=names.get(unknown),
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_of_scores(
    vocab: dict[str, int], scores: list[float], types: list[int]
) -> list[list[str]]:
    """Every way to put a piece together from two others, the piece of the best score first."""
    normal = {token for token, i in vocab.items() if types[i] == NORMAL}
    merges = []
    for piece in sorted(normal, key=lambda token: (-scores[vocab[token]], vocab[token])):
        pairs = [
            [piece[:cut], piece[cut:]]
            for cut in range(len(piece) - 1, 0, -1)
            if piece[:cut] in normal and piece[cut:] in normal
        ]
        merges.extend(pairs)
    return merges


def _bpe(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **changes,
        "vocab": vocab,
        "merges": merges,
    }


def _bos_processor(config: Mapping[str, Any], vocab: dict[str, int]) -> dict[str, Any]:
    token = config.get("bos_token")
    if token is None:
        raise FormatError("tokenizer.ggml.bos_token_id: missing, though add_bos_token asks for it")
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [vocab[token]], "tokens": [token]}},
    }


def check_merges(merges: list[list[str]], vocab: Mapping[str, int], where: str) -> None:
    """Refuse the first merge whose parts or result are not in the vocabulary, by its index."""
    for i, merge in enumerate(merges):
        if len(merge) != 2 or any(
            part not in vocab for part in (merge[0], merge[1], merge[0] + merge[1])
        ):
            raise FormatError(f"{where}: merge {i} {merge!r}: not all of it is in the vocabulary")


def pairs(merges: Sequence[Any]) -> list[list[str]]:
    """Merges as pairs, from pairs or from lines such as "a b"; a version line is dropped."""
    return [
        merge.split(" ") if isinstance(merge, str) else list(merge)
        for merge in merges
        if not (isinstance(merge, str) and merge.startswith("#version"))
    ]
