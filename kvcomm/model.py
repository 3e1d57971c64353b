"""A model: found by path or name, checked, and loaded onto a device.

Owns: what a name means (folder, GGUF file, catalogue name, hub id), the order in which the core
reads the weights, and the plain facts about a model that the rest of the package asks for. Knows
no prompt and no packet.

Memory while loading is the model's own weights: the core reads a few rows of a file at a time.
The tokenizer is read meanwhile; its library and the core need different things of the machine.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcomm import _core, catalogue, convert
from kvcomm.checkpoint import Item, Plan, match
from kvcomm.config import Config, read_config
from kvcomm.errors import MismatchError, NumericError, UnsupportedError
from kvcomm.fields import AnyPath, check_pointer, shown
from kvcomm.fingerprint import Files, Fingerprint, of_weights
from kvcomm.tokenizer import Tokenizer
from kvcomm.weights import TYPES, bf16_from_f32, f32_from_bf16, open_weights

if TYPE_CHECKING:
    from tqdm import tqdm

_DTYPES = ("f32", "f16", "bf16")
#: Weight of the core -> its place among the matrices of a layer that are held together.
_GROUPS = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 2, "up": 2, "down": 3}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model"]
_HUB_LEFT_OUT = ["consolidated*", "original/*", "onnx/*"]

#: Bytes of tensors that the core reads in one call, during which Ctrl-C has to wait and the
#: tokenizer's library, which does not let go of the interpreter, has its time; and with a
#: progress bar.
_BATCH, _BAR_BATCH = 1 << 30, 1 << 26


class Model:
    """Weights on a device with their configuration and tokenizer; made by `Model.load`.

    May be shared by any number of threads. Close it, use it in a with statement, or let it go:
    its memory is freed when the last session or packet on it is gone too.

    Attributes
    ----------
    name : str
        What it was loaded as, for messages and tables.
    path : Path
        The folder that was read.
    config : Config
        What its config.json says.
    tokenizer : Tokenizer or None
        None when the folder has no tokenizer files: such a model takes ids only.
    kv_dtype : str
        Element type of the K and V that sessions of this model hold by default.
    unused : tuple of str
        Tensors of the files that were left out.
    memory : dict
        Bytes: "weights" held now, "files" read, "kv_per_token" of a session.
    """

    def __init__(
        self,
        core: _core.Model,
        config: Config,
        tokenizer: Tokenizer | None,
        *,
        name: str,
        path: Path,
        identity: Fingerprint,
        kv_dtype: str = "f32",
        file_bytes: int = 0,
        unused: tuple[str, ...] = (),
    ) -> None:
        self._core: _core.Model | None = core
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.path = path
        self.identity = identity
        self.vocabulary = Fingerprint(lambda: tokenizer.vocabulary_fingerprint if tokenizer else "")
        self.kv_dtype = kv_dtype
        self.unused = unused
        self.device = core.device
        self.dtype = core.dtype
        self.nbytes = core.nbytes
        self.memory = {
            "weights": core.nbytes,
            "files": file_bytes,
            "kv_per_token": 2
            * self.n_layers
            * self.n_kv_heads
            * self.head_dim
            * (4 if kv_dtype == "f32" else 2),
        }

    @classmethod
    def load(
        cls,
        path_or_name: AnyPath,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        kv_dtype: str = "f32",
        cache: AnyPath | None = None,
        progress: bool = False,
    ) -> "Model":
        """Load a model.

        Parameters
        ----------
        path_or_name
            A Hugging Face folder, a GGUF file, a name of the catalogue, or a hub id
            ("org/name"), tried in this order. A path is str, bytes or a path object.
        device
            "cpu", "cuda" or "guard".
        dtype
            What the matrices are held in: "f32", "f16", "bf16", "q8_0" (blocks of 32 with one
            scale), or "auto" for the stored type of each; those that are held together (q, k and
            v; gate and up) are in f32 when their types differ. Vectors are always f32.
        kv_dtype
            Default element type of K and V: "f32", "f16" or "bf16".
        cache
            Folder for downloaded and converted models; None for the default one.
        progress
            Show a progress bar.

        Raises
        ------
        OSError
            No such file, folder or name; a file that cannot be read; the hub out of reach.
        FormatError, UnsupportedError, MismatchError
            Files that are damaged, of a kind not handled, or that do not fit each other.
        NumericError
            A weight that is not finite; the message names it and its file.
        DeviceError
            The device is not there.
        """
        _check_choice("dtype", dtype, ("auto", *_DTYPES, "q8_0"))
        _check_choice("kv_dtype", kv_dtype, _DTYPES)
        folder, name = _find(path_or_name, cache, progress)
        config = read_config(folder)
        with open_weights(folder) as weights:
            plan = match(weights, config)
        files = Files(dict.fromkeys(item.tensor.file for item in plan.items))
        dtypes = _matrix_dtypes(plan, config, dtype)
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(_read_tokenizer, folder, config)
            core = _core.Model(_core_config(config, plan, dtypes[0]), device=device, dtype=dtypes)
            _fill(core, files, plan, name if progress else None)
            tokenizer = reading.result()
        files.check()
        core.seal()
        return cls(
            core,
            config,
            tokenizer,
            name=name,
            path=folder,
            identity=of_weights(files, config.core | {"tied_head": plan.tied}, plan.items),
            kv_dtype=kv_dtype,
            file_bytes=sum(item.tensor.nbytes for item in plan.items),
            unused=plan.unused,
        )

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._core is None:
            return f"Model({self.name!r}, closed)"
        return (
            f"Model({self.name!r}, {self.config.family}, {self.n_layers} layers,"
            f" {self.n_heads}/{self.n_kv_heads} heads of {self.head_dim},"
            f" vocabulary {self.vocab_size}, {self.dtype} on {self.device},"
            f" {self.nbytes / 1e6:.0f} MB)"
        )

    def close(self) -> None:
        """Let the weights go. Sessions and packets that are still in use keep what they need."""
        self._core = None

    @property
    def core(self) -> _core.Model:
        """The model of the compiled core; ValueError once closed."""
        if self._core is None:
            raise ValueError(f"model {self.name} is closed")
        return self._core

    @property
    def fingerprint(self) -> str:
        """64 hex digits that tell models apart: configuration and every weight.

        Taken when first asked for, from the files that were loaded, at about the speed of
        SHA-256; then kept.

        Raises
        ------
        OSError
            A file was changed since the model was loaded; the message names it.
        """
        return self.identity.value

    @property
    def max_position(self) -> int:
        """Number of positions that the model was made for."""
        return self.config.max_position

    @property
    def n_layers(self) -> int:
        return int(self.config.core["n_layers"])

    @property
    def n_heads(self) -> int:
        return int(self.config.core["n_heads"])

    @property
    def n_kv_heads(self) -> int:
        return int(self.config.core["n_kv_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.config.core["head_dim"])

    @property
    def vocab_size(self) -> int:
        """Rows of the head; may exceed the tokenizer's entries."""
        return int(self.config.core["vocab_size"])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the EOS ids of the files, else the tokenizer's."""
        if self.config.eos_ids is not None:
            return self.config.eos_ids
        return () if self.tokenizer is None else tuple(self.tokenizer.stop_ids)

    @property
    def config_stop_ids(self) -> tuple[int, ...]:
        """EOS ids of config.json alone; the published kvcomm and ac know no other."""
        raw = self.config.raw
        inner = raw.get("text_config") or {}
        stated = raw.get("eos_token_id", inner.get("eos_token_id"))
        return (stated,) if isinstance(stated, int) else tuple(stated or ())


def _check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{argument} is {value!r}, expected one of {', '.join(choices)}")


# ---- what a name means ---------------------------------------------------------------------


def _find(source: AnyPath, cache: AnyPath | None, progress: bool) -> tuple[Path, str]:
    """The folder to read, and the model's name."""
    if not isinstance(source, str | bytes | os.PathLike):
        raise TypeError(f"path_or_name is {type(source).__name__}, expected str, bytes or a path")
    text = os.fsdecode(source)
    if not text or "\0" in text:
        raise ValueError(f"path_or_name is {text!r}, expected a path or a name")
    path = Path(text)
    if path.is_dir():
        return path, shown(path.resolve().name)
    if path.is_file():
        _check_gguf(path)
        return convert.prepared(path, cache), shown(path.stem)
    if isinstance(source, str) and text in catalogue.CATALOGUE:
        return catalogue.prepared(text, cache, _report if progress else None), text
    if isinstance(source, str) and _HUB_ID.fullmatch(text):
        return _from_hub(text, cache), text
    raise FileNotFoundError(
        f"{shown(path)}: no such folder or file; models by name: {', '.join(catalogue.CATALOGUE)}"
    )


def _check_gguf(path: Path) -> None:
    check_pointer(path)
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UnsupportedError(
            f"{shown(path)}: neither a model folder nor a GGUF file (starts with {magic!r})"
        )


def _report(what: str, _done: int, _total: int) -> None:
    print(what, file=sys.stderr)


def _from_hub(name: str, cache: AnyPath | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_LEFT_OUT,
            cache_dir=None if cache is None else os.path.join(os.fsdecode(cache), "hub"),
            etag_timeout=5,
        )
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OSError(
            f"{name}: no such folder or file, and not to be had from the hub: {reason}"
        ) from error
    return Path(folder)


# ---- loading -------------------------------------------------------------------------------


def _read_tokenizer(folder: Path, config: Config) -> Tokenizer | None:
    if not any(os.path.lexists(folder / name) for name in ("tokenizer.json", "tokenizer.model")):
        return None
    tokenizer = Tokenizer.load(folder)
    try:
        tokenizer.fits(config.core["vocab_size"])
    except MismatchError as error:
        raise MismatchError(f"{shown(folder)}: {error}") from None
    return tokenizer


def _matrix_dtypes(plan: Plan, config: Config, dtype: str) -> list[str]:
    """Types of embed, head and each layer's groups of matrices; as stored for "auto". f32 holds
    every other, so it is for a group that has several."""
    stored: list[set[str]] = [set() for _ in range(2 + 4 * int(config.core["n_layers"]))]
    for item in plan.items:
        if item.weight in ("embed", "head"):
            stored[item.weight == "head"].add(TYPES[item.tensor.dtype])
        elif item.weight in _GROUPS:
            place = 2 + 4 * item.layer + _GROUPS[item.weight]
            stored[place].add(TYPES[item.tensor.dtype])
    if plan.tied:
        stored[1] = stored[0]
    if dtype != "auto":
        return [dtype] * len(stored)
    return [min(kinds) if len(kinds) == 1 else "f32" for kinds in stored]


def _core_config(config: Config, plan: Plan, dtype: str) -> dict[str, Any]:
    """The configuration for the core, with the head that was found. The embedding scale is
    rounded to the embedding's type, as the models that have one were trained and are run."""
    scale = np.float32(config.core["embed_scale"])
    rounded = {
        "f32": scale,
        "f16": np.float16(scale),
        "bf16": f32_from_bf16(bf16_from_f32(np.array(scale)))[()],
    }
    core = config.core | {"tied_head": plan.tied, "embed_scale": float(rounded.get(dtype, scale))}
    if not core["window"]:
        del core["windowed"]
    return core


def _fill(core: _core.Model, files: Files, plan: Plan, name: str | None) -> None:
    """Have the core read every tensor; a name is shown with a progress bar."""
    with _bar(plan, name) if name else nullcontext() as bar:
        for batch in _batches(plan.items, _BAR_BATCH if bar else _BATCH):
            file = batch[0].tensor.file
            try:
                core.read(files.descriptor(file), [_entry(item) for item in batch])
            except (NumericError, OSError) as error:
                files.check()
                raise type(error)(f"{shown(file)}: {error}") from None
            if bar:
                bar.update(sum(item.tensor.nbytes for item in batch))


def _bar(plan: Plan, name: str) -> "tqdm":
    from tqdm import tqdm

    n_bytes = sum(item.tensor.nbytes for item in plan.items)
    return tqdm(total=n_bytes, desc=name, unit="B", unit_scale=True)


def _batches(items: Sequence[Item], n_bytes: int) -> Iterator[list[Item]]:
    """Runs of items of one file, of n_bytes or one tensor at most."""
    batch: list[Item] = []
    room = 0
    for item in items:
        if batch and (item.tensor.file != batch[0].tensor.file or item.tensor.nbytes > room):
            yield batch
            batch = []
        room = (room if batch else n_bytes) - item.tensor.nbytes
        batch.append(item)
    if batch:
        yield batch


def _entry(item: Item) -> tuple[str, str, int, Any, int, int, int]:
    """What the core has to know of a tensor in a file."""
    tensor = item.tensor
    rows, columns = (1, *tensor.shape)[-2:]
    dtype = TYPES[tensor.dtype]
    return tensor.name, item.weight, item.layer, dtype, tensor.begin, rows, columns
