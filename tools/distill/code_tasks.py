"""Prompts for code completion put together here: a function's name, its docstring, and true examples.

A task takes the elements of a list or text that pass a test, changes each, and reduces what is left; the
examples in the docstring are computed, so that what the target reads makes sense.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Part:
    """One step of a task: how a name and a sentence call it, and what it does."""

    name: str
    words: str
    apply: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Domain:
    """What a task is about: its argument, and parts that fit each other."""

    argument: str
    annotation: str
    plural: str
    sample: Callable[[random.Random], Any]
    tests: Sequence[_Part]
    changes: Sequence[_Part]
    ends: Sequence[_Part]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


_NUMBERS = _Domain(
    argument="numbers",
    annotation="List[int]",
    plural="numbers",
    sample=lambda draw: [draw.randint(-9, 30) for _ in range(draw.randint(3, 6))],
    tests=(
        _Part("", "", lambda x: True),
        _Part("even", "even", lambda x: x % 2 == 0),
        _Part("odd", "odd", lambda x: x % 2 == 1),
        _Part("positive", "positive", lambda x: x > 0),
        _Part("negative", "negative", lambda x: x < 0),
        _Part("prime", "prime", _is_prime),
        _Part("two_digit", "two-digit", lambda x: 10 <= abs(x) <= 99),
        _Part("nonzero", "nonzero", lambda x: x != 0),
    ),
    changes=(
        _Part("", "", lambda x: x),
        _Part("squared", "squares of the", lambda x: x * x),
        _Part("doubled", "doubles of the", lambda x: 2 * x),
        _Part("absolute", "absolute values of the", abs),
        _Part("negated", "negatives of the", lambda x: -x),
        _Part("incremented", "successors of the", lambda x: x + 1),
        _Part("digit_sum", "digit sums of the", lambda x: sum(map(int, str(abs(x))))),
    ),
    ends=(
        _Part("sum", "the sum of the", sum),
        _Part("count", "how many different values there are among the", lambda xs: len(set(xs))),
        _Part("largest", "the largest of the", lambda xs: max(xs, default=None)),
        _Part("smallest", "the smallest of the", lambda xs: min(xs, default=None)),
        _Part("sorted", "a sorted list of the", sorted),
        _Part("reversed", "a list in reverse order of the", lambda xs: xs[::-1]),
        _Part("unique", "a list without duplicates of the", lambda xs: list(dict.fromkeys(xs))),
        _Part("average", "the average of the", lambda xs: sum(xs) / len(xs) if xs else None),
        _Part("range", "the difference between the largest and the smallest of the",
              lambda xs: max(xs) - min(xs) if xs else None),
        _Part("first", "the first of the", lambda xs: xs[0] if xs else None),
        _Part("running_total", "a list of the running totals of the",
              lambda xs: [sum(xs[: i + 1]) for i in range(len(xs))]),
        _Part("any", "whether there are any", lambda xs: bool(xs)),
    ),
)  # fmt: skip

_WORD_SAMPLES = (
    "apple", "river", "Moon", "stone", "a", "level", "Book", "kayak", "sky", "tree", "Radar", "ice", "noon",
    "planet", "xyz", "Queen", "jazz", "it", "window", "Otto", "green", "",
)  # fmt: skip

_WORDS = _Domain(
    argument="words",
    annotation="List[str]",
    plural="words",
    sample=lambda draw: [draw.choice(_WORD_SAMPLES) for _ in range(draw.randint(2, 5))],
    tests=(
        _Part("", "", lambda w: True),
        _Part("short", "short (at most four letters)", lambda w: len(w) <= 4),
        _Part("long", "long (more than four letters)", lambda w: len(w) > 4),
        _Part("capitalized", "capitalized", lambda w: w[:1].isupper()),
        _Part("lowercase", "lowercase", str.islower),
        _Part("palindromic", "palindromic", lambda w: w.lower() == w.lower()[::-1]),
        _Part("nonempty", "nonempty", bool),
    ),
    changes=(
        _Part("", "", lambda w: w),
        _Part("uppercased", "uppercase forms of the", str.upper),
        _Part("reversed", "reversed forms of the", lambda w: w[::-1]),
        _Part("length", "lengths of the", len),
        _Part("first_letter", "first letters of the", lambda w: w[:1]),
        _Part("vowel_count", "numbers of vowels in the", lambda w: sum(c in "aeiouAEIOU" for c in w)),
    ),
    ends=(
        _Part("count", "how many different values there are among the", lambda xs: len(set(xs))),
        _Part("sorted", "a sorted list of the", sorted),
        _Part("list", "a list of the", list),
        _Part("last", "the last of the", lambda xs: xs[-1] if xs else None),
        _Part("joined", "a string that joins with commas the", lambda xs: ",".join(map(str, xs))),
        _Part("positions", "a dictionary from position to value of the", lambda xs: dict(enumerate(xs))),
        _Part("longest", "the one with the longest spelling among the",
              lambda xs: max(xs, key=lambda x: len(str(x)), default=None)),
    ),
)  # fmt: skip

_CHARACTERS = _Domain(
    argument="text",
    annotation="str",
    plural="characters",
    sample=lambda draw: " ".join(draw.choice(_WORD_SAMPLES[:-1]) for _ in range(draw.randint(1, 3))),
    tests=(
        _Part("", "", lambda c: True),
        _Part("vowel", "vowel", lambda c: c in "aeiouAEIOU"),
        _Part("consonant", "consonant", lambda c: c.isalpha() and c not in "aeiouAEIOU"),
        _Part("uppercase", "uppercase", str.isupper),
        _Part("lowercase", "lowercase", str.islower),
        _Part("letter", "alphabetic", str.isalpha),
        _Part("nonspace", "nonblank", lambda c: c != " "),
    ),
    changes=(
        _Part("", "", lambda c: c),
        _Part("swapped", "case-swapped forms of the", str.swapcase),
        _Part("code", "character codes of the", ord),
        _Part("doubled", "doubled forms of the", lambda c: 2 * c),
    ),
    ends=(
        _Part("count", "how many different values there are among the", lambda xs: len(set(xs))),
        _Part("sorted", "a sorted list of the", sorted),
        _Part("joined", "a string of all the", lambda xs: "".join(map(str, xs))),
        _Part("frequency", "a dictionary that counts the",
              lambda xs: {x: xs.count(x) for x in dict.fromkeys(xs)}),
        _Part("most_common", "the most common of the", lambda xs: max(xs, key=xs.count, default=None)),
        _Part("backwards", "a reversed string of the", lambda xs: "".join(map(str, xs[::-1]))),
    ),
)  # fmt: skip

_DOMAINS = (_NUMBERS, _WORDS, _CHARACTERS)
_LEADS = (
    "",
    "Complete the code I provided.\n\n",
    "Complete this function.\n\n",
    "Please finish this Python function:\n\n",
    "Complete the code I provided.\nfrom typing import List\n\n\n",
)
_OPENINGS = ("Return {}.", "Given {a}, return {}.", "Write a function that returns {}.", "Find {}.", "{}.")


def code_tasks(count: int, *, seed: int) -> list[str]:
    """`count` different prompts, the same for the same seed; fewer where no more are found."""
    draw = random.Random(f"tasks {seed}")
    found: dict[str, None] = {}
    for _ in range(count * 10):
        if len(found) >= count:
            break
        found.setdefault(draw.choice(_LEADS) + _task(draw))
    return list(found)


def _task(draw: random.Random) -> str:
    domain = draw.choices(_DOMAINS, weights=(5, 3, 3))[0]
    test, change, end = draw.choice(domain.tests), draw.choice(domain.changes), draw.choice(domain.ends)
    name = "_".join(part for part in (end.name, test.name, change.name, domain.plural) if part)
    rest = " ".join(part for part in (end.words, change.words, test.words, domain.plural) if part)
    kind = "the text" if domain.argument == "text" else f"a list of {domain.plural}"
    sentence = draw.choice(_OPENINGS).format(f"{rest} in {domain.argument}", a=kind)
    doc = [sentence[0].upper() + sentence[1:]]
    for _ in range(draw.randint(0, 3)):
        value = domain.sample(draw)
        result = end.apply([change.apply(item) for item in value if test.apply(item)])
        if draw.random() < 0.7:
            doc += [f">>> {name}({value!r})", repr(result)]
        else:
            doc.append(f"For {value!r} the result is {result!r}.")
    annotated = f"{domain.argument}: {domain.annotation}" if draw.random() < 0.6 else domain.argument
    quotes = draw.choice(('"""', '"""', "'''"))
    body = "\n    ".join(doc)
    return f"def {name}({annotated}):\n    {quotes}{draw.choice(('', ' '))}{body}\n    {quotes}\n"
