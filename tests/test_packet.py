"""Packets: what is held, selecting, views, the file and everything that may be wrong with it."""

import json
import os
import struct
import threading
from pathlib import Path

import numpy as np
import oracle
import pytest

import kvcomm
from kvcomm import _core
from kvcomm.errors import FormatError, MismatchError
from kvcomm.packet import VERSION, Origin, Packet, layer_set

CONTEXT = [5, 9, 31, 77, 200, 14]
QUESTION = [10, 20, 30]


@pytest.fixture(scope="module")
def model(tiny, device):
    return kvcomm.Model.load(tiny("llama"), device=device)


@pytest.fixture(scope="module")
def packet(model):
    return kvcomm.Sender(model).read(CONTEXT)


# ---- what is held ----


def test_keys_and_values_are_the_oracles(tiny, packet):
    run = oracle.read_folder(tiny("llama")).run(CONTEXT)
    for layer in range(4):
        np.testing.assert_allclose(packet.keys(layer), run.keys[layer], atol=2e-5)
        np.testing.assert_allclose(packet.values(layer), run.values[layer], atol=2e-5)


def test_views_are_read_only_and_share_memory(packet, device):
    if device == "cuda":
        pytest.skip("views without a copy need memory that the host can address")
    keys = packet.keys(2)
    assert keys.shape == (2, 6, 16) and keys.dtype == np.float32
    assert not keys.flags.writeable
    assert keys.__array_interface__["data"] == packet.keys(2).__array_interface__["data"]
    with pytest.raises(ValueError, match="read-only"):
        keys[0, 0, 0] = 1.0


def test_view_outlives_its_packet(model):
    keys = kvcomm.Sender(model).read(CONTEXT).keys(1)
    assert np.isfinite(np.array(keys)).all()


def test_fields(model, packet):
    assert packet.layers == (0, 1, 2, 3)
    assert (packet.n_layers, packet.context_len, packet.cut_tokens) == (4, 6, 0)
    assert packet.ids == tuple(CONTEXT)
    assert packet.preset == "paper"
    assert packet.fingerprint == model.fingerprint
    assert packet.nbytes == 4 * 2 * 2 * 6 * 16 * 4  # layers, K and V, heads, tokens, size, bytes
    assert "kv=" not in repr(packet)


def test_select_in_paper_holds_nothing_else(packet):
    chosen = packet.select([3, 1])
    assert chosen.layers == (1, 3)
    assert chosen.kv.lengths == [0, 6, 0, 6]
    assert chosen.nbytes == packet.nbytes // 2
    assert chosen.keys(0).shape == (2, 0, 16)
    np.testing.assert_array_equal(chosen.keys(3), packet.keys(3))
    assert packet.kv.lengths == [6, 6, 6, 6]


def test_select_in_reference_keeps_layer_0_and_sinks(model):
    packet = kvcomm.Sender(model).read(CONTEXT, preset="reference")
    chosen = packet.select([2])
    assert chosen.layers == (2,)
    assert chosen.whole_layers == (0, 2)
    assert chosen.kv.lengths == [6, 1, 6, 1]
    assert chosen.nbytes == (6 + 1 + 6 + 1) * 2 * 2 * 16 * 4
    np.testing.assert_array_equal(chosen.keys(1), packet.keys(1)[:, :1])
    assert chosen.select([0]).kv.lengths == [6, 1, 1, 1]  # layer 0 is there without being chosen


def test_select_what_is_not_held(packet):
    with pytest.raises(ValueError, match=r"layers: 2 is not in the packet, which has \(1, 3\)"):
        packet.select([1, 3]).select([2])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([3, 1], (1, 3)),
        ([1, 1, 3], (1, 3)),
        ([], ()),
        (np.array([1, 3]), (1, 3)),
        ({1, 3}, (1, 3)),
        ((np.int64(2),), (2,)),
    ],
)
def test_layer_sets(layers, expected):
    assert layer_set(layers, 4) == expected


@pytest.mark.parametrize("layers", [[-1], [4], np.array([0, 9])])
def test_layers_out_of_range(packet, layers):
    with pytest.raises(ValueError, match=r"outside 0 \.\. 3"):
        packet.select(layers)


@pytest.mark.parametrize("layers", [True, [True], [1.0], "1", ["1"], 3])
def test_layers_of_another_kind(packet, layers):
    with pytest.raises(TypeError, match="layers: expected"):
        packet.select(layers)


def test_windowed_layers_are_trimmed(tiny, device):
    model = kvcomm.Model.load(tiny("gemma3"), device=device)  # window 8, layer 5 sees all
    sender, ids = kvcomm.Sender(model), list(range(20, 40))
    assert sender.read(ids).kv.lengths == [7, 7, 7, 7, 7, 20, 7]
    assert sender.read(ids, [1, 5]).kv.lengths == [0, 7, 0, 0, 0, 20, 0]
    assert sender.read(ids, trim=False).kv.lengths == [20] * 7
    assert sender.read(ids[:7]).kv.lengths == [7] * 7
    # Preset reference sends what the published code sends.
    assert sender.read(ids, [1], preset="reference").kv.lengths == [20, 20, 1, 1, 1, 1, 1]
    sink = sender.read(ids, preset="reference").select([1]).keys(3)
    np.testing.assert_array_equal(sink, sender.read(ids[:1]).keys(3))


# ---- the file ----


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_file_and_bytes_give_the_same_packet(tiny, device, tmp_path, kv_dtype, preset):
    model = kvcomm.Model.load(tiny("llama"), device=device, kv_dtype=kv_dtype)
    packet = kvcomm.Sender(model).read(CONTEXT, [1, 2], preset=preset)
    packet.save(tmp_path / "packet")
    loaded = Packet.load(tmp_path / "packet", device=device)
    for again in (loaded, Packet.from_bytes(packet.to_bytes(), device=device)):
        assert again.kv.lengths == packet.kv.lengths
        assert again.kv.dtype == kv_dtype
        assert again.kv.next_position == 6
        for name in ("layers", "context_len", "ids", "cut_tokens", "preset", "origin", "nbytes"):
            assert getattr(again, name) == getattr(packet, name)
        for layer in range(4):
            np.testing.assert_array_equal(again.keys(layer), packet.keys(layer))
            np.testing.assert_array_equal(again.values(layer), packet.values(layer))
    receiver = kvcomm.Receiver(model)
    assert receiver.logits(QUESTION, loaded).tolist() == receiver.logits(QUESTION, packet).tolist()


def test_packet_of_no_layers(model, tmp_path):
    packet = kvcomm.Sender(model).read(CONTEXT, [])
    packet.save(tmp_path / "empty")
    again = Packet.load(tmp_path / "empty", device=model.device)
    assert (again.layers, again.nbytes, again.kv.next_position) == ((), 0, 6)


def test_a_packet_knows_its_model(tiny, device, tmp_path, model, packet):
    """KV-093: as a model's own only where it is; as a foreign sender's where it fits."""
    path = tmp_path / "packet"
    packet.save(path)
    moved = kvcomm.Model.load(tiny("llama", shards=2), device=device)  # other files, same weights
    assert Packet.load(path, model=moved, device=device).fingerprint == model.fingerprint
    other = kvcomm.Model.load(tiny("llama", seed=1), device=device)
    with pytest.raises(MismatchError, match="was made by"):
        Packet.load(path, model=other)
    rope = kvcomm.Model.load(tiny("llama", rope_theta=500000.0), device=device)
    with pytest.raises(MismatchError, match="was made by"):
        Packet.load(path, model=rope)
    loaded = Packet.load(path, device=device)
    assert kvcomm.Receiver(other).answer(QUESTION, loaded, 2).ids  # a fine-tune may use it
    with pytest.raises(MismatchError, match=r"rope in sender layer 0 .*10000.* against .*500000"):
        kvcomm.Receiver(rope).answer(QUESTION, loaded, 2)


def _with_metadata(data: bytes, **changes: str) -> bytes:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@pytest.mark.parametrize("version", ["0", str(VERSION + 1), "text"])
def test_other_versions_are_refused(packet, version):
    data = _with_metadata(packet.to_bytes(), version=version)
    with pytest.raises(FormatError, match=f"version is {version}, expected {VERSION}"):
        Packet.from_bytes(data)


def test_other_files_are_refused(tiny, packet, tmp_path):
    with pytest.raises(FormatError, match=r"format is 'pt', expected 'kvcomm\.packet'"):
        Packet.load(tiny("llama") / "model.safetensors")
    junk = np.random.default_rng(0).bytes(1000)
    for data in (b"", junk, junk[:5], b"version https://git-lfs", b"{}"):
        (tmp_path / "junk").write_bytes(data)
        with pytest.raises(FormatError, match="is not a whole safetensors file"):
            Packet.load(tmp_path / "junk")
    with pytest.raises(FileNotFoundError):
        Packet.load(tmp_path / "absent")


def test_truncation_is_detected(packet):
    data = packet.to_bytes()
    for tenth in range(10):
        with pytest.raises(FormatError):
            Packet.from_bytes(data[: len(data) * tenth // 10])
    with pytest.raises(FormatError):
        Packet.from_bytes(data[:-1])
    with pytest.raises(FormatError):
        Packet.from_bytes(data + b"\0")


def test_every_flipped_byte_is_detected(model):
    """A byte of the header, its spaces apart, or of the payload: none goes unnoticed."""
    data = kvcomm.Sender(model).read(CONTEXT[:2], [1]).to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    blanks = {8 + n for n, byte in enumerate(data[8 : 8 + length]) if byte == ord(" ")}
    accepted = []
    for place in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[place] ^= 0x01
        try:
            Packet.from_bytes(bytes(flipped))
        except FormatError:
            continue
        accepted.append(place)
    assert set(accepted) <= blanks


def test_payload_of_the_other_byte_order_is_detected(packet):
    """KV-097: a file is little-endian; swapped values do not match their digest."""
    data = packet.to_bytes()
    (length,) = struct.unpack_from("<Q", data)
    payload = np.frombuffer(data[8 + length :], "<f4").astype(">f4").tobytes()
    with pytest.raises(FormatError, match=r"tensor layers\.\S+ does not match its digest"):
        Packet.from_bytes(data[: 8 + length] + payload)


def test_big_endian_ids_are_read_by_value(model, packet):
    swapped = kvcomm.Sender(model).read(np.array(CONTEXT, ">i8"))
    assert swapped.ids == packet.ids
    np.testing.assert_array_equal(swapped.keys(3), packet.keys(3))


def test_saving_replaces_in_one_step(packet, tmp_path, monkeypatch):
    """EV-180: whatever fails, the old file stands and nothing is left beside it."""
    path = tmp_path / "packet"
    path.write_bytes(b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        packet.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["packet"]
    packet.save(path)
    assert Packet.load(path).ids == packet.ids
    with pytest.raises(FileNotFoundError) as caught:
        packet.save(tmp_path / "absent" / "packet")
    assert caught.value.filename == str(tmp_path / "absent" / "packet")


def test_two_writers_leave_one_whole_file(packet, tmp_path):
    path = tmp_path / "packet"
    threads = [threading.Thread(target=packet.save, args=(path,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(Packet.load(path).keys(3), packet.keys(3))
    assert [p.name for p in tmp_path.iterdir()] == ["packet"]


def test_path_of_any_kind(packet, tmp_path: Path):
    for name in (tmp_path / "a", str(tmp_path / "b"), os.fsencode(tmp_path / "modèle 模型")):
        packet.save(name)
        assert Packet.load(name).ids == packet.ids


# ---- origins ----


def test_origin_spells_out_what_places_keys(tiny, device):
    origin = Origin.of(kvcomm.Model.load(tiny("gemma3"), device=device))
    assert origin.rope[0] == "default theta=10000.0 rotary_dim=16"
    assert origin.rope[5] == "linear theta=1000000.0 rotary_dim=16 factor=8.0"
    assert origin.window == 8
    assert origin.windowed == (True, True, True, True, True, False, True)
    assert (origin.n_layers, origin.n_kv_heads, origin.head_dim, origin.vocab_size) == (
        7,
        2,
        16,
        320,
    )


def test_kv_of_arrays_of_the_other_byte_order():
    """KV-097: the core takes values, or refuses; it never reads swapped bytes."""
    values = np.arange(32, dtype=np.float32).reshape(1, 2, 16)
    swapped = values.astype(">f4")
    options = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 16, "dtype": "f32", "next_position": 2}
    try:
        kv = _core.KV.from_arrays({0: [(swapped, swapped, 0, 0)]}, **options)
    except (TypeError, ValueError):
        return
    np.testing.assert_array_equal(kv.parts(0)[0][0], values)
