"""Senders and receivers that do not fit: refused before anything runs, with both sides named."""

import json

import fixtures
import pytest

import kvcomm
from kvcomm.errors import MismatchError, UnsupportedError

CONTEXT = [5, 9, 31, 77, 200, 14, 3, 60, 61, 62, 7]
SECOND = [8, 8, 120, 44]
QUESTION = [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, "kv heads 1 against 2"),
        ({"head_dim": 8}, "head size 8 against 16"),
        ({"num_hidden_layers": 3}, r"number of layers \(without a layer map\) 3 against 4"),
        ({"rope_theta": 500000.0}, r"rope in sender layer 0 .*=500000\.0 .*theta=10000\.0"),
        ({"vocab_size": 328}, "vocabulary size .* 328 against 320"),
    ],
)
def test_pairs_that_do_not_fit(load, changes, message):
    """KV-092: refused before anything is computed, with both sides named."""
    _, sender = load("llama", **changes)
    _, receiver = load("llama")
    packet = kvcomm.Sender(sender).read(CONTEXT)
    with pytest.raises(MismatchError, match=message) as caught:
        kvcomm.Receiver(receiver).answer(QUESTION, packet)
    assert repr(sender.name) in str(caught.value) and repr(receiver.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_windows_have_to_agree(load):
    _, sender = load("mistral")
    _, receiver = load("mistral", sliding_window=6)
    packet = kvcomm.Sender(sender).read(CONTEXT, (2,))
    with pytest.raises(MismatchError, match="window in sender layer 2 .* 8 against 6"):
        kvcomm.Receiver(receiver).answer(QUESTION, packet)


def test_another_vocabulary_on_request(load):
    _, sender = load("llama", vocab_size=328)
    _, receiver = load("llama")
    packet = kvcomm.Sender(sender).read(CONTEXT)
    assert kvcomm.Receiver(receiver, any_tokenizer=True).answer(QUESTION, packet, 2).ids


def test_another_tokenizer(load, tmp_path, device):
    """KV-093: the same weights beside another tokenizer; none at all is no contradiction."""
    folder = fixtures.write_model(tmp_path / "m", "llama")
    (folder / "tokenizer.json").write_text(json.dumps(fixtures.tokenizer_json(ignore_merges=True)))
    other = kvcomm.Model.load(folder, device=device)
    packet = kvcomm.Sender(other).read(CONTEXT)
    _, model = load("llama")
    with pytest.raises(MismatchError, match="tokenizer .* against"):
        kvcomm.Receiver(model).answer(QUESTION, packet)
    assert kvcomm.Receiver(model, any_tokenizer=True).answer(QUESTION, packet, 2).ids
    plain = fixtures.write_model(tmp_path / "plain", "llama", tokenizer=False)
    silent = kvcomm.Model.load(plain, device=device)
    packet = kvcomm.Sender(silent).read(CONTEXT)
    assert kvcomm.Receiver(model).answer(QUESTION, packet, 2).ids
    answer = kvcomm.Receiver(silent).answer(QUESTION, packet, 2)
    assert (answer.text, len(answer.ids)) == ("", 2)
    with pytest.raises(ValueError, match="context: model 'plain' has no tokenizer"):
        kvcomm.Sender(silent).read("text")
    with pytest.raises(ValueError, match="answer: model 'plain' has no tokenizer"):
        kvcomm.Receiver(silent).score(QUESTION, "text")


def test_layer_maps_that_do_not_fit(load):
    _, model = load("llama")
    _, deep = load("llama", num_hidden_layers=6, seed=3)
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(deep)
    packet = sender.read(CONTEXT)
    with pytest.raises(ValueError, match="layer_map: expected 4 entries, found 3"):
        receiver.answer(QUESTION, packet, layer_map=[0, 1, 2])
    with pytest.raises(ValueError, match=r"6 is outside 0 \.\. 5"):
        receiver.answer(QUESTION, packet, layer_map=[0, 1, 2, 6])
    with pytest.raises(MismatchError, match="layers 0 and 1 both land on receiver layer 0"):
        receiver.answer(QUESTION, packet, layer_map=[0, 0, 1, 2])
    # Layers that are not sent do not collide.
    assert receiver.answer(QUESTION, packet.select([1, 2]), 2, layer_map=[0, 0, 1, 1]).ids


def test_reference_needs_layer_0_and_has_no_shift_back_between_depths(load):
    _, model = load("llama")
    _, deep = load("llama", num_hidden_layers=6, seed=3)
    receiver = kvcomm.Receiver(deep)
    packet = kvcomm.Sender(model).read(CONTEXT, (1,), preset="reference")
    with pytest.raises(UnsupportedError, match="whole context in receiver layer 0"):
        receiver.answer(QUESTION, packet, layer_map=[1, 2, 3, 4])
    with pytest.raises(UnsupportedError, match="no shift_back when receiver layer 1"):
        receiver.answer(QUESTION, packet, layer_map=[0, 2, 3, 5], shift_back=True)


def test_overlapping_positions_and_windows(load):
    _, model = load("gemma3")
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    packets = tuple(sender.read(c, (1, 5)) for c in (CONTEXT, SECOND))
    with pytest.raises(UnsupportedError, match="layer 1 of sender .* windowed"):
        receiver.answer(QUESTION, packets)
    whole = tuple(sender.read(c, (5,)) for c in (CONTEXT, SECOND))  # layer 5 sees everything
    assert receiver.answer(QUESTION, whole, 2).ids
    assert receiver.answer(QUESTION, packets, 2, positions="sequential").ids
