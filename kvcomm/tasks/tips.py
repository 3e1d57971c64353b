"""Records of the kind of tipsheets: notes on a few invented companies, one clearly the best.

Owns the made-up names and the phrases, all written for this project, and how a record is drawn
from them. What a record means is in `tipsheets.py`.

Of each company the notes say one thing about where it is heading, which decides, and up to three
facts. Only the best one is on its way up; its facts are good but for at most one. The others tread
water or go down, and a good fact among theirs never outweighs that.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

STARTS = (
    "Alder", "Brisk", "Calyx", "Dorn", "Ember", "Fenwick", "Galen", "Harrow", "Ivory", "Juno",
    "Kestrel", "Larch", "Merrow", "Norrin", "Osprey", "Pelham", "Quarry", "Rowan", "Sorrel",
    "Thorne", "Umbra", "Vesper", "Wexley", "Yarrow", "Zephyr",
)  # fmt: skip
ENDS = (
    "Biotech", "Cables", "Dairy", "Energy", "Foods", "Freight", "Glass", "Motors", "Paper",
    "Robotics", "Shipping", "Software", "Steel", "Textiles",
)  # fmt: skip

HEADINGS = {
    "positive": (
        "is growing faster than anyone in its field",
        "has beaten its own forecast three quarters in a row",
        "keeps winning customers while its costs fall",
        "has raised its outlook for the year twice",
        "is taking market share at rising margins",
    ),
    "neutral": (
        "is moving sideways, with nothing new in sight",
        "reported just what was expected of it",
        "holds its place in a flat market",
        "offers little reason to buy or to sell",
        "has left its outlook as it was",
    ),
    "negative": (
        "is losing customers to cheaper rivals",
        "has cut its forecast for the second time this year",
        "is burning cash and may need new money by spring",
        "struggles with falling orders and rising costs",
        "warned that losses will go on",
    ),
}
GAINS = (
    "revenue rose {percent}%",
    "profit per share is up {percent}%",
    "the order book grew by {percent}%",
)
LOSSES = (
    "revenue fell {percent}%",
    "profit per share is down {percent}%",
    "the order book shrank by {percent}%",
)
LUCK = (
    "a large hospital chain signed for five years",
    "a new plant opened ahead of schedule",
    "debt was paid back early",
    "the regulator cleared its main product",
    "the board is buying shares back",
    "a rare patent was granted",
)
TROUBLE = (
    "the head of finance left without notice",
    "a recall of its best seller is under way",
    "the auditors asked for more time",
    "a patent suit was lost",
    "the credit rating was lowered",
    "a warehouse burned down",
)
PLAIN = (
    "the shares trade at {ratio} times earnings",
    "headquarters will move within the city",
    "the dividend stays the same",
    "a new logo was presented",
    "the annual meeting takes place in May",
    "the shares moved to another exchange",
    "the chair was elected again",
    "it has {ratio} offices",
)

#: Facts by what a company is: per fact the phrases it is drawn from. Figures never speak against
#: where the company is heading.
FACTS = {
    "positive": ((GAINS, LUCK), (GAINS, LUCK, PLAIN), (GAINS, LUCK, TROUBLE)),
    "neutral": ((PLAIN,), (PLAIN, PLAIN), (LUCK, TROUBLE), ()),
    "negative": ((LOSSES, TROUBLE), (TROUBLE, PLAIN), (LOSSES, TROUBLE, LUCK)),
}

#: The companies of a record besides the best one.
OTHERS = (
    ("negative", "neutral"),
    ("negative", "negative"),
    ("neutral", "negative", "negative"),
    ("neutral", "neutral", "negative"),
)

QUESTION = (
    "You can buy shares of one of these companies: {options}. Which one do you buy? "
    "Answer with the name of the company and nothing else.\nThe company name is:"
)

#: How many records differ from each other; there are many more, but no use for them.
MOST = 100_000


def records(n: int, rng: Random) -> Iterator[dict[str, object]]:
    """n records, no two alike."""
    seen: set[str] = set()
    while len(seen) < n:
        record = _record(rng)
        text = str(record["prompt_A"])
        if text not in seen:
            seen.add(text)
            yield record


def _record(rng: Random) -> dict[str, object]:
    attitudes = ["positive", *rng.choice(OTHERS)]
    rng.shuffle(attitudes)
    starts = rng.sample(STARTS, len(attitudes))
    ends = rng.sample(ENDS, len(attitudes))
    names = [f"{start} {end}" for start, end in zip(starts, ends, strict=True)]
    used: set[str] = set()
    notes = [_note(name, kind, used, rng) for name, kind in zip(names, attitudes, strict=True)]
    return {
        "prompt_A": " ".join(notes),
        "prompt_B": QUESTION.format(options=", ".join(names)),
        "options": names,
        "label": names[attitudes.index("positive")],
        "attitudes": dict(zip(names, attitudes, strict=True)),
    }


def _note(name: str, attitude: str, used: set[str], rng: Random) -> str:
    """A sentence on a company; no phrase is used twice in one record."""

    def draw(phrases: tuple[str, ...]) -> str:
        phrase = rng.choice([one for one in phrases if one not in used])
        used.add(phrase)
        return phrase.format(percent=rng.randint(4, 38), ratio=rng.randint(8, 31))

    heading = draw(HEADINGS[attitude])
    facts = [draw(phrases) for phrases in rng.choice(FACTS[attitude])]
    rng.shuffle(facts)
    return f"{name} {heading}" + "".join(f"; {fact}" for fact in facts) + "."
