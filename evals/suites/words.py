"""Words that items are made of. Plain ones, so that a small model reads them, and none of them a Python keyword."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    """
    Alice Amir Anna Boris Bruno Carla Cesar Clara Daniel Dora Edith Elena Emil Farid Felix Flora Frank Greta
    Gustav Hanna Hector Helen Hugo Ines Irene Ivan Jacob Jonas Julia Karim Karla Laura Leon Lydia Marco Marta
    Milan Mona Nadia Nina Nora Oscar Otto Paula Pedro Petra Quentin Ralph Rita Robin Rosa Samir Sarah Simon
    Sofia Tamara Theo Ursula Victor Walter Wanda Xenia Yusuf Zelda
    """
)
THINGS = _words(
    """
    anchor apple barrel basket beacon bottle bridge bucket button candle canoe carpet castle cedar chain clock
    cloud copper coral cradle curtain desk diamond drum engine falcon feather fence flute forest fountain
    garden glacier hammer harbor helmet island ivory jacket kettle ladder lantern leather magnet maple marble
    meadow mirror needle ocean orchid oven paddle pepper piano pillow planet pocket puzzle quarry rabbit
    ribbon river rocket saddle salmon shadow silver sparrow spider summit temple ticket tunnel turtle valley
    velvet violin wagon walnut whistle window
    """
)
QUALITIES = _words(
    """
    amber ancient bitter brave bright broken calm clever cold crimson curious dark dusty eager early empty
    faint fancy fierce gentle golden grand green heavy hidden hollow humble icy jolly lazy light little lonely
    loud lucky mellow misty narrow noble odd pale patient plain polite proud purple quick quiet rapid rough
    round rusty sharp shiny silent simple sleepy smooth solid spicy steep stormy sunny swift tall tender tiny
    vivid warm wild wise young
    """
)


def numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of five digits, of which at least three differ.

    Five: a guess is right once in 90,000 times, and with seven small models mix up needles of one form more often.
    """
    found: list[str] = []
    while len(found) < count:
        new = str(rng.randrange(10_000, 100_000))
        if len(set(new)) >= 3 and new not in found:
            found.append(new)
    return found


def pairs(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Different (quality, thing) pairs; no word twice while the lists last."""
    qualities = rng.sample(QUALITIES, min(count, len(QUALITIES)))
    things = rng.sample(THINGS, min(count, len(THINGS)))
    while len(qualities) < count:
        qualities.append(rng.choice(QUALITIES))
    while len(things) < count:
        things.append(rng.choice(THINGS))
    made = list(zip(qualities, things, strict=True))
    return made if len(set(made)) == count else pairs(rng, count)
