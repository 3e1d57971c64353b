"""The message: K and V of some layers of a sender, and what a receiver must know about them.

Owns `Packet` (what travels), `Origin` (which model made it, and whether a receiver may use it)
and the packet's form on disk: one safetensors file, little-endian by that format's rule, whose
metadata holds the version, the origin, positions, token ids and a digest of every tensor. Does
not run models: agents.py makes packets and reads them.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import safetensors
from numpy.typing import NDArray

from kvcomm._core import KV
from kvcomm.errors import FormatError, MismatchError
from kvcomm.fingerprint import Fingerprint

if TYPE_CHECKING:
    from kvcomm.account import Reading
    from kvcomm.model import Model

Preset = Literal["paper", "reference"]
PRESETS: tuple[Preset, ...] = ("paper", "reference")

VERSION = 1
FORMAT = "kvcomm.packet"

#: Fields of a rope description that matter besides theta and rotary_dim, by kind.
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
    "yarn": (
        "factor",
        "original_length",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}

#: KV dtype -> (safetensors name for writing, name in the file, little-endian NumPy dtype).
_STORED = {
    "f32": ("float32", "F32", np.dtype("<f4")),
    "f16": ("float16", "F16", np.dtype("<f2")),
    "bf16": ("bfloat16", "BF16", np.dtype("<u2")),
}


def layer_set(layers: Iterable[int], n_layers: int) -> tuple[int, ...]:
    """Layer indices, sorted and each once.

    Raises
    ------
    TypeError
        An entry is not an integer (a bool is not one).
    ValueError
        An entry is outside 0 .. n_layers - 1; negative indices do not count from the end.
    """
    if isinstance(layers, (bool, str, bytes)) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: expected a sequence of integers, found {layers!r}")
    chosen = set()
    for layer in layers:
        if isinstance(layer, (bool, np.bool_)) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"layers: expected integers, found {layer!r}")
        if not 0 <= layer < n_layers:
            raise ValueError(f"layers: {layer} is outside 0 .. {n_layers - 1}")
        chosen.add(int(layer))
    return tuple(sorted(chosen))


def check_preset(preset: str) -> None:
    """Refuse a preset that is not one of PRESETS, as a ValueError."""
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, found {preset!r}")


@dataclass(frozen=True)
class Origin:
    """What matters about the model that made a packet.

    Two fine-tunes of one base differ in `fingerprint` and in nothing else that is compared. Both
    fingerprints cost time, so they are taken when a message is saved or meets another model.
    """

    model: str
    fingerprint: Fingerprint
    tokenizer: Fingerprint  # of its vocabulary; "" when the model has none
    vocab_size: int
    n_kv_heads: int
    head_dim: int
    rope: tuple[str, ...]  # per layer, spelled out
    window: int  # keys that a windowed layer sees; 0: no layer is windowed
    windowed: tuple[bool, ...]  # per layer

    @classmethod
    def of(cls, model: "Model") -> "Origin":
        """The origin of packets that `model` makes."""
        config = model.config.core
        same = [0] * config["n_layers"]
        ropes = [_spell_rope(rope) for rope in config["rope"]]
        return cls(
            model=model.name,
            fingerprint=model.identity,
            tokenizer=model.vocabulary,
            vocab_size=config["vocab_size"],
            n_kv_heads=config["n_kv_heads"],
            head_dim=config["head_dim"],
            rope=tuple(ropes[which] for which in config.get("rope_of_layer", same)),
            window=config["window"],
            windowed=tuple(map(bool, config.get("windowed", same))),
        )

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Origin":
        """What `to_json` gave."""
        known = {name: Fingerprint.known(stored[name]) for name in ("fingerprint", "tokenizer")}
        lists = {name: tuple(stored[name]) for name in ("rope", "windowed")}
        return cls(**{**stored, **known, **lists})

    def to_json(self) -> dict[str, Any]:
        """The fields by name, with the values of the fingerprints."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {
            "fingerprint": self.fingerprint.value,
            "tokenizer": self.tokenizer.value,
        }

    @property
    def n_layers(self) -> int:
        return len(self.rope)

    def check_receiver(
        self,
        receiver: "Origin",
        layers: Sequence[int],
        layer_map: Sequence[int] | None = None,
        *,
        any_tokenizer: bool = False,
    ) -> None:
        """Refuse a receiver that cannot read keys and values of `layers` of this sender.

        Raises
        ------
        MismatchError
            KV heads, head size, depth, rope, window, vocabulary or tokenizer differ, or two of
            the layers land on one receiver layer; the message names both sides.
        """
        pair = f"sender {self.model!r} and receiver {receiver.model!r}"

        def same(what: str, mine: object, theirs: object) -> None:
            if mine != theirs:
                raise MismatchError(f"{pair} do not fit: {what} {mine} against {theirs}")

        same("kv heads", self.n_kv_heads, receiver.n_kv_heads)
        same("head size", self.head_dim, receiver.head_dim)
        if layer_map is None:
            same("number of layers (without a layer map)", self.n_layers, receiver.n_layers)
        target = check_layer_map(layer_map, self.n_layers, receiver.n_layers)
        taken: dict[int, int] = {}
        for layer in layers:
            to = target[layer]
            if to in taken:
                raise MismatchError(
                    f"{pair} do not fit: sender layers {taken[to]} and {layer} both land on "
                    f"receiver layer {to}"
                )
            taken[to] = layer
            place = f"in sender layer {layer} and receiver layer {to}"
            same(f"rope {place}:", self.rope[layer], receiver.rope[to])
            same(f"window {place}:", self._window(layer), receiver._window(to))
        if not any_tokenizer:
            hint = "(Receiver(..., any_tokenizer=True) takes any)"
            same(f"vocabulary size {hint}", self.vocab_size, receiver.vocab_size)
            if self.tokenizer is not receiver.tokenizer:
                mine, theirs = self.tokenizer.value, receiver.tokenizer.value
                if mine and theirs:
                    same(f"tokenizer {hint}", mine[:12], theirs[:12])

    def _window(self, layer: int) -> int:
        return self.window if self.windowed[layer] else 0


def check_layer_map(
    layer_map: Sequence[int] | None, n_layers: int, receiver_layers: int
) -> tuple[int, ...]:
    """The receiver layer of each sender layer; the identity for None.

    Raises
    ------
    TypeError, ValueError
        Entries that are not integers, a wrong length, or layers that the receiver does not have.
    """
    if layer_map is None:
        return tuple(range(n_layers))
    if len(layer_map) != n_layers:
        raise ValueError(f"layer_map: expected {n_layers} entries, found {len(layer_map)}")
    for entry in layer_map:
        layer_set((entry,), receiver_layers)
    return tuple(int(entry) for entry in layer_map)


@dataclass(frozen=True, eq=False)
class Packet:
    """K and V of some layers of a sender's context, ready for any number of receivers.

    Immutable; selecting layers shares memory. Made by `Sender.read` or `Packet.load`.

    Attributes
    ----------
    kv
        The keys (after rope) and values, per layer.
    layers
        The selected sender layers, ascending.
    context_len
        C, the tokens of the sender's prompt; the receiver's positions start there.
    ids
        Those tokens, after any cut.
    cut_tokens
        How many tokens were cut out of the context because it was too long.
    preset
        "paper": only `layers` are held. "reference": layer 0 besides, and the first token of
        every other layer, as its published code does.
    origin
        The model that made it.
    stats
        What reading it cost; None for one that was loaded.
    """

    kv: KV = field(repr=False)
    layers: tuple[int, ...]
    context_len: int
    ids: tuple[int, ...] = field(repr=False)
    cut_tokens: int
    preset: Preset
    origin: Origin = field(repr=False)
    stats: "Reading | None" = field(default=None, repr=False)

    @property
    def n_layers(self) -> int:
        """Layers of the sender."""
        return self.kv.n_layers

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the sending model; OSError as for `Model.fingerprint`."""
        return self.origin.fingerprint.value

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Layers that hold the whole context: `layers`, and layer 0 in preset reference."""
        return whole_layers(self.layers, self.preset)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are sent, sinks and layer 0 included."""
        return self.kv.nbytes

    def select(self, layers: Iterable[int]) -> "Packet":
        """The packet of fewer layers, sharing this one's memory.

        In preset reference layer 0 stays whole and other layers keep their first token.

        Raises
        ------
        TypeError, ValueError
            A layer that is no integer, or that this packet does not hold whole.
        """
        chosen = layer_set(layers, self.n_layers)
        missing = sorted(set(chosen) - set(self.whole_layers))
        if missing:
            raise ValueError(f"layers: {missing[0]} is not in the packet, which has {self.layers}")
        whole = whole_layers(chosen, self.preset)
        kv = self.kv.select(whole, sink=self.preset == "reference")
        return replace(self, kv=kv, layers=chosen)

    def trim(self) -> "Packet":
        """The packet without those keys of windowed layers that no receiver can see.

        In preset reference everything stays: it sends what the published code sends, and a sink
        is the first token even where the window has passed it.
        """
        if self.preset == "reference" or not self.origin.window:
            return self
        return replace(self, kv=self.kv.trim(self.origin.windowed, self.origin.window))

    def keys(self, layer: int) -> NDArray[Any]:
        """Keys of a layer after rope, [n_kv_heads, n, head_dim]; bf16 as uint16 bits.

        A read-only view of the packet's own memory, without a copy, on the CPU (a copy where it is
        in several parts).

        Raises
        ------
        ValueError
            No such layer.
        """
        return self._array(layer, 0)

    def values(self, layer: int) -> NDArray[Any]:
        """Values of a layer, [n_kv_heads, n, head_dim]; views and errors as of `keys`."""
        return self._array(layer, 1)

    def _array(self, layer: int, which: int) -> NDArray[Any]:
        (layer,) = layer_set((layer,), self.n_layers)
        parts = [part[which] for part in self.kv.parts(layer)]
        if len(parts) == 1:
            return parts[0]
        native = _STORED[self.kv.dtype][2].newbyteorder("=")
        nothing = np.empty((self.kv.n_kv_heads, 0, self.kv.head_dim), native)
        return np.concatenate([nothing, *parts], axis=1)

    def to_bytes(self) -> bytes:
        """The packet as the bytes of a safetensors file.

        Raises
        ------
        OSError
            A weight file of the model was changed before its fingerprint was taken.
        """
        write_dtype, _, little = _STORED[self.kv.dtype]
        arrays: dict[str, NDArray[Any]] = {}
        parts: list[list[list[int]]] = []
        for layer in range(self.n_layers):
            places = []
            for number, (k, v, position, offset) in enumerate(self.kv.parts(layer)):
                places.append([position, offset])
                for name, array in (("k", k), ("v", v)):
                    stored = np.ascontiguousarray(array, little)
                    arrays[f"layers.{layer}.{number}.{name}"] = stored
            parts.append(places)
        header = {
            "layers": self.layers,
            "context_len": self.context_len,
            "ids": self.ids,
            "cut_tokens": self.cut_tokens,
            "preset": self.preset,
            "origin": self.origin.to_json(),
            "dtype": self.kv.dtype,
            "next_position": self.kv.next_position,
            "parts": parts,
            "digests": {name: _digest(array) for name, array in arrays.items()},
        }
        text = json.dumps(header)
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "packet": text,
            "digest": hashlib.sha256(text.encode()).hexdigest(),
        }
        specs = {
            name: safetensors.TensorSpec(
                dtype=write_dtype,
                shape=list(array.shape),
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, array in arrays.items()
        }
        return bytes(safetensors.serialize(specs, metadata))

    @classmethod
    def from_bytes(cls, data: bytes, *, device: str = "cpu") -> "Packet":
        """The packet that `to_bytes` wrote.

        Raises
        ------
        FormatError
            Not a packet, another version, or damaged: every tensor is held against its digest.
        """
        return _parse(bytes(data), "packet", device)

    def save(self, path: str | bytes | os.PathLike[str]) -> None:
        """Write the packet to a file, which appears whole or not at all.

        Raises
        ------
        OSError
            The file cannot be written, or as for `to_bytes`; whatever stood there before is
            intact.
        """
        write_whole(path, self.to_bytes())

    @classmethod
    def load(
        cls,
        path: str | bytes | os.PathLike[str],
        *,
        model: "Model | None" = None,
        device: str = "cpu",
    ) -> "Packet":
        """The packet that `save` wrote.

        model: if given, only a packet that this very model made is accepted (same configuration
        and weights, wherever the folder lies). A receiver needs no such thing: it checks what has
        to fit between two models when it is handed the packet.

        Raises
        ------
        FormatError
            As for `from_bytes`.
        MismatchError
            The packet is of another model than `model`.
        OSError
            The file cannot be read.
        """
        where = f"packet file {os.fsdecode(path)!r}"
        packet = _parse(Path(os.fsdecode(path)).read_bytes(), where, device)
        if model is not None and packet.fingerprint != model.fingerprint:
            raise MismatchError(
                f"{where} was made by {packet.origin.model!r} ({packet.fingerprint[:12]}), "
                f"expected {model.name!r} ({model.fingerprint[:12]})"
            )
        return packet


def whole_layers(layers: Sequence[int], preset: Preset) -> tuple[int, ...]:
    """The layers that are sent whole when `layers` are selected."""
    return tuple(sorted({0, *layers})) if preset == "reference" else tuple(layers)


def write_whole(path: str | bytes | os.PathLike[str], data: bytes) -> None:
    """Write a file beside its place, flush it to the disk, and move it there in one step.

    Raises
    ------
    OSError
        It cannot be written; the error names `path`, and whatever stood there is intact.
    """
    target = Path(os.fsdecode(path))
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    finally:
        with suppress(OSError):  # after a success it is not there any more
            aside.unlink()


def _spell_rope(rope: Mapping[str, Any]) -> str:
    fields = ("theta", "rotary_dim", *_ROPE_FIELDS[rope["kind"]])
    return " ".join([rope["kind"], *(f"{name}={rope[name]}" for name in fields)])


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()


def _parse(data: bytes, where: str, device: str) -> Packet:
    tensors, metadata = _read_safetensors(data, where)
    if metadata.get("format") != FORMAT:
        raise FormatError(f"{where}: format is {metadata.get('format')!r}, expected {FORMAT!r}")
    if metadata.get("version") != str(VERSION):
        raise FormatError(f"{where}: version is {metadata.get('version')}, expected {VERSION}")
    text = metadata.get("packet", "")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("digest"):
        raise FormatError(f"{where}: metadata does not match its digest")
    packet = json.loads(text)
    if set(tensors) != set(packet["digests"]):
        raise FormatError(f"{where}: {len(tensors)} tensors, expected {len(packet['digests'])}")
    _, stored_dtype, little = _STORED[packet["dtype"]]

    def array(name: str) -> NDArray[Any]:
        tensor = tensors[name]
        if tensor["dtype"] != stored_dtype:
            raise FormatError(
                f"{where}: tensor {name} is {tensor['dtype']}, expected {stored_dtype}"
            )
        values = np.frombuffer(tensor["data"], little).reshape(tensor["shape"])
        if _digest(values) != packet["digests"][name]:
            raise FormatError(f"{where}: tensor {name} does not match its digest")
        return values.astype(little.newbyteorder("="), copy=False)

    layers = {}
    for layer, places in enumerate(packet["parts"]):
        names = [f"layers.{layer}.{number}" for number in range(len(places))]
        layers[layer] = [
            (array(f"{name}.k"), array(f"{name}.v"), position, offset)
            for name, (position, offset) in zip(names, places, strict=True)
        ]
    origin = Origin.from_json(packet["origin"])
    kv = KV.from_arrays(
        layers,
        n_layers=origin.n_layers,
        n_kv_heads=origin.n_kv_heads,
        head_dim=origin.head_dim,
        dtype=packet["dtype"],
        next_position=packet["next_position"],
        device=device,
    )
    return Packet(
        kv=kv,
        layers=tuple(packet["layers"]),
        context_len=packet["context_len"],
        ids=tuple(packet["ids"]),
        cut_tokens=packet["cut_tokens"],
        preset=packet["preset"],
        origin=origin,
    )


def _read_safetensors(data: bytes, where: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Tensors {name: {dtype, shape, data}} and metadata; the library checks lengths and offsets."""
    try:
        tensors = dict(safetensors.deserialize(data))
        n_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + n_bytes])
    except (safetensors.SafetensorError, UnicodeDecodeError, ValueError) as error:
        raise FormatError(f"{where} is not a whole safetensors file: {error}") from None
    return tensors, header.get("__metadata__", {})
