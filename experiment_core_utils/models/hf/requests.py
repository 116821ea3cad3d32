"""Requests made by a transformers processor or tokenizer, with their actual token counts."""

import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from experiment_core_utils.engines.answer_ends import TextOf, text_reader, without_appended_eos
from experiment_core_utils.engines.likelihood import CONTINUATIONS, continuation_tensors
from experiment_core_utils.knobs.token_units import TokenUnit, tokens_of_crops
from experiment_core_utils.knobs.vision_tokens import CropRange
from experiment_core_utils.models.common.continuations import (
    continuation_ids,
    split_context,
    unprompted_request,
    whole_text_request,
)
from experiment_core_utils.models.common.text_generation import context_fault, context_length, is_surely_longer
from experiment_core_utils.models.hf.knobs.patches import fields_in_force
from experiment_core_utils.models.hf.several_pictures import joined, options_of_all, placed
from experiment_core_utils.models.hf.tilings import VisionOptions
from experiment_core_utils.models.hf.token_options import (
    AS_IT_IS,
    TRIAL_SIZES,
    WHOLE,
    Sizes,
    TokenOption,
    token_options,
)
from experiment_core_utils.models.hf.vision_tokens import vision_options_of
from experiment_core_utils.primitives.clock import HostClock
from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, SampleTimedOut, first_line
from experiment_core_utils.primitives.interruption import time_limit
from experiment_core_utils.primitives.texts import is_text, shown
from experiment_core_utils.records.requests import PreparedRequest, RequestShape, VisionGeometry
from experiment_core_utils.tasks.answers import (
    is_in_thinking,
    is_thinking_opened_by,
    marks_in,
    marks_in_text,
    thinking_pair,
)
from experiment_core_utils.tasks.interface import PromptFamily, Sample

# Tensors [1, T] beside the ids, with the padding value of each.
ALONG_THE_PROMPT = {"attention_mask": 0, "mm_token_type_ids": 0, "token_type_ids": 0}
_PROBE = "probe of the template"
# What templates get where they ask for today's date, so that a prompt is the same on every day; Llama 3's gives this
# date where it has no clock.
_PROMPT_DATE = datetime(2024, 7, 26)
_DIRECTIVES = ("-d", "-m", *"aAbBcdeHIjmMpSUwWxXyYZ")
# In front of a template; transformers gives it texts and no functions. The plus keeps a line break behind it.
_TODAY = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{each}', '{_PROMPT_DATE.strftime(f'%{each}')}')" for each in _DIRECTIVES)
    + " }}{% endmacro +%}"
)
# A template takes milliseconds; one that takes so long never ends.
RENDERING_S = 10.0

# What tokenizers, templates and processors raise for one prompt or picture that they cannot use.
UNUSABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
    OSError,
    Image.DecompressionBombError,
    TemplateError,
)


def has_pixels(name: str) -> bool:
    """Whether what a model takes under this name are pictures."""
    return "pixel_values" in name or name == "image_patches"


@contextmanager
def unusable_named(sample_id: int, what: str) -> Iterator[None]:
    """A context in which whatever is raised for one sample becomes a SampleError that names it, and says `what`."""
    try:
        yield
    except SampleError as error:
        # Of its own class: a sample that is out of time says so.
        raise type(error)(f"sample {sample_id}: {error}") from error
    except UNUSABLE as error:
        raise SampleError(f"sample {sample_id}: {what} cannot be used ({shown(first_line(error))})") from error


def refuse_longer_prompt(
    sample_id: int,
    tokens: int,
    model_config: PreTrainedConfig,
    given: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Raises SampleError for a prompt that is longer than the model's context.

    Args:
        given: tensors of continuations, which have to fit as well; their last token is not computed.
    """
    longest = given[CONTINUATIONS].shape[1] - 1 if given else 0
    if fault := context_fault(tokens + longest, model_config):
        raise SampleError(f"sample {sample_id}: its prompt {fault}")


def check_prompt(prompt: Any, tokenizer: Any, model_config: PreTrainedConfig) -> None:
    """Raises SampleError for a prompt that no tokenizer takes, or whose first part alone exceeds the context."""
    if not is_text(prompt):
        raise SampleError(f"its prompt {shown(repr(prompt))} is not a text that can be written as UTF-8")
    limit = context_length(model_config)
    if limit is not None and is_surely_longer(prompt, limit, tokenizer):
        raise SampleError(
            f"its prompt of {len(prompt)} characters is longer than the model's context of {limit} tokens"
        )


@dataclass(frozen=True)
class ChatOptions:
    """What was requested of the chat template."""

    system_prompt: str | None = None  #: None for what the template adds by itself
    no_chat_template: bool = False  #: whether prompts are given without it

    def refuse_without_template(self, name: str) -> None:
        """Raises ConfigurationError where anything is requested of a model without a chat template."""
        if self.no_chat_template:
            raise ConfigurationError(f"--no_chat_template does nothing for {name}, which has no chat template; drop it")
        if self.system_prompt is not None:
            raise ConfigurationError(
                f"--system_prompt has no place: {name} has no chat template; drop it, or write it into "
                "--prompt_template"
            )


DEFAULT_CHAT = ChatOptions()


@dataclass(frozen=True)
class PromptLayout:
    """The layout of a prompt: a system message if one is given, one user turn and the beginning of the answer; or the
    bare prompt where there is no template.
    """

    tokenizer: Any  #: renders the template
    template: str | None  #: None for a base model
    image_token: str | None  #: the placeholder of a picture; None for a text model
    takes_parts: bool  #: whether the template takes a message as a list of parts; else it takes a text
    system_message: Any = None  #: as the template takes it, a text or parts; None for what the template adds by itself
    variables: Mapping[str, Any] = field(default_factory=dict)  #: of the template, beside its usual ones
    after_picture: str = "\n"  #: what follows the placeholder where no template says it

    def text(self, prompt: str, num_pictures: int) -> str:
        """The text to tokenise, with a placeholder for each picture where `places` says.

        Raises:
            SampleError: the prompt itself has a placeholder in it, or the template has no place for so many pictures.
        """
        if self.image_token is not None and self.image_token in prompt:
            raise SampleError(f"the prompt has the picture's placeholder {self.image_token} in it; leave that out")
        places = self.places(prompt, num_pictures)
        if self.template is None or not self.takes_parts:
            in_front = sum(1 for _ in takewhile(lambda each: isinstance(each, int), places))
            marks = [f"{self.image_token}{self.after_picture}"] * in_front + [str(self.image_token)] * (
                num_pictures - in_front
            )
            marked = "".join(each if isinstance(each, str) else marks.pop(0) for each in places)
            return marked if self.template is None else self._render(marked)
        parts = [{"type": "text", "text": each} if isinstance(each, str) else {"type": "image"} for each in places]
        text = self._render(parts)
        if num_pictures > 1 and text.count(str(self.image_token)) != num_pictures:
            raise SampleError(f"its {num_pictures} pictures have no place in the chat template, which takes fewer")
        return text

    @property
    def date(self) -> str | None:
        """The date that is today in every prompt; None where the template does not ask for it."""
        return _PROMPT_DATE.date().isoformat() if self.template and "strftime_now" in self.template else None

    def places(self, prompt: str, num_pictures: int) -> list[str | int]:
        """The prompt's texts and pictures in their order; see `several_pictures.placed`.

        Where a template puts all pictures in front of the text, so they are, and the prompt's marks stay.
        """
        places = placed(prompt, num_pictures)
        return places if num_pictures < 2 or self._keeps_places else [*range(num_pictures), prompt]

    @cached_property
    def _keeps_places(self) -> bool:
        """Whether pictures stay between the texts around them. A prompt of PaliGemma begins behind them."""
        if self.template is None or not self.takes_parts:
            return self.after_picture != ""
        try:
            text = self._render(
                [
                    {"type": "text", "text": _PROBE},
                    {"type": "image"},
                    {"type": "text", "text": _PROBE},
                    {"type": "image"},
                ]
            )
        except (TemplateError, TypeError, ValueError):
            return False
        first, second = text.find(_PROBE), text.rfind(_PROBE)
        return 0 <= first < text.find(str(self.image_token)) < second < text.rfind(str(self.image_token))

    def has_begin_mark(self, text: str) -> bool:
        """Whether the template adds the begin-of-sequence token that the tokenizer would add."""
        begin = self.tokenizer.bos_token
        return self.template is not None and begin is not None and text.startswith(begin)

    def _messages(self, content: Any) -> list[dict[str, Any]]:
        user = {"role": "user", "content": content}
        return [user] if self.system_message is None else [{"role": "system", "content": self.system_message}, user]

    def _render(self, content: Any) -> str:
        # A template is a program: it may loop. Where Python delivers no signals it is not interrupted.
        in_main = threading.current_thread() is threading.main_thread()
        try:
            with time_limit(RENDERING_S if in_main else None):
                text: str = self.tokenizer.apply_chat_template(
                    self._messages(content),
                    chat_template=self.template if self.date is None else f"{_TODAY}{self.template}",
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.variables,
                )
        except SampleTimedOut as error:
            raise SampleTimedOut(f"the chat template was {error}; correct or remove it") from error
        return text


def default_template(template: Any, name: str) -> str | None:
    """The chat template of a processor or tokenizer, of several under names the default one; None for none.

    Raises:
        ConfigurationError: several, and none that is called default.
    """
    if not isinstance(template, dict):
        return None if template is None else str(template)
    if "default" not in template:
        raise ConfigurationError(
            f"{name} has chat templates {', '.join(sorted(template))} and none that is called default"
        )
    return str(template["default"])


def prompt_layout_of(
    tokenizer: Any,
    template: str | None,
    image_token: str | None,
    name: str,
    system_prompt: str | None = None,
    after_picture: str = "\n",
) -> PromptLayout:
    """The layout of a checkpoint, tried on a probe.

    Raises:
        ConfigurationError: its template fails, or loses the prompt or the picture, or has no place for the system
            prompt.
    """
    if template is None:
        return PromptLayout(tokenizer, None, image_token, takes_parts=False, after_picture=after_picture)
    reason = ""
    # Templates of models with vision are written for parts, those of text models for text; a few take one of them only.
    for takes_parts in (image_token is not None, image_token is None):
        layout = PromptLayout(tokenizer, template, image_token, takes_parts)
        try:
            text = layout.text(_PROBE, num_pictures=int(image_token is not None))
        except SampleTimedOut as error:
            raise ConfigurationError(f"{name}: {error}") from error
        except (TemplateError, TypeError, ValueError) as error:
            reason = reason or first_line(error)
            continue
        if text.count(_PROBE) == 1 and (image_token is None or text.count(image_token) == 1):
            return layout if system_prompt is None else _with_system_prompt(layout, system_prompt, name)
    raise ConfigurationError(
        f"the chat template of {name} cannot be used for one user turn"
        f"{' with a picture' if image_token is not None else ''} "
        f"({reason or 'the given text is not in it exactly once'}); correct or remove it"
    )


def _with_system_prompt(layout: PromptLayout, system_prompt: str, name: str) -> PromptLayout:
    """The layout with a system message; raises ConfigurationError where the template refuses or loses it."""
    reason = "it is left out there"
    # Some templates take the user's message as parts, and the system's as a text.
    for message in (system_prompt, [{"type": "text", "text": system_prompt}]):
        found = replace(layout, system_message=message)
        try:
            text = found.text(_PROBE, num_pictures=int(layout.image_token is not None))
        except SampleTimedOut as error:
            raise ConfigurationError(f"{name}: {error}") from error
        except (TemplateError, TypeError, ValueError) as error:
            reason = first_line(error)
            continue
        if text.count(_PROBE) == 1 and system_prompt.strip() in text:
            return found
    raise ConfigurationError(
        f"--system_prompt has no place in the chat template of {name} ({reason}); drop it, or write it into "
        "--prompt_template"
    )


@dataclass(frozen=True)
class ThinkingMarks:
    """Tokens that close a thought."""

    closing: tuple[int, ...]  #: one that goes on
    empty: tuple[int, ...]  #: one that has not begun
    in_prompt: tuple[int, ...]  #: the same as the chat template writes it behind a prompt; () where it does not


# A crop of the whole of a longer strip would first be scaled to gigabytes.
LONGEST_ASPECT = 200
# The names that families have for the token that a picture's feature takes the place of, and for those around it.
_PLACEHOLDERS = ("image_token_id", "image_token_index")

_MARKER_IDS = (
    "vision_start_token_id",
    "vision_end_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "start_image_token_id",
    "end_image_token_id",
)

_MARKER_TOKENS = ("fake_image_token", "global_image_token", "global_image_tag")
_ROW_MARKER = re.compile(r"<row_\d+_col_\d+>")


class HFRequests:
    """Makes the requests of one transformers model; `StagedModel.prepare` calls it.

    Args:
        processor_or_tokenizer: the processor of an image-text-to-text model, the tokenizer of a causal language model.
        config: of the model.
        name: path or hub id, for messages.
        chat: what was requested of its chat template.

    Attributes:
        has_vision: whether pictures are used. A text model gets the same prompts without them.
        prompt_family: how the model is asked.
        vision_knob_unsupported_reason: why the number of vision tokens cannot be set; None where it can.

    Raises:
        ConfigurationError: a chat template that cannot be used, or a processor without image processor or placeholder.
    """

    def __init__(
        self,
        processor_or_tokenizer: ProcessorMixin | PreTrainedTokenizerBase,
        config: PreTrainedConfig,
        name: str,
        chat: ChatOptions = DEFAULT_CHAT,
    ) -> None:
        self.name = name
        self._processor: Any = processor_or_tokenizer
        self.has_vision = isinstance(processor_or_tokenizer, ProcessorMixin)
        self._tokenizer: Any = self._processor.tokenizer if self.has_vision else processor_or_tokenizer
        self._config = config
        self._options = None
        image_token, self._placeholder = None, None
        self._markers = torch.empty(0, dtype=torch.long)
        if self.has_vision:
            self._validate_processor()
            self._placeholder = self._placeholder_of(config)
            image_token = self._tokenizer.convert_ids_to_tokens(self._placeholder)
            image_token = getattr(self._processor, "image_token", image_token)
            if self._tokenizer.convert_tokens_to_ids(image_token) in (None, self._tokenizer.unk_token_id):
                raise ConfigurationError(
                    f"the processor, the tokenizer and the config of {name} do not match: the tokenizer lacks the "
                    f"picture token {image_token!r}; give the files of one model"
                )
            self._markers = torch.tensor(sorted(self._marker_ids(config) - {self._placeholder}), dtype=torch.long)
        template, is_paligemma = self._template(), config.model_type == "paligemma"
        self.prompt_family: PromptFamily = "paligemma" if is_paligemma else "plain"
        if template is None:
            chat.refuse_without_template(name)
        elif chat.no_chat_template:
            template = None
        else:
            self.prompt_family = "chat"
        # What stands in `provenance.task.prompt_form`.
        self.chat_template_use = "off" if chat.no_chat_template else "none" if template is None else "applied"
        # PaliGemma's processor puts the begin of sequence behind the picture, and a line break behind the prompt.
        after_picture = "" if is_paligemma else "\n"
        self._layout = prompt_layout_of(self._tokenizer, template, image_token, name, chat.system_prompt, after_picture)
        self._own_counts: dict[Sizes, int | None] = {}
        self._fitted: dict[tuple[int, Sizes], tuple[TokenOption, int] | None] = {}
        if self.has_vision:
            self._options = vision_options_of(self._processor, config, self._tried_geometry)
        self.vision_knob_unsupported_reason = self._unsupported_reason()

    @property
    def placeholder(self) -> int | None:
        """The token that an image feature takes the place of; None in a text model."""
        return self._placeholder

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint."""
        return self._tokenizer

    @property
    def token_unit(self) -> TokenUnit:
        """What a number of vision tokens is made of; of no meaning where it cannot be set."""
        return TokenUnit(None) if self._options is None else self._options.unit

    @property
    def fraction_reasons(self) -> tuple[str | None, str | None]:
        """Why a picture cannot take fewer, and why not more, vision tokens than by itself; None where it can."""
        if not self.has_vision:
            return None, None
        fewer, more = self._token_options
        return (
            None if fewer is not None else self._unmoved("takes vision tokens of a picture away"),
            None if more is not None else self._unmoved("adds vision tokens to a picture"),
        )

    @cached_property
    def vision_options(self) -> dict[str, str]:
        """What takes vision tokens of a picture away and what adds some, by `fewer` and `more`, as trials found it."""
        options = self._token_options if self.has_vision else (None, None)
        named = zip(("fewer", "more"), options, strict=True)
        return {name: option.written for name, option in named if option is not None}

    @property
    def chat_template(self) -> str | None:
        """The chat template that prompts are put into; None where they are taken as they are."""
        return self._layout.template

    @property
    def prompt_date(self) -> str | None:
        return self._layout.date

    def config_for(self, crops: CropRange | None) -> Mapping[str, Any]:
        """Fields of the model's config that must be in force while requests with these crops run; mostly none."""
        if self._options is None or crops is None or crops.fraction is not None:
            return {}
        return self._options.config_for(crops)

    def make(self, sample: Sample, prompt: str, crops: CropRange | None) -> PreparedRequest:
        """The request's tensors on the host, as `generate()` takes them; a text model gets the prompt without the
        picture.

        Where the number of vision tokens cannot be set, `crops` changes nothing; None leaves the processor as it is.
        For a fraction, and for a family without a rule of its own, the value of the option that a trial found is looked
        for before anything is timed: the largest at which the pictures take no more tokens than the target.

        Raises:
            SampleError: a picture or a prompt that cannot be used, a prompt with a placeholder in it, without any
                token, or longer than the model's context.
        """
        images = sample.images if self.has_vision else ()
        with unusable_named(sample.sample_id, "its picture"):
            _refuse_strips(images)
            target = self._target_tokens(crops, tuple(image.size for image in images))
        clock = HostClock()
        started_s = clock.now_s()
        tokens = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        prefix = next((each for each in tokens if each is not None), None)
        if sample.continuations == ():
            with unusable_named(sample.sample_id, "its text"):
                return whole_text_request(partial(self._encoded, special=True), prompt, prefix, self._config, started_s)
        given: Mapping[str, torch.Tensor] = {}
        with unusable_named(sample.sample_id, "its prompt"):
            check_prompt(prompt, self._tokenizer, self._config)
            whole = self._layout.text(prompt, num_pictures=len(images))
            if sample.continuations and not whole:
                encode = partial(self._encoded, special=False)
                return unprompted_request(encode, sample.continuations, prefix, started_s)
            text = whole if sample.continuations is None else split_context(whole)[0]
            images = tuple(images[each] for each in self._layout.places(prompt, len(images)) if isinstance(each, int))
            inputs = self._picture_inputs(text, images, crops, target) if images else self._text_inputs(text)
            if sample.continuations is not None:
                given = self._continuations(whole, sample.continuations, inputs)
        preprocess_s = clock.now_s() - started_s
        tokens = inputs["input_ids"].shape[1]
        if tokens == 0:
            raise SampleError(f"sample {sample.sample_id}: its prompt has no token")
        refuse_longer_prompt(sample.sample_id, tokens, self._config, given)
        closed = len(self.thinking.in_prompt) if self.thinking is not None else 0
        if not images:
            shape = RequestShape(None, None, 0, 0, tokens, preprocess_s, closed_thought_tokens=closed)
            return PreparedRequest({**inputs, **given}, shape, text)
        features = int((inputs["input_ids"] == self._placeholder).sum())
        if features == 0:
            raise SampleError(f"sample {sample.sample_id}: its picture gives no vision token")
        markers = int(torch.isin(inputs["input_ids"], self._markers).sum())
        expected = None
        if self._options is not None and target is None:
            sizes, rule = [each.size for each in images], self._options
            own = [rule.own_geometry(*size) if crops is None else rule.geometry_for(crops, *size) for size in sizes]
            known = [each for each in own if each is not None]
            expected = joined(known) if len(known) == len(own) else None
        actual = self._counted_geometry(inputs, expected, features, len(images))
        text_tokens = tokens - features - markers
        asked = target if crops is not None and crops.fraction is not None else None
        counts = features, markers, text_tokens
        shape = RequestShape(expected or actual, actual, *counts, preprocess_s, asked, closed_thought_tokens=closed)
        return PreparedRequest({**inputs, **given}, shape, text)

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text, whose end no tokenizer adds."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return without_appended_eos(ids, text, self._tokenizer)

    def _continuations(
        self, text: str, continuations: Sequence[str], inputs: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The tensors of continuations of a prompt, which has its placeholders of pictures.

        Raises:
            SampleError: the processor ends the prompt otherwise than with its text.
        """
        special = self._layout.template is None if not self.has_vision else not self._layout.has_begin_mark(text)
        encode = partial(self._encoded, special=special)
        context, ids = encode(split_context(text)[0]), inputs["input_ids"][0].tolist()
        if ids[-1:] != context[-1:]:
            raise SampleError("the processor adds tokens behind the prompt, so that nothing can continue its text")
        return continuation_tensors(continuation_ids(encode, text, continuations))

    @cached_property
    def text_of(self) -> TextOf:
        return text_reader(self._tokenizer)

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether prompts end inside thinking."""
        return is_thinking_opened_by(self._layout.text(_PROBE, num_pictures=0))

    @cached_property
    def thinking(self) -> ThinkingMarks | None:
        """What closes a thought of the model; None where its tokenizer and its template have no marks of thinking, or
        its tokens do not show them.
        """
        added: dict[str, int] = getattr(self._tokenizer, "get_added_vocab", dict)()
        pair = thinking_pair([*marks_in_text(self._layout.template or ""), *marks_in(added)])
        if pair is None:
            return None
        opening, closing = pair
        ended = self._ids_of(f"\n{closing}\n\n")
        if is_in_thinking(self.text_of([*self._ids_of(opening), *ended])):
            return None
        return ThinkingMarks(ended, self._ids_of(f"{opening}\n\n{closing}\n\n"), self._empty_thought())

    def _empty_thought(self) -> tuple[int, ...]:
        """What the chat template adds to a prompt where it is told that the model is not to think; () where it has no
        such place, or writes something else there.
        """
        with suppress(TemplateError, TypeError, ValueError, SampleError):
            plain = self._layout.text(_PROBE, num_pictures=0)
            text = replace(self._layout, variables={"enable_thinking": False}).text(_PROBE, num_pictures=0)
            more = self._ids_of(text.removeprefix(plain))
            if text.startswith(plain) and not self.opens_thinking and self._ids_of(text) == self._ids_of(plain) + more:
                return more
        return ()

    def _ids_of(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out but those around thinking."""
        return self.text_of(token_ids).strip()

    def _text_inputs(self, text: str) -> dict[str, Any]:
        if not self.has_vision:
            special = self._layout.template is None
            encoded = self._tokenizer(
                text, return_tensors="pt", add_special_tokens=special, return_token_type_ids=False
            )
        else:
            special = not self._layout.has_begin_mark(text)
            encoded = self._processor(text=[text], return_tensors="pt", add_special_tokens=special)
        return self._without_appended_eos(_tensors(encoded), text)

    def _picture_inputs(
        self, text: str, images: Sequence[Image.Image], crops: CropRange | None, target: int | None
    ) -> dict[str, Any]:
        """The tensors of pictures within `crops`, or of at most `target` tokens, where it is not None."""
        try:
            sizes = tuple(image.size for image in images)
            if target is None:
                options = options_of_all(self._options, crops, sizes)
            else:
                option, value = self._fit(target, sizes) or (None, 0)
                options = {} if option is None else option.keywords(value)
                scaled = sizes if option is None else option.sizes(value, sizes)
                images = [
                    image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
                    for image, size in zip(images, scaled, strict=True)
                ]
            return self._processed(text, images, options, crops)
        except UNUSABLE as error:
            what = "its picture" if len(images) == 1 else f"its {len(images)} pictures together"
            raise SampleError(f"{what} cannot be used ({shown(first_line(error))})") from error

    def _processed(
        self, text: str, images: Sequence[Image.Image], options: Mapping[str, Any], crops: CropRange | None = None
    ) -> dict[str, Any]:
        with self._in_force(crops):
            encoded = self._processor(
                images=list(images),
                text=[text],
                return_tensors="pt",
                add_special_tokens=not self._layout.has_begin_mark(text),
                images_kwargs=dict(options),
            )
        return self._without_appended_eos(_tensors(encoded), text)

    def _target_tokens(self, crops: CropRange | None, sizes: Sizes) -> int | None:
        """The tokens that pictures of these sizes are to take together; None where a rule of the family, or nothing,
        sets them.
        """
        if crops is None or not sizes or (self._options is not None and crops.fraction is None):
            return None
        if crops.fraction is None:
            return len(sizes) * (crops.tokens or tokens_of_crops(crops.max_crops))
        tokens = self._own_count(sizes)
        return None if tokens is None else max(math.floor(tokens * crops.fraction + 0.5), 1)

    def _fit(self, target: int, sizes: Sizes) -> tuple[TokenOption, int] | None:
        """The option and its value by which pictures of these sizes take at most so many tokens, or as few as they can;
        None where they do so by themselves, or no option adds any.
        """
        if (target, sizes) not in self._fitted:
            tokens = self._own_count(sizes)
            fewer, more = self._token_options
            option = None if tokens is None or tokens == target else fewer if target < tokens else more
            self._fitted[target, sizes] = (
                None if option is None else (option, option.fitting(target, sizes, self._count))
            )
        return self._fitted[target, sizes]

    @cached_property
    def _token_options(self) -> tuple[TokenOption | None, TokenOption | None]:
        return token_options(self._processor, self._count)

    def _own_count(self, sizes: Sizes) -> int | None:
        if sizes not in self._own_counts:
            self._own_counts[sizes] = self._count(AS_IT_IS, WHOLE, sizes)
        return self._own_counts[sizes]

    def _count(self, option: TokenOption, value: int, sizes: Sizes) -> int | None:
        """Image tokens of blank pictures; None where the processor refuses them."""
        blanks = [Image.new("RGB", size) for size in option.sizes(value, sizes)]
        try:
            inputs = self._processed(self._layout.text(_PROBE, len(sizes)), blanks, option.keywords(value))
        except UNUSABLE:
            return None
        return int((inputs["input_ids"] == self._placeholder).sum()) or None

    def _tried_geometry(self, rule: VisionOptions, crops: CropRange, size: tuple[int, int]) -> VisionGeometry:
        """What the processor makes of a blank picture by a rule that may not be its own."""
        blank, fields = Image.new("RGB", size), rule.config_for(crops)
        with fields_in_force(self._processor.image_processor, fields) if fields else nullcontext():
            inputs = self._processed(self._layout.text(_PROBE, 1), [blank], rule.options_for(crops, *size))
        features = int((inputs["input_ids"] == self._placeholder).sum())
        return self._counted_geometry(inputs, rule.geometry_for(crops, *size), features, 1)

    def _without_appended_eos(self, inputs: dict[str, Any], text: str) -> dict[str, Any]:
        """The inputs of a prompt that its tokenizer does not end."""
        ids = inputs["input_ids"][0].tolist()
        kept = len(without_appended_eos(ids, text, self._tokenizer))
        if kept == len(ids):
            return inputs
        along = {"input_ids", *ALONG_THE_PROMPT}
        return {name: value[:, :kept] if name in along else value for name, value in inputs.items()}

    def _in_force(self, crops: CropRange | None) -> AbstractContextManager[None]:
        """A context with the image processor's fields for the crops: processors count placeholders by these fields,
        whatever a call says.
        """
        fields = self.config_for(crops)
        return fields_in_force(self._processor.image_processor, fields) if fields else nullcontext()

    def _counted_geometry(
        self, inputs: Mapping[str, Any], expected: VisionGeometry | None, features: int, num_pictures: int
    ) -> VisionGeometry:
        """Crops and patches counted from the tensors; the places of crops are as expected if there are as many."""
        if "image_grid_thw" in inputs:
            images = self._processor.image_processor
            merged, found = getattr(images, "merge_size", 1) ** 2, []
            for frames, rows, cols in inputs["image_grid_thw"].tolist():
                size = (rows * images.patch_size, cols * images.patch_size)
                grid, patches = (rows, cols) if frames == 1 else None, frames * rows * cols
                own = features if num_pictures == 1 else patches // merged
                found.append(VisionGeometry(0, None, size, own, patches=patches, patch_grid=grid))
            return replace(joined(found), pooled_features=features)
        pixels = next((each for name, each in inputs.items() if has_pixels(name)), None)
        if pixels is None or pixels.dim() not in (4, 5):
            return VisionGeometry(0, None, None, features)
        crops, height, width = math.prod(pixels.shape[:-3]), pixels.shape[-2], pixels.shape[-1]
        if pixels.dim() == 5 and num_pictures > 1:
            # Pictures of fewer crops than others are filled up with zeros, which models leave out.
            crops = int(pixels.flatten(2).any(2).sum())
        if expected is not None and expected.total_crops == crops:
            return replace(expected, pooled_features=features)
        if crops == num_pictures:
            one = VisionGeometry(0, None, (height, width), features // crops)
            return replace(joined([one] * crops), pooled_features=features)
        by_rule = self._options is not None and self._options.unit.overview != "never"
        has_overview = num_pictures == 1 and (by_rule if expected is None else expected.has_overview)
        return VisionGeometry(crops - has_overview, None, None, features, has_overview)

    def _validate_processor(self) -> None:
        if "image_processor" not in self._processor.get_attributes():
            raise ConfigurationError(
                f"the processor of {self.name}, a {type(self._processor).__name__}, has no image processor; give an "
                "image-text-to-text model"
            )
        if getattr(self._processor, "patch_size", 0) is None:
            raise ConfigurationError(
                f"the processor of {self.name}, a {type(self._processor).__name__}, has no patch_size, without which "
                "no picture can be used; save it with patch_size into processor_config.json"
            )

    def _placeholder_of(self, config: PreTrainedConfig) -> int:
        found = [getattr(config, name, None) for name in _PLACEHOLDERS]
        for token_id in (*found, getattr(self._processor, "image_token_id", None)):
            if isinstance(token_id, int):
                return token_id
        raise ConfigurationError(
            f"the config of {self.name} names no picture token ({', '.join(_PLACEHOLDERS)}); its "
            "vision tokens cannot be counted"
        )

    def _marker_ids(self, config: PreTrainedConfig) -> set[int]:
        owners = (config, self._processor)
        ids = {getattr(owner, name, None) for owner in owners for name in _MARKER_IDS}
        vocabulary = self._tokenizer.get_added_vocab()
        tokens = {getattr(self._processor, name, None) for name in _MARKER_TOKENS}
        ids |= {token_id for token, token_id in vocabulary.items() if token in tokens or _ROW_MARKER.fullmatch(token)}
        return {token_id for token_id in ids if isinstance(token_id, int)}

    def _template(self) -> str | None:
        """The processor's chat template, else the tokenizer's; of several under names the default one."""
        return default_template(
            getattr(self._processor, "chat_template", None) or self._tokenizer.chat_template, self.name
        )

    def _unsupported_reason(self) -> str | None:
        if not self.has_vision:
            return f"{self.name} is a text model: it has no vision tokens"
        is_fixed = self._options is None and self._token_options == (None, None)
        return self._unmoved("moves the number of vision tokens") if is_fixed else None

    def _unmoved(self, what: str) -> str:
        counts = [f"{self._own_count((size,))} for {size[0]} x {size[1]} pixels" for size in TRIAL_SIZES]
        return (
            f"neither an option of the {type(self._processor.image_processor).__name__} of {self.name} nor the size of "
            f"the picture {what} ({' and '.join(counts)} by itself)"
        )


def _refuse_strips(images: Sequence[Image.Image]) -> None:
    for width, height in (image.size for image in images):
        if max(width, height) > LONGEST_ASPECT * min(width, height):
            raise SampleError(
                f"its picture of {width} x {height} pixels cannot be used: one side is more than {LONGEST_ASPECT} "
                "times the other"
            )


def _tensors(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that the model takes, without those for the processor itself and labels, which are for training."""
    return {name: value for name, value in encoded.items() if isinstance(value, torch.Tensor) and name != "labels"}
