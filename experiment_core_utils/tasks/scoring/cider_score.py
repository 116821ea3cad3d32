"""CIDEr-D of captions, over a whole run and for each caption.

R. Vedantam, C. L. Zitnick, D. Parikh, "CIDEr: Consensus-based Image Description Evaluation", CVPR 2015, in its
variant D (clipped counts, Gaussian length penalty), as the COCO caption evaluation computes it (X. Chen et al.,
"Microsoft COCO Captions", arXiv 1504.00325): best 10, where papers quote the figure times 100, so that 1.2 is "120".
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, diags_array

from experiment_core_utils.primitives.errors import SampleError
from experiment_core_utils.tasks.scoring.ptb_tokenizer import ptb_tokenize

BEST = 10.0
LONGEST_NGRAM = 4
LENGTH_SIGMA = 6.0
FEWEST_IMAGES = 2
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DocumentFrequencies:
    """The number of images in whose references each n-gram occurs; what CIDEr's inverse document frequencies come from.

    Made by `document_frequencies`. An n-gram is found by its first n - 1 tokens' place in the level below and its last
    token, so that a whole split's n-grams are four sorted arrays.
    """

    images: int  #: how many images were counted
    source: str  #: which they were, in words, for the record beside a result
    vocabulary: Mapping[str, int]  #: token -> its number
    #: for n = 1 to 4 the n-grams, sorted; [n - 1][i] = place of the first n - 1 tokens in the level below times the
    #: size of the vocabulary, plus the last token's number
    keys: tuple[_Ints, ...]
    counts: tuple[_Ints, ...]  #: in how many images each of them occurs


def document_frequencies(references: Mapping[str, Sequence[str]], source: str) -> DocumentFrequencies:
    """Count in how many images' references each n-gram of 1 to 4 tokens occurs, for all images of a split or a run.

    Args:
        references: image id -> its reference captions.
        source: says which images these are, for example ``"references of coco_caption validation, 40504 images"``.

    Raises:
        SampleError: an image has no references.
    """
    for image_id, captions in references.items():
        _require(captions, image_id)
    tokens = [ptb_tokenize(caption) for captions in references.values() for caption in captions]
    image_of = np.repeat(
        np.arange(len(references), dtype=np.int64), [len(captions) for captions in references.values()]
    )
    return _count_images(tokens, image_of, source)


def score_captions(
    captions: Sequence[str],
    set_of: Sequence[int],
    reference_sets: Sequence[tuple[Hashable, tuple[str, ...]]],
    frequencies: DocumentFrequencies | None,
) -> tuple[_Floats | None, list[bool], str]:
    """CIDEr-D of captions, all scored together; several may be of one image.

    The weight of an n-gram is its count times log(images) - log(max(1, images that have it)). The similarity of a
    caption and a reference is, for n = 1 to 4, the cosine of their weights with the caption's clipped to the
    reference's, times exp(-d² / (2 · 6²)) where d is the difference of their numbers of bigrams; the score is 10
    times the mean over n and over the references. An n-gram that every image has weighs nothing.

    Args:
        captions: the captions to score.
        set_of: for each caption, which of `reference_sets` it is scored against.
        reference_sets: (image id, its references). An image that occurs twice is counted once in the document
            frequencies.
        frequencies: document frequencies of a larger corpus, such as all references of the split. None: those of
            `reference_sets`. A small run's own frequencies flatter it, so the source is part of the result.

    Returns:
        (score of each caption, 0 to 10, or None where the frequencies are of fewer than 2 images; whether each
        caption has no token; where the frequencies are from)

    Raises:
        SampleError: an image has no references.
    """
    for image_id, texts in reference_sets:
        _require(texts, image_id)
    reference_tokens = [ptb_tokenize(text) for _, texts in reference_sets for text in texts]
    caption_tokens = [ptb_tokenize(caption) for caption in captions]
    empty = [not tokens for tokens in caption_tokens]
    set_sizes = np.array([len(texts) for _, texts in reference_sets], dtype=np.int64)
    if frequencies is None:
        image_numbers: dict[Hashable, int] = {}
        image_of_set = [image_numbers.setdefault(image_id, len(image_numbers)) for image_id, _ in reference_sets]
        frequencies = _count_images(
            reference_tokens,
            np.repeat(np.array(image_of_set, dtype=np.int64), set_sizes),
            f"references of this run's {len(image_numbers)} images",
        )
    if frequencies.images < FEWEST_IMAGES:
        return None, empty, frequencies.source
    # Every (caption, reference) pair: the caption's row of texts, and the reference's.
    sets = np.array(set_of, dtype=np.int64)
    first_of_set = np.cumsum(set_sizes) - set_sizes
    references_of = set_sizes[sets]
    pair_caption = np.repeat(np.arange(len(captions), dtype=np.int64), references_of)
    pair_reference = np.repeat(first_of_set[sets], references_of) + _counted_from_zero(references_of)
    similarity = _similarities(reference_tokens, caption_tokens, pair_caption, pair_reference, frequencies)
    total = np.bincount(pair_caption, weights=similarity, minlength=len(captions))
    return BEST * total / references_of, empty, frequencies.source


def _require(references: Sequence[str], image_id: Hashable) -> None:
    if not references:
        raise SampleError(f"image {image_id!r} has no reference captions: check the sample's `answers`")


def _counted_from_zero(sizes: _Ints) -> _Ints:
    """[3, 2] -> [0, 1, 2, 0, 1]."""
    return np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)


@dataclass(frozen=True)
class _Level:
    """The n-grams of one length n in some texts."""

    counts: csr_array  #: [texts, n-grams]: how often each is in each
    #: parent, last: for every n-gram: the number of its first n - 1 tokens in the level below (0 for n = 1), and its
    #: last token
    parent: _Ints
    last: _Ints


def _levels(texts: Sequence[Sequence[str]], vocabulary: dict[str, int]) -> list[_Level]:
    """Number the n-grams of texts for n = 1 to 4; tokens that `vocabulary` does not have are added to it."""
    lengths = np.array([len(tokens) for tokens in texts], dtype=np.int64)
    tokens = np.array(
        [vocabulary.setdefault(token, len(vocabulary)) for tokens in texts for token in tokens], dtype=np.int64
    )
    text_of = np.repeat(np.arange(len(texts), dtype=np.int64), lengths)
    left_in_text = np.repeat(lengths, lengths) - _counted_from_zero(lengths)
    size = max(len(vocabulary), 1)
    # `start`: where in `tokens` the n-grams begin; `prefix`: the number of each one's first n - 1 tokens.
    start = np.arange(len(tokens), dtype=np.int64)
    prefix = np.zeros(len(tokens), dtype=np.int64)
    levels = []
    for n in range(1, LONGEST_NGRAM + 1):
        long_enough = left_in_text[start] >= n
        start, prefix = start[long_enough], prefix[long_enough]
        keys, number = np.unique(prefix * size + tokens[start + n - 1], return_inverse=True)
        counts = _summed(text_of[start], number, (len(texts), len(keys)))
        levels.append(_Level(counts, keys // size, keys % size))
        prefix = number
    return levels


def _summed(row: _Ints, column: _Ints, shape: tuple[int, int]) -> csr_array:
    """How often each pair of a row and a column is given."""
    return csr_array((np.ones(len(row)), (row, column)), shape=shape)


def _count_images(texts: Sequence[Sequence[str]], image_of: _Ints, source: str) -> DocumentFrequencies:
    vocabulary: dict[str, int] = {}
    levels = _levels(texts, vocabulary)
    images = len(set(image_of.tolist()))
    texts_of_image = _summed(image_of, np.arange(len(texts), dtype=np.int64), (images, len(texts)))
    return DocumentFrequencies(
        images=images,
        source=source,
        vocabulary=vocabulary,
        keys=tuple(level.parent * max(len(vocabulary), 1) + level.last for level in levels),
        counts=tuple((texts_of_image @ level.counts).count_nonzero(axis=0) for level in levels),
    )


def _similarities(
    reference_tokens: Sequence[Sequence[str]],
    caption_tokens: Sequence[Sequence[str]],
    pair_caption: _Ints,
    pair_reference: _Ints,
    frequencies: DocumentFrequencies,
) -> _Floats:
    """CIDEr-D's similarity of each pair of a caption and a reference, from 0 to 1."""
    texts = [*reference_tokens, *caption_tokens]
    pair_caption = pair_caption + len(reference_tokens)
    lengths = np.array([len(tokens) for tokens in texts], dtype=np.int64)
    bigrams = np.maximum(lengths - 1, 0)
    difference = (bigrams[pair_caption] - bigrams[pair_reference]).astype(np.float64)
    penalty = np.exp(-(difference**2) / (2 * LENGTH_SIGMA**2))

    vocabulary: dict[str, int] = {}
    levels = _levels(texts, vocabulary)
    # Places of the run's tokens and n-grams in the frequencies; -1 for those that it does not have.
    token_place = np.array([frequencies.vocabulary.get(token, -1) for token in vocabulary], dtype=np.int64)
    place = np.zeros(1, dtype=np.int64)
    total = np.zeros(len(pair_caption), dtype=np.float64)
    for level, keys, counts in zip(levels, frequencies.keys, frequencies.counts, strict=True):
        place = _places(place[level.parent], token_place[level.last], keys, max(len(frequencies.vocabulary), 1))
        in_images = np.where(place >= 0, counts[place], 0) if len(counts) else np.zeros(len(place), dtype=np.int64)
        idf = math.log(frequencies.images) - np.log(np.maximum(in_images, 1))
        weights = level.counts @ diags_array(idf)
        of_caption, of_reference = weights[pair_caption], weights[pair_reference]
        product = of_caption.minimum(of_reference).multiply(of_reference).sum(axis=1)
        norm = np.sqrt(weights.power(2).sum(axis=1))
        norms = norm[pair_caption] * norm[pair_reference]
        total += np.divide(product, norms, out=np.zeros_like(product), where=norms > 0)
    return total * penalty / LONGEST_NGRAM


def _places(parent: _Ints, last: _Ints, keys: _Ints, size: int) -> _Ints:
    if not len(keys):
        return np.full(len(parent), -1, dtype=np.int64)
    wanted = parent * size + last
    found = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((parent >= 0) & (last >= 0) & (keys[found] == wanted), found, -1)
