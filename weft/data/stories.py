"""Short stories for the demo, made by a grammar: text that a small model learns in a minute.

A model of two million parameters cannot learn English in a minute, but it can learn a small part of
it: few words, short sentences, and stories whose people and things stay the same from the first
sentence to the last.  The stories are made here, so that the demo needs no download; the same ones
on every machine.

    weft train demo
    weft generate runs/demo 'The fox and the lost key'
"""

from __future__ import annotations

import random
from collections.abc import Iterator

NUM_STORIES = 20_000

# Every animal has its name, so that the title already says who the story is about.
ANIMALS = {
    "fox": "Finn",
    "bear": "Ben",
    "mouse": "Mina",
    "owl": "Olga",
    "rabbit": "Rosa",
    "otter": "Oskar",
    "hedgehog": "Hugo",
    "duck": "Dora",
    "badger": "Bruno",
    "squirrel": "Sam",
    "frog": "Frida",
    "cat": "Clara",
    "goat": "Greta",
    "crow": "Kira",
    "mole": "Max",
    "turtle": "Tilda",
}
TRAITS = ("small", "brave", "shy", "clever", "old", "young", "kind", "curious", "lazy", "cheerful")
PLACES = (
    *("in the forest", "by the river", "near the mill", "on the hill", "under the old bridge"),
    *("at the edge of the village", "behind the garden", "by the lake", "in a hollow tree"),
)
WEATHER = (
    *("It was a warm morning in May.", "It was raining.", "The first snow had fallen."),
    *("The sun was shining.", "A cold wind was blowing.", "There was fog over the fields."),
)
THINGS = (
    *("key", "lamp", "kite", "boat", "book", "hat", "bell", "basket", "map", "drum", "ring"),
    *("letter", "blanket", "flute", "wheel", "mirror"),
)
FOODS = ("soup", "bread with honey", "apple pie", "warm milk", "pancakes", "plums", "cheese")
SPOTS = ("under a stone", "in the tall grass", "behind a barrel", "in an empty nest", "on a roof")

# Each plot is a title and its sentences; a sentence is one of several, with the same meaning.
PLOTS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "The {a} and the lost {thing}",
        (
            (
                "One day {A} could not find the {thing}.",
                "But one morning the {thing} was gone.",
            ),
            (
                "{A} looked under the bed and behind the door, but it was not there.",
                "{A} looked everywhere, in the kitchen and in the garden.",
            ),
            (
                '"Have you seen my {thing}?" {A} asked {B} the {b}.',
                'So {A} went to {B} the {b} and asked: "Where is my {thing}?"',
            ),
            (
                '"No," said {B}, "but I will help you to look for it."',
                '"I have not seen it," said {B}. "Let us look for it together."',
            ),
            (
                "They looked until the evening. Then {B} found the {thing} {spot}.",
                "After a long time they found the {thing} {spot}.",
            ),
            (
                '"Thank you!" said {A}. "Without you I would never have found it."',
                "{A} was so happy that {A} danced around {B} three times.",
            ),
            ("Then they went home and ate {food}.", "In the evening the two friends ate {food}."),
        ),
    ),
    (
        "{A} builds a {thing}",
        (
            (
                "{A} wanted to have a {thing}, but there was none to buy.",
                "More than anything, {A} wished for a {thing}.",
            ),
            (
                '"Then I will build one," said {A}.',
                'So {A} said: "I can build a {thing} of my own."',
            ),
            (
                "{A} worked all day, but in the evening the {thing} fell apart.",
                "The first {thing} broke, and the second one did, too.",
            ),
            (
                '{B} the {b} came by and laughed. "That is no {thing}!"',
                '"What a strange {thing}," said {B} the {b}, who came by.',
            ),
            (
                "But {A} did not give up, and after a while {B} began to help.",
                '"Then show me how to do it," said {A}. And {B} sat down and helped.',
            ),
            (
                "Together they finished the {thing}, and it was better than any other.",
                "At last the {thing} was ready, and it was beautiful.",
            ),
            (
                "From that day on they used it together.",
                '"We made it," said {B}, and {A} nodded.',
            ),
        ),
    ),
    (
        "The {a} who was afraid of the dark",
        (
            (
                "{A} was afraid of only one thing, and that was the dark.",
                "Every night, when the light was out, {A} was afraid.",
            ),
            (
                "One night {A} heard a noise outside. Tap, tap, tap.",
                "Then, one night, there was a strange noise at the window.",
            ),
            (
                '"Who is there?" asked {A}. Nobody answered.',
                "{A} pulled the blanket up and waited.",
            ),
            (
                "{A} took the {thing} and opened the door, very slowly.",
                "At last {A} held the {thing} tight and went outside.",
            ),
            (
                'There stood {B} the {b}, cold and wet. "I have lost my way," said {B}.',
                'It was only {B} the {b}. "May I come in?" asked {B}. "I have lost my way."',
            ),
            (
                "{A} let {B} in and made {food}.",
                'They sat by the fire and ate {food}. "I was afraid, too," said {B}.',
            ),
            (
                "After that, {A} was never afraid of the dark again.",
                "And when {A} blew out the candle, the dark was not so dark any more.",
            ),
        ),
    ),
    (
        "The {a}, the {b} and the {food}",
        (
            (
                "{A} had made {food} and put it on the table to cool.",
                "On Sunday {A} made {food}, as on every Sunday.",
            ),
            (
                "When {A} came back from the garden, the plate was empty.",
                "But then the {food} disappeared, down to the last bite.",
            ),
            (
                '"Who has eaten it?" cried {A}. Only {B} the {b} was there.',
                "Outside sat {B} the {b} and looked at the ground.",
            ),
            (
                '"It was me," said {B}. "I was so hungry, and it smelled so good."',
                '{B} began to cry. "I am sorry," said {B}. "I ate it."',
            ),
            (
                '"You could have asked," said {A}. "There is enough for two."',
                '"Next time, knock at the door," said {A}. "I like to share."',
            ),
            (
                "The next day {B} came back with a {thing} as a present.",
                "In the morning there was a {thing} at the door, with a note: I am sorry.",
            ),
            (
                "And on the next Sunday they ate {food} together.",
                "Since then {A} always cooks for two.",
            ),
        ),
    ),
)

OPENINGS = (
    "Once there was a {trait} {a} called {A}, who lived {place}.",
    "{A} was a {trait} {a} and lived {place}.",
    "There once lived a {trait} {a} {place}. The {a} was called {A}.",
)


def stories() -> Iterator[str]:
    """Yield the stories, in the same order in every call."""
    for number in range(NUM_STORIES):
        yield tell(random.Random(number))


def tell(source: random.Random) -> str:
    """Return one story: a title, an empty line, and a paragraph."""
    a, b = source.sample([*ANIMALS], 2)
    title, sentences = source.choice(PLOTS)
    words = {
        "a": a,
        "b": b,
        "A": ANIMALS[a],
        "B": ANIMALS[b],
        "trait": source.choice(TRAITS),
        "place": source.choice(PLACES),
        "thing": source.choice(THINGS),
        "food": source.choice(FOODS),
        "spot": source.choice(SPOTS),
    }
    parts = [source.choice(OPENINGS), source.choice(WEATHER)]
    parts += [source.choice(alternatives) for alternatives in sentences]
    text = f"{title}\n\n{' '.join(parts)}\n".format(**words)
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}")
    return text
