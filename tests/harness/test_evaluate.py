"""The harness: what a line holds, and how it is counted.

Where only the harness is in question a fake method stands behind the interface; models are tiny.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eval_bench import EXAMPLES, FIELDS, TASK, Fake, lines, timeless, variant_and_record

from kvcomm import metrics, prompts
from kvcomm.agents import Receiver, Sender
from kvcomm.commands import score
from kvcomm.evaluate import _batches, evaluate
from kvcomm.methods import Item, Options, methods
from kvcomm.model import Model
from kvcomm.plan import Prompts, divide
from kvcomm.progress import Running
from kvcomm.records import RECORDS
from kvcomm.runs import SUMMARY, read_run
from kvcomm.summary import row_key
from kvcomm.tasks import find

# ---- a line of the log ---------------------------------------------------------------------


def test_every_line_has_the_fields_of_the_contract(run: Any, tmp_path: Path) -> None:
    summary = run(methods(("baseline", "skyline", "kvcomm"), Options()), n_calibration=1)
    found = lines(tmp_path / "run")
    assert len(found) == 6 * 3
    for line in found:
        assert list(line) == FIELDS
        assert set(line["seconds"]) == {"sender", "transfer", "first_token", "total"}
        assert len(line["prompt_sha256"]) == 64
        assert line["n_gold_tokens"] == len(tiny_tokens(line["gold"][0]))
    assert {line["id"] for line in found} == {f"r{n}" for n in range(1, 7)}
    assert [line["index"] for line in found if line["method"] == "baseline"] == [1, 2, 3, 4, 5, 6]
    layers = [line["settings"]["layers"] for line in found if line["method"] == "kvcomm"]
    assert all(layers[0] == one for one in layers)
    assert len(layers[0]) == 2  # half of four
    assert [m["label"] for m in summary["methods"]] == ["baseline", "skyline", "kvcomm 0.5"]
    assert summary["settings"]["calibration"] == ["r0"]
    assert len(summary["calibration"]["mass"]) == 4
    assert json.loads((tmp_path / "run" / SUMMARY).read_text()) == summary


def tiny_tokens(text: str) -> list[str]:
    """Tokens of a short lower-case word in the tiny tokenizer: bytes, after its few merges."""
    return {"boat": ["b", "o", "at"]}[text]


def test_baseline_and_skyline_are_the_same_prompts_for_all_methods(
    run: Any, pair: tuple[Sender, Receiver], tmp_path: Path
) -> None:
    run(methods(("baseline", "kvcomm", "skyline"), Options(ratios=("0", "0.5", "1"))),
        n_calibration=1)  # fmt: skip
    found = lines(tmp_path / "run")
    ids = {m: [x["id"] for x in found if x["method"] == m] for m in ("baseline", "skyline")}
    assert ids["baseline"] == ids["skyline"]
    by_ratio: dict[float, list[str]] = {}
    for line in found:
        if line["method"] == "kvcomm":
            by_ratio.setdefault(line["settings"]["ratio"], []).append(line["prompt_sha256"])
    assert by_ratio[0.0] == by_ratio[0.5] == by_ratio[1.0]
    assert {line["receiver_tokens"] for line in found if line["method"] == "kvcomm"} == {
        line["receiver_tokens"] for line in found if line["method"] == "baseline"
    }


def test_without_layers_every_answer_is_the_baseline_s(run: Any, tmp_path: Path) -> None:
    run(methods(("baseline", "kvcomm"), Options(ratios=("0",))), n_calibration=1)
    found = lines(tmp_path / "run")
    base = [line for line in found if line["method"] == "baseline"]
    none = [line for line in found if line["method"] == "kvcomm"]
    assert [line["token_ids"] for line in base] == [line["token_ids"] for line in none]
    np.testing.assert_allclose(
        [line["nll"] for line in base], [line["nll"] for line in none], atol=1e-3
    )
    assert all(line["message_bytes"] == 0 for line in none)


def test_results_do_not_depend_on_the_batch_size(run: Any, tmp_path: Path) -> None:
    chosen = methods(("baseline", "skyline", "kvcomm"), Options(ratios=("0.3", "0.7")))
    found = []
    for batch_size in (1, 3, 50):
        out = tmp_path / str(batch_size)
        run(chosen, n_calibration=1, batch_size=batch_size, out=out)
        found.append(sorted(timeless(lines(out)), key=variant_and_record))
    assert found[0] == found[1] == found[2]


def test_each_context_is_read_once_for_all_variants(
    run: Any, pair: tuple[Sender, Receiver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Sender.read

    def counted(self: Sender, context: Any, layers: Any = None, **options: Any) -> Any:
        if self is pair[0]:
            read.append(len(context) if isinstance(context, list) else 1)
        return original(self, context, layers, **options)

    monkeypatch.setattr(Sender, "read", counted)
    options = Options(ratios=("0.3", "0.5", "1"), strategies=("attention_gaussian", "random"))
    run(methods(("kvcomm",), options), n_calibration=1, batch_size=4)
    assert sorted(read) == [1, 2, 4]  # the calibration, then six records in batches of four
    # Records too long to be held together are read alone.
    read.clear()
    monkeypatch.setattr("kvcomm.evaluate.BATCH_BYTES", 1)
    run(methods(("kvcomm",), options), n_calibration=1, batch_size=4, out=tmp_path / "long")
    assert read == [1] * 7


def test_a_context_that_several_records_have_is_held_once() -> None:
    def item(number: int, context: list[int], question: list[int]) -> Item:
        ids = np.array([*context, *question], np.int32)
        return Item(number, EXAMPLES[0], ids, ids, ids, ids, len(context), 0, 0, ())

    one, other = [1] * 80, [2] * 70
    items: list[Item | Exception] = [
        item(0, one, [5] * 10), item(1, one, [6] * 10), ValueError("broken"),
        item(3, other, [5] * 10), item(4, one, [7] * 10), item(5, other, [8] * 10),
    ]  # fmt: skip
    every = range(len(items))
    # 90 tokens and 10 more for the second; with the other context it would be 180.
    together = list(_batches(items, every, 50, 180, shared=True))
    assert together == [[0, 1, 2, 3], [4, 5]]
    assert list(_batches(items, every, 50, 179, shared=True)) == [[0, 1, 2], [3, 4], [5]]
    assert list(_batches(items, every, 3, 1000, shared=True)) == [[0, 1, 2], [3, 4, 5]]
    assert list(_batches(items, every, 50, 180, shared=False)) == [[0, 1, 2], [3, 4], [5]]
    # A record that is too long for any batch is alone in one.
    assert list(_batches(items, [0, 1], 50, 1, shared=True)) == [[0], [1]]


def test_layers_chosen_online_change_at_every_t_th_record(run: Any, tmp_path: Path) -> None:
    chosen = methods(("kvcomm",), Options(online=3))
    summary = run(chosen, batch_size=2)
    found = lines(tmp_path / "run")
    layers = [line["settings"]["layers"] for line in found]
    assert layers[0] == layers[1] == layers[2]
    assert layers[3] == layers[4] == layers[5]
    assert all(len(one) == 2 for one in layers)
    assert summary["methods"][0]["settings"]["online"] == 3


@pytest.mark.parametrize("senders", ["one", "split"])
def test_the_published_protocol_counts_the_answer_that_calibrates(
    run: Any, tmp_path: Path, senders: str
) -> None:
    """reference.md section 8: every T-th record counts twice, once with all layers."""
    records = [replace(one, pieces=tuple(one.context.split(" the ", 1))) for one in EXAMPLES]
    options = Options(online=3, senders=senders, strategies=("attention_gaussian", "all"))
    once = run(methods(("kvcomm",), options), records, preset="reference", out=tmp_path / "once")
    published = divide(records, n_calibration=0, published=True)
    out = tmp_path / "twice"
    twice = run(methods(("kvcomm",), options), plan=published, preset="reference", out=out,
                batch_size=2)  # fmt: skip
    usual = {(x["method"], x["settings"]["strategy"], x["id"]): x
             for x in timeless(lines(tmp_path / "once"))}  # fmt: skip
    found = [line for line in timeless(lines(out)) if line["settings"]["online"]]
    assert [line["id"] for line in found] == [
        "r0 (calibrating)", "r0", "r1", "r2", "r3 (calibrating)", "r3", "r4", "r5",
        "r6 (calibrating)", "r6",
    ]  # fmt: skip
    own = ("id", "method", "settings")
    for line in found:
        assert list(line) == FIELDS[:-1]
        name, extra = line["id"].split(" ")[0], line["id"].endswith(")")
        expected = usual["kvcomm", "all" if extra else "attention_gaussian", name]
        assert [line[field] for field in line if field not in own] == [
            expected[field] for field in line if field not in own
        ]
        assert line["settings"]["layers"] == expected["settings"]["layers"]
    method, all_layers = twice["methods"]
    assert (method["attempted"], method["done"], all_layers["done"]) == (10, 10, 7)
    assert once["methods"][0]["done"] == 7
    counted = [usual["kvcomm", "attention_gaussian", f"r{n}"]["nll"] for n in range(7)]
    counted += [usual["kvcomm", "all", f"r{n}"]["nll"] for n in (0, 3, 6)]
    assert method["nll"]["value"] == pytest.approx(sum(counted) / 10)


def test_an_answer_that_calibrates_survives_a_kill(run: Any, tmp_path: Path) -> None:
    chosen = methods(("kvcomm",), Options(online=3))
    how = {"plan": divide(EXAMPLES, n_calibration=0, published=True), "preset": "reference"}
    run(chosen, **how)
    log = tmp_path / "run" / RECORDS
    whole, data = timeless(lines(tmp_path / "run")), log.read_bytes()
    for n_kept in (0, 1, 2, 5, 9):
        log.write_bytes(b"".join(data.splitlines(keepends=True)[:n_kept]))
        run(chosen, **how)
        assert timeless(lines(tmp_path / "run")) == whole, n_kept
    # A line that is lost in the middle is made again, and only that one.
    log.write_bytes(b"".join(data.splitlines(keepends=True)[1:]))
    run(chosen, **how)
    assert timeless(lines(tmp_path / "run")) == [*whole[1:], whole[0]]


# ---- counting ------------------------------------------------------------------------------


def test_means_recovered_and_counts_by_hand(run: Any) -> None:
    nll = {"baseline": (10.0, 20.0), "skyline": (4.0, 8.0), "mine": (7.0, 11.0)}
    chosen = [Fake(name, lambda number, name=name: nll[name][number]) for name in nll]
    found = {m["label"]: m for m in run(chosen, EXAMPLES[:2])["methods"]}
    assert found["mine"]["nll"]["value"] == 9.0
    assert found["mine"]["nll"]["n"] == 2
    assert found["mine"]["recovered"]["value"] == pytest.approx((30 - 18) / (30 - 12))
    # Resampling two records gives shares between the worse and the better one's.
    assert found["mine"]["recovered"]["low"] == pytest.approx(3 / 6)
    assert found["mine"]["recovered"]["high"] == pytest.approx(9 / 12)
    assert found["baseline"]["recovered"]["value"] == 0.0
    assert found["skyline"]["recovered"]["value"] == 1.0
    assert found["mine"]["message_bytes"]["value"] == 5.0
    # "boat 0" against "boat": sets {boat, 0} and {boat}, F1 2/3; tokens the same; EM 0.
    assert found["mine"]["match"]["value"] == 1.0
    assert found["mine"]["f1"]["value"] == pytest.approx(2 / 3)
    assert found["mine"]["em"]["value"] == 0.0
    assert found["mine"]["first_token"] is None
    assert found["mine"]["total"]["value"] == 1.0


def test_one_record_s_failure_is_counted_and_told(run: Any, tmp_path: Path) -> None:
    chosen = [Fake("baseline"), Fake("mine", broken=frozenset({1, 4}))]
    summary = run(chosen, batch_size=3)
    mine = summary["methods"][1]
    assert (mine["attempted"], mine["done"], mine["failed"]) == (7, 5, 2)
    assert mine["nll"]["n"] == 5
    assert mine["nll"]["value"] == pytest.approx((0 + 2 + 3 + 5 + 6) / 5)
    assert summary["methods"][0]["failed"] == 0
    failed = [line for line in lines(tmp_path / "run") if "error" in line]
    assert [line["id"] for line in failed] == ["r1", "r4"]
    assert failed[0]["error"] == "ArithmeticError: item 1 is broken"
    assert failed[0]["answer"] is None
    # A later start tries them again, and only them.
    again = [Fake("baseline"), Fake("mine")]
    summary = run(again)
    assert again[0].seen == []
    assert again[1].seen == [1, 4]
    assert summary["methods"][1]["failed"] == 0
    assert len(lines(tmp_path / "run")) == 14


def test_a_run_in_which_all_fail_has_no_means(run: Any) -> None:
    found = run([Fake("mine", broken=frozenset(range(7)))])["methods"][0]
    assert (found["attempted"], found["done"], found["failed"]) == (7, 0, 7)
    assert found["nll"] is None
    assert found["match"] is None


def test_a_prompt_that_cannot_be_made_fails_alone(run: Any) -> None:
    records = [*EXAMPLES[:2], replace(EXAMPLES[2], question=" ")]
    found = run([Fake("mine")], records)["methods"][0]
    assert (found["done"], found["failed"]) == (2, 1)


def test_values_that_json_lacks_become_null_with_a_note(run: Any, tmp_path: Path) -> None:
    values = {0: float("nan"), 1: np.float32(2.5), 2: 3.5}
    found = run([Fake("mine", nll=values.__getitem__)], EXAMPLES[:3])["methods"][0]
    first, second, _ = lines(tmp_path / "run")
    assert first["nll"] is None
    assert first["notes"] == ["nll is nan"]
    assert second["nll"] == 2.5
    assert (found["nll"]["value"], found["nll"]["n"]) == (3.0, 2)
    assert found["match"]["n"] == 3


def test_reasoning_that_never_ends_is_noted(run: Any, tmp_path: Path) -> None:  # EV-166
    run([Fake("ended", says="<think>x</think>boat"), Fake("endless", says="<think>boat")],
        EXAMPLES[:1])  # fmt: skip
    ended, endless = lines(tmp_path / "run")
    assert list(ended) == FIELDS
    assert ended["match"] == 1.0
    assert endless.pop("reasoning_cut_off") is True
    assert list(endless) == FIELDS
    assert endless["answer"] == "<think>boat 0"  # as it was said
    assert (endless["match"], endless["f1"], endless["em"]) == (0.0, 0.0, 0.0)


def test_reasoning_that_the_prompt_opened_is_none_of_the_answer(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # EV-166
    said = [Fake("ended", says="so</think>boat"), Fake("endless", says="boat")]
    plain = Prompts.ids

    def opened(self: Prompts, message: str, role: Any) -> Any:
        ids = plain(self, message, role)
        tail = self._bench.receiver.model.tokenizer.encode("<think>\n")
        return np.concatenate([ids, np.array(tail, np.int32)])

    monkeypatch.setattr(Prompts, "ids", opened)
    run(said, EXAMPLES[:1])
    ended, endless = lines(tmp_path / "run")
    assert ended.pop("reasoning_opened") is endless.pop("reasoning_opened") is True
    assert list(ended) == FIELDS
    assert ended["match"] == 1.0
    assert endless["reasoning_cut_off"] is True
    assert (endless["match"], endless["f1"], endless["em"]) == (0.0, 0.0, 0.0)
    # Scoring the log again knows it, too.
    log = (tmp_path / "run" / RECORDS).read_bytes()
    score.rescore(tmp_path / "run")
    assert (tmp_path / "run" / RECORDS).read_bytes() == log


def test_blank_golds_are_counted(run: Any) -> None:  # EV-157
    golds = [("The The", "!!!"), ("A", "boat"), ("boat",), ("a",)]
    records = [replace(one, answers=gold) for one, gold in zip(EXAMPLES, golds, strict=False)]
    assert run([Fake("mine"), Fake("yours")], records)["blank_golds"] == 2


def test_the_running_score_by_hand() -> None:
    chosen: dict[str, dict[str, Any]] = {"baseline": {}, "skyline": {}, "kvcomm": {"ratio": 0.5}}

    def line(method: str, name: str, nll: float, match: float, **more: Any) -> dict[str, Any]:
        settings = {**chosen[method], "layers": [1]}
        scores = {"nll": nll, "match": match}
        return {"id": name, "method": method, "settings": settings, **scores, **more}

    labels = {row_key(method, settings): method for method, settings in chosen.items()}
    score = Running(labels, "match", [line("baseline", "r0", 10.0, 0.0)])
    assert score.add(line("baseline", "r1", 20.0, 1.0)) == "baseline: match 0.50, nll 15.0"
    broken = line("kvcomm", "r0", 0.0, 0.0, error="ValueError: broken")
    assert score.add(broken) == "kvcomm: nothing done"
    skyline = score.add(line("skyline", "r0", 4.0, 1.0))
    assert skyline == "skyline: match 1.00, nll 4.0, recovered 1.00"
    share = score.add(line("kvcomm", "r0", 7.0, 0.0))
    assert share == "kvcomm: match 0.00, nll 7.0, recovered 0.50"
    # What skyline has not answered yet counts for the means, and not for the share.
    share = score.add(line("kvcomm", "r1", 11.0, 1.0))
    assert share == "kvcomm: match 0.50, nll 9.0, recovered 0.50"
    score.add(line("skyline", "r1", 8.0, 1.0))
    assert score.add(broken) == "kvcomm: match 0.50, nll 9.0, recovered 0.67"  # 12 of 18 nats


# ---- the whole way -------------------------------------------------------------------------


def test_a_run_is_read_back_as_it_was_written(run: Any, tmp_path: Path) -> None:
    summary = run(methods(("baseline", "kvcomm"), Options()), n_calibration=1)
    found, records = read_run(tmp_path / "run")
    assert found["settings"] == summary["settings"]
    assert found["calibration"] == summary["calibration"]
    assert len(records) == 12
    assert found["settings"]["prompts"]["sender"] == prompts.FAMILIES["qa"].sender


def test_likelihoods_of_a_real_model_are_the_recorded_ones(
    real_model: Model, shared: Path, tmp_path: Path
) -> None:
    """The whole way from the data file to summary, against an independent implementation."""
    recorded = json.loads((shared / "reference" / "paper_smollm2.json").read_text())
    folder = shared / "data" / "hotpotqa"
    plan = divide(
        find("hotpotqa").load(folder / "dev_distractor_100.jsonl"),
        calibration=find("hotpotqa").load(folder / "train_distractor_100.jsonl"),
        limit=4,
    )
    chosen = methods(
        ("baseline", "skyline", "kvcomm"),
        Options(ratios=("0.3", "0.5"), strategies=("attention_gaussian", "all")),
    )
    evaluate(
        Sender(real_model), Receiver(real_model), TASK, plan, chosen, tmp_path / "run",
        max_new_tokens=1,
    )  # fmt: skip
    names = {
        ("baseline", None): "baseline",
        ("skyline", None): "skyline",
        ("kvcomm", 0.3): "attention_gaussian ratio=0.3 alpha=1.0",
        ("kvcomm", 0.5): "attention_gaussian ratio=0.5 alpha=1.0",
        ("kvcomm", None): "all",
    }
    found = lines(tmp_path / "run")
    assert len(found) == 4 * 5
    for line in found:
        name = names[line["method"], line["settings"].get("ratio")]
        expected = recorded["records"][line["index"]]
        assert line["nll"] == pytest.approx(sum(expected["nll"][name]), abs=2e-3), name
        assert line["n_gold_tokens"] == len(expected["answer_ids"])
        if line["method"] == "kvcomm" and name != "all":
            assert line["settings"]["layers"] == recorded["layers"][name]


def test_without_answers_their_scores_are_unknown(run: Any, tmp_path: Path) -> None:
    summary = run(methods(("baseline", "skyline"), Options()), max_new_tokens=0)
    for line in lines(tmp_path / "run"):
        assert line["answer"] == "" and line["token_ids"] == []
        assert {line[name] for name in metrics.NAMES} == {None}
        assert line["nll"] > 0
    for method in summary["methods"]:
        assert method["match"] is None and method["recovered"] is not None
