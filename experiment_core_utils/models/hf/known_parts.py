"""What stands against describing modules by their parts: each function gives the reason, or None where nothing does."""

import re
from collections.abc import Collection

from torch import nn

# Numbers that a module may have: dropout acts in training alone, the others are checked by their own values.
_NUMBERS = re.compile(r"dropout|_eps|epsilon|^eps$|^scaling$|noise|attention_scaling|aux_loss")
# transformers' own hooks, which note what a module gives and change nothing.
_NOTES = "transformers.utils.output_capturing"


def replaced_unsupported_reason(stack: nn.Module) -> str | None:
    """Modules that do more than their class says: hooks, such as those of weights divided among processes."""
    for name, module in stack.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(hook.__module__ != _NOTES for hook in hooks) or "forward" in vars(module):
            return f"{name or 'it'} has hooks or a forward of its own, which engines do not call"
        if isinstance(module, nn.Linear) and tuple(module.weight.shape) != (module.out_features, module.in_features):
            return f"the weights of {name} are not of the size that it says"
    return None


def parts_unsupported_reason(
    module: nn.Module, what: str, names: Collection[str], numbers: Collection[str] = ()
) -> str | None:
    """Parts and numbers with other names, and weights beside the parts."""
    others = sorted({name for name, _ in module.named_children()} - set(names))
    others += [name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
    return f"{what} has {', '.join(others)}" if others else numbers_unsupported_reason(module, what, numbers)


def numbers_unsupported_reason(module: nn.Module, what: str, known: Collection[str] = ()) -> str | None:
    """Numbers other than 0 and 1 that no part says, unless the caller has checked them."""
    for name, value in vars(module).items():
        if isinstance(value, float) and value not in (0.0, 1.0) and not _NUMBERS.search(name) and name not in known:
            return f"{what} has a number {name} ({value:g})"
    return None
