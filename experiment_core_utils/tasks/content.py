"""What a sample is known by again: a digest of its words and its picture, wherever they lie."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from PIL import Image

from experiment_core_utils.primitives.errors import DataChanged, SampleError, SampleTimedOut
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.texts import shown
from experiment_core_utils.tasks.interface import Sample, Task


class Words(Protocol):
    """What a sample says, as `Sample` has it."""

    @property
    def question(self) -> str: ...
    @property
    def answers(self) -> tuple[str, ...]: ...
    @property
    def options(self) -> tuple[str, ...]: ...
    @property
    def answer_index(self) -> int | None: ...


def sample_digest(words: Words, picture_sha256: str | None) -> str:
    """SHA-256 over question, answers, options, the right one's index and the digest of the picture, in hexadecimal
    digits.
    """
    content = [words.question, list(words.answers), list(words.options), words.answer_index, picture_sha256]
    # A row that is not checked yet may contain anything.
    return hashlib.sha256(json.dumps(content, default=repr).encode()).hexdigest()


def joined_digests(of_pictures: Iterable[str]) -> str | None:
    """The digests of a sample's pictures in one text; None where there is none."""
    return " ".join(of_pictures) or None


def digest_of(sample: Sample) -> str:
    """The digest of a sample that has the digest of its picture."""
    return sample_digest(sample, sample.picture_sha256)


def pixel_digest(image: Image.Image) -> str:
    """SHA-256 over the mode, the size and the pixels of a picture."""
    digest = hashlib.sha256(f"{image.mode} {image.width} {image.height} ".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def with_picture_digest(sample: Sample) -> Sample:
    """The sample with the digest of each picture: as it is stored where its task gave that, else of its pixels."""
    if sample.image is None or sample.picture_sha256 is not None:
        return sample
    return replace(sample, picture_sha256=joined_digests(map(pixel_digest, sample.images)))


def digests_of(task: Task, sample_ids: Sequence[int], sample_timeout_s: float | None) -> Mapping[int, str] | None:
    """The content of the drawn samples before a run: digests by id; None for a generated task, whose ids say it.

    A sample that cannot be read, or not in time, is left out.
    """
    if getattr(task, "is_generated", False):
        return None
    found = {}
    for sample_id in sample_ids:
        try:
            with time_limit(sample_timeout_s):
                digest = _digest_at(task, sample_id)
        except SampleTimedOut:  # not counted: it is a failed sample where it is requested
            continue
        if digest is not None:
            found[sample_id] = digest
    return found


def _digest_at(task: Task, sample_id: int) -> str | None:
    if (data_sha256 := _optional(task, "data_sha256")) is not None:
        return data_sha256(sample_id)
    try:
        return digest_of(with_picture_digest(task[sample_id]))
    except SampleTimedOut:
        raise
    except Exception:  # whatever the code of a task raises; it does so again where the sample is requested
        return None


def read_unchanged(task: Task, sample_id: int, known: dict[int, str]) -> Sample:
    """The sample, with the digest of its picture.

    Args:
        known: digests by id, from before the run or from an earlier reading; one that it lacks is put in.

    Raises:
        SampleError: it cannot be read.
        DataChanged: it is another than the known one.
    """
    try:
        sample = with_picture_digest(task[sample_id])
    except SampleError:
        # A picture may have become one that cannot be decoded.
        data_sha256 = _optional(task, "data_sha256")
        now = None if data_sha256 is None else data_sha256(sample_id)
        if now is not None and now != known.get(sample_id, now):
            raise _changed(task, sample_id) from None
        raise
    now = digest_of(sample)
    if now != known.setdefault(sample_id, now):
        raise _changed(task, sample_id)
    return sample


def _changed(task: Task, sample_id: int) -> DataChanged:
    file_of = _optional(task, "file_of")
    file = None if file_of is None else file_of(sample_id)
    named = f"sample {sample_id} of {task.name}" + (f" (picture {shown(file)})" if file is not None else "")
    return DataChanged(
        f"{named} has changed since this run began: put the former data back and run the same command again to resume, "
        "or measure the new data with another --output_dir"
    )


def _optional(task: Task, name: str) -> Callable[[int], str | None] | None:
    """A method that a task may have."""
    found: Callable[[int], str | None] | None = getattr(task, name, None)
    return found
