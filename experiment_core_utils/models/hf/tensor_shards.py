"""Which weights of a model transformers divides among processes, by its plan of tensor parallelism."""

import math
import re

from torch import nn
from transformers import PreTrainedModel

from experiment_core_utils.primitives.errors import ConfigurationError

_PROJECTIONS = (".q_proj", ".k_proj", ".v_proj")


def refuse_uneven_heads(skeleton: PreTrainedModel, name: str, size: int) -> None:
    """Refuse a number of processes that does not divide the heads of an attention whose products stay divided.

    Transformers cuts other products into parts of uneven width, and heads only where it gathers the products first.

    Args:
        skeleton: the model, which needs no storage.
        name: of the model, for messages.
        size: processes.

    Raises:
        ConfigurationError: see above, or transformers has no plan for the model.
    """
    if not skeleton.tp_plan:
        raise ConfigurationError(
            f"--tensor_parallel {size}: transformers has no plan to divide a {skeleton.config.model_type}; give "
            "--device_map auto"
        )
    counts = sorted(_divided_heads(skeleton))
    if all(count % size == 0 for count in counts):
        return
    common = math.gcd(*counts)
    allowed = [str(number) for number in range(2, common + 1) if common % number == 0]
    advice = " or ".join(allowed) or "--device_map auto"
    raise ConfigurationError(
        f"--tensor_parallel {size}: each process takes whole heads, and the attention of {name} has "
        f"{' and '.join(map(str, counts))} (of queries, keys and values); give {advice}"
    )


def elements_of_each(skeleton: PreTrainedModel, size: int) -> int:
    """Elements of the parameters that each of `size` processes has: its part of those that the plan divides, and the
    others as a whole, such as norms and mostly vision towers; tied parameters count once.
    """
    whole = divided = 0
    for name, parameter in skeleton.named_parameters():
        if "wise" in (_style_of(skeleton, name) or _style_of(skeleton, name.rpartition(".")[0]) or ""):
            divided += parameter.numel()
        else:
            whole += parameter.numel()
    return whole + -(-divided // size)


def _divided_heads(skeleton: PreTrainedModel) -> set[int]:
    """Numbers of heads that products of attentions have, where each process keeps its part of them."""
    counts = set()
    for name, module in skeleton.named_modules():
        owner = skeleton.get_submodule(name.rpartition(".")[0])
        head_dim = getattr(owner, "head_dim", None)
        is_of_heads = isinstance(module, nn.Linear) and isinstance(head_dim, int) and name.endswith(_PROJECTIONS)
        if is_of_heads and module.out_features % head_dim == 0 and _style_of(skeleton, name) == "colwise":
            counts.add(module.out_features // head_dim)
    return counts


def _style_of(skeleton: PreTrainedModel, name: str) -> str | None:
    """What the plan says of a module or parameter; None where it says nothing."""
    style: str | None = skeleton.tp_plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
    return style
