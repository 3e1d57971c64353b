"""The paper's tables and figures, made again from a user's models and data.

    request.py    what was asked for        runs.py       runs what is missing, and reads it back
    methods.py    which methods are run     measures.py   values and intervals out of records
    catalogue.py  which exhibits there are  table.py      tables and how they are written
    paper.py      what the paper printed    figures.py    how figures are drawn
    claims.py     the paper's claims        account.py    writes the folder of results
    tables.py, sweeps.py, curves.py         the exhibits themselves

Nothing here runs a model by itself: every answer is a line of the log of a run that evaluate.py
made, so a reproduction that was stopped at any moment goes on where it was.
"""
