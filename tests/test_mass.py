"""Both masses from one pass: what `Receiver.mass` measures each way, and the work that it takes."""

import numpy as np
import pytest

import kvcomm
from kvcomm.mass import both_masses

CONTEXTS = [list(range(20, 40)), [8, 8, 120]]
QUESTION = [10, 20, 30, 40, 5]


def agents(folder, device):
    model = kvcomm.Model.load(folder, device=device)
    return kvcomm.Sender(model), kvcomm.Receiver(model)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3"])
@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_both_are_those_of_a_pass_each_to_the_last_bit(tiny, device, family, preset):
    sender, receiver = agents(tiny(family), device)
    packet = sender.read(CONTEXTS[0], preset=preset, trim=False)
    for skip, found in enumerate(both_masses(receiver, QUESTION, packet)):
        expected = receiver.mass(QUESTION, packet, skip_first=skip)
        assert found.shape == (receiver.model.n_layers, receiver.model.n_heads)
        assert found.tolist() == expected.tolist()


def test_several_senders_and_a_layer_map(tiny, device):
    sender, _ = agents(tiny("llama"), device)
    _, receiver = agents(tiny("llama", num_hidden_layers=6, seed=3), device)
    packets = tuple(sender.read(context, trim=False) for context in CONTEXTS)
    options = {"layer_map": kvcomm.published_layer_map(4, 6), "positions": "sequential"}
    for skip, found in enumerate(both_masses(receiver, QUESTION, packets, **options)):
        expected = receiver.mass(QUESTION, packets, skip_first=skip, **options)
        assert found.tolist() == expected.tolist()


def test_it_is_less_work_than_two_passes(tiny, device):
    """The second time only q, k and v of every layer are made, counted."""
    sender, receiver = agents(tiny("llama"), device)
    packet = sender.read(CONTEXTS[0], trim=False)

    def flops(measure):
        before = receiver.counts["linear_flops"]
        measure()
        return receiver.counts["linear_flops"] - before

    one = flops(lambda: receiver.mass(QUESTION, packet))
    both = flops(lambda: both_masses(receiver, QUESTION, packet))
    # The tiny model's shape: 64 wide, 4 heads and 2 KV heads of 16, 4 layers, 2 FLOPs a product.
    qkv = 2 * len(QUESTION) * 64 * (4 + 2 + 2) * 16
    assert both == one + 4 * qkv
    assert both < 2 * one


def test_one_token_is_not_measured_in_preset_reference(tiny, device):
    sender, receiver = agents(tiny("llama"), device)
    packet = sender.read(CONTEXTS[0], preset="reference")
    with pytest.raises(ValueError, match="one token is not measured in preset reference"):
        both_masses(receiver, [4], packet)
    assert np.isfinite(both_masses(receiver, [4, 5], packet)[0]).all()
