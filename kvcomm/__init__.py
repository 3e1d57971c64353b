"""kvcomm: a language model answers from the KV cache of another that has read the document.

    import kvcomm

    model = kvcomm.Model.load("smollm2-135m")
    sender, receiver = kvcomm.Sender(model), kvcomm.Receiver(model)
    scores = kvcomm.calibrate(sender, receiver, [(context0, question0)])
    layers = scores.top(ratio=0.5)
    packet = sender.read(context, layers=layers)
    answer = receiver.answer(question, packet, max_new_tokens=48)

The method is that of "KVComm: Enabling Efficient LLM Communication through Selective KV Sharing"
(ICLR 2026, arXiv 2510.03346). The arithmetic is done by a C core (`kvcomm._core`); this package
loads, tokenizes, evaluates and reports.
"""

from kvcomm._core import __version__, devices, get_num_threads, set_num_threads
from kvcomm.account import Reading, Stats
from kvcomm.agents import Receiver, Sender, published_layer_map
from kvcomm.errors import (
    DeviceError,
    FormatError,
    KVCommError,
    MismatchError,
    NumericError,
    UnsupportedError,
)
from kvcomm.model import Model
from kvcomm.packet import Packet
from kvcomm.selection import LayerScores, calibrate
from kvcomm.turns import Answer, Score

__all__ = [
    "Answer",
    "DeviceError",
    "FormatError",
    "KVCommError",
    "LayerScores",
    "MismatchError",
    "Model",
    "NumericError",
    "Packet",
    "Reading",
    "Receiver",
    "Score",
    "Sender",
    "Stats",
    "UnsupportedError",
    "__version__",
    "calibrate",
    "devices",
    "get_num_threads",
    "published_layer_map",
    "set_num_threads",
]
