"""The binding's messages: views, copies, selections, and dtypes that are read by value."""

import gc
from typing import Any

import numpy as np
import pytest
from core_model import HEAD_DIM, KV_HEADS, LAYERS, build, from_parts, logits, read

from kvcomm import _core
from kvcomm.errors import MismatchError, NumericError


@pytest.fixture(scope="module")
def model(device: str) -> _core.Model:
    return build(device)


def test_views_are_zero_copy_read_only_and_keep_the_kv(model: _core.Model) -> None:
    kv = read(model, [5, 6, 7])
    ((k, v, position, offset),) = kv.parts(1)
    assert k.shape == v.shape == (KV_HEADS, 3, HEAD_DIM)
    assert k.dtype == np.float32
    assert (position, offset) == (0, 0)
    again = kv.parts(1)[0][0]
    assert np.shares_memory(k, again)
    assert np.shares_memory(k, kv.select([1]).parts(1)[0][0])
    for array in (k, v):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    before = k.copy()
    del kv, again
    gc.collect()
    [read(model, [9, 9, 9]) for _ in range(20)]  # would reuse the memory if it were free
    np.testing.assert_array_equal(k, before)


def test_arrays_round_trip(model: _core.Model, device: str) -> None:
    kv = read(model, [5, 6, 7, 8])
    layers = {layer: kv.parts(layer) for layer in (0, 2)}
    made = _core.KV.from_arrays(
        layers,
        n_layers=LAYERS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="f32",
        next_position=4,
        device=device,
    )
    assert made.lengths == [4, 0, 4, 0]
    assert (made.n_layers, made.n_kv_heads, made.head_dim) == (LAYERS, KV_HEADS, HEAD_DIM)
    assert (made.dtype, made.device, made.next_position) == ("f32", device, 4)
    assert made.nbytes == 2 * 2 * 4 * KV_HEADS * HEAD_DIM * 4
    for ours, theirs in zip(made.parts(2)[0][:2], kv.parts(2)[0][:2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.shares_memory(made.parts(2)[0][0], kv.parts(2)[0][0])
    np.testing.assert_array_equal(
        logits(model, [1, 2], made), logits(model, [1, 2], kv.select([0, 2]))
    )


def test_arrays_of_any_order_and_endianness(device: str) -> None:
    k = np.arange(KV_HEADS * 3 * HEAD_DIM, dtype=np.float32).reshape(KV_HEADS, 3, HEAD_DIM)
    raw = np.frombuffer(b"x" + k.tobytes(), np.float32, k.size, 1).reshape(k.shape)
    for name, array in {
        "big-endian": k.astype(">f4"),
        "transposed": np.ascontiguousarray(k.transpose(2, 1, 0)).transpose(2, 1, 0),
        "misaligned": raw,
    }.items():
        kv = from_parts(device, [(array, array[:, ::-1], 2, 5)])
        found, reverse, position, offset = kv.parts(0)[0]
        np.testing.assert_array_equal(found, k, name)
        np.testing.assert_array_equal(reverse, k[:, ::-1], name)
        assert (position, offset) == (2, 5)
    half = from_parts(device, [(k.astype(">f2"), k.astype("<f2"), 0, 0)], "f16").parts(0)[0]
    np.testing.assert_array_equal(half[0], half[1])
    assert half[0].dtype == np.float16


GOOD_PART = np.zeros((KV_HEADS, 3, HEAD_DIM), np.float32)


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ((GOOD_PART[:1], GOOD_PART, 0, 0), ValueError, r"k of layer 0, part 0 is \[1, 3, 8\]"),
        ((GOOD_PART, GOOD_PART[:, :2], 0, 0), ValueError, r"v of layer 0, part 0 is \[2, 2, 8\]"),
        ((GOOD_PART, GOOD_PART.astype("f8"), 0, 0), TypeError, "v of .* float64, expected float32"),
        ((GOOD_PART[0], GOOD_PART, 0, 0), ValueError, "k of .* has 2 dimensions, expected 3"),
        ((GOOD_PART, GOOD_PART, 0), ValueError, "a part has 3 entries, expected 4"),
        ((GOOD_PART, GOOD_PART, 0.5, 0), TypeError, "integer"),
        (7, TypeError, "a part must be a sequence, not int"),
    ],
)
def test_bad_parts(device: str, part: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        from_parts(device, [part])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_parts_that_are_not_finite(device: str, dtype: str, value: float, which: int) -> None:
    parts = [GOOD_PART.copy(), GOOD_PART.copy()]
    parts[0][...] = parts[1][...] = 65504  # the largest of f16 is a number

    def made() -> _core.KV:
        stored = [part.astype("f2") if dtype == "f16" else part for part in parts]
        if dtype == "bf16":
            stored = [(part.view(np.uint32) >> 16).astype(np.uint16) for part in parts]
        return from_parts(device, [(*stored, 0, 0)], dtype)

    assert made().lengths[0] == 3
    parts[which][-1, -1, -1] = value
    with pytest.raises(NumericError, match="layer 0: keys or values that are not finite"):
        made()


def test_bad_layers_of_arrays(device: str) -> None:
    with pytest.raises(ValueError, match="4"):
        from_parts(device, [], layer=4)
    with pytest.raises(TypeError, match="not str"):
        from_parts(device, [], layer="0")
    with pytest.raises(ValueError, match='dtype must be one of f32, f16, bf16, not "f64"'):
        from_parts(device, [], dtype="f64")
    with pytest.raises(TypeError, match="cannot create"):
        _core.KV()


@pytest.mark.parametrize("layers", [[3, 1], [1, 1, 3], np.array([1, 3]), {1, 3}, (3, 1, 3)])
def test_layer_lists_are_sets(model: _core.Model, layers: Any) -> None:
    kv = read(model, [5, 6])
    assert kv.select(layers).lengths == [0, 2, 0, 2]
    np.testing.assert_array_equal(
        logits(model, [1], kv.select(layers)), logits(model, [1], kv.select([1, 3]))
    )


def test_layer_lists_are_checked(model: _core.Model) -> None:
    kv = read(model, [5, 6])
    assert kv.select([]).lengths == [0] * LAYERS
    assert kv.select([2], sink=True).lengths == [1, 1, 2, 1]
    for bad in ([-1], [LAYERS], [0, 2**70]):
        with pytest.raises(ValueError, match=r"layers must be in 0 \.\. 3, not"):
            kv.select(bad)
    mask = np.array([True, False, True, False])
    for wrong in (True, [True], mask, [1.0], "13", 1, None):
        with pytest.raises(TypeError, match="layers must be"):
            kv.select(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer must be in"):
        kv.parts(LAYERS)


def test_concat_and_trim(model: _core.Model) -> None:
    a, b = read(model, [1, 2, 3]), read(model, [4, 5])
    joined = _core.KV.concat([a, b], sequential=True, whole=[0, 1])
    assert joined.lengths == [5, 5, 3, 3]
    assert joined.next_position == 5
    assert [part[2:] for part in joined.parts(0)] == [(0, 0), (0, 3)]
    trimmed = joined.trim([True, False, False, False], 4)
    assert trimmed.lengths == [3, 5, 3, 3]
    with pytest.raises(TypeError, match="an entry of kvs must be a KV, not int"):
        _core.KV.concat([a, 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no KV"):
        _core.KV.concat([])
    with pytest.raises(ValueError, match="windowed has 1 entries, expected 4"):
        a.trim([True], 4)


def test_layer_map(model: _core.Model) -> None:
    kv = read(model, [1, 2, 3])
    session = _core.Session(model)
    with pytest.raises(ValueError, match="layer_map has 2 entries, the KV has 4 layers"):
        session.give(kv, [0, 1])
    with pytest.raises(ValueError, match="receiver layer 4 at place 3"):
        session.give(kv, [0, 1, 2, 4])
    with pytest.raises(MismatchError, match="2"):
        session.give(kv, [0, 1, 2, 2])
    session.give(kv.select([0, 1]), np.array([3, 2, 1, 0]))
    assert session.given == [0, 0, 3, 3]


# ---- dtypes by value ----


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_16_bit_message_is_read_by_value(model: _core.Model, device: str, dtype: Any) -> None:
    kv = read(model, [5, 6, 7], kv_dtype=dtype)
    assert kv.dtype == dtype

    def widen(array: np.ndarray) -> np.ndarray:
        if dtype == "f16":
            return array.astype(np.float32)
        return (array.astype(np.uint32) << 16).view(np.float32)

    wide = _core.KV.from_arrays(
        {
            layer: [(widen(k), widen(v), at, offset) for k, v, at, offset in kv.parts(layer)]
            for layer in range(LAYERS)
        },
        n_layers=LAYERS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="f32",
        next_position=3,
        device=device,
    )
    np.testing.assert_allclose(
        wide.parts(0)[0][0], read(model, [5, 6, 7]).parts(0)[0][0], rtol=0.01
    )
    np.testing.assert_allclose(
        logits(model, [1, 2], kv), logits(model, [1, 2], wide), rtol=1e-5, atol=1e-5
    )


def test_keys_above_the_range_of_f16_are_refused_there_only(device: str) -> None:
    large = build(device, k_bias=1e5)
    for dtype in ("f32", "bf16"):
        assert np.isfinite(read(large, [1, 2], kv_dtype=dtype).parts(0)[0][0].astype("f4")).all()
    session = _core.Session(large, kv_dtype="f16")
    with pytest.raises(NumericError):
        _core.Workspace(large).forward([session], [[1, 2]])
    assert session.lengths == [0] * LAYERS
