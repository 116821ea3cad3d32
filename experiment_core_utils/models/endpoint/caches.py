"""Whether a server answers a prompt that it has seen from a cache, and salts by which it has not seen any.

Rounds send one prompt at several settings. Where the server keeps what it computed of a prompt, all but the first would
be answered without computing it. A salt is a number before everything else, so that no beginning of a prompt is known.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from experiment_core_utils.records.caveats import Caveat, caveat

# Of the time to the first token of a new prompt: below it, and by more than that many seconds, a repeated one was not
# computed.
WARM_RATIO, _LEAST_SAVED_S = 0.8, 0.002
# Of answers that a salt changes: above it, times are of other answers.
MOST_CHANGED = 0.02
_PAIRS = 8
_DRAWS = random.SystemRandom()  # another run of the same seed must not draw the same


def new_salt() -> str:
    """A number of nine digits: as many tokens whether a tokenizer takes them one by one, by three or all."""
    return f"[{_DRAWS.randrange(10**8, 10**9)}] "


def warm_ratio(first_token_s: Callable[[str], float]) -> float:
    """The time to the first token of a prompt sent again over that of the first time, the slowest of some new prompts
    over the fastest without the oddest of each (by chance below it in 1 of 198); 1 where that saves less than a client
    can tell.

    Args:
        first_token_s: asks with a salt, and gives seconds.
    """
    pairs = [(first_token_s(salt), first_token_s(salt)) for salt in (new_salt() for _ in range(_PAIRS))]
    fastest_new_s, slowest_again_s = sorted(once for once, _ in pairs)[1], sorted(again for _, again in pairs)[-2]
    return slowest_again_s / fastest_new_s if fastest_new_s - slowest_again_s > _LEAST_SAVED_S else 1.0


@dataclass(frozen=True)
class CacheFinding:
    """What was found of a server's cache at the start of a run."""

    ratio: float  #: see `warm_ratio`
    num_changed: int = 0  #: of the first samples, asked with a salt and without, those whose answers differ
    num_asked: int = 0
    salt_tokens: tuple[int, ...] = ()  #: numbers of tokens that salts were, by the server's count

    @property
    def is_there(self) -> bool:
        """Whether a prompt that the server has seen is not computed again."""
        return self.ratio < WARM_RATIO

    @property
    def caveats(self) -> list[Caveat]:
        """What a reader must know of it."""
        if not self.is_there:
            return []
        share = self.num_changed / max(self.num_asked, 1)
        kind = "server_salt_changes" if share > MOST_CHANGED else "server_salted"
        return [caveat(kind, ratio=self.ratio, num_changed=self.num_changed, num_asked=self.num_asked)]

    def line(self, where: str) -> str:
        """What a run says of it at its start."""
        if not self.is_there:
            return f"cache: {where} computes a prompt that it has seen again"
        tokens = " or ".join(map(str, self.salt_tokens)) or "uncounted"
        share = self.num_changed / max(self.num_asked, 1)
        return (
            f"cache: {where} has the first token of a prompt that it has seen after {self.ratio:.0%} of the time; "
            f"timed requests begin with a salt of {tokens} tokens, accuracy is of prompts without it; of the first "
            f"{self.num_asked} samples, asked both ways, {self.num_changed} have another answer ({share:.0%})"
        )
