"""Records of requests: their shape, their runs, the proof of the knobs and their FLOPs."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from experiment_core_utils.primitives.errors import ConfigurationError
from experiment_core_utils.primitives.units import MemoryReading

StageName = Literal["vision", "prefill", "decode"]
# `first_token` stands for vision and prefill together, where only a server sees them.
SpanName = StageName | Literal["first_token"]


@dataclass(frozen=True)
class VisionGeometry:
    """How one picture was cut, or several of one question together."""

    num_crops: int  #: crops R * C, without the overview crop; 0 where the picture is not cut
    #: (R, C); None where the picture is not cut, or its crops are counted but not placed
    tiling: tuple[int, int] | None
    #: (height, width) in pixels of the canvas that the crops are cut from, or of the picture as the model sees it; None
    #: where it is unknown
    image_size: tuple[int, int] | None
    pooled_features: int  #: what the vision stage gives: (num_crops + 1) * 144 in MolmoE
    has_overview: bool = True  #: whether the whole picture is a crop too
    #: patches of the picture, for models that take it in its own shape; None where it is cut into crops
    patches: int | None = None
    patch_grid: tuple[int, int] | None = None  #: (rows, columns) of these; None where it is cut, or has several frames
    pictures: tuple["VisionGeometry", ...] = ()  #: of each picture, where there are several and it is known

    @property
    def crops_if_cut(self) -> int | None:
        """`num_crops`; None for a picture that is not cut because it is taken in its own shape."""
        return None if self.patches is not None else self.num_crops

    @property
    def total_crops(self) -> int:
        """Crops that the vision stage takes, the whole picture counted; 0 for a picture in its own shape."""
        if self.pictures:
            return sum(each.total_crops for each in self.pictures)
        return 0 if self.patches is not None else self.num_crops + self.has_overview

    @property
    def crop_features(self) -> int | None:
        """Features that each crop gives; None where crops differ in it, and for a picture in its own shape."""
        if self.total_crops == 0 or self.pooled_features % self.total_crops:
            return None
        return self.pooled_features // self.total_crops


@dataclass(frozen=True)
class RequestSize:
    """What a request's operations depend on beside the model and its setting.

    Raises:
        ConfigurationError: no token in the prompt, no request, a negative number, or grids of other patches.
    """

    prompt_tokens: int  #: positions of the prompt, those of pictures among them; no padding
    output_tokens: int  #: n, generated tokens; n - 1 decode steps, since the first comes from the prefill
    crops: int = 0  #: pictures or crops of one size, the crop of a whole picture counted, for models that cut so
    #: patches of each picture (or of each frame pair), for models that take pictures as they are
    patches: tuple[int, ...] = ()
    requests: int = 1  #: how many requests of this size run
    #: (rows, columns) of the patches of each picture, for models whose patches attend in windows; empty where they are
    #: not known
    grids: tuple[tuple[int, int], ...] = ()
    #: features that each crop gives, for models whose crops have one of several sizes; None where it is not known
    crop_features: int | None = None

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.requests) < 1 or min(self.output_tokens, self.crops, *self.patches, 0) < 0:
            raise ConfigurationError(
                f"{self} is not possible; give at least one prompt token and one request, and no negative number"
            )
        if self.grids and self.patches != tuple(rows * columns for rows, columns in self.grids):
            raise ConfigurationError(
                f"{self} is not possible; give grids whose rows times columns are the patches, or none"
            )


@dataclass(frozen=True)
class RequestShape:
    """Sizes of one prepared request, without its tensors."""

    #: the geometry that the picture's size and the vision target call for; None without a picture
    theoretical: VisionGeometry | None
    actual: VisionGeometry | None  #: the geometry that the tensors have
    #: image features that enter the language model; this and the next two are None where a server alone knows them
    vision_tokens: int | None
    image_marker_tokens: int | None  #: start, end and column tokens of the image part
    text_tokens: int | None  #: all other prompt tokens, bos included
    preprocess_s: float  #: host time for resizing, cutting and tokenising
    #: image features that a fraction of the model's own asks for; None for any other vision target
    target_tokens: int | None = None
    served_tokens: int | None = None  #: positions of the prompt by the server's count; None where it gives none
    closed_thought_tokens: int = 0  #: that a prompt has more, not counted here, where its model is not to think

    @property
    def known_prompt_tokens(self) -> int | None:
        """All positions of the prompt; None where they are not known."""
        parts = [each for each in (self.vision_tokens, self.image_marker_tokens, self.text_tokens) if each is not None]
        return sum(parts) if len(parts) == 3 else self.served_tokens

    @property
    def prompt_tokens(self) -> int:
        """All positions of the prompt; raises ValueError where they are not known."""
        known = self.known_prompt_tokens
        if known is None:
            raise ValueError("the tokens of this prompt are counted by a server, which has not said how many they are")
        return known

    def counted_by_server(self, prompt_tokens: int | None) -> "RequestShape":
        """The same with the server's count of the whole prompt: a prompt without a picture is text alone."""
        if self.vision_tokens == 0 and self.text_tokens is None:
            return replace(self, text_tokens=prompt_tokens)
        return replace(self, served_tokens=prompt_tokens)

    @property
    def layout(self) -> Hashable:
        """Equal for requests of which libraries prepare the same kernels: tiling and image size of each picture; None
        without one."""
        if self.actual is None:
            return None
        return tuple((each.tiling, each.image_size) for each in self.actual.pictures or (self.actual,))

    @property
    def vision_tokens_difference(self) -> int | None:
        """Theoretical minus actual vision tokens; None without a picture."""
        if self.theoretical is None or self.vision_tokens is None:
            return None
        return self.theoretical.pooled_features - self.vision_tokens

    def size(self, output_tokens: int) -> RequestSize:
        """What the request's operations depend on, with an answer of so many tokens."""
        actual = self.actual
        pictures = () if actual is None else actual.pictures or (actual,)
        grids = tuple(each.patch_grid for each in pictures if each.patch_grid is not None)
        return RequestSize(
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens,
            crops=0 if actual is None else actual.total_crops,
            patches=tuple(each.patches for each in pictures if each.patches is not None),
            grids=grids if len(grids) == len(pictures) else (),
            crop_features=None if actual is None else actual.crop_features,
        )


@dataclass(frozen=True)
class PreparedRequest:
    """One sample ready for the model, on the host."""

    #: tensors by argument name; `input_ids` [1, T], with a picture also `pixel_values` [1, K, 3, S, S], `image_masks`
    #: [1, K, P] and `image_input_idx` [1, K, F]
    inputs: Mapping[str, Any]
    shape: RequestShape
    text: str = ""  #: what was tokenised, in its chat template; a picture is one placeholder, in MolmoE it has none


@dataclass(frozen=True)
class ServedNotes:
    """What a server's answer says beside its text."""

    answered_by: str | None = None  #: the model that it names; None where it names none, or the one that was asked
    is_counted: bool = True  #: whether its tokens are the server's count; else they are the pieces that came
    are_counts_possible: bool = True  #: whether all that it counts can be; what cannot is left out
    is_recut: bool = False  #: whether more pieces came than tokens
    is_too_long: bool = False  #: whether it has more tokens than were asked for, by the server's count
    cached_tokens: int | None = None  #: of the prompt that it did not compute; None where it does not say


@dataclass(frozen=True)
class ScoredContinuation:
    """How likely a model finds a given continuation of a prompt."""

    logprob: float  #: sum of the natural log-probabilities of its tokens
    num_tokens: int  #: how many these are
    is_greedy: bool  #: whether each of them is the likeliest in its place, so that greedy decoding would give it


@dataclass(frozen=True)
class TimedTokens:
    """An answer, and what lies between the marks that were set while it was made."""

    token_ids: tuple[int, ...]  #: generated ids, end-of-sequence included where it came
    #: the stage of each interval between neighbouring marks, in order; one `decode` for each token after the first
    spans: tuple[SpanName, ...]
    #: whether each decode interval is of one token; False where several came at once
    is_by_token: bool = True
    prompt_tokens: int | None = None  #: positions of the prompt by a server's count; None where this process counts
    hidden_tokens: int = 0  #: of thinking that a server counted and did not send, beside `token_ids`
    served: ServedNotes | None = None  #: None where no server answered
    scores: tuple[ScoredContinuation, ...] = ()  #: of given continuations, in place of an answer; () with one


@dataclass(frozen=True)
class TimedBatch:
    """The answers to several requests that ran together, and what lies between the marks that were set meanwhile."""

    token_ids: tuple[tuple[int, ...], ...]  #: of each request, end-of-sequence included where it came
    #: as in `TimedTokens`: vision of all, prefill of all, then one `decode` for each step, until every answer has ended
    spans: tuple[SpanName, ...]

    @property
    def first(self) -> TimedTokens:
        """The first answer, with the intervals of all."""
        return TimedTokens(self.token_ids[0], self.spans)


@dataclass(frozen=True)
class StagedRun:
    """One run of one request, from marks of that run; the stages add up to the total."""

    token_ids: tuple[int, ...]  #: generated ids, end-of-sequence included where it came
    vision_s: float | None  #: crops on the device -> features ready; None without a picture
    #: features and prompt on the device -> first token on the host; None where a server does not show it
    prefill_s: float | None
    decode_s: float | None  #: first token -> last token; None for fewer than 2 tokens, and where all came at once
    total_s: float  #: request handed over -> last token
    inter_token_s: tuple[float, ...]  #: the n - 1 times between tokens; none where several came at once
    ended: bool  #: whether end-of-sequence came before the limit
    first_token_s: float | None = None  #: request handed over -> first token, where its stages are not seen; else None
    prompt_tokens: int | None = None  #: as in `TimedTokens`
    hidden_tokens: int = 0  #: as in `TimedTokens`
    served: ServedNotes | None = None  #: as in `TimedTokens`
    scores: tuple[ScoredContinuation, ...] = ()  #: as in `TimedTokens`

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than 2 tokens."""
        steps = len(self.inter_token_s) or len(self.token_ids) - 1
        return None if self.decode_s is None or steps < 1 else self.decode_s / steps

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None where given continuations were scored, and none was generated."""
        if self.scores:
            return None
        return (self.vision_s or 0.0) + (self.prefill_s or 0.0) + (self.first_token_s or 0.0)

    @property
    def num_requests(self) -> int:
        """Requests that ran in this time."""
        return 1

    @property
    def all_output_tokens(self) -> int:
        """Output tokens of all of them."""
        return len(self.token_ids)


@dataclass(frozen=True)
class BatchedRun(StagedRun):
    """One run of a batch, as one of its requests sees it: its own tokens, and the times of the whole batch."""

    batch_size: int = field(kw_only=True)  #: requests of the batch, this one among them
    batch_output_tokens: int = field(kw_only=True)  #: true tokens of all of their answers, without padding

    @property
    def num_requests(self) -> int:
        return self.batch_size

    @property
    def all_output_tokens(self) -> int:
        return self.batch_output_tokens


@dataclass(frozen=True)
class KnobProof:
    """What ran when the setting was in force, counted inside the model on one request outside the measurement."""

    #: experts that the router chose for a token, before `expert_mass` leaves any out, for each block that ran, in the
    #: prefill; a block without a router has none; None where the model does not show them
    experts_per_token: tuple[int | None, ...] | None
    #: blocks that ran in the prefill, as indices of the whole model; None where the model does not show them
    blocks_run: tuple[int, ...] | None
    blocks_run_decode: tuple[int, ...] | None  #: the same in a decode step; None where no step was run
    #: layers of the cache that contain keys or a recurrent state; where each block has several, those count as one;
    #: None where the model does not show them
    cache_layers: int | None
    execution: str | None = None  #: how the setting ran, as `model.execution`; None if not reported
    execution_reason: str | None = None  #: as `model.execution_reason`; None where there is none
    #: how transformers computed the experts of the prefill; None where there are none,
    #: or engines compute them by kernels of their own
    experts_implementation: str | None = None
    experts_implementation_decode: str | None = None  #: the same in a decode step; None in the same cases
    #: engine of each stage at this setting, as `execution_stages` of the model; None if not reported
    execution_stages: Mapping[Any, str] | None = None
    #: relative distance of the engines' logits from the modules in higher precision, mean over the prompt's last
    #: position and decode steps after it; None where the modules or plain torch run
    engine_error: float | None = None
    #: the same of the modules in the precision that was measured; None in the same cases
    modules_error: float | None = None
    #: seconds that Inductor took for the decode step of this setting, less where it found it on disk; None where it
    #: compiled nothing
    compile_s: float | None = None
    prefill_tokens: int | None = None  #: positions that the prefill computed; None where they are not counted
    prompt_tokens: int | None = None  #: positions of the prompt as it was prepared; None in the same cases
    vision_tokens: int | None = None  #: image features among these; None in the same cases
    #: why nothing that was counted shows whether a knob acted, by knob; not there where each was seen
    knobs_not_seen: Mapping[str, str] = field(default_factory=dict)
    #: what was counted of knobs whose cost differs between tokens, by knob; not there where there is none
    counted: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageFlops:
    """Floating-point operations of one request; one multiply-add is 2. The model's own formulas say what counts."""

    vision_flops: int | None
    prefill_flops: int
    decode_flops_per_token: float | None

    def total(self, output_tokens: int) -> float:
        """Of the whole request; the first of its output tokens belongs to the prefill."""
        steps_flops = (self.decode_flops_per_token or 0) * max(output_tokens - 1, 0)
        return (self.vision_flops or 0) + self.prefill_flops + steps_flops


@dataclass(frozen=True)
class RequestFlops:
    """Operations of all requests of a `RequestSize`; one multiply-add is 2."""

    stages: StageFlops  #: by stage; decode as the mean over steps
    decode_flops: int  #: sum over all decode steps; 0 where there is none

    @property
    def total_flops(self) -> int:
        """Vision, prefill and every decode step."""
        return (self.stages.vision_flops or 0) + self.stages.prefill_flops + self.decode_flops


@dataclass(frozen=True)
class FlopsFigure:
    """Operations of a request, or why there is no figure."""

    flops: RequestFlops | None
    source: Literal["formula", "counted"]  #: `formula`, or `counted` on a model without weights
    reason: str | None


@dataclass(frozen=True)
class BatchedAnswer:
    """What a sample was answered in a batch with others of the same setting, without measuring."""

    token_ids: tuple[int, ...]  #: generated ids, end-of-sequence included where it came
    ended: bool  #: whether it came before the limit
    batch_size: int  #: requests that were answered together
    batch_limit: int  #: most that were allowed together; less than what was requested where memory had run out
    #: why it was answered alone though batches were requested: in one, answers were wrong; None where they were right
    alone_reason: str | None = None
    scores: tuple[ScoredContinuation, ...] = ()  #: as in `TimedTokens`


@dataclass(frozen=True)
class FollowedAnswer:
    """What a model makes of a given answer, token by token."""

    likeliest: tuple[int, ...]  #: the most likely token in the place of each of the answer's
    logits: Any  #: [n, V] float32 on the model's device, from which the first n of them were chosen; n is 8 at most


class TokenisedPrompts(TypedDict):
    """Left-padded ids and their mask, both [N, T]; a prompt's true length is the sum of its row of the mask."""

    input_ids: Any
    attention_mask: Any


class ArchitectureSizes(TypedDict):
    """Sizes of a decoder; None where the model's config does not state them."""

    num_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    vocab_size: int | None
    max_position_embeddings: int | None


def merge_memory(readings: Sequence[MemoryReading]) -> MemoryReading | None:
    """The largest of each figure over processes: what one of them needs."""
    if not readings:
        return None
    peaks = [reading.peak_memory_bytes for reading in readings if reading.peak_memory_bytes is not None]
    reserved = [reading.peak_reserved_bytes for reading in readings if reading.peak_reserved_bytes is not None]
    return MemoryReading(
        peak_memory_bytes=max(peaks, default=None),
        peak_reserved_bytes=max(reserved, default=None),
        process_rss_bytes=max(reading.process_rss_bytes for reading in readings),
        reason=readings[0].reason,
        num_passes=min((each.num_passes for each in readings if each.num_passes is not None), default=None),
    )


def whole_window(readings: Sequence[MemoryReading]) -> MemoryReading | None:
    """One process's readings in order of time: the highest peaks, the resident memory at the end."""
    merged = merge_memory(readings)
    return None if merged is None else replace(merged, process_rss_bytes=readings[-1].process_rss_bytes)
