"""What the paper claims of cost, computed for the setting of its Figure 8, without weights.

The shape is Llama-3.2-3B's; lengths are means over the records of Tipsheets and MultiFieldQA-en in
a data folder, in tokens of a catalogue model's tokenizer and chat template, which stands in for
Llama's. Answers are taken as long as the gold ones, and as long as the task allows. Writes cost.md
and cost.json into --out: one line per claim and account, and the tables of `kvcomm cost`.

    python benchmarks/cost.py --data-dir data --out benchmarks/results
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from kvcomm import catalogue, cost_sheet, prompts, tasks
from kvcomm.cost import AS_RUN, Lengths
from kvcomm.cost_sheet import Row, Sheet
from kvcomm.packet import write_whole
from kvcomm.records import write_json
from kvcomm.shapes import find
from kvcomm.tokenizer import Tokenizer

SHAPE = "llama-3.2-3b"
TASKS = ("tipsheets", "multifieldqa_en")
RATIOS = ("0.3", "0.5", "0.7")

#: An end of a computed range may fall short of the claimed one by so much.
SLACK = 0.1


@dataclass(frozen=True)
class Claim:
    """A range that the paper states, and one way to compute it.

    low, high: as claimed; low None: "up to". value: of one row of kvcomm, None where it is not
    above 0. only: the tasks that it is stated for.
    """

    text: str
    account: str
    low: float | None
    high: float
    value: Callable[[Row, Sheet], float | None]
    written: str = "{:.2f}x"
    only: tuple[str, ...] = TASKS


LESS = "2.5x to 6x less computation than Skyline"
SENT = "up to 3x less sent than all layers"
MEMORY = "23% to 73% less memory than Skyline (Tipsheets)"

CLAIMS = (
    Claim(LESS, "excess over AC, the paper's formulas", 2.5, 6, lambda r, s: r.paper.excess_less),
    Claim(
        LESS,
        "excess over AC, FLOPs of visible pairs, every prefill in full",
        2.5,
        6,
        lambda r, s: r.full.excess_less,
    ),
    Claim(
        LESS,
        "excess over AC, FLOPs, as kvcomm runs it",
        2.5,
        6,
        lambda r, s: r.as_run.excess_less,
    ),
    Claim(LESS, "whole run, the paper's formulas", 2.5, 6, lambda r, s: r.paper.whole_less),
    Claim(LESS, "whole run, FLOPs, every prefill in full", 2.5, 6, lambda r, s: r.full.whole_less),
    Claim(LESS, "whole run, FLOPs, as kvcomm runs it", 2.5, 6, lambda r, s: r.as_run.whole_less),
    Claim(
        SENT,
        "bytes of K and V",
        None,
        3,
        lambda r, s: s.row("all layers").message_bytes / r.message_bytes,
    ),
    Claim(
        MEMORY,
        "excess over AC at the receiver: K and V of the context",
        0.23,
        0.73,
        lambda r, s: 1 - r.memory.excess / s.row("skyline").memory.excess,
        "{:.0%}",
        ("tipsheets",),
    ),
    Claim(
        MEMORY,
        "whole receiver: weights, K and V",
        0.23,
        0.73,
        lambda r, s: 1 - 1 / r.memory.whole_less,
        "{:.2%}",
        ("tipsheets",),
    ),
)


@dataclass(frozen=True)
class Setting:
    """One task at one length of answers. skyline: tokens of skyline's prompt as it really is; in
    `lengths` it has those of the two prompts of an exchange, as in the paper's formulas."""

    task: str
    answers: str
    n_records: int
    lengths: Lengths
    skyline: int


def settings_of(task: str, folder: Path, tokenizer: Tokenizer) -> list[Setting]:
    """Mean lengths over a task's records."""
    task = tasks.find(task)
    examples = task.load(task.find_files(folder))

    def mean(message: Callable[[tasks.Example], str]) -> int:
        chats = ([{"role": "user", "content": message(one)}] for one in examples)
        return round(fmean(len(tokenizer.chat(chat, add_generation_prompt=True)) for chat in chats))

    context = mean(lambda one: prompts.sender_message(one.context, task.family))
    query = mean(lambda one: prompts.receiver_message(one.question, task.family))
    both = mean(lambda one: prompts.skyline_message(one.context, one.question, task.family))
    gold = round(fmean(len(tokenizer.encode(one.answers[0])) + 1 for one in examples))
    return [
        Setting(task.name, name, len(examples), Lengths(context, query, answer), both)
        for name, answer in (("as gold", gold), ("at the limit", task.max_new_tokens))
    ]


def judge(claim: Claim, settings: list[Setting], sheets: list[Sheet]) -> dict[str, object]:
    """The claim's values at the ratios, per setting, and whether their range is the claimed one."""
    found = []
    for setting, made in zip(settings, sheets, strict=True):
        if setting.task not in claim.only:
            found.append(None)
            continue
        values = [claim.value(made.row(f"kvcomm {ratio}"), made) for ratio in RATIOS]
        least, most = (1 - SLACK) * (claim.low or 0), (1 - SLACK) * claim.high
        known = None not in values
        holds = known and min(values) >= least and max(values) >= most
        found.append({"values": values, "holds": holds if known else None})
    return {"claim": claim.text, "as": claim.account, "settings": found}


def verdict(found: list[dict[str, object] | None], heads: list[str]) -> str:
    """In words, over the settings that the claim is about."""
    about = {head: one["holds"] for head, one in zip(heads, found, strict=True) if one is not None}
    if None in about.values():
        return "no ratio: KVComm is not above AC everywhere"
    if len(set(about.values())) == 1:
        return "holds" if all(about.values()) else "does not hold"
    return "does not hold for " + "; ".join(head for head, holds in about.items() if not holds)


def claims_table(claims: list[dict[str, object]], settings: list[Setting]) -> str:
    """One line per claim and account."""
    heads = [f"{one.task}, answers {one.answers}" for one in settings]
    lines = [["claim", "as", *heads, "verdict"], ["---"] * (3 + len(heads))]
    for claim, judged in zip(CLAIMS, claims, strict=True):
        cells = [
            "-"
            if one is None
            else "below AC"
            if None in one["values"]
            else " to ".join(claim.written.format(end(one["values"])) for end in (min, max))
            for one in judged["settings"]
        ]
        words = verdict(judged["settings"], heads)
        lines.append([claim.text, claim.account, *cells, words])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def real_prompts(settings: list[Setting], sheets: list[Sheet]) -> str:
    """What the formulas leave out: one prompt has the template and instruction once, two twice."""
    lines = []
    for setting, made in zip(settings, sheets, strict=True):
        two = setting.lengths.context + setting.lengths.query
        real = sheet_of(replace(setting.lengths, skyline=setting.skyline))
        excess = real.row("skyline").full.excess
        lines.append(
            f"- {setting.task}, answers {setting.answers}: skyline's real prompt has "
            f"{setting.skyline} tokens, the two prompts of an exchange {two}. With it skyline's "
            f"whole run is {excess / 1e9:+.3g} GFLOP against AC's (every prefill in full), where "
            f"equal lengths give {made.row('skyline').full.excess / 1e9:+.3g}."
        )
    return "\n".join(lines)


def sheet_of(lengths: Lengths) -> Sheet:
    return cost_sheet.sheet(SHAPE, find(SHAPE), lengths, ratios=RATIOS, setting=AS_RUN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tokenizer", default="qwen2.5-coder-0.5b", help="of a catalogue model")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(catalogue.prepared(args.tokenizer))
    settings = [one for task in TASKS for one in settings_of(task, args.data_dir, tokenizer)]
    sheets = [sheet_of(one.lengths) for one in settings]
    claims = [judge(claim, settings, sheets) for claim in CLAIMS]
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(
        args.out / "cost.json",
        {
            "tokenizer": args.tokenizer,
            "settings": [
                {"task": one.task, "answers": one.answers, "n_records": one.n_records,
                 "skyline": one.skyline}
                for one in settings
            ],
            "claims": claims,
            "sheets": [made.as_dict() for made in sheets],
        },
    )  # fmt: skip
    command = ["python", "benchmarks/cost.py", "--data-dir", "data", "--out", "benchmarks/results"]
    parts = [
        "# Cost: the paper's claims, computed",
        f"`{shlex.join(command)}`, lengths in tokens of {args.tokenizer}; no model runs.",
        f"Shape {SHAPE}, KVComm at {', '.join(RATIOS)} of its layers. A cell is the range over "
        "these. It holds where each end is at least nine tenths of the claimed one.",
        claims_table(claims, settings),
        "By (query, key) pairs that a causal mask lets through, Skyline's excess over AC is to "
        "KVComm's as the number of layers is to the number sent, whatever the lengths. The paper's "
        "formulas count the whole square of context and query for Skyline, with the masked pairs "
        "of a context token and a later query token: that makes its ratio up to twice as large, "
        "and the more so the shorter the answer is beside the query. As kvcomm runs it, KVComm's "
        "sender stops in the highest layer that is sent (here of layers in the middle; where the "
        "last layer is among those sent it saves next to nothing) and may cost less than AC's, "
        "which leaves no ratio of excesses.",
        "## Prompts as they are",
        real_prompts(settings, sheets),
    ]
    for one, made in zip(settings, sheets, strict=True):
        parts.append(f"## {one.task}, {one.n_records} records, answers {one.answers}")
        parts += [table.markdown() for table in cost_sheet.tables(made)]
        parts.append("\n".join(f"- {note}" for note in cost_sheet.notes(made)))
    write_whole(args.out / "cost.md", ("\n\n".join(parts) + "\n").encode())
    print(claims_table(claims, settings), file=sys.stderr)


if __name__ == "__main__":
    main()
