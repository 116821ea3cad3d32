"""In: a checkpoint's chat template, if it has one; out: the text around a prompt, with the place of its picture."""

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from PIL import Image

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError, first_line
from experiment_core_utils.primitives.texts import is_text, shown

_PROBE = "probe of the template"
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


def check_prompt(prompt: Any) -> None:
    """Raises SampleError for what no tokenizer takes."""
    if not is_text(prompt):
        raise SampleError(f"its prompt {shown(repr(prompt))} is not a text that can be written as UTF-8")


@dataclass(frozen=True)
class PromptLayout:
    """One user turn and the beginning of the answer, or the bare prompt where there is no template.

    Attributes:
        tokenizer: renders the template.
        template: None for a base model.
        image_token: what stands for a picture; None for a text model.
        takes_parts: whether the template takes a message as a list of parts; else it takes a text.
    """

    tokenizer: Any
    template: str | None
    image_token: str | None
    takes_parts: bool

    def text(self, prompt: str, has_picture: bool) -> str:
        """The text to tokenise, with one placeholder in front of the prompt for a picture.

        Raises:
            SampleError: the prompt itself has a placeholder in it.
        """
        if self.image_token is not None and self.image_token in prompt:
            raise SampleError(f"the prompt has the picture's placeholder {self.image_token} in it; leave that out")
        marked = f"{self.image_token}\n{prompt}" if has_picture else prompt
        if self.template is None:
            return marked
        if not self.takes_parts:
            return self._render(marked)
        picture = [{"type": "image"}] if has_picture else []
        return self._render([*picture, {"type": "text", "text": prompt}])

    def has_begin_mark(self, text: str) -> bool:
        """Whether the template has put in what the tokenizer would put in front."""
        begin = self.tokenizer.bos_token
        return self.template is not None and begin is not None and text.startswith(begin)

    def _render(self, content: Any) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return text


def prompt_layout_of(tokenizer: Any, template: str | None, image_token: str | None, name: str) -> PromptLayout:
    """The layout of a checkpoint, tried on a probe.

    Raises:
        ConfigurationError: its template fails, or loses the prompt or the picture.
    """
    if template is None:
        return PromptLayout(tokenizer, None, image_token, takes_parts=False)
    reason = ""
    # Templates of models with vision are written for parts, those of text models for text; a few take one of them only.
    for takes_parts in (image_token is not None, image_token is None):
        layout = PromptLayout(tokenizer, template, image_token, takes_parts)
        try:
            text = layout.text(_PROBE, has_picture=image_token is not None)
        except (TemplateError, TypeError, ValueError) as error:
            reason = reason or first_line(error)
            continue
        if text.count(_PROBE) == 1 and (image_token is None or text.count(image_token) == 1):
            return layout
    raise ConfigurationError(
        f"the chat template of {name} cannot be used for one user turn"
        f"{' with a picture' if image_token is not None else ''} "
        f"({reason or 'what is given does not stand in the text once'}); correct or remove it"
    )
