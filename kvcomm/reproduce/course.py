"""The course of a reproduction: one exhibit after the other, each written when it is made."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvcomm.reproduce import account, claims
from kvcomm.reproduce.catalogue import EXHIBITS, NOT_MADE
from kvcomm.reproduce.exhibit import Built
from kvcomm.reproduce.request import Request
from kvcomm.reproduce.runs import Runs
from kvcomm.reproduce.write import write


def reproduce(
    names: Sequence[str],
    request: Request,
    *,
    command: Sequence[str] = (),
    note: Callable[[str], None] = lambda line: None,
    tell: Callable[[Built, Sequence[claims.Verdict], Sequence[Path]], None] = lambda *_: None,
) -> int:
    """Make exhibits by name, such as "table-1"; returns how many records failed.

    tell: gets every exhibit when it is written.

    Raises
    ------
    ValueError
        An unknown exhibit, or one that none of the data is for.
    """
    for name in names:
        check(name)
    request.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(request, note)
    n_failed = 0
    for name in names:
        exhibit = EXHIBITS[name]
        note(f"{name}: {exhibit.title}")
        try:
            built = exhibit.build(runs, exhibit)
        finally:
            account.write(runs, request, command)
        verdicts = [*claims.judged(name, built.results), *built.verdicts]
        paths = write(exhibit, built, verdicts, request.out)
        n_failed += sum(len(errors) for one in built.results for errors in one.failed.values())
        account.write(runs, request, command)
        tell(built, verdicts, paths)
    return n_failed


def check(name: str) -> None:
    """Raises ValueError for a table or a figure that is not made."""
    if name in NOT_MADE:
        raise ValueError(f"{name} is not made: {NOT_MADE[name]}")
    if name not in EXHIBITS:
        raise ValueError(f"{name}: not in the paper; made are {', '.join(EXHIBITS)}")
