"""Every numbered table and figure of the paper, and this project's own: what each is and needs.

The whole list of `kvcomm reproduce --list`. How an exhibit is made is in tables.py, sweeps.py and
curves.py.
"""

from kvcomm.reproduce import bill, curves, groups, ranking, sweeps, tables
from kvcomm.reproduce.exhibit import TASKS, Exhibit

_MAIN = "baseline, skyline, NLD, CIPHER, AC by three rules, KVComm at 0.3, 0.5, 0.7, all layers"
_RANDOM = "KVComm against as many random layers at 0.3, 0.5, 0.7"
_TOKEN = "One token's hidden state kept or zeroed at layer l"
_TOKEN_RUNS = "one model, token importance: four tokens kept, and zeroed, over layers"
_PREPEND = "Hidden states of layer k prepended at layer j"
_PREPEND_RUNS = "the context's hidden states of layer k prepended, over (k, j)"

EXHIBITS: dict[str, Exhibit] = {
    one.name: one
    for one in (
        Exhibit("table-1", "Main results", _MAIN, TASKS, tables.main(("1",))),
        Exhibit(
            "table-2", "Random layers against the selection", _RANDOM, TASKS,
            tables.over_main(tables.RANDOM, ("2",), notes=tables.RANDOM_NOTES),
        ),
        Exhibit(
            "table-4", "Number of records of each data set", "nothing; records are counted",
            TASKS, tables.sizes,
        ),
        Exhibit(
            "table-6", "Larger sets, and SAMSum", _MAIN,
            ("hotpotqa", "qasper", "musique", "samsum"), tables.main(("6",), tables.LARGER_NOTES),
        ),
        Exhibit(
            "table-7", "Number of records of each larger data set",
            "nothing; records are counted", ("hotpotqa", "qasper", "musique", "samsum"),
            tables.sizes,
        ),
        Exhibit(
            "table-8", "Main results, more pairs (as table 1, beside other values)", _MAIN, TASKS,
            tables.main(("8",)),
        ),
        Exhibit(
            "table-9", "Random layers, more pairs (as table 2, beside other values)", _RANDOM,
            TASKS, tables.over_main(tables.RANDOM, ("9",), notes=tables.RANDOM_NOTES),
        ),
        Exhibit(
            "table-10", "Two senders against one", "NLD, CIPHER and KVComm with one sender and two",
            ("hotpotqa", "musique", "2wikimqa"), tables.two_senders,
        ),
        Exhibit(
            "table-11", "Positions: KVComm-S against KVComm", "KVComm with and without shift_back",
            TASKS,
            tables.over_main(
                tables.SHIFT_BACK, ("11",), groups.shift_back, tables.SHIFT_BACK_NOTES
            ),
        ),
        Exhibit("figure-2", _TOKEN, _TOKEN_RUNS, ("mmlu",), curves.token_importance),
        Exhibit("figure-3", _PREPEND, _PREPEND_RUNS, ("hotpotqa",), curves.prepend_hidden),
        Exhibit(
            "figure-4", "Contiguous chunks of layers against the selection",
            "KVComm with every chunk (from, to), and the selection of as many layers",
            ("hotpotqa",), sweeps.contiguous,
        ),
        Exhibit(
            "figure-5", "Alpha against the number of layers",
            "KVComm with alpha 1.0 to 0.5 at every number of layers", ("hotpotqa",), sweeps.alphas,
        ),
        Exhibit(
            "figure-6", "Chunks of a fixed size against the selection",
            "KVComm with chunks of 10/32 and 16/32 of the layers from every layer on",
            ("hotpotqa",), sweeps.chunk_starts,
        ),
        Exhibit(
            "figure-7", "Levels of attention importance",
            "KVComm with 9/28 of the layers from falling ranks of the attention",
            ("hotpotqa", "tipsheets", "countries"), sweeps.levels,
        ),
        Exhibit(
            "figure-8", "Cost per record", "nothing; the analytic model of costs",
            ("tipsheets", "multifieldqa_en"), bill.build,
        ),
        Exhibit(
            "figure-9", f"{_TOKEN} (as figure 2)", _TOKEN_RUNS, ("mmlu",), curves.token_importance
        ),
        Exhibit(
            "figure-10", f"{_PREPEND}, more sets", _PREPEND_RUNS,
            ("hotpotqa", "countries", "tipsheets"), curves.prepend_hidden,
        ),
        Exhibit(
            "figure-11", "Calibration set size", "KVComm with layers chosen on 1 to 128 records",
            ("countries", "hotpotqa", "tipsheets"), sweeps.calibration,
        ),
        Exhibit(
            "figure-12", "Length of NLD's message", "NLD with messages of 64 to 1024 tokens",
            ("hotpotqa", "multifieldqa_en", "2wikimqa"), curves.message_length,
        ),
        Exhibit(
            "figure-13", "Online calibration", "KVComm (0.3), chosen again at every T-th record",
            ("countries", "multifieldqa_en", "tipsheets"), curves.online,
        ),
        Exhibit(
            "figure-14", "Likeness of layer rankings between data sets",
            "calibrations on each data set", TASKS, ranking.build,
        ),
        Exhibit(
            "figure-15", "Alpha against the number of layers (as figure 5)",
            "KVComm with alpha 1.0 to 0.5 at every number of layers", ("hotpotqa",), sweeps.alphas,
        ),
        Exhibit(
            "extra-first-token", "The first context token in the attention mass, or not",
            "KVComm with layers by either mass", TASKS, sweeps.first_token,
        ),
        Exhibit(
            "extra-search", "Layers searched by likelihood, against the selection",
            "KVComm with searched layers, and with the selection on the same records", TASKS,
            curves.search,
        ),
        Exhibit(
            "extra-controls", "Messages that hold nothing of use, beside the baseline",
            "KV of a wrong context, of shuffled tokens, of noise, and of random layers", TASKS,
            tables.over_main(tables.CONTROLS, (), groups.controls),
        ),
    )
}  # fmt: skip

#: What is not made, and why.
NOT_MADE = {
    "table-3": "it has no values that this project holds results against",
    "table-5": "the pairs of models and the hyper-parameters; printed as settings, nothing is run",
    "figure-1": "it has no values that this project holds results against",
}
