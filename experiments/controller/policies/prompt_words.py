"""Which of the known prompts are most like another one, by the words that they have in common."""

import math
from collections.abc import Sequence

import numpy as np


class PromptWords:
    """The words of N prompts.

    Two prompts are as like as the cosine of the angle between their words, each word counted once.
    """

    def __init__(self, prompts: Sequence[str]) -> None:
        # Its import takes a second, and most policies need none of it.
        from sklearn.feature_extraction.text import TfidfVectorizer

        # Letters and digits alone are words too: an option, a number to be read.
        self._vectoriser = TfidfVectorizer(binary=True, use_idf=False, token_pattern=r"\w+")
        self._vectors = self._vectoriser.fit_transform(prompts)
        self._neighbours: dict[tuple[str, float], np.ndarray] = {}

    def vectors(self, prompts: Sequence[str]) -> np.ndarray:
        """Vectors [M, words] of length 1 of prompts."""
        return np.asarray(self._vectoriser.transform(prompts).toarray())

    def nearest(self, prompt: str, share: float) -> np.ndarray:
        """Places of the `share` of the prompts that are most like this one, and of all that are as like as the last."""
        key = prompt, share
        if key not in self._neighbours:
            likeness = np.asarray(self._vectors @ self.vectors([prompt])[0])
            least = np.partition(likeness, -math.ceil(share * len(likeness)))[-math.ceil(share * len(likeness))]
            self._neighbours[key] = np.flatnonzero(likeness >= least - 1e-9)
        return self._neighbours[key]
