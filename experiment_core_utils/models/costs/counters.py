"""Counters of the floating-point operations of a model's run; one multiply-add is 2.

There are two counters: torch's own, with the formulas that it lacks, and ptflops. The gaps of ptflops are larger: it
has no formula for fused attention or grouped expert products, so its figure leaves out attention and does not change
with top-k.
"""

import contextlib
import copy
import functools
import io
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker
from transformers import PreTrainedModel

from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.primitives.errors import MeterUnavailable, first_line
from experiment_core_utils.primitives.private_apis import without_weights

# Counting pictures of these operators, which torch's counter does not know; rows are routed token-expert pairs.
_GROUPED_GEMMS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")

_FUSED_ATTENTION = tuple(
    f"aten::_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
)

# Modules of torch's own quantisation: their weights are no parameters.
_TORCH_QUANTISED = tuple(f"torch.ao.nn.{kind}quantized" for kind in ("", "intrinsic.", "sparse."))


def _grouped_mm_flops(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
    """FLOPs of [S, in] x [E, in, out]: each row meets one expert, so 2 * S * in * out."""
    return int(2 * rows[0] * rows[1] * weights[-1])


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """FLOPs of [B, H, T, D] x [B, G, S, D] x [B, G, S, V] with G <= H heads of keys: scores 2 * B*H*T*S*D, values 2 *
    B*H*T*S*V.

    torch's own formula takes as many heads of keys as of queries only.
    """
    batch, heads, positions, width = query
    return int(2 * batch * heads * positions * key[-2] * (width + value[-1]))


def extra_flop_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas for `FlopCounterMode(custom_mapping=...)`: grouped expert products and the CPU's fused attention.

    Without them the experts of a mixture count as nothing and the figure does not depend on top-k. An operator that
    this version of torch or transformers does not have is left out.
    """
    formulas: dict[str, Callable[..., int]] = dict.fromkeys(_GROUPED_GEMMS, _grouped_mm_flops)
    formulas |= dict.fromkeys(_FUSED_ATTENTION, _attention_flops)
    found = {}
    for name, formula in formulas.items():
        namespace, operator = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None:
            found[packet] = formula
    return found


def count_flops(run: Callable[[], object]) -> int:
    """FLOPs of everything that `run` computes; attention counts as the full rectangle.

    Operators without a formula (elementwise work, norms, look-ups, packed weights) count as nothing. Never use it while
    timing.
    """
    counter = FlopCounterMode(display=False, custom_mapping=extra_flop_formulas())
    counter.mod_tracker = _NoModules()
    with torch.inference_mode(), counter:
        run()
    return int(counter.get_total_flops())


class _NoModules(ModuleTracker):
    """A module tracker that does not distinguish modules: torch's own needs gradients of a parameter that is given to a
    module.
    """

    def __enter__(self) -> "_NoModules":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def count_with_ptflops(model: Callable[..., object], input_ids: torch.Tensor) -> int:
    """FLOPs of `model(input_ids)`: ptflops' multiply-adds, twice; `input_ids` [1, T] on the model's device.

    Raises:
        MeterUnavailable: ptflops is not installed, or gives no figure.
    """
    shell = _Shell(model)
    message = io.StringIO()
    # Its aten engine sees what inference mode hides from it only without that mode.
    with torch.no_grad(), contextlib.redirect_stdout(message), contextlib.redirect_stderr(message):
        products, _ = _ptflops().get_model_complexity_info(
            shell,
            tuple(input_ids.shape[1:]),
            print_per_layer_stat=False,
            as_strings=False,
            backend="aten",
            input_constructor=lambda _shape: {"input_ids": input_ids},
        )
    if shell.failure is not None:
        # ptflops prints it and continues.
        raise shell.failure
    if products is None:
        raise MeterUnavailable(f"ptflops gives no figure: {message.getvalue().strip().splitlines()[:1]}")
    return 2 * int(products)


class _Shell(nn.Module):
    """A model in the form that ptflops needs: one tensor in, one out.

    The model is not a submodule, because ptflops leaves hooks on those and sets them to evaluation.
    """

    def __init__(self, model: Callable[..., object]) -> None:
        super().__init__()
        self._run = (model,)
        self.failure: BaseException | None = None

    def forward(self, input_ids: torch.Tensor) -> Any:
        try:
            return self._run[0](input_ids=input_ids)
        except BaseException as error:
            self.failure = error
            raise


def has_packed_weights(model: nn.Module) -> bool:
    """Whether the products of the model's weights are operators that no counter has a formula for.

    So it is where its config says that it is quantised, and where torch quantised its modules after loading.
    """
    if isinstance(model, PreTrainedModel) and getattr(model.config, "quantization_config", None) is not None:
        return True
    return any(type(module).__module__.startswith(_TORCH_QUANTISED) for module in model.modules())


def countable(build: Callable[[], Any]) -> Any:
    """A model without storage, in forms that count alike, of what `build` makes with unfused attention.

    Experts are batched products, because routed work must not depend on what was routed.
    """
    with torch.device("meta"):
        model = build()
    # Some architectures without experts refuse; one with experts fails when it runs.
    with contextlib.suppress(ValueError):
        model.set_experts_implementation("batched_mm")
    return model.eval()


def meta_twin(model: nn.Module) -> PreTrainedModel:
    """The model's architecture with full-precision weights without storage, in forms that count alike.

    Raises:
        MeterUnavailable: the architecture cannot be built like that.
    """
    if not isinstance(model, PreTrainedModel):
        raise MeterUnavailable(
            f"the weights of this {type(model).__name__} are packed, and no config describes its operations without "
            f"them"
        )
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    try:
        twin: PreTrainedModel = countable(lambda: without_weights(model, config))
    except HF_CODE_ERRORS as error:
        raise MeterUnavailable(f"no copy of {type(model).__name__} without weights: {first_line(error)}") from error
    return twin


def without_padding_warning(model: nn.Module) -> Callable[..., Any]:
    """A model without weights as it can be run on ids [B, T] that have no values.

    Some look for padding among the ids unless a mask says that there is none; others look into the mask.
    """
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"))
    except RuntimeError:
        return functools.partial(_run_with_mask, model)
    return model


def _run_with_mask(model: nn.Module, input_ids: torch.Tensor, **others: Any) -> Any:
    """Runs a model with an attention mask in which the keys in a cache are not padding either."""
    cache = others.get("past_key_values")
    attended = input_ids.shape[1] + (0 if cache is None else cache.get_seq_length())
    mask = input_ids.new_ones(input_ids.shape[0], attended)
    return model(input_ids=input_ids, attention_mask=mask, **others)


def _ptflops() -> ModuleType:
    try:
        import ptflops
    except ImportError as error:
        raise MeterUnavailable("ptflops is not installed (pip install ptflops)") from error
    found: ModuleType = ptflops
    return found
