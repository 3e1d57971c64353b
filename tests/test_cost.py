"""The cost model: by hand on a tiny shape, and against what the core counts while each method runs.

The hand-made numbers are those of 2 layers, width 4, MLP 6, 2 heads of 2 with 1 of K and V, 10
words. Per token: K and V 32 FLOPs, Q 32, output 32, MLP 144, so a layer 240; the vocabulary 80; a
visible (query, key) pair 16.
"""

import argparse
import json
import re
from dataclasses import replace

import fixtures
import numpy as np
import piece_bench
import pytest

from kvcomm import Model, cost, cost_sheet, shapes
from kvcomm.agents import Receiver, Sender
from kvcomm.commands import cost as command
from kvcomm.config import read_config
from kvcomm.cost import Lengths, Setting, Work
from kvcomm.methods import Bench, Method
from kvcomm.methods.ac import AC
from kvcomm.methods.baseline import Baseline
from kvcomm.methods.cipher import Cipher
from kvcomm.methods.kvcomm import KVComm
from kvcomm.methods.nld import NLD
from kvcomm.methods.prepend_hidden import PrependHidden
from kvcomm.methods.skyline import Skyline
from kvcomm.methods.token_importance import TokenImportance
from kvcomm.shapes import SHAPES, Shape

TINY = Shape(2, 4, 6, 2, 1, 2, 10)
LENGTHS = Lengths(context=3, query=2, answer=2, message=2)
F32 = Setting("f32", "f32")
FULL = Setting("f32", "f32", full=True)


# ---- by hand ----


def test_baseline():
    found = cost.baseline(TINY, LENGTHS, F32)
    # Layer 0 whole for 2 tokens; layer 1: Q, K, V of both, the rest and the vocabulary of the last.
    assert found.prefill == Work(2 * 240 + (2 * 64 + 176) + 80, 2 * 3 * 16)
    # The second token of the answer is not run: one step behind 2 tokens.
    assert found.decode == Work(2 * 240 + 80, 2 * 3 * 16)
    assert found.sender == Work()
    assert (found.message_bytes, found.sender_kv, found.sender_weights) == (0, 0, 0)
    assert found.receiver_kv == 2 * 3 * 16  # layers, tokens, bytes of K and V
    # Per layer 2 * 4 * (4 + 2) + 3 * 4 * 6 = 120 elements; 2 tables of 40; 5 norms of 4.
    assert found.receiver_weights == 4 * (2 * 120 + 2 * 40 + 5 * 4)


@pytest.mark.parametrize(
    ("layers", "sender", "prefill", "decode", "n_bytes"),
    [
        ((), Work(), 6, 6, 0),
        ((0,), Work(3 * 32, 0), 6 + 6, 6 + 3, 48),
        ((1,), Work(3 * 240 + 3 * 32, 6 * 16), 6 + 6, 6 + 3, 48),
        ((0, 1), Work(3 * 240 + 3 * 32, 6 * 16), 6 + 12, 6 + 6, 96),
    ],
)
def test_kvcomm_stops_early(layers, sender, prefill, decode, n_bytes):
    """prefill, decode: visible pairs of both layers."""
    found = cost.kvcomm(TINY, LENGTHS, layers, F32)
    assert found.sender == sender
    assert found.prefill == Work(864, prefill * 16)
    assert found.decode == Work(560, decode * 16)
    assert found.message_bytes == n_bytes
    assert found.receiver_kv == n_bytes + 96
    assert found.sender_kv == 48 * (max(layers, default=-1) + 1)
    assert found.n_sent == len(layers)


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_kvcomm_in_full(layers):
    """The paper's sender runs all layers whatever is sent."""
    found = cost.kvcomm(TINY, LENGTHS, layers, FULL)
    assert found.sender == Work(2 * 3 * 240, 2 * 6 * 16)
    assert found.prefill == Work(2 * 2 * 240 + 80, (6 + 6 * len(layers)) * 16)
    assert found.sender_kv == 96


def test_skyline():
    assert cost.skyline(TINY, LENGTHS, F32).prefill == Work(816 + 864, (6 + 2 * 9) * 16)
    assert cost.skyline(TINY, LENGTHS, FULL).prefill == Work(2 * 5 * 240 + 80, 2 * 15 * 16)
    assert cost.skyline(TINY, LENGTHS, F32).decode == Work(560, 2 * 6 * 16)
    assert cost.skyline(TINY, LENGTHS, F32).receiver_kv == 2 * 6 * 16


def test_skyline_of_another_length():
    """5 tokens of which 4 are read first; the last is a prompt of one token."""
    lengths = Lengths(2, 2, 1, skyline=5, shared=4)
    found = cost.skyline(TINY, lengths, F32)
    assert found.prefill == Work(4 * 240 + 4 * 32 + 2 * 240 + 80, (10 + 2 * 5) * 16)
    assert found.decode == Work()


def test_ac():
    found = cost.ac(TINY, LENGTHS, 1, 1, F32)
    assert found.sender == Work(3 * 64 + 176, 6 * 16)
    assert found.prefill == cost.baseline(TINY, LENGTHS, F32).prefill
    assert found.message_bytes == 4 * 4
    assert found.sender_kv == 48
    assert cost.ac(TINY, LENGTHS, 1, 1, FULL).sender == Work(2 * 3 * 240, 2 * 6 * 16)
    assert cost.ac(TINY, LENGTHS, 0, 0, F32).sender == Work()


def test_prepend_hidden():
    found = cost.prepend_hidden(TINY, LENGTHS, 0, 1, F32)
    assert found.sender == Work()
    assert found.prefill == Work(3 * 32 + 864, (6 + 6) * 16)
    assert found.message_bytes == 3 * 4 * 4


def test_nld_and_cipher():
    """Prompts of 3, 2 and, with both messages, 6 tokens; each message is 2 tokens."""
    nld, cipher = (method(TINY, LENGTHS, F32) for method in (cost.nld, cost.cipher))
    assert nld.sender == Work(720 + 3 * 64 + 176 + 80 + 560, (2 * 6 + 2 * 4) * 16)
    second = Work(6 * 240 + 6 * 64 + 176 + 80, 2 * 21 * 16)
    assert nld.prefill == Work(864, 6 * 16) + second
    assert nld.decode == Work(560, 6 * 16) + Work(560, 2 * 7 * 16)
    assert nld.receiver_kv == 2 * 7 * 16
    # Each vector is a mean of the table and is looked up in it: 80 and 80.
    assert cipher.sender == nld.sender + Work(2 * 160)
    assert cipher.decode == nld.decode + Work(2 * 160)
    assert cipher.message_bytes == 2 * 4 * 4


def test_operations():
    """Section 3.3 and Appendix N, put in by hand: L 2, d 4, C 3, Q 2, T 2, Ts 2."""
    assert cost.operations("ac", TINY, LENGTHS) == 2 * 7 * 16 + 2 * (9 + 4 + 4 + 4) * 4
    assert cost.operations("kvcomm", TINY, LENGTHS, 1) == 224 + (2 * 21 + 3 * 4) * 4
    assert cost.operations("skyline", TINY, LENGTHS) == 224 + 2 * (25 + 2 * 7) * 4
    more = 2 * 10 * 16 + 2 * (4 + 4 + 36 + 6 + 4 + 8) * 4
    assert cost.operations("nld", TINY, LENGTHS) == cost.operations("ac", TINY, LENGTHS) + more
    assert cost.operations("baseline", TINY, LENGTHS) == 2 * 4 * 16 + 2 * 12 * 4


def test_operations_give_figure_8():
    """paper_tables.json: 4 FLOPs a term give 2.9 GFLOPs over AC for Skyline, 0.5 and 1.1 for KVComm
    with 9 and 20 of 28 layers, 6 and 2.7 times less."""
    shape, lengths = SHAPES["llama-3.2-3b"], Lengths(80, 50, 5)
    ac = cost.operations("ac", shape, lengths)
    skyline = cost.operations("skyline", shape, lengths) - ac
    few, many = (cost.operations("kvcomm", shape, lengths, n) - ac for n in (9, 20))
    assert [round(4 * n / 1e9, 1) for n in (skyline, few, many)] == [2.9, 0.5, 1.1]
    assert [round(skyline / n, 1) for n in (few, many)] == [5.9, 2.7]


# ---- against the core's counts ----


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3", "gemma3", "falcon3"])
def model(request, tiny, device):
    return Model.load(tiny(request.param), device=device)


def ids(n, seed=0):
    return np.random.default_rng([seed, n]).integers(0, 256, n).astype(np.int32)


def spent(agent, before=None):
    counts = agent.counts
    before = before or {"linear_flops": 0, "attention_flops": 0}
    return Work(*(counts[name] - before[name] for name in ("linear_flops", "attention_flops")))


def check_answer(receiver, prefilled, expect, context, query, n_answer=4):
    """expect(lengths) against what the receiver has counted; returns the cost."""
    prefill, before = spent(receiver), receiver.counts
    answer = prefilled.answer(n_answer)[0]
    found = expect(Lengths(context, query, len(answer.ids)))
    assert prefill == found.prefill
    assert spent(receiver, before) == found.decode
    return found


@pytest.mark.parametrize("preset", ["paper", "reference"])
@pytest.mark.parametrize("lengths", [(7, 5), (1, 1), (3, 20), (530, 515)])
@pytest.mark.parametrize("layers", [(), (0,), (2,), (1, 3), (0, 1, 2, 3)])
def test_kvcomm_is_what_is_counted(model, preset, lengths, layers):
    sender, receiver = Sender(model), Receiver(model)
    setting = Setting("f32", "f32", preset=preset)
    packet = sender.read(ids(lengths[0]), layers, preset=preset)
    prefilled = receiver.prefill([ids(lengths[1], 1)], [packet])
    found = check_answer(
        receiver, prefilled, lambda n: cost.kvcomm(Shape.of(model), n, layers, setting), *lengths
    )
    assert spent(sender) == found.sender
    assert packet.nbytes == found.message_bytes


@pytest.mark.parametrize("n", [1, 9, 512, 513])
def test_baseline_is_what_is_counted(model, n):
    receiver = Receiver(model)
    check_answer(
        receiver,
        receiver.prefill([ids(n)]),
        lambda lengths: cost.baseline(Shape.of(model), lengths, F32),
        0,
        n,
    )


@pytest.mark.parametrize("shared", [1, 8, 15])
def test_skyline_is_what_is_counted(model, shared):
    sender, receiver, prompt = Sender(model), Receiver(model), ids(16)
    packet = sender.read(prompt[:shared], trim=False)
    prefilled = receiver.prefill([prompt[shared:]], [packet])
    answer = prefilled.answer(4)[0]
    lengths = Lengths(10, 6, len(answer.ids), shared=shared)
    found = cost.skyline(Shape.of(model), lengths, F32)
    assert spent(sender) + spent(receiver) == found.receiver


@pytest.mark.parametrize("k", [0, 1, 3, 4])
@pytest.mark.parametrize("j", [0, 2, 3])
@pytest.mark.parametrize("lengths", [(7, 5), (513, 514)])
def test_hidden_states_are_what_is_counted(model, k, j, lengths):
    shape, (context, query) = Shape.of(model), lengths
    for method, expect in (
        (AC(from_layer=k, to_layer=j), cost.ac),
        (PrependHidden(from_layer=k, to_layer=j), cost.prepend_hidden),
    ):
        sender, receiver = Sender(model), Receiver(model)
        prefilled, _ = method.prefill(Bench(sender, receiver), [ids(context)], [ids(query, 1)])
        found = check_answer(
            receiver, prefilled, lambda n, f=expect: f(shape, n, k, j, F32), context, query
        )
        assert spent(sender) == found.sender


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_token_importance_is_what_is_counted(model, layer):
    receiver, shape = Receiver(model), Shape.of(model)
    layer = layer if layer < 3 else shape.n_layers - 1
    method = TokenImportance(layer=layer)
    prefilled = method.prefill(Bench(Sender(model), receiver), [ids(9)], [0])
    check_answer(receiver, prefilled, lambda n: cost.token_importance(shape, n, layer, F32), 5, 4)


# Whole runs: an answer's likelihood costs nothing beyond the prompt when gold is one token.


def ran(model, method, read_layers=()):
    """One record run by a method alone: what it cost, the outcome, and its lengths."""
    bench = piece_bench.bench_of(model)
    bench.read_layers = read_layers
    item = replace(bench.items[0], gold=(ids(1),))
    (outcome,) = method.run(bench, [item])
    lengths = Lengths(
        len(item.sender),
        len(item.receiver),
        len(outcome.token_ids),
        3,
        skyline=len(item.skyline),
        shared=item.skyline_shared,
    )
    return bench, outcome, lengths


@pytest.mark.parametrize(
    ("method", "expect", "layers"),
    [
        (Baseline(), cost.baseline, ()),
        (Skyline(), cost.skyline, ()),
        (
            KVComm(strategy="layers", given=(1, 2)),
            lambda *given: cost.kvcomm(*given[:2], (1, 2), given[2]),
            (1, 2),
        ),
        (AC(), lambda *given: cost.ac(*given[:2], setting=given[2]), ()),
        (PrependHidden(), lambda *given: cost.prepend_hidden(*given[:2], setting=given[2]), ()),
        (TokenImportance(), lambda *given: cost.token_importance(*given[:2], setting=given[2]), ()),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_methods_cost_what_is_counted(model, method, expect, layers):
    bench, outcome, lengths = ran(model, method, layers)
    found = expect(Shape.of(model), lengths, F32)
    assert spent(bench.sender) == found.sender
    assert spent(bench.receiver) == found.receiver
    assert outcome.message_bytes == found.message_bytes


@pytest.mark.parametrize(("method", "expect"), [(NLD, cost.nld), (Cipher, cost.cipher)])
def test_two_phases_cost_what_is_counted(model, method, expect):
    """Sender and receiver write 3 tokens or vectors each."""
    bench, outcome, lengths = ran(model, method(message_tokens=3))
    second = outcome.receiver_tokens - lengths.query
    found = expect(Shape.of(model), replace(lengths, refine=second), F32)
    assert spent(bench.sender) == found.sender
    assert spent(bench.receiver) == found.receiver
    if method is Cipher:
        assert outcome.message_bytes == found.message_bytes


def test_weights_are_what_the_core_holds(model):
    """Up to the padding of matrices to 16 rows and of buffers to 64 bytes, which these have not."""
    assert cost.baseline(Shape.of(model), LENGTHS, F32).receiver_weights == model.nbytes


# ---- shapes ----


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the files of these models add up.
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-7b", 7_615_616_512),
        ("falcon3-7b", 7_455_550_464),
        ("qwen2.5-coder-0.5b", 494_032_768),
        ("qwen2.5-coder-1.5b", 1_543_714_304),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_published_sizes(name, parameters):
    assert SHAPES[name].parameters == parameters


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_names_and_files_agree(name):
    from kvcomm.convert import cache_folder

    folders = sorted((cache_folder() / "models").glob(f"{name}-v*"))
    if not folders:
        pytest.skip(f"{name} is not in the cache (`kvcomm fetch {name}`)")
    found = Shape.of(read_config(folders[-1]))
    if not any(found.windowed):  # a window that no layer has
        found = replace(found, window=0, windowed=())
    # GGUF files of tied models may hold the head once more, in another type: it is then loaded.
    published = SHAPES[name]
    assert replace(found, tied_head=published.tied_head) == published


def test_shape_of_a_folder(tmp_path):
    folder = fixtures.write_model(tmp_path / "m", "qwen3")
    shape = shapes.find(str(folder))
    assert shape == Shape.of(read_config(folder)) == Shape.of(read_config(folder).core)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.qk_norm) == (4, 2, 32, True)


# ---- bad input ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context": -1}, "context: expected 0 or more tokens, found -1"),
        ({"query": 0}, "query: expected 1 or more tokens, found 0"),
        ({"answer": -3}, "answer: expected 0 or more tokens, found -3"),
        ({"message": -1}, "message: expected 0 or more"),
        ({"shared": 5}, "shared: expected fewer than 5 tokens, found 5"),
    ],
)
def test_bad_lengths(fields, message):
    with pytest.raises(ValueError, match=message):
        Lengths(**({"context": 3, "query": 2, "answer": 2} | fields))


@pytest.mark.parametrize("value", [1.5, True, "3", None])
def test_lengths_are_integers(value):
    with pytest.raises(TypeError, match="context: expected a number of tokens"):
        Lengths(value, 2, 2)


def test_bad_shapes():
    with pytest.raises(ValueError, match="n_heads: 4 is not a multiple of n_kv_heads 3"):
        Shape(2, 4, 6, 4, 3, 2, 10)
    with pytest.raises(ValueError, match="dim: expected 1 or more, found 0"):
        Shape(2, 0, 6, 4, 2, 2, 10)
    with pytest.raises(TypeError, match="n_layers: expected an integer, found 2.0"):
        Shape(2.0, 4, 6, 4, 2, 2, 10)
    with pytest.raises(TypeError, match="found list"):
        Shape.of([])
    with pytest.raises(ValueError, match="the configuration has no dim"):
        Shape.of({"n_layers": 2})


def test_bad_settings():
    with pytest.raises(ValueError, match="kv_dtype: expected one of f32, f16, bf16, found 'int8'"):
        Setting("f32", "int8")
    with pytest.raises(ValueError, match="preset"):
        Setting(preset="published")
    with pytest.raises(ValueError, match="2 is outside 0 .. 1"):
        cost.kvcomm(TINY, LENGTHS, (2,))
    with pytest.raises(ValueError, match=r"to_layer: expected a layer in 0 \.\. 1, found 2"):
        cost.ac(TINY, LENGTHS, 0, 2)
    with pytest.raises(ValueError, match="method: expected one of"):
        cost.operations("cipher", TINY, LENGTHS)
    with pytest.raises(ValueError, match="n_sent: 3 is outside 0 .. 2"):
        cost.operations("kvcomm", TINY, LENGTHS, 3)


# ---- the sheet and the command ----


def test_sheet_names_both():
    """Whole runs and excesses over AC, each from its own numbers."""
    made = cost_sheet.sheet("tiny", TINY, LENGTHS, ratios=("0.5",), setting=F32)
    row, skyline, ac = (made.row(name) for name in ("kvcomm 0.5", "skyline", "ac"))
    assert row.n_sent == 1
    assert row.full.whole == row.sender_full + cost.kvcomm(TINY, LENGTHS, (0,), FULL).receiver.flops
    assert row.full.excess == (6 + 3) * 16  # pairs with what was sent: 2 queries and 1 step, 3 keys
    assert skyline.full.excess == 2 * 9 * 16
    assert row.full.excess_less == 2.0
    assert row.full.whole_less == skyline.full.whole / row.full.whole
    assert (ac.full.excess, ac.full.excess_less) == (0, None)
    assert row.paper.excess == 3 * 4 * 4
    assert row.memory.excess == row.message_bytes == 48
    assert made.row("cipher").paper is None


def parsed(*words):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(words)


LONG = ("--model-shape", "llama-3.2-3b", "--context", "2000", "--query", "50", "--answer", "48")


def test_command_prints_tables(capsys):
    assert command.run(parsed(*LONG)) == 0
    text = capsys.readouterr().out
    for words in ("whole run", "excess over AC", "kvcomm 0.3", "9/28", "not FLOPs"):
        assert words in text
    assert command.run(parsed(*LONG, "--markdown")) == 0
    text = capsys.readouterr().out
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in tables if line.startswith("| skyline")} == {9, 7, 11}


def test_command_prints_json(capsys):
    assert command.run(parsed(*LONG, "--json", "--kv-dtype", "f32", "--ratio", "0.5")) == 0
    made = json.loads(capsys.readouterr().out)
    (row,) = (row for row in made["rows"] if row["label"] == "kvcomm 0.5")
    assert row["message_bytes"] == 2000 * 14 * 2 * 8 * 128 * 4
    assert row["paper"]["excess"] == 2000 * 14 * 98 * 3072
    assert made["lengths"]["query"] == 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model-shape", "gpt-5"), "model shape: 'gpt-5' is neither a folder nor one of"),
        (("--ratio", "1.5"), "ratio: 1.5 is outside 0 .. 1"),
        (("--ratio", "nan"), "ratio: nan is outside 0 .. 1"),
        (("--ratio", "half"), "--ratio: expected numbers such as 0.3,0.5, found 'half'"),
        (("--ratio", "0.5,0.50"), "--ratio: a number is written twice"),
        (("--context", "-1"), "context: expected 0 or more tokens, found -1"),
        (("--query", "0"), "query: expected 1 or more tokens, found 0"),
    ],
)
def test_command_refuses(words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as found:
        command.run(parsed(*LONG, *words))
    assert "\n" not in str(found.value)


def test_folder_without_a_configuration(tmp_path):
    with pytest.raises(OSError, match=r"config\.json"):
        command.run(parsed(*LONG, "--model-shape", str(tmp_path)))
