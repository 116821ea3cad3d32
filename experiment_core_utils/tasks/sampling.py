"""Reproducible samples of a dataset.

No sample is made and no picture decoded while choosing. Choosing looks at the length alone, or, where the types of
questions shall keep their proportions, at the types.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, library_faults_named
from experiment_core_utils.primitives.texts import counted, first_of
from experiment_core_utils.records.caveats import Caveat, caveat
from experiment_core_utils.tasks.interface import Sample, Task

# Below this, differences between settings are mostly noise: the published minimum for a Pareto comparison.
LEAST_SAMPLES_TO_COMPARE = 500
SampleT_co = TypeVar("SampleT_co", covariant=True)
How = Literal["all", "random", "question_type", "ids"]


class Indexable(Protocol[SampleT_co]):
    """Whatever has a length and gives the item at an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SampleT_co: ...


@dataclass(frozen=True)
class Sampling:
    """How samples were chosen."""

    how: How  #: `all` of the split, at `random`, at random within each `question_type`, or by their `ids`
    seed: int | None  #: of the draw; None where nothing was drawn
    num_asked: int | None  #: requested samples; None where none were named and so all were taken
    num_in_split: int  #: samples that there are
    num_left_out: int = 0  #: of them, those that were not to be drawn; `all` means all others


@dataclass(frozen=True)
class SampledDataset(Generic[SampleT_co]):
    """A view of a dataset: item i is the dataset's item `sample_ids[i]`, made when it is requested.

    The ids are in the order of the draw.
    """

    dataset: Indexable[SampleT_co]
    sample_ids: tuple[int, ...]
    sampling: Sampling

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> SampleT_co:
        return self.dataset[self.sample_ids[index]]


def create_sampled_dataset(
    dataset: Indexable[SampleT_co],
    num_samples: int | None,
    seed: int = 42,
    *,
    stratify_by_type: bool = False,
    ids: Sequence[int] | None = None,
    left_out: Set[int] = frozenset(),
) -> SampledDataset[SampleT_co]:
    """`num_samples` items of `dataset`, without replacement; all of them for None or where it has no more.

    The random draw is the published one, `RandomState(seed).choice(len(dataset), num_samples, replace=False)`, in its
    order. It depends on length, number and seed only, so every setting and every process gets the same one. What is
    left out is passed over in that order.

    Args:
        stratify_by_type: keep each question type's proportion; see `allocate`. The ids are then ascending.
        ids: exactly these, in this order; nothing is drawn.
        left_out: ids that are not drawn; `ids` contains none of them.

    Raises:
        ConfigurationError: an empty dataset or one of which all is left out, fewer than one sample, ids that are not
            there, given twice or no whole numbers, or types of a dataset that has none.
    """
    length = len(dataset)
    if length == 0:
        raise ConfigurationError("the dataset has no samples to choose from")
    if num_samples is not None and not isinstance(num_samples, int):
        raise ConfigurationError(f"num_samples is {num_samples!r}; give a whole number, or None for all")
    if ids is not None:
        return SampledDataset(dataset, _checked_ids(ids, length), Sampling("ids", None, len(ids), length))
    if num_samples is not None and num_samples < 1:
        raise ConfigurationError(f"{num_samples} samples cannot be drawn; request at least 1")
    allowed = [index for index in range(length) if index not in left_out]
    if not allowed:
        raise ConfigurationError(f"none of {counted(length, 'sample')} of the dataset can be drawn: all are left out")
    num_left_out = length - len(allowed)
    if num_samples is None or num_samples >= len(allowed):
        return SampledDataset(dataset, tuple(allowed), Sampling("all", None, num_samples, length, num_left_out))
    if stratify_by_type:
        type_of = getattr(dataset, "question_type", None)
        if type_of is None:
            raise ConfigurationError(f"{type(dataset).__name__} has no question types; draw at random instead")
        drawn = _draw_within_types({index: type_of(index) for index in allowed}, num_samples, seed)
        return SampledDataset(dataset, drawn, Sampling("question_type", seed, num_samples, length, num_left_out))
    # The beginning of this order is what `choice` draws.
    order = map(int, np.random.RandomState(seed=seed).permutation(length))
    chosen = tuple(itertools.islice((index for index in order if index not in left_out), num_samples))
    return SampledDataset(dataset, chosen, Sampling("random", seed, num_samples, length, num_left_out))


def allocate(sizes: Mapping[str, int], num_samples: int) -> Mapping[str, int]:
    """How many of `num_samples` each type gets: its proportion of the whole, rounded by largest remainder.

    Where there are at least as many samples as types, no type goes without, at the cost of the types that are
    furthest above their proportion. Equal remainders fall to the type that is first in the alphabet.
    """
    total = sum(sizes.values())
    least = 1 if num_samples >= len(sizes) else 0
    given = {kind: max(num_samples * sizes[kind] // total, least) for kind in sorted(sizes)}

    def deficit(kind: str) -> int:
        """How far a type is below its exact proportion, in units of 1 / total."""
        return num_samples * sizes[kind] - given[kind] * total

    while sum(given.values()) > num_samples:
        given[min((kind for kind in given if given[kind] > least), key=deficit)] -= 1
    while sum(given.values()) < num_samples:
        given[max((kind for kind in given if given[kind] < sizes[kind]), key=deficit)] += 1
    return given


def _draw_within_types(types: Mapping[int, str], num_samples: int, seed: int) -> tuple[int, ...]:
    members: dict[str, list[int]] = defaultdict(list)
    for index, kind in types.items():
        members[kind].append(index)
    counts = allocate({kind: len(indices) for kind, indices in members.items()}, num_samples)
    generator = np.random.RandomState(seed)
    drawn: list[int] = []
    for kind, count in counts.items():
        drawn.extend(map(int, generator.choice(members[kind], size=count, replace=False)))
    return tuple(sorted(drawn))


def _checked_ids(ids: Sequence[int], length: int) -> tuple[int, ...]:
    odd = [index for index in ids if isinstance(index, bool) or not isinstance(index, int | np.integer)]
    if odd:
        raise ConfigurationError(f"sample id {odd[0]!r} is not a whole number; give 0 to {length - 1}")
    ids = [int(index) for index in ids]
    outside = [index for index in ids if not 0 <= index < length]
    if outside:
        raise ConfigurationError(f"sample ids {first_of(outside, 5)} are outside the split; it has 0 to {length - 1}")
    twice = [index for index in dict.fromkeys(ids) if ids.count(index) > 1] if len(set(ids)) < len(ids) else []
    if twice:
        raise ConfigurationError(f"sample ids {first_of(twice, 5)} are given twice; give each once")
    if not ids:
        raise ConfigurationError("no sample ids are given; give at least one")
    return tuple(ids)


def few_samples_caveats(num_settings: int, num_samples: int) -> list[Caveat]:
    """The caveat of that many settings with that many samples each; none for one setting or enough samples."""
    if num_settings < 2 or num_samples >= LEAST_SAMPLES_TO_COMPARE:
        return []
    return [caveat("few_samples", num_samples=num_samples, num_settings=num_settings, least=LEAST_SAMPLES_TO_COMPARE)]


def shard_of_process(sample_ids: Sequence[int], rank: int, num_processes: int) -> tuple[int, ...]:
    """Every `num_processes`-th id from `rank` on: the shards are disjoint and together complete."""
    return tuple(sample_ids[rank::num_processes])


def shards_of(sample_ids: Sequence[int], num_processes: int) -> Mapping[int, tuple[int, ...]]:
    """The shard of each process, by rank."""
    return {rank: shard_of_process(sample_ids, rank, num_processes) for rank in range(num_processes)}


def split_by(chosen: Set[int], sample_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that are chosen and those that are not, each in their order."""
    return tuple(each for each in sample_ids if each in chosen), tuple(
        each for each in sample_ids if each not in chosen
    )


def choose_latency_ids(sample_ids: Sequence[int], num_latency_samples: int | None, seed: int) -> frozenset[int]:
    """The samples that are measured: the first so many in a random order of all, which depends on ids and seed only.

    More of them include fewer of them; None, or as many as there are, takes all.
    """
    if num_latency_samples is None or num_latency_samples >= len(sample_ids):
        return frozenset(sample_ids)
    order = np.random.default_rng(seed).permutation(sorted(sample_ids))
    return frozenset(map(int, order[:num_latency_samples]))


# Samples whose pictures are opened to see whether there are any.
_INSPECTED_SAMPLES = 8


def inspected(task: Task, sample_ids: Sequence[int]) -> list[Sample]:
    return list(itertools.islice(_readable(task, sample_ids), _INSPECTED_SAMPLES))


def _readable(task: Task, sample_ids: Sequence[int]) -> Iterator[Sample]:
    for sample_id in sample_ids:
        try:
            with library_faults_named(f"sample {sample_id}"):
                sample = task[sample_id]
        except SampleError:  # not counted: it is recorded among the samples
            continue
        yield sample
