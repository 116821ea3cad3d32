"""Times of a sample's request, and the tokens that they are spent on."""

from typing import Annotated

from experiment_core_utils.records.json_record import Count, Delay, Record, Time
from experiment_core_utils.records.quantities.quantity import Quantity


class StageTimes(Record):
    """The times of a request's stages in milliseconds."""

    #: vision stage, of a batch that of all its pictures; None if no picture
    T_vision_total: Annotated[Delay | None, Quantity("vision_s", "ms", of="run", is_part=True)]
    #: prefill up to the first token, of a batch all prompts up to all first tokens; None if answered untimed in a
    #: batch, or by a server, which does not show it
    T_LLM_prefill: Annotated[Time | None, Quantity("prefill_s", "ms", of="run")]
    #: first token to last token, of a batch the last one of all its answers; None if fewer than 2 output tokens, or all
    #: came at once
    T_LLM_decode: Annotated[Time | None, Quantity("decode_s", "ms", of="run", is_part=True)]
    #: request handed to the model, to last token; at a `batch_size` above 1 the time of the whole batch, which each of
    #: its requests waits; None if answered untimed in a batch
    T_total: Annotated[
        Time | None,
        Quantity("e2e_s", "ms", of="run", figures=("mean", "std", "p50", "p95", "p99"), typical=("mean", "p95", "p99")),
    ]
    #: `T_LLM_decode` / (output tokens - 1), of a batch / its decode steps; None if fewer than 2 output tokens
    T_decode_per_token: Annotated[Time | None, Quantity("tpot_s", "ms", of="run")]


class SampleTimes(Record):
    """The times of a sample that its runs do not have one by one, in milliseconds."""

    #: `T_vision_total` + `T_LLM_prefill`, or request sent to first text received from a server; None if answered in a
    #: batch
    T_first_token: Annotated[Time | None, Quantity("ttft_s", "ms", of="run")]
    #: resizing, cutting and tokenising on the host; not in `T_total`
    T_preprocess: Annotated[Delay, Quantity("preprocess_s", "ms", may_take_none=True)]
    #: host to device; not in `T_total`; None if answered in a batch
    T_transfer: Annotated[Delay | None, Quantity("transfer_s", "ms", figures=(), may_take_none=True)]


class ThinkingPart(Record):
    """What a sample's answer thought before it answered."""

    #: output tokens up to the end of thinking, its tags included; 0 if the model did not think
    thinking_tokens: Annotated[Count, Quantity("thinking_tokens", "tokens", in_table=False)]
    #: 1 if the thought still went on at `--thinking_tokens_list` and was closed there, else 0; not there without it
    thinking_forced: Annotated[
        Count | None, Quantity("thinking_forced", "answers", in_table=False, is_everywhere=False)
    ] = None
    #: time of the decode steps among them, part of `T_LLM_decode`; None if fewer than 2, or answered in a batch
    T_thinking: Annotated[Delay | None, Quantity("thinking_s", "ms", of="run", in_table=False, is_part=True)] = None


class RequestTokens(Record):
    """The image features and tokens of a sample's prompt."""

    #: features that the vision stage computed; None if no picture
    pooled_image_features: Annotated[Count | None, Quantity("pooled_image_features", "features", figures=())]
    #: image features that entered the language model, 0 without a picture; None if a server alone knows
    actual_vision_tokens: Annotated[Count | None, Quantity("vision_tokens", "tokens", figures=())]
    #: `theoretical_vision_tokens` - `actual_vision_tokens`; None if no picture
    vision_tokens_diff: Annotated[int | None, Quantity("vision_tokens_diff", "tokens", in_table=False, figures=())] = (
        None
    )
    #: start, end and row-end tokens of the image part, 0 without a picture; None if a server alone knows
    image_marker_tokens: Annotated[Count | None, Quantity("image_marker_tokens", "tokens", figures=None)]
    #: prompt tokens other than image tokens, beginning-of-text included, and all of a text that is scored; None if a
    #: server alone knows
    input_text_tokens: Annotated[Count | None, Quantity("text_tokens", "tokens", figures=None)]
    #: sum of `actual_vision_tokens`, `image_marker_tokens` and `input_text_tokens`, or a server's count; None if it
    #: gives none
    prompt_tokens: Annotated[Count | None, Quantity("prompt_tokens", "tokens")]


class AnswerTokens(Record):
    """The length of a sample's answer."""

    #: tokens generated, end-of-sequence included where it came; in a batch without the padding
    output_tokens: Annotated[Count, Quantity("output_tokens", "tokens")]
