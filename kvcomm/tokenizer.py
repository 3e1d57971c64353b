"""Text to token ids and back, and prompts from chat templates.

Owns: loading a model folder's tokenizer, which text may become a control token, stop ids, and
decoding whole or as a stream. The algorithm itself is the `tokenizers` library's; rendering a
template is template.py's, rebuilding a tokenizer from a GGUF file gguf_vocabulary.py's.

Two rules hold throughout. Control tokens come from templates only: documents, questions and
message texts cannot forge one, nor any other added token (added tokens that are nothing but
white space are harmless and left alone). And no text gets a BOS unless it is asked for.
"""

import hashlib
import json
import operator
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvcomm import template
from kvcomm.errors import FormatError, MismatchError, UnsupportedError
from kvcomm.fields import AnyPath, check_pointer, read_json, shown
from kvcomm.gguf_vocabulary import check_merges, pairs

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

# Noncharacters of Unicode, which no text for exchange may hold; U+FFFD takes their place in
# message texts. While a template is rendered they mark forged control tokens: the token after,
# the token before (either with the token's id in the digits), and an edge that could be one half
# of a token. The last stands for a genuine token in text that is encoded as plain text.
_AFTER, _BEFORE, _EDGE, _GENUINE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_DIGITS = [chr(c) for c in range(0xFDD4, 0xFDF0)]
_NO_MARKS = str.maketrans("", "", "".join((_AFTER, _BEFORE, _EDGE, *_DIGITS)))
_NO_NONCHARACTERS = str.maketrans(
    dict.fromkeys((_AFTER, _BEFORE, _EDGE, _GENUINE, *_DIGITS), "\ufffd")
)

# What clean_up_tokenization_spaces means where a folder asks for it, in this order.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


class Tokenizer:
    """A model's tokenizer. Immutable after loading; any number of threads may share it.

    Attributes
    ----------
    stop_ids : tuple of int
        Ids that end a text, ascending, and are left out when it is decoded.
    special_tokens : dict of str to str
        Texts of the named special tokens, such as ``bos_token``; templates see them.
    chat_templates : dict of str to str
        Template texts by name, the usual one under ``"default"``.
    vocab_size : int
        Largest id plus one.
    """

    def __init__(
        self,
        content: str,
        *,
        config: Mapping[str, Any] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        where: str = "tokenizer.json",
    ) -> None:
        config = config or {}
        self._full = _parse(content, where)
        # Stored settings that would cut or pad every text.
        self._full.no_truncation()
        self._full.no_padding()
        self._add_listed_tokens(config.get("added_tokens_decoder") or {}, where)
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self._clean_up = bool(config.get("clean_up_tokenization_spaces", False))
        self.vocab_size = max(self._full.get_vocab(with_added_tokens=True).values()) + 1
        self._unknown = getattr(self._full.model, "unk_token", None)
        self._controls = {
            i: token.content
            for i, token in self._full.get_added_tokens_decoder().items()
            if not token.content.isspace()
        }
        texts = set(self._controls.values())
        self._beginnings = tuple({t[:n] for t in texts for n in range(1, len(t))})
        self._endings = tuple({t[n:] for t in texts for n in range(1, len(t))})
        self._plain: tokenizers.Tokenizer | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: AnyPath, *, chat_template: str | None = None) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face folder.

        Parameters
        ----------
        folder
            Holds tokenizer.json; read if there: tokenizer_config.json, special_tokens_map.json,
            generation_config.json, config.json, chat_template.jinja and chat_template.json (the
            .jinja file goes before the .json file, that before tokenizer_config.json).
        chat_template
            The text of a template to use in place of the folder's.

        Raises
        ------
        FormatError
            A file is damaged, a Git-LFS pointer, or holds merges that do not fit.
        UnsupportedError
            The folder has a tokenizer of another form only.
        OSError
            tokenizer.json is missing or cannot be read.

        Notes
        -----
        Stop ids are the ``eos_token_id`` of generation_config.json, else of config.json (one, a
        list, or null), and the tokenizer's own EOS. If the files state null or an empty list,
        nothing stops.
        """
        path = Path(os.fsdecode(folder))
        file = path / "tokenizer.json"
        if not file.exists():
            others = [n for n in ("tokenizer.model", "vocab.json") if (path / n).exists()]
            if others:
                raise UnsupportedError(
                    f"{shown(path)}: only tokenizer.json is read, found {others[0]}"
                )
            raise FileNotFoundError(f"{shown(file)}: no such file")
        config = _read_optional(path / "tokenizer_config.json")
        specials = _special_tokens(_read_optional(path / "special_tokens_map.json"), config)
        templates = template.find(path, config)
        if chat_template is not None:
            templates["default"] = chat_template
        self = cls(
            _read_text(file),
            config=config,
            special_tokens=specials,
            chat_templates=templates,
            where=shown(file),
        )
        eos = self._full.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
        self.stop_ids = _stop_ids(path, eos)
        return self

    def __len__(self) -> int:
        """Number of entries; fewer than `vocab_size` if ids are left out."""
        return self._full.get_vocab_size(with_added_tokens=True)

    def fits(self, model_vocab_size: int) -> None:
        """Raise MismatchError if this tokenizer has ids that a model has no rows for.

        A model with more rows than the tokenizer has entries is fine: they are padding.
        """
        if self.vocab_size > model_vocab_size:
            raise MismatchError(
                f"the tokenizer has {self.vocab_size} ids, "
                f"the model {model_vocab_size} (vocab_size)"
            )

    @cached_property
    def vocabulary_fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides a text's ids: vocabulary, merges and rules.

        Two fine-tunes of one base share it. It does not depend on the folder, nor on how the file
        is laid out.
        """
        content = json.loads(self._full.to_str())
        content["model"]["merges"] = pairs(content["model"].get("merges") or [])
        return _sha256(content)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides a chat's ids: the vocabulary's and templates."""
        return _sha256([self.vocabulary_fingerprint, self.chat_templates])

    @property
    def asks_day(self) -> bool:
        """Whether a chat's ids may depend on the day that it is rendered on."""
        return any(map(template.asks_day, self.chat_templates.values()))

    # ---- encoding ----------------------------------------------------------------------------

    def encode(
        self, text: str, *, special: bool = False, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Parameters
        ----------
        text
            Any text.
        special
            False: the text is data, and what looks like a control token in it is spelt out as
            plain text. True: added tokens in the text are taken as such; for text that a
            template made.
        add_special_tokens
            Add what the tokenizer puts around a text by itself, usually BOS. A prompt made by
            a template has its own, and a second segment after a cache needs none.

        Returns
        -------
        list of int

        Raises
        ------
        TypeError, ValueError
            Not text, or text with a lone surrogate.
        """
        encoding = self._encoding(text)
        if not special and any(i in self._controls for i in encoding.ids):
            encoding = self._plain_tokenizer().encode(
                text.translate(_NO_NONCHARACTERS), add_special_tokens=False
            )
        if add_special_tokens:
            encoding = self._full.post_process(encoding, None, True)
        return encoding.ids

    def _encoding(self, text: str) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise TypeError(f"text: expected str, found {type(text).__name__}")
        try:
            return self._full.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is None:
                raise
            raise ValueError(f"text: lone surrogate U+{ord(text[at]):04X} at {at}") from None

    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        """The same tokenizer without its added tokens, made when it is first needed.

        The library's own switch leaves added tokens alone that are not flagged special.
        """
        with self._lock:
            if self._plain is None:
                self._plain = tokenizers.Tokenizer.from_str(self._plain_content())
            return self._plain

    def _plain_content(self) -> str:
        content = json.loads(self._full.to_str())
        model = content["model"]
        keep = [t for t in content["added_tokens"] if t["id"] not in self._controls]
        for token in keep:
            model["vocab"][token["content"]] = token["id"]
        gone = set(self._controls.values()) - {self._unknown}
        model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in gone}
        if "merges" in model:
            model["merges"] = [
                pair
                for pair in pairs(model["merges"])
                if gone.isdisjoint((pair[0], pair[1], pair[0] + pair[1]))
            ]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        model["vocab"][_GENUINE] = self.vocab_size
        genuine = {"id": self.vocab_size, "content": _GENUINE, "special": True, **flags}
        content.update(added_tokens=[*keep, genuine], post_processor=None)
        return json.dumps(content, ensure_ascii=False)

    # ---- chat --------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text as the chat template gives it; see `chat`.

        The text does not say which of its control tokens are genuine; `chat` knows.
        """
        source, messages, options = self._chat_parts(messages, chat_template, template_kwargs)
        return template.render(
            source, messages, {**options, "add_generation_prompt": add_generation_prompt}
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, put into the model's chat template.

        Parameters
        ----------
        messages
            Dicts with ``role`` and ``content``.
        add_generation_prompt
            End with the header of the assistant's turn, so that the model answers. What follows
            with False is a beginning of what follows with True.
        chat_template
            A template's text, or the name of one of `chat_templates`.
        **template_kwargs
            Options that the template knows, such as ``enable_thinking`` or ``tools``.

        Returns
        -------
        list of int
            The template's own tokens, BOS included if it prints one; none is added.

        Raises
        ------
        UnsupportedError
            The model has no chat template.
        FormatError
            The template is broken.
        ValueError, TypeError
            Messages that cannot be rendered, or whose texts hold control tokens in a place where
            the template takes text apart.

        Notes
        -----
        No text in a message can forge a control token: it is encoded as plain text, whatever the
        template does around it. Without such text the ids are those of the reference library.
        """
        source, messages, options = self._chat_parts(messages, chat_template, template_kwargs)
        options["add_generation_prompt"] = add_generation_prompt
        text = template.render(source, messages, options)
        specials = dict.fromkeys(self.special_tokens)
        marked = template.plain(messages, self._mark, "messages")
        given = {k: v for k, v in options.items() if k not in specials}
        marked_options = {**options, **template.plain(given, self._mark, "option")}
        if marked == messages and marked_options == options:
            return self._encoding(text).ids
        marked_text = template.render(source, marked, marked_options)
        if marked_text.translate(_NO_MARKS) != text:
            raise ValueError(
                "messages: a text holds a control token where the chat template takes text apart"
            )
        return self._encode_marked(marked_text)

    def _chat_parts(
        self, messages: Any, chat_template: str | None, kwargs: Mapping[str, Any]
    ) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
        template.check_messages(messages)

        def clean(text: str) -> str:
            return text.translate(_NO_NONCHARACTERS)

        with_tools = kwargs.get("tools") and "tool_use" in self.chat_templates
        name = "tool_use" if with_tools else "default"
        if chat_template is not None:
            source = self.chat_templates.get(chat_template, chat_template)
        elif name in self.chat_templates:
            source = self.chat_templates[name]
        else:
            raise UnsupportedError(
                "the model has no chat template: pass chat_template=, or encode plain text"
            )
        options = {**self.special_tokens, **template.plain(dict(kwargs), clean, "option")}
        return source, template.plain(messages, clean, "messages"), options

    def _control_spans(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of every added token in `text`, in characters."""
        encoding = self._encoding(text)
        return [
            (i, start, end)
            for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            # What the vocabulary cannot spell gives the unknown token too, with no such text.
            if i in self._controls
            and (self._controls[i] != self._unknown or text[start:end].strip() == self._unknown)
        ]

    def _mark(self, text: str) -> str:
        """Mark what could become a control token, in places where no template would notice.

        Templates trim, split at and look for tokens in a text, and ask how it begins and ends:
        marks stand beside tokens, never in them, inside of the margins of white space, and
        after the token if the text begins with one. A mark names its token, since a template
        may cut the token away and put one of its own beside the mark.
        """
        core = text.strip()
        margin = len(text) - len(text.lstrip())
        parts, done = [], 0
        for i, start, end in self._control_spans(text):
            token = text[start:end]
            first = not text[:start].strip()
            parts += [text[done:start], token + _BEFORE + _digits(i) if first else ""]
            parts.append("" if first else _AFTER + _digits(i) + token)
            done = end
        marked = "".join((*parts, text[done:]))
        if core.endswith(self._beginnings):
            at = len(marked.rstrip())
            marked = marked[:at] + _EDGE + marked[at:]
        if core.startswith(self._endings):
            marked = marked[:margin] + _EDGE + marked[margin:]
        return marked

    def _encode_marked(self, text: str) -> list[int]:
        """Encode a rendered text: marked tokens as plain text, the others as what they are."""
        genuine, parts, done = [], [], 0
        for i, start, end in self._control_spans(text):
            before, after = _AFTER + _digits(i), _BEFORE + _digits(i)
            if text.endswith(before, 0, start) or text.startswith(after, end):
                continue
            genuine.append(i)
            parts += [text[done:start], _GENUINE]
            done = end
        joined = "".join((*parts, text[done:])).translate(_NO_MARKS)
        ids = self._plain_tokenizer().encode(joined, add_special_tokens=False).ids
        following = iter(genuine)
        return [next(following) if i == self.vocab_size else i for i in ids]

    # ---- decoding ----------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids.

        Ids without an entry (rows of padding in the model's head) give no text. With
        `skip_special`, tokens flagged special and all stop ids give none either.

        Raises
        ------
        ValueError, TypeError
            A negative id, or something that is no integer.
        """
        text = self._decode(self._known(ids, skip_special), skip_special)
        return self._clean(text) if self._clean_up else text

    def stream(self, skip_special: bool = True) -> "TextStream":
        """A decoder for ids that arrive one by one; see `TextStream`."""
        return TextStream(self, skip_special)

    def _known(self, ids: Iterable[int], skip_special: bool) -> list[int]:
        dropped = self.stop_ids if skip_special else ()
        known = []
        for i in map(operator.index, ids):
            if i < 0:
                raise ValueError(f"token id {i} is negative")
            if i < self.vocab_size and i not in dropped:
                known.append(i)
        return known

    def _decode(self, known: list[int], skip_special: bool) -> str:
        return self._full.decode(known, skip_special_tokens=skip_special)

    @staticmethod
    def _clean(text: str) -> str:
        for old, new in _CLEAN_UP:
            text = text.replace(old, new)
        return text

    def _add_listed_tokens(self, listed: Mapping[str, Any], where: str) -> None:
        """Add tokens that only tokenizer_config.json lists."""
        for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
            if self._full.id_to_token(int(key)) is not None:
                continue
            token = tokenizers.AddedToken(**{k: v for k, v in entry.items() if k != "__type"})
            (self._full.add_special_tokens if token.special else self._full.add_tokens)([token])
            if (found := self._full.token_to_id(token.content)) != int(key):
                raise FormatError(
                    f"{where}: added token {token.content!r} gets id {found}, expected {key}"
                )


class TextStream:
    """Decodes ids one by one into whole characters.

    The pieces joined are the text of all ids decoded at once. At most the bytes of one
    unfinished character are held back (and, where the folder asks for spaces to be cleaned
    up, the last few characters after a blank). One exception: a tokenizer with byte fallback
    whose ids end inside a character decodes the whole run of bytes to U+FFFD; the stream only
    the bytes of that character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # A word in front, since the first token of a text may lose its leading blank.
        self._anchor = tokenizer.encode("a")[-1:]
        # An unfinished character shows as one mark, or as one for each byte.
        self._n_marks = 3 if getattr(tokenizer._full.model, "byte_fallback", False) else 1
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were taken from it
        self._tail = ""  # taken, but kept for the clean-up of spaces

    def push(self, i: int) -> str:
        """Take one id; return the text that is now certain, which may be empty."""
        known = self._tokenizer._known((i,), self._skip_special)
        if not known:
            return ""
        self._window += known
        text = certain = self._text(self._window)
        for _ in range(self._n_marks):
            certain = certain.removesuffix("\ufffd")
        piece = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if certain == text:
            self._window = list(self._anchor)
            self._sent = len(self._text(self._window))
        return self._release(piece, end=False)

    def finish(self) -> str:
        """Return what was held back, and start afresh."""
        piece = self._text(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return self._release(piece, end=True)

    def _text(self, known: list[int]) -> str:
        return self._tokenizer._decode(known, self._skip_special)

    def _release(self, piece: str, *, end: bool) -> str:
        if not self._tokenizer._clean_up:
            return piece
        text = self._tail + piece
        # A pattern of the clean-up begins with a blank and has at most four characters.
        cut = len(text) if end else text.rfind(" ", max(0, len(text) - 3))
        cut = len(text) if cut < 0 else cut
        while not end and text[:cut].endswith(" '"):
            cut -= 2  # the one pattern with a blank at its end, too: it may be this one
        self._tail = text[cut:]
        return self._tokenizer._clean(text[:cut])


def _digits(i: int) -> str:
    """A token id in four marks, enough for half a million ids."""
    n = len(_DIGITS)
    return "".join(_DIGITS[i // n**k % n] for k in range(4))


# ---- reading a folder ------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    check_pointer(path)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{shown(path)}: is not utf-8 at byte {error.start}") from None


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; later sources go before earlier ones."""
    found: dict[str, str] = {}
    for source in sources:
        for name in (f"{name}_token" for name in _SPECIAL_NAMES):
            token = source.get(name)
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                found[name] = token
    return found


def _stop_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    own = () if eos is None else (eos,)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        content = _read_optional(path)
        if "eos_token_id" not in content:
            content = content.get("text_config") or {}
        if "eos_token_id" not in content:
            continue
        stated = content["eos_token_id"]
        stated = [] if stated is None else stated if isinstance(stated, list) else [stated]
        if any(type(i) is not int or i < 0 for i in stated):
            raise FormatError(f"{shown(path)}: eos_token_id: expected ids, found {stated}")
        return tuple(sorted({*stated, *own})) if stated else ()
    return own


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _parse(content: str, where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more special
        reason = str(error)
    try:
        model = json.loads(content)["model"]
        vocab, merges = model["vocab"], model.get("merges") or []
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FormatError(f"{where}: {reason}") from None
    check_merges(pairs(merges), vocab, where)
    raise FormatError(f"{where}: {reason}")
