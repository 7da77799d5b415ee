"""Short stories for the demo, made by a grammar that a small model learns quickly.

A model of two million parameters cannot learn English in a minute, but it can learn a small part of
it: few words, short sentences, and a few plots with thousands of variants.  The plots are in
``stories.txt``.  The demo needs no download, and its text is the same on every machine.

    weft train demo
    weft generate runs/demo 'The fox and the lost key'
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib import resources

NUM_STORIES = 20_000

# Words of a story that do not depend on each other.
WORDS = {
    "trait": ("brave", "shy", "clever", "young", "kind", "curious", "lazy", "cheerful"),
    "place": (
        *("in the forest", "by the river", "near the mill", "on the hill", "by the lake"),
        *("under the old bridge", "at the edge of the village", "behind the garden"),
    ),
    "weather": (
        *("It was a warm morning in May.", "It was raining.", "The first snow had fallen."),
        *("The sun was shining.", "A cold wind was blowing.", "There was fog over the fields."),
    ),
    "food": ("soup", "bread with honey", "apple pie", "pancakes", "plums", "cheese"),
    "spot": ("under a stone", "in the tall grass", "behind a barrel", "in an empty nest"),
    "time": ("in the evening", "the next day", "on Sunday", "after a week"),
}

OPENINGS = (
    "Once there was a {trait} {a} called {A}, who lived {place}.",
    "{A} was a {trait} {a} and lived {place}.",
    "There once lived a {trait} {a} {place}. The {a} was called {A}.",
)


def stories() -> Iterator[str]:
    """Yield the stories, in the same order in every call."""
    text = (resources.files("weft") / "data" / "stories.txt").read_text("utf-8")
    _comment, *plots = text.strip().split("\n\n")
    for number in range(NUM_STORIES):
        yield make_story(plots, random.Random(number))


def make_story(plots: Sequence[str], source: random.Random) -> str:
    """Return one story: a title, an empty line, and a paragraph."""
    head, *lines = source.choice(plots).splitlines()
    title, hero, _friend = head.split("; ")
    animal, name = hero.split()
    words = {key: source.choice(values) for key, values in WORDS.items()}
    parts = [source.choice(OPENINGS), "{weather}"]
    parts += [source.choice(line.split("|")) for line in lines]
    return f"{title}\n\n{' '.join(parts)}\n".format(a=animal, A=name, **words)
