"""The fingerprint of a model: what it depends on, when it is taken, and files that change."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import build, write_folder, write_model

import kvcomm
from kvcomm import model as loading
from kvcomm.fingerprint import Files, Fingerprint
from kvcomm.model import Model

IDS = [5, 9, 31, 77]

#: Names of the core for the endings of tensor names in a folder of the llama family.
WEIGHTS = {
    "embed_tokens.weight": "embed", "lm_head.weight": "head", "model.norm.weight": "final_norm",
    "input_layernorm.weight": "attn_norm", "post_attention_layernorm.weight": "mlp_norm",
    "q_proj.weight": "q", "k_proj.weight": "k", "v_proj.weight": "v", "o_proj.weight": "o",
    "gate_proj.weight": "gate", "up_proj.weight": "up", "down_proj.weight": "down",
}  # fmt: skip


def test_value(tmp_path: Path, device: str) -> None:
    """SHA-256 over the configuration and the digests of the tensors as stored, by hand."""
    config, weights = build("llama")
    model = Model.load(write_folder(tmp_path, config, weights), device=device)
    rows = []
    for name, values in weights.items():
        (weight,) = [short for ending, short in WEIGHTS.items() if name.endswith(ending)]
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        digest = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
        rows.append([weight, layer, "F32", digest])
    core = model.config.core | {"tied_head": False}
    text = json.dumps([core, sorted(rows)], sort_keys=True, separators=(",", ":"))
    assert model.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_what_it_depends_on(tmp_path: Path, device: str) -> None:  # KV-093
    def fingerprint(name: str, **options: Any) -> str:
        folder = write_model(tmp_path / name, "llama", **options)
        return Model.load(folder, device=device).fingerprint

    base = fingerprint("base")
    assert len(base) == 64
    assert fingerprint("again") == base
    assert fingerprint("eos", eos_token_id=5) == base
    others = {
        fingerprint("seed", seed=2),
        fingerprint("theta", rope_theta=20000.0),
        fingerprint("eps", rms_norm_eps=1e-5),
        fingerprint("bf16", dtype="bf16"),
    }
    config, weights = build("llama")
    weights["model.layers.3.mlp.down_proj.weight"][5, 7] = np.nextafter(
        weights["model.layers.3.mlp.down_proj.weight"][5, 7], np.float32(9)
    )
    one_bit = write_folder(tmp_path / "bit", config, weights)
    others.add(Model.load(one_bit, device=device).fingerprint)
    assert len(others | {base}) == 6
    wide = Model.load(tmp_path / "bf16", device=device, dtype="f32")
    assert wide.fingerprint == Model.load(tmp_path / "bf16", device=device).fingerprint


def test_taken_when_asked_for_and_once(
    tiny: Callable[..., Path], device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model answers from a message without it; a message that is saved needs it."""
    asked: list[str] = []
    digest = Files.digest

    def counted(self: Files, tensor: Any) -> str:
        asked.append(tensor.name)
        return digest(self, tensor)

    monkeypatch.setattr(Files, "digest", counted)
    model = Model.load(tiny("llama"), device=device)
    packet = kvcomm.Sender(model).read(IDS, [1, 2])
    assert kvcomm.Receiver(model).answer(IDS, packet, 2).ids
    assert packet.select([1]).origin == packet.origin
    assert not asked
    packet.save(tmp_path / "packet")
    tensors = len(asked)
    assert tensors == len(set(asked)) == len(build("llama")[1])
    assert packet.fingerprint == model.fingerprint
    assert len(asked) == tensors


def test_a_folder_that_is_replaced_or_deleted(tmp_path: Path, device: str) -> None:
    """What was loaded counts, not what stands in its place later; nor does close matter."""
    folder = write_model(tmp_path / "model", "llama")
    known = Model.load(folder, device=device).fingerprint
    replaced, deleted = (Model.load(folder, device=device) for _ in range(2))
    other = write_model(tmp_path / "other", "llama", seed=2)
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    assert replaced.fingerprint == known
    assert Model.load(folder, device=device).fingerprint != known
    shutil.rmtree(folder)
    deleted.close()
    assert deleted.fingerprint == known


@pytest.mark.parametrize("how", ["written", "longer", "shorter"])
def test_a_file_that_is_written_to(tmp_path: Path, device: str, how: str) -> None:
    folder = write_model(tmp_path, "llama")
    file = folder / "model.safetensors"
    model = Model.load(folder, device=device)
    packet = kvcomm.Sender(model).read(IDS)
    before = file.stat()
    with open(file, "r+b") as changed:
        if how == "shorter":
            changed.truncate(before.st_size - 1)
        else:
            changed.seek(-1 if how == "written" else 0, os.SEEK_END)
            changed.write(b"\x01")
    later = before.st_mtime_ns + (10**9 if how == "written" else 0)
    os.utime(file, ns=(later, later))
    for ask in (lambda: model.fingerprint, packet.to_bytes):
        with pytest.raises(OSError, match=r"model\.safetensors: changed since it was opened"):
            ask()
    assert kvcomm.Receiver(model).answer(IDS, packet, 2).ids  # it needs none


def test_a_file_that_is_cut_while_it_is_read(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "llama", shards=2)
    file = sorted(folder.glob("*.safetensors"))[1]
    fill = loading._fill

    def cut(*arguments: Any) -> None:
        os.truncate(file, file.stat().st_size // 2)
        fill(*arguments)

    monkeypatch.setattr(loading, "_fill", cut)
    with pytest.raises(OSError, match=rf"{file.name}: changed since it was opened"):
        Model.load(folder, device=device)


def test_equality_asks_only_where_it_must() -> None:
    def never() -> str:
        raise AssertionError("not needed")

    lazy = Fingerprint(never)
    assert lazy == lazy and repr(lazy) == "Fingerprint(not taken)"
    assert Fingerprint.known("a" * 64) == Fingerprint(lambda: "a" * 64)
    assert Fingerprint.known("a" * 64) != Fingerprint.known("b" * 64)
    assert len({Fingerprint.known("a"), Fingerprint.known("a"), Fingerprint.known("b")}) == 2


def test_a_fault_is_not_kept() -> None:
    answers = iter([OSError("busy"), "a" * 64])

    def take() -> str:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    fingerprint = Fingerprint(take)
    with pytest.raises(OSError, match="busy"):
        _ = fingerprint.value
    assert fingerprint.value == "a" * 64
