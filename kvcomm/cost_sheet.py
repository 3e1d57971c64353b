"""Costs of all methods side by side: whole runs, and what each has more than AC.

Owns which methods a sheet lists and how it is written. The numbers are cost.py's. Three accounts of
the computation, which never stand for each other (FLOPs as kvcomm runs it, FLOPs with every prefill
in full, operations of the paper's formulas), and one of the bytes. In each a method stands beside
skyline twice: by its whole run, and by its excess over AC per query, which is what Figure 8 shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvcomm import cost, selection
from kvcomm.cost import Cost, Lengths, Setting
from kvcomm.shapes import Shape


@dataclass(frozen=True)
class Compared:
    """A number of one method beside those of skyline and AC.

    whole: as it is. whole_less: skyline's over it. excess: what it has more than AC; below 0 where
    it has less. excess_less: skyline's excess over this one, None unless both are above 0.
    """

    whole: int
    whole_less: float
    excess: int
    excess_less: float | None

    @classmethod
    def of(cls, whole: int, skyline: int, ac: int) -> "Compared":
        """From this method's number and those of the two."""
        excess, most = whole - ac, skyline - ac
        known = excess > 0 and most > 0
        return cls(whole, skyline / whole, excess, most / excess if known else None)


@dataclass(frozen=True)
class Row:
    """One method of a sheet.

    n_sent: layers sent whole, None where that means nothing. as_run, full: FLOPs; sender_as_run and
    sender_full are the sender's part of them. paper: operations, None where the paper has no
    formula. memory: bytes of weights and of K and V at the receiver, so that its excess is of K and
    V. Bytes of sender_kv, receiver_kv as in `Cost`.
    """

    label: str
    n_sent: int | None
    sender_as_run: int
    as_run: Compared
    sender_full: int
    full: Compared
    paper: Compared | None
    message_bytes: int
    sender_kv: int
    receiver_kv: int
    memory: Compared


@dataclass(frozen=True)
class Sheet:
    """What `sheet` makes; setting is that of as_run."""

    name: str
    shape: Shape
    lengths: Lengths
    setting: Setting
    rows: tuple[Row, ...]

    def row(self, label: str) -> Row:
        """By its label; KeyError when there is none."""
        return {row.label: row for row in self.rows}[label]

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return asdict(self)


def sheet(
    name: str,
    shape: Shape,
    lengths: Lengths,
    *,
    ratios: Sequence[str] = ("0.3", "0.5", "0.7"),
    setting: Setting = cost.AS_RUN,
) -> Sheet:
    """All methods with their defaults, kvcomm once per ratio of the layers.

    No model runs, so no attention chooses the layers of a ratio: they are those in the middle,
    strategy "gaussian". Only where the sender stops depends on that.

    Parameters
    ----------
    name
        Of the shape, for titles.

    Raises
    ------
    ValueError
        A ratio that is not in 0 .. 1.
    """

    def costs(setting: Setting) -> list[Cost]:
        given = (shape, lengths)
        chosen = {
            f"kvcomm {float(ratio):g}": selection.choose(
                "gaussian", shape.n_layers, ratio=ratio, preset=setting.preset
            )
            for ratio in ratios
        }
        chosen["all layers"] = tuple(range(shape.n_layers))
        return [
            cost.baseline(*given, setting),
            cost.skyline(*given, setting),
            *(cost.kvcomm(*given, layers, setting, label) for label, layers in chosen.items()),
            cost.ac(*given, setting=setting),
            cost.nld(*given, setting),
            cost.cipher(*given, setting),
            cost.prepend_hidden(*given, setting=setting),
            cost.token_importance(*given, setting=setting),
        ]

    as_run = costs(replace(setting, full=False))
    full = costs(replace(setting, full=True))
    of_paper = [_paper(shape, lengths, one) for one in as_run]
    return Sheet(name, shape, lengths, setting, tuple(_rows(as_run, full, of_paper)))


def _paper(shape: Shape, lengths: Lengths, one: Cost) -> int | None:
    method = one.label if one.n_sent is None else "kvcomm"
    if method not in cost.FORMULAS:
        return None
    return cost.operations(method, shape, lengths, one.n_sent or 0)


def _rows(as_run: list[Cost], full: list[Cost], of_paper: list[int | None]) -> list[Row]:
    place = {one.label: n for n, one in enumerate(as_run)}

    def beside(values: Sequence[int | None]) -> list[Compared | None]:
        skyline, ac = values[place["skyline"]], values[place["ac"]]
        return [None if v is None else Compared.of(v, skyline, ac) for v in values]

    table = zip(
        as_run,
        beside([one.total.flops for one in as_run]),
        full,
        beside([one.total.flops for one in full]),
        beside(of_paper),
        beside([one.receiver_memory for one in as_run]),
        strict=True,
    )
    return [
        Row(
            label=one.label,
            n_sent=one.n_sent,
            sender_as_run=one.sender.flops,
            as_run=run,
            sender_full=whole.sender.flops,
            full=in_full,
            paper=formula,
            message_bytes=one.message_bytes,
            sender_kv=one.sender_kv,
            receiver_kv=one.receiver_kv,
            memory=memory,
        )
        for one, run, whole, in_full, formula, memory in table
    ]


# ---- written -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A titled table of texts; the first cell of a line names the method."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """For a terminal."""
        rows = [self.headings, *self.lines]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self.headings))]
        texts = [
            "  ".join(
                cell.rjust(width) if n else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([self.title, texts[0], rule, *texts[1:]])

    def markdown(self) -> str:
        rows = [self.headings, ("---", *("---:",) * (len(self.headings) - 1)), *self.lines]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(row)} |" for row in rows)])


#: Headings of the cells that `_compared` makes.
_COMPARED = ("whole run", "skyline / it", "excess over AC", "excess: skyline / it")


def tables(made: Sheet) -> list[Table]:
    """The accounts of a sheet, one table each."""
    return [
        _flops_table(
            made, "FLOPs, as kvcomm runs it", lambda row: (row.sender_as_run, row.as_run)
        ),
        _flops_table(
            made, "FLOPs, every prefill in full", lambda row: (row.sender_full, row.full)
        ),
        Table(
            "operations, the paper's leading-order formulas (not FLOPs)",
            ("method", "layers", *_COMPARED),
            tuple(
                (row.label, _layers(made, row), *_compared(row.paper, _scaled))
                for row in made.rows
                if row.paper is not None
            ),
        ),
        Table(
            f"bytes, weights {made.setting.dtype}, K and V {made.setting.kv_dtype}",
            (
                "method", "layers", "sent", "all layers / it", "sender K, V", "receiver K, V",
                "with weights", *_COMPARED[1:],
            ),
            tuple(_bytes_line(made, row) for row in made.rows),
        ),
    ]  # fmt: skip


def notes(made: Sheet) -> list[str]:
    """What the tables mean, one line each."""
    lengths, shape = made.lengths, made.shape
    return [
        f"{made.name}: {shape.n_layers} layers, width {shape.dim}, {shape.parameters / 1e9:.3g}G "
        f"parameters. One record: context {lengths.context}, query {lengths.query}, answer "
        f"{lengths.answer} tokens; skyline's prompt {lengths.both}; messages of nld and cipher "
        f"{lengths.message}, their second prompt {lengths.second}. Preset {made.setting.preset}.",
        "whole run: sender and receiver. skyline / it: skyline's whole run over this one. excess "
        "over AC: what a method has more than AC, as the paper's Figure 8 shows it. excess: "
        "skyline / it: a ratio of these, not of whole runs (- where one is not above 0).",
        "as kvcomm runs it: the sender stops in the highest layer that is sent, the last layer and "
        "the vocabulary run for returned rows only; AC's sender stops too, in front of its layer. "
        "Every prefill in full: all layers for all tokens, the vocabulary for the last.",
        "the paper's formulas count causal attention as the full square and nothing of the MLP; "
        "ac and baseline follow from the one of kvcomm. kvcomm of a ratio: layers in the middle. "
        "nld's text is taken as 4 bytes a token.",
    ]


def _flops_table(made: Sheet, title: str, pick: Callable[[Row], tuple[int, Compared]]) -> Table:
    lines = []
    for row in made.rows:
        sender, compared = pick(row)
        whole, *rest = _compared(compared, _scaled)
        receiver = _scaled(compared.whole - sender)
        lines.append((row.label, _layers(made, row), _scaled(sender), receiver, whole, *rest))
    headings = ("method", "layers", "sender", "receiver", *_COMPARED)
    return Table(title, headings, tuple(lines))


def _bytes_line(made: Sheet, row: Row) -> tuple[str, ...]:
    sent = made.row("all layers").message_bytes
    return (
        row.label,
        _layers(made, row),
        _size(row.message_bytes),
        _times(sent / row.message_bytes if row.message_bytes else None),
        _size(row.sender_kv),
        _size(row.receiver_kv),
        *_compared(row.memory, _size),
    )


def _layers(made: Sheet, row: Row) -> str:
    return "-" if row.n_sent is None else f"{row.n_sent}/{made.shape.n_layers}"


def _compared(compared: Compared, written: Callable[[int], str]) -> tuple[str, str, str, str]:
    return (
        written(compared.whole),
        _times(compared.whole_less),
        written(compared.excess),
        _times(compared.excess_less),
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def _scaled(value: int) -> str:
    """Three digits and a prefix: "1.38 T"."""
    for prefix, one in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= one:
            return f"{value / one:.3g} {prefix}"
    return str(value)


def _size(value: int) -> str:
    from kvcomm.report import size

    return f"-{size(-value)}" if value < 0 else size(value)
