"""The course of a reproduction: one exhibit after the other, each written when it is made."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvcomm import template
from kvcomm.reproduce import account, claims
from kvcomm.reproduce.catalogue import EXHIBITS, NOT_MADE
from kvcomm.reproduce.exhibit import Built
from kvcomm.reproduce.request import Request
from kvcomm.reproduce.runs import NoDataError, Runs
from kvcomm.reproduce.verdict import Verdict
from kvcomm.reproduce.write import write


def reproduce(
    names: Sequence[str],
    request: Request,
    *,
    command: Sequence[str] = (),
    note: Callable[[str], None] = lambda line: None,
    tell: Callable[[Built, Sequence[Verdict], Sequence[Path]], None] = lambda *_: None,
) -> int:
    """Make exhibits by name, such as "table-1"; returns how many records failed.

    tell: gets every exhibit when it is written.

    Of several exhibits those that there is no data for are left out, and told.

    Raises
    ------
    ValueError
        An unknown exhibit, or none that there is data for.
    """
    for name in names:
        check(name)
    request.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(request, command, note)
    n_failed = n_made = 0
    for name in names:
        for task in runs.wanted(EXHIBITS[name]):
            runs.data(task)  # a file that cannot be read is told of before hours of work
    with template.on_day(runs.day):
        for name in names:
            exhibit = EXHIBITS[name]
            note(f"{name}: {exhibit.title}")
            try:
                built = exhibit.build(runs, exhibit)
            except NoDataError as error:
                if len(names) == 1:
                    raise
                runs.leave_out(name, str(error).removeprefix(f"{name}: "))
                continue
            verdicts = [*claims.judged(name, built.results), *built.verdicts]
            paths = write(exhibit, built, verdicts, runs)
            n_failed += sum(len(errors) for one in built.results for errors in one.failed.values())
            n_made += 1
            account.write(runs)
            tell(built, verdicts, paths)
    if not n_made:
        raise NoDataError(f"nothing below {request.data.name} for any of {', '.join(names)}")
    account.write(runs)
    return n_failed


def check(name: str) -> None:
    """Raises ValueError for a table or a figure that is not made."""
    if name in NOT_MADE:
        raise ValueError(f"{name} is not made: {NOT_MADE[name]}")
    if name not in EXHIBITS:
        raise ValueError(f"{name}: not in the paper; made are {', '.join(EXHIBITS)}")
