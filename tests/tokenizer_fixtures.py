"""The tiny tokenizer of fixtures.py as the product's object, and small helpers around it."""

import json
from typing import Any

import fixtures
from tokenizers import Tokenizer as LibraryTokenizer

from kvcomm.tokenizer import Tokenizer


def tiny(
    *,
    chat_template: str | None = fixtures.CHAT_TEMPLATE,
    config: dict[str, Any] | None = None,
    specials: dict[str, str] | None = None,
    content: dict[str, Any] | None = None,
    **model: Any,
) -> Tokenizer:
    return Tokenizer(
        json.dumps({**fixtures.tokenizer_json(**model), **(content or {})}),
        config=config,
        special_tokens=specials or {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"},
        chat_templates={} if chat_template is None else {"default": chat_template},
        stop_ids=(fixtures.TURN_END,),
    )


def spelt(text: str) -> list[int]:
    """Ids of a text by the library, from a tokenizer that has no added tokens at all."""
    content = fixtures.tokenizer_json(bos=False) | {"added_tokens": []}
    return LibraryTokenizer.from_str(json.dumps(content)).encode(text).ids


def user(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def streamed(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.finish()]
