"""What several commands share: options with their help, and what is made of them.

    values.py  what may be written after an option
    pair.py    the two models
    choice.py  methods and layers
    data.py    the records
    output.py  what is printed

Nothing here is imported by the library; modules import what takes time when they need it, so that
help is instant.
"""
