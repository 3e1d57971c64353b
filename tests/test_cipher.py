"""`cipher`: the loop and the splicing against the oracle, how messages end, and the recordings."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fixtures
import numpy as np
import oracle
import pytest
from oracle.transformer import softmax
from text_bench import EXAMPLES, N_NEW, TASK, assert_alone_as_together, bench_of
from text_bench import assert_equal as assert_parity
from text_bench import parity as load_parity

from kvcomm.errors import MismatchError
from kvcomm.methods import Bench, Options, methods
from kvcomm.methods import cipher as module
from kvcomm.methods.cipher import Cipher, splice
from kvcomm.model import Model
from kvcomm.tasks import find

N_STEPS = 6
FAMILIES = ("llama", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> tuple[Path, Path]:
    return tuple(tiny(request.param, seed=seed) for seed in (0, 1))


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path], device: str) -> tuple[Model, Model]:
    return tuple(Model.load(folder, device=device) for folder in folders)


@pytest.fixture(scope="module")
def bench(models: tuple[Model, Model]) -> Bench:
    return bench_of(*models)


@pytest.fixture(scope="module")
def llamas(tiny: Callable[..., Path], device: str) -> tuple[Model, Model]:
    return tuple(Model.load(tiny("llama", seed=seed), device=device) for seed in (0, 1))


def steps(truth: Any, prompt: Sequence[int], temperature: float) -> tuple[np.ndarray, list[int]]:
    """Vectors [N_STEPS, dim] and nearest rows, the whole sequence run again for every step."""
    table = truth.embed(np.arange(fixtures.VOCAB_SIZE))
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    sequence, vectors = truth.embed(prompt), []
    for _ in range(N_STEPS):
        logits = truth.run(embeddings=sequence).logits[-1]
        vectors.append(softmax(logits / temperature) @ table)
        sequence = np.concatenate([sequence, vectors[-1][None]])
    return np.stack(vectors), [int(np.argmax(unit @ vector)) for vector in vectors]


def spliced(truth: Any, pieces: Sequence[Any], vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Embeddings of a refine prompt."""
    parts = [truth.embed(pieces[0])]
    for vector, piece in zip(vectors, pieces[1:], strict=True):
        parts += [vector, truth.embed(piece)]
    return np.concatenate(parts)


def no_eos(monkeypatch: pytest.MonkeyPatch, eos: int = -1) -> None:
    monkeypatch.setattr(module, "_eos", lambda tokenizer: eos)


@pytest.mark.parametrize(("preset", "temperature"), [("paper", 0.7), ("reference", 1.0)])
def test_messages_and_answers_are_the_oracle_s(
    folders: tuple[Path, Path],
    models: tuple[Model, Model],
    preset: Any,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_eos(monkeypatch)
    truths = [oracle.read_folder(folder) for folder in folders]
    bench = bench_of(*models, preset=preset)
    method = Cipher(N_STEPS)
    item = bench.items[0]
    (outcome,) = method.run(bench, [item])
    context, question, *pieces = outcome.prompts
    messages = []
    for agent, truth, prompt in (
        (bench.receiver, truths[1], question),
        (bench.sender, truths[0], context),
    ):
        (written,) = method.write(bench, agent, [prompt])
        vectors, nearest = steps(truth, prompt, temperature)
        np.testing.assert_allclose(written.vectors, vectors, rtol=0, atol=2e-5)
        assert written.nearest.tolist() == nearest
        assert not written.ended
        messages.append(vectors)
    states = spliced(truths[1], pieces, messages)
    prefilled = splice(bench, [pieces], [[m.astype(np.float32) for m in messages]])
    # Greedy, so that every token is the best behind those before it.
    behind = truths[1].embed(outcome.token_ids[:-1])
    logits = truths[1].run(embeddings=np.concatenate([states, behind])).logits[len(states) - 1 :]
    np.testing.assert_allclose(prefilled.logits[0], logits[0], rtol=0, atol=5e-5)
    assert outcome.token_ids == tuple(logits.argmax(axis=1).tolist())
    ended = [token in models[1].stop_ids for token in outcome.token_ids]
    assert not any(ended[:-1])
    assert ended[-1] or len(ended) == N_NEW
    golds = []
    for gold in item.gold:
        rows = truths[1].run(embeddings=np.concatenate([states, truths[1].embed(gold)])).logits
        rows = rows[len(states) - 1 : -1]
        golds.append(float(-np.log(softmax(rows)[np.arange(len(gold)), gold]).sum()))
    assert outcome.nll == pytest.approx(min(golds), abs=2e-4)
    dim = models[0].config.core["dim"]
    assert outcome.message_bytes == 4 * dim * N_STEPS
    assert outcome.receiver_tokens == len(question) + len(states)
    assert outcome.message is None
    assert outcome.layers is None
    seconds = outcome.seconds
    assert 0 < seconds.sender < seconds.sender + seconds.first_token <= seconds.total


def test_the_refine_prompt_is_cut_where_the_vectors_go(llamas: tuple[Model, Model]) -> None:
    bench = bench_of(*llamas)
    (outcome,) = Cipher(2).run(bench, bench.items[:1])
    pieces = [llamas[1].tokenizer.decode(ids, skip_special=False) for ids in outcome.prompts[2:]]
    assert pieces == [
        "<|im_start|>user\nInstruction: Directly answer the question based on the context passage, "
        "no explanation is needed. Question: Who rows?\nYour previous answer:\n",
        "\nOther agents' answers (for your consideration):\n",
        "\nIf needed, revise your answer. Your new answer is:<|im_end|>\n<|im_start|>assistant\n",
    ]


def test_an_outcome_does_not_depend_on_the_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_alone_as_together(Cipher(N_STEPS), bench)
    no_eos(monkeypatch)
    assert_alone_as_together(Cipher(N_STEPS, senders="documents", temperature=2.0), bench)


def test_a_message_ends_where_eos_is_nearest(
    llamas: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_eos(monkeypatch)
    bench = bench_of(*llamas)
    prompts = [item.sender for item in bench.items]
    method = Cipher(24, temperature=0.05)
    free = method.write(bench, bench.sender, prompts)
    # An id that ends the messages at different steps, none at the first.
    ids = [row.nearest.tolist() for row in free]
    eos = next(i for i in ids[0][1:] if not any(i == row[0] for row in ids))
    lengths = [row.index(eos) if eos in row else len(row) for row in ids]
    assert min(lengths) > 0
    no_eos(monkeypatch, eos)
    for one, whole, n in zip(
        method.write(bench, bench.sender, prompts), free, lengths, strict=True
    ):
        assert one.ended == (n < 24)
        np.testing.assert_array_equal(one.message, whole.vectors[:n])
        assert one.nearest.tolist() == whole.nearest[: n + 1].tolist()


def test_a_record_whose_first_vector_is_eos_is_an_error(
    llamas: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(*llamas)
    (written,) = Cipher(1).write(bench, bench.sender, [bench.items[0].sender])
    no_eos(monkeypatch, int(written.nearest[0]))
    with pytest.raises(ValueError, match="the first vector is EOS"):
        Cipher(4).run(bench, bench.items[:1])


def test_several_senders_have_a_place_each(
    llamas: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_eos(monkeypatch)
    bench = bench_of(*llamas)
    (outcome,) = Cipher(3, senders="documents").run(bench, bench.items[2:])
    *contexts, _, first, a, b, c, last = outcome.prompts
    assert len(contexts) == len(EXAMPLES[2].pieces) == 3
    decode = llamas[1].tokenizer.decode
    assert {decode(ids) for ids in (a, b, c)} == {
        "\nAnother agent's answer (for your consideration):\n"
    }
    assert outcome.message_bytes == 3 * 3 * 4 * 64
    assert outcome.receiver_tokens == len(bench.items[2].receiver) + 4 * 3 + sum(
        map(len, (first, a, b, c, last))
    )


def test_a_message_fits_the_model_s_positions(
    tiny: Callable[..., Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_eos(monkeypatch)
    n = len(bench_of(Model.load(tiny("llama"), device=device)).items[0].sender)
    short = Model.load(tiny("llama", max_position_embeddings=n + 3), device=device)
    bench = bench_of(short, Model.load(tiny("llama"), device=device), limit=None, task=TASK)
    prompt = np.resize(bench.items[0].sender, n)
    (written,) = Cipher(9).write(bench, bench.sender, [prompt])
    assert len(written.vectors) == 4
    with pytest.raises(ValueError, match=f"has {n + 3}"):
        Cipher(9).write(bench, bench.sender, [np.resize(prompt, n + 4)])


def test_a_refine_prompt_that_is_too_long_is_an_error(
    llamas: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_eos(monkeypatch)
    bench = bench_of(*llamas, limit=220)
    with pytest.raises(ValueError, match=r"refine prompt: \d+ tokens, 220 are the limit"):
        Cipher(20).run(bench, bench.items[:1])


# ---- what is refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"message_tokens": 0}, "message_tokens: expected a number above 0, found 0"),
        ({"cipher_temperature": 0.0}, "cipher_temperature: expected a number above 0, found 0.0"),
        ({"cipher_temperature": -1.0}, "cipher_temperature"),
        ({"cipher_temperature": float("nan")}, "cipher_temperature"),
        ({"cipher_temperature": float("inf")}, "cipher_temperature"),
        ({"senders": "many"}, "senders"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods(("cipher",), Options(**options))


def test_models_of_another_width_are_refused(
    llamas: tuple[Model, Model], tiny: Callable[..., Path], device: str
) -> None:
    wide = Model.load(tiny("llama", hidden_size=96), device=device)
    with pytest.raises(MismatchError, match="of 96 numbers, .* of 64"):
        Cipher().layers(bench_of(wide, llamas[0]))


def test_a_tokenizer_without_eos_is_refused(
    llamas: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(*llamas)
    assert Cipher().layers(bench) == ()
    with pytest.raises(ValueError, match="task 'mmlu' has none"):
        Cipher().layers(bench_of(*llamas, task=find("mmlu")))
    monkeypatch.setitem(llamas[0].tokenizer.special_tokens, "eos_token", "two tokens")
    with pytest.raises(ValueError, match="expected one token for EOS, found 'two tokens'"):
        Cipher().layers(bench)
    monkeypatch.delitem(llamas[0].tokenizer.special_tokens, "eos_token")
    with pytest.raises(ValueError, match="expected one token for EOS"):
        Cipher().layers(bench)


def test_variants_are_told_apart() -> None:
    options = Options(cipher_temperature=0.5, message_tokens=9, sender_aware=True, senders="split")
    named, usual = (methods(("cipher",), one)[0] for one in (options, Options()))
    assert usual.label == "cipher"
    assert re.fullmatch(r"cipher aware senders split T=0\.5", named.label)
    assert json.loads(json.dumps(named.settings)) == {
        "message_tokens": 9,
        "sender_aware": True,
        "senders": "split",
        "temperature": 0.5,
    }
    assert usual.settings["temperature"] is None


def test_recorded_run(shared: Path, real_model: Model) -> None:
    """One of the two recorded runs; benchmarks/parity.py runs both, on two models."""
    recordings = shared / "reference"
    data = json.loads((recordings / "oracle_smollm2.json").read_text())
    outcomes = list(load_parity().published_cipher(real_model, data, recordings, 1))
    assert_parity(outcomes, 3 + 2 * 4 + 2)
