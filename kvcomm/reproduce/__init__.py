"""The paper's tables and figures, made again from a user's models and data.

    request.py    what was asked for         course.py     the course: made, judged, written
    data.py       which records are scored   runs.py       runs what is missing, reads it back
    groups.py     which methods are run      measures.py   values and intervals out of records
    catalogue.py  which exhibits there are   exhibit.py    what an exhibit is
    table.py      tables and their forms     figures.py    how figures are drawn
    paper.py      what the paper printed     claims.py     claims, and whether they hold
    verdict.py    the rule of these          write.py      the files of an exhibit
    account.py    README.md of the folder
    tables.py, sweeps.py, curves.py, ranking.py, bill.py: the exhibits; series.py: what figures over
    settings share

Nothing here runs a model by itself: every answer is a line of the log of a run that evaluate.py
made, so a reproduction that was stopped at any moment goes on where it was.
"""
