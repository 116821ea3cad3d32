"""In: a question with its style and options; out: the text of the prompt, by Molmo's template or a given one.

Molmo (arXiv 2409.17146) marks the kind of answer it is to give by a style before the question, as in
`` User: vqa2: What is this? Assistant:``.
"""

import string
from collections.abc import Sequence

from experiment_core_utils.primitives.errors import ConfigurationError, SampleError
from experiment_core_utils.primitives.texts import is_text

OPEN_TEMPLATE = " User: {style}: {question} Assistant:"
CHOICE_TEMPLATE = " User: {style}: {question}\n{options} Assistant:"
FIELDS = ("question", "style", "options")


def options_block(options: Sequence[str]) -> str:
    """One line for each option, ``A: text`` and a line break; raises SampleError above 26 options."""
    if len(options) > len(string.ascii_uppercase):
        raise SampleError(f"a question has {len(options)} options, more than there are letters")
    return "".join(f"{letter}: {option}\n" for letter, option in zip(string.ascii_uppercase, options, strict=False))


def check_template(template: str, required: Sequence[str]) -> str:
    """`template` itself, if it names `required` fields and none that is unknown.

    Raises:
        ConfigurationError: an unknown or missing field, a conversion or format specification, a lone brace.
    """
    if not is_text(template):
        raise ConfigurationError(f"prompt template {template!r} is not valid UTF-8; write it in UTF-8")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(
            f"prompt template {template!r} is malformed ({error}): write a brace of the text itself as {{{{ or }}}}"
        ) from error
    named = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    for name, spec, conversion in named:
        if name not in FIELDS or spec or conversion:
            raise ConfigurationError(f"prompt template {template!r} has the field {{{name}}}: plain {known} are known")
    missing = [f"{{{name}}}" for name in required if name not in {found for found, _, _ in named}]
    if missing:
        raise ConfigurationError(f"prompt template {template!r} leaves out {', '.join(missing)}, which this task needs")
    return template


def fill(template: str, style: str, question: str, options: Sequence[str]) -> str:
    """The prompt; braces within the question or the options stay as they are."""
    return template.format(style=style, question=question, options=options_block(options))
