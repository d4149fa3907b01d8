"""Refusals of values, which a library words, in words of our own. Leaf.

Worst case: a sentence that is not known here, which is passed on as it is.
"""

import re

_WORDS = (
    (r"Input should be greater than or equal to (.*)", r"\1 is the least"),
    (r"Input should be greater than (.*)", r"has to be above \1"),
    (r"Input should be less than or equal to (.*)", r"\1 is the most"),
    (r"Input should be less than (.*)", r"has to be below \1"),
    (r"Input should be a valid integer.*", "is not a whole number"),
    (r"Input should be a valid number.*", "is not a number"),
    (r"Input should be a finite number.*", "is not a finite number"),
    (r"Input should be a valid boolean.*", "is neither true nor false"),
    (r"Input should be a valid (?:list|tuple|set).*", "is not a list"),
    (r"Input should be a valid (?:dictionary|mapping).*", "is not a table"),
    (r"Input should be a valid string.*", "is not a text"),
    (r"Input is not a valid path.*", "is not a path"),
    (r"Input should be (.*)", r"is not \1"),
)


def plain_words(problem: str) -> str:
    """The problem as we say it, behind the name of what has the value."""
    for theirs, ours in _WORDS:
        if fit := re.fullmatch(theirs, problem):
            return fit.expand(ours)
    return problem.removeprefix("Value error, ")
