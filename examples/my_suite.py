"""A suite in one file: ``{name: "my_suite:LastWord", counts: {512: 40}}`` in a plan, from this folder."""

from typing import ClassVar

from kvgate.evals.data.items import Exact, Item, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import Generated, GroupSpec

WORDS = ("amber", "birch", "coral", "delta", "ember", "fjord")


class LastWord(Generated):
    """A password among noise."""

    name = "last_word"
    measures = "Whether a password said at some depth is still known at the end."
    why_eviction_hurts = "It is said once, and nothing near the end repeats it."
    tasks: ClassVar = {"password": "one password in lines of noise"}

    def make(self, tokens: Tokens, spec: GroupSpec) -> list[Item]:
        """One item whose context has exactly ``spec.length`` ids."""
        code = f"{spec.rng.choice(WORDS)} {spec.rng.randrange(100)}"
        fact = tuple(tokens.encode(f" The password is {code}."))
        room = spec.length - len(tokens.bos) - len(fact)
        noise = [f" Line {spec.rng.randrange(1000)}: the sky is blue." for _ in range(room)]
        filler = tuple(tokens.encode("".join(noise)))[:room]
        at = int(spec.depth * room)
        start = len(tokens.bos) + at
        turn = Turn(prompt=tuple(tokens.encode(" The password is")), scoring=Exact((code,)), max_new_tokens=6)
        return [
            Item(
                suite=self.name,
                task=spec.task,
                index=spec.index,
                length=spec.length,
                context=(*tokens.bos, *filler[:at], *fact, *filler[at:]),
                turns=(turn,),
                cluster=f"{spec.length}-{spec.index}",
                depth=spec.depth,
                facts=((start, start + len(fact)),),
            )
        ]
