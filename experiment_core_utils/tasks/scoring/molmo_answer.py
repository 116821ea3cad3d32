"""In: a model's output; out: the short answer in it, by the rule of Molmo's evaluation.

The rule is the one that M. Deitke et al., "Molmo and PixMo", arXiv 2409.17146, score short answers with.
"""

from collections import Counter

_MARKER = "Answer:"


def molmo_answer(prediction: str) -> str:
    """The short answer in an output: after the first "Answer:", then the most frequent line.

    What follows the first "Answer:" (to the next one, if there is another) is taken where the output has one. Of
    several lines, the most frequent counts, of equally frequent ones the first; empty lines do not count. White space
    is collapsed and stripped. An output without any text gives "".
    """
    _, marker, after = prediction.partition(_MARKER)
    text = after.partition(_MARKER)[0] if marker else prediction
    lines = [" ".join(line.split()) for line in text.split("\n")]
    counts = Counter(line for line in lines if line)
    return counts.most_common(1)[0][0] if counts else ""
