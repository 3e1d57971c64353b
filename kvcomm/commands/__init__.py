"""Commands of the command line, one file each: HELP, add_options(parser), run(arguments)."""
