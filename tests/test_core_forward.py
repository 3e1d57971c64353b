"""The binding's forward call: ids and hidden states in, one batch, arrays out; what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_model import DIM, HEADS, LAYERS, VOCAB, build, logits, read

from kvcomm import _core
from kvcomm.errors import MismatchError


@pytest.fixture(scope="module")
def model(device: str) -> _core.Model:
    return build(device)


# ---- ids ----


class ArrayOnly:
    """Another library's tensor, as NumPy sees it."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([5, 6, 7])


class DLPackOnly:
    """One that NumPy does not see as an array."""

    def __init__(self) -> None:
        self.array = np.array([5, 6, 7])

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


INTEGERS = ["i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", "<i8", ">i8", "<u8", ">u8"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype_gives_the_same(model: _core.Model, dtype: str) -> None:
    np.testing.assert_array_equal(
        logits(model, np.array([5, 6, 7], dtype)), logits(model, [5, 6, 7])
    )


@pytest.mark.parametrize(
    "ids", [(5, 6, 7), [np.int64(5), np.uint8(6), 7], ArrayOnly(), DLPackOnly(), range(5, 8)]
)
def test_sequences_and_foreign_arrays_give_the_same(model: _core.Model, ids: Any) -> None:
    np.testing.assert_array_equal(logits(model, ids), logits(model, [5, 6, 7]))


def test_views_equal_their_copies(model: _core.Model, tmp_path: Path) -> None:
    base = np.arange(20)
    raw = b"x" + np.arange(6, dtype=np.int64).tobytes()
    frozen = np.arange(4)
    frozen.flags.writeable = False
    np.arange(9, dtype=np.int32).tofile(tmp_path / "ids")
    views = {
        "strided": base[::2],
        "reversed": base[::-1],
        "column": base.reshape(5, 4)[:, 1],
        "broadcast": np.broadcast_to(np.int64(3), 5),
        "memory map": np.memmap(tmp_path / "ids", np.int32, "r"),
        "read-only": frozen,
        "misaligned": np.frombuffer(raw, np.int64, 6, 1),
    }
    for name, view in views.items():
        copy = np.array(view)
        np.testing.assert_array_equal(logits(model, view), logits(model, copy.tolist()), name)
        np.testing.assert_array_equal(view, copy, name)


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5.0, 6.0], np.float32),
        [5.5],
        np.array([True, False]),
        [True],
        np.array([5, 6], object),
        ["5"],
        "567",
        None,
        [None],
        5,
        np.array([5 + 0j]),
    ],
)
def test_what_is_no_integer_is_a_type_error(model: _core.Model, ids: Any) -> None:
    session = _core.Session(model)
    with pytest.raises((TypeError, ValueError)) as caught:
        _core.Workspace(model).forward([session], [ids])
    if not (isinstance(ids, int) and not isinstance(ids, bool)):  # 5 has no dimension
        assert caught.type is TypeError
    assert "row 0" in str(caught.value)
    assert session.lengths == [0] * LAYERS


@pytest.mark.parametrize(
    ("ids", "place", "value"),
    [
        ([-1], 0, -1),
        ([VOCAB], 0, VOCAB),
        ([2**31 - 1], 0, 2**31 - 1),
        ([0, VOCAB - 1, VOCAB], 2, VOCAB),
        ([3, -100], 1, -100),
        ([2**32 + 5], 0, 2**32 + 5),
        (np.array([1, 2**64 - 1], np.uint64), 1, 2**64 - 1),
    ],
)
def test_ids_out_of_range_name_row_place_and_value(
    model: _core.Model, ids: Any, place: int, value: int
) -> None:
    first, second = _core.Session(model), _core.Session(model)
    workspace = _core.Workspace(model)
    with pytest.raises(
        ValueError, match=rf"row 1: id {value} at place {place} .*0 \.\. {VOCAB - 1}"
    ):
        workspace.forward([first, second], [[1], ids])
    assert first.lengths == second.lengths == [0] * LAYERS
    out, _ = workspace.forward([first], [[1, 2]], output="logits")  # still works
    assert out is not None
    np.testing.assert_array_equal(out[0], logits(model, [1, 2]))


def test_empty_input(model: _core.Model) -> None:
    workspace, session = _core.Workspace(model), _core.Session(model)
    for empty in ([], (), np.array([], np.int64), np.zeros((0, DIM), np.float32)):
        with pytest.raises(ValueError, match="row 0: no tokens"):
            workspace.forward([session], [empty])
    with pytest.raises(ValueError, match="row 1: no tokens"):
        workspace.forward([session, _core.Session(model)], [[5], []])
    out, mass = workspace.forward([], [], output="logits", mass="paper")
    assert out is not None
    assert out.shape == (0, VOCAB)
    assert mass is not None
    assert mass.shape == (0, LAYERS, HEADS)
    assert session.lengths == [0] * LAYERS


# ---- forward ----


def test_outputs_are_views_of_one_computation(model: _core.Model) -> None:
    ids, workspace = [3, 1, 4, 1, 5], _core.Workspace(model)

    def run(**options: Any) -> np.ndarray:
        out, _ = workspace.forward([_core.Session(model)], [ids], **options)
        assert out is not None
        return out

    every = run(output="logits", outputs="all")
    assert every.shape == (5, VOCAB)
    assert every.dtype == np.float32
    assert every.flags.c_contiguous
    assert every.flags.owndata
    np.testing.assert_array_equal(run(output="logits"), every[-1:])
    np.testing.assert_array_equal(run(output="logits", outputs=[[1, 3]]), every[[1, 3]])
    best = run(output="argmax", outputs="all")
    assert best.dtype == np.int32
    np.testing.assert_array_equal(best, every.argmax(-1))
    wide = every.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    expected = shifted[[0, 4], [7, 9]] - np.log(np.exp(shifted[[0, 4]]).sum(-1))
    found = run(output="logprob", outputs=[[0, 4]], targets=[[7, 9]])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layers_in_two_calls_equal_one(model: _core.Model) -> None:
    ids, workspace, session = [3, 1, 4], _core.Workspace(model), _core.Session(model)
    hidden, _ = workspace.forward([session], [ids], output="hidden", outputs="all", layers=(0, 2))
    assert hidden is not None
    assert hidden.shape == (3, DIM)
    assert session.lengths == [3, 3, 0, 0]
    strided = np.repeat(hidden, 2, axis=0)[::2].astype(">f4")
    out, _ = workspace.forward([session], [strided], output="logits", layers=(2, LAYERS))
    assert out is not None
    assert session.lengths == [3] * LAYERS
    np.testing.assert_array_equal(out[0], logits(model, ids))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"output": "probabilities"}, ValueError, "output must be one of none, hidden, normed, "),
        ({"output": "logits", "outputs": "first"}, ValueError, "outputs must be one of last, all"),
        ({"output": "logits", "outputs": [[3]]}, ValueError, "row 0: output 3 at place 0"),
        ({"output": "logits", "outputs": [[0], [0]]}, ValueError, "outputs has 2 entries, expec"),
        ({"output": "logprob"}, ValueError, "targets go with output"),
        ({"output": "logits", "targets": [[1]]}, ValueError, "targets go with output"),
        ({"output": "logprob", "targets": [[VOCAB]]}, ValueError, "row 0: target 320 at place 0"),
        ({"output": "logprob", "targets": [[1, 2]]}, ValueError, "row 0: 2 targets for 1 output"),
        ({"layers": (0, 5)}, ValueError, r"layers\[1\] must be in 0 .. 4, not 5"),
        ({"layers": (2, 2)}, ValueError, "layers"),
        ({"layers": (True, 2)}, TypeError, r"layers\[0\] must be an integer, not bool"),
        ({"layers": 3}, TypeError, "layers must be a sequence, not int"),
        ({"mass": "all"}, ValueError, "mass must be one of paper, published"),
        ({"mass": "paper", "mass_skip": -1}, ValueError, "mass_skip must not be negative"),
        ({"mass": "paper", "mass_skip": 2**63}, ValueError, r"mass_skip must be in 0 \.\. "),
        ({"layers": (2, 2)}, ValueError, r"layers 2 \.\. 2: the end must be above the beginning"),
        ({"slack": [[0, 0]]}, ValueError, "row 0: slack has 2 entries, expected 4"),
        ({"slack": [[0, 0, -1, 0]]}, ValueError, "row 0: slack -1 at place 2"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
def test_forward_refuses(
    model: _core.Model, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    session = _core.Session(model)
    with pytest.raises(kind, match=message):
        _core.Workspace(model).forward([session], [[1, 2, 3]], **options)
    assert session.lengths == [0] * LAYERS


def test_sessions_are_checked(model: _core.Model, device: str) -> None:
    workspace, session = _core.Workspace(model), _core.Session(model)
    with pytest.raises(ValueError, match="row 1: the session stands in row 0 already"):
        workspace.forward([session, session], [[1], [2]])
    with pytest.raises(ValueError, match="tokens has 2 entries, expected 1"):
        workspace.forward([session], [[1], [2]])
    with pytest.raises(TypeError, match="an entry of sessions must be a Session, not str"):
        workspace.forward(["x"], [[1]])  # type: ignore[list-item]
    with pytest.raises(MismatchError, match="row 0"):
        workspace.forward([_core.Session(build(device, seed=1))], [[1]])
    with pytest.raises(ValueError, match="row 0: hidden states have 5 columns, expected 32"):
        workspace.forward([session], [np.zeros((2, 5), np.float32)])
    workspace.forward([session], [[1]])  # nothing stayed claimed
    assert session.lengths == [1] * LAYERS


@pytest.mark.parametrize("window", [0, 4])
def test_asking_for_mass_changes_no_logit(device: str, window: int) -> None:  # LS-108
    windowed = {"window": window, "windowed": [True, False, True, False]} if window else {}
    model = build(device, **windowed)
    message, ids = read(model, [9, 8, 7, 6, 5, 4]), np.arange(12)

    def run(**options: Any) -> tuple[Any, Any]:
        session = _core.Session(model)
        session.give(message)
        return _core.Workspace(model).forward(
            [session], [ids], output="logits", outputs="all", **options
        )

    plain, nothing = run()
    assert nothing is None
    for kind in ("paper", "published"):
        out, mass = run(mass=kind)
        np.testing.assert_array_equal(out, plain, kind)
        assert mass.shape == (1, LAYERS, HEADS)
        assert ((mass > 0) & (mass < 1)).all()


def test_counts(model: _core.Model) -> None:
    workspace = _core.Workspace(model)
    assert workspace.counts == {"tokens": 0, "linear_flops": 0.0, "attention_flops": 0.0}
    workspace.forward([_core.Session(model)], [[1, 2, 3]])
    assert workspace.counts["tokens"] == 3
