"""The commands of the command line, one file each: HELP, add_options(parser), run(arguments).

`run` returns the exit status. Options that several commands share are in kvcomm/options. Modules
import what takes time inside `run`, so that help is instant.
"""

#: In the order in which help lists them; "-" is "_" in the file's name.
COMMANDS = (
    "demo", "eval", "reproduce", "report", "score", "calibrate", "generate", "cost", "make-data",
    "convert", "fetch", "models", "doctor",
)  # fmt: skip
