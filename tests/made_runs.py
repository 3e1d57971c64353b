"""Summaries and logs of runs, made by hand for the tests of reports and plots."""

from typing import Any

N_LAYERS = 10
N_RECORDS = 3

#: label, method, settings, layers, bytes, recovered, nll, seconds of the sender and to first token
METHODS: list[tuple[str, str, dict[str, Any], list[int] | None, int, float, float, float, float]]
METHODS = [
    ("baseline", "baseline", {}, None, 0, 0.0, 12.0, 0.0, 0.012),
    ("skyline", "skyline", {}, None, 0, 1.0, 4.0, 0.0, 0.05),
    ("kvcomm 0.3", "kvcomm", {"strategy": "attention_gaussian", "ratio": 0.3}, [1, 4, 5],
     1_380_000, 0.5, 8.0, 0.1, 0.014),
    ("random 0.3", "kvcomm", {"strategy": "random", "ratio": 0.3}, [0, 2, 9],
     1_380_000, 0.0625, 11.5, 0.1, 0.014),
    ("all layers", "kvcomm", {"strategy": "all", "ratio": None}, list(range(10)),
     4_600_000, 0.9375, 4.5, 0.1, 0.02),
]  # fmt: skip

MODEL = {"model": "tiny <b>", "fingerprint": "f" * 64, "n_layers": N_LAYERS, "dtype": "f32"}


def interval(value: float, n: int = N_RECORDS, spread: float = 0.1) -> dict[str, Any]:
    return {"value": value, "low": value - spread, "high": value + spread, "n": n}


def method(
    label: str, name: str, settings: dict[str, Any], layers: list[int] | None, n_bytes: int,
    recovered: float | None, nll: float, sender: float, first_token: float, **fields: Any,
) -> dict[str, Any]:  # fmt: skip
    """A method of a summary; `fields` replace what is made."""
    return {
        "label": label, "method": name, "settings": settings, "layers": layers,
        "records": N_RECORDS, "attempted": N_RECORDS, "done": N_RECORDS, "failed": 0,
        "recovered": None if recovered is None else interval(recovered),
        "nll": interval(nll, spread=1.0), "match": interval(1 / 3), "f1": interval(0.5),
        "em": interval(0.25), "rouge_l_recall": None, "rouge_l_f": None,
        "published_rouge_l": None, "accuracy": None,
        "n_gold_tokens": interval(3), "message_bytes": interval(n_bytes, spread=0),
        "receiver_tokens": interval(66), "cut_tokens": interval(0),
        "sender": interval(sender, spread=0.01), "transfer": interval(0.0, spread=0.0),
        "first_token": interval(first_token, spread=0.002), "total": interval(1.5),
        **fields,
    }  # fmt: skip


def summary(
    *, leave_out: tuple[str, ...] = (), more: tuple[dict[str, Any], ...] = (),
    changes: dict[str, dict[str, Any]] | None = None, settings: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The summary of a run of three records.

    changes: per label of a method fields that replace what is made. more: further methods.
    """
    methods = [method(*one) for one in METHODS if one[0] not in leave_out]
    if {"baseline", "skyline"} & set(leave_out):
        methods = [one | {"recovered": None} for one in methods]
    return {
        "settings": {
            "task": "hotpotqa", "closed_answers": True, "seed": 42, "preset": "paper",
            "sender": MODEL, "receiver": MODEL, "calibration": ["c0"],
            "published_protocol": False, "n_records": N_RECORDS, "data": "one.jsonl, two.jsonl",
            "calibration_data": "one.jsonl, two.jsonl", **(settings or {}),
        },
        "environment": {
            "command": ["kvcomm", "eval", "--data", "a file.json"], "batch_size": 8,
            "versions": {"kvcomm": "7.8.9"}, "machine": {"threads": 2, "processor": "a & b"},
        },
        "excluded": {"calibration": ["c0"], "no gold answer": []},
        "methods": [one | (changes or {}).get(one["label"], {}) for one in methods] + list(more),
        "calibrated": True,
        "calibration": {
            "preset": "paper", "n_samples": 1, "mass": [0.1 * (1 + n % 4) for n in range(N_LAYERS)]
        },
        "blank_golds": 0,
        "comparisons": [
            {"method": "kvcomm 0.3", "control": "random 0.3", "nll_less": interval(3.5)}
        ],
    }  # fmt: skip


def many(n: int) -> tuple[dict[str, Any], ...]:
    """n methods more, with long labels, of all sizes of message."""
    return tuple(
        method(
            f"a method of number {k} and its options", "other", {"k": k},
            None if k % 2 else [k % N_LAYERS], 600 * 3**(k % 12), k / n, 12 - 8 * k / n, 0.3, 0.02,
            rouge_l_recall=interval(0.4), rouge_l_f=interval(0.3),
        )
        for k in range(n)
    )  # fmt: skip


def records(run: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """A log of a run: record r0 is right everywhere, r1 in skyline only, r2 nowhere."""
    lines = []
    for one in run["methods"]:
        for index in range(N_RECORDS):
            right = index == 0 or (index == 1 and one["label"] == "skyline")
            lines.append(
                {
                    "id": f"r{index}", "index": index, "method": one["method"],
                    "settings": {**one["settings"], "layers": one["layers"]},
                    "answer": f"answer {index} of {one['label']}", "gold": ["Ann"],
                    "match": float(right), "f1": 0.5, "em": 0.0, "rouge_l_recall": None,
                    "rouge_l_f": None, "published_rouge_l": None, "accuracy": None,
                    "nll": one["nll"]["value"],
                    **fields,
                }
            )  # fmt: skip
    return lines
