"""Quantisation of a model on loading: whether the device and the checkpoint allow it, and the config for it.

8 and 4 bits are bitsandbytes', float8 is transformers' fine-grained fp8 (blocks of 128 x 128 weights share a scale).
Both quantise linear layers; the head stays as it is. bitsandbytes also leaves alone the experts of a mixture, which are
no linear layers in transformers 5; fp8 quantises them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, PreTrainedConfig, PreTrainedModel
from transformers.utils import (
    is_bitsandbytes_available,
    is_gptqmodel_available,
    is_kernels_available,
    is_optimum_available,
)

from experiment_core_utils.config.parts import ModelConfig
from experiment_core_utils.config.text import Quantisation, TextConfig
from experiment_core_utils.primitives.errors import ConfigurationError, ImpossibleCombination, first_line
from experiment_core_utils.records.text import QuantSupport

FP8_CAPABILITY = (8, 9)
PROBE_SIDE = 64
DEFAULT_4BIT_TYPE = "nf4"
# Rounding normally distributed weights costs 9 % with nf4 and 12 % with fp4, mixed-up scales 23 % and more.
MOST_4BIT_ERROR = 0.18


@dataclass(frozen=True)
class RequestedQuantisation:
    """The requested quantisation, by the names that a text experiment has for it."""

    model_name: str  #: for messages
    fp_precision: str  #: of which `float8` quantises
    quantization_config: Quantisation

    @classmethod
    def of(cls, config: ModelConfig) -> "RequestedQuantisation":
        """4 and 8 bits are by bitsandbytes' defaults, fp8 by transformers'."""
        width = config.quantization
        requested = Quantisation(
            quantization=width in ("4bit", "8bit"), load_in_4bit=width == "4bit", load_in_8bit=width == "8bit"
        )
        return cls(config.model_path, "float8" if width == "fp8" else config.precision, requested)


QuantisationOptions = RequestedQuantisation | TextConfig


def supported_types(device: torch.device) -> QuantSupport:
    """The types that weights can be quantised to on loading; 8 bits are "int8" by bitsandbytes, "fp8" where only the
    GPU has it.
    """
    has_bitsandbytes = bitsandbytes_unsupported_reason(device) is None
    has_fp8 = fp8_unsupported_reason(device) is None
    return {
        "supports_4bit": has_bitsandbytes,
        "supports_8bit": has_bitsandbytes or has_fp8,
        "default_4bit_quant_type": DEFAULT_4BIT_TYPE if has_bitsandbytes else None,
        "default_8bit_quant_type": "int8" if has_bitsandbytes else "fp8" if has_fp8 else None,
    }


def bitsandbytes_unsupported_reason(device: torch.device) -> str | None:
    """Why bitsandbytes cannot quantise on `device`; None where it can."""
    if not is_bitsandbytes_available():
        return "bitsandbytes is not installed, or older than transformers takes (pip install -U bitsandbytes)"
    return _probe_bitsandbytes(str(device))


@cache
def _probe_bitsandbytes(device: str) -> str | None:
    """Quantises a small matrix, since the package may be installed without a library for this device."""
    # On some processors it recommends another package when it is imported, and at every product in 8 bits it says that
    # it casts to float16, which would be written while a run is timed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes

        bitsandbytes.nn.Params4bit(torch.ones(PROBE_SIDE, PROBE_SIDE), requires_grad=False).to(device)
    except (ImportError, OSError, RuntimeError, AttributeError, NotImplementedError) as error:
        return f"bitsandbytes does not work on {device}: {first_line(error)}"
    return None


def type_of_4bit_weights(config: QuantisationOptions, own: PreTrainedConfig) -> str | None:
    """Type of the weights that bitsandbytes will multiply, requested or in the checkpoint; None for other widths."""
    if config.quantization_config.load_in_4bit:
        return config.quantization_config.bnb_4bit_quant_type or DEFAULT_4BIT_TYPE
    found = vars(own).get("quantization_config") or {}
    return str(found["bnb_4bit_quant_type"]) if found.get("load_in_4bit") else None


def refuse_wrong_4bit_products(layers: Iterable[nn.Linear], device: torch.device, quant_type: str) -> None:
    """Try a product with 4-bit weights of every width that the layers have.

    bitsandbytes 0.50 on the CPU mixes up the scales of matrices whose rows are no whole blocks of 64 for most such
    widths, and says nothing.

    Raises:
        ConfigurationError: a product is further off than rounding explains.
    """
    for width in sorted({layer.in_features for layer in layers}):
        error = error_of_4bit_product(str(device), width, quant_type)
        if error > MOST_4BIT_ERROR:
            raise ConfigurationError(
                f"bitsandbytes is wrong about {quant_type} weights of width {width} on {device}: a product is off by "
                f"{error:.0%}, where rounding explains about 10 %; load in 8 bits, or take a GPU"
            )


def refuse_wrong_4bit_weights(
    config: QuantisationOptions, own: PreTrainedConfig, device: torch.device, skeleton: Callable[[], PreTrainedModel]
) -> None:
    """Try products with the linear layers, except for the head, of a model whose weights will have 4 bits.

    Args:
        skeleton: makes the model without storage, where it is needed.

    Raises:
        ConfigurationError: see `refuse_wrong_4bit_products`.
    """
    quant_type = type_of_4bit_weights(config, own)
    if quant_type is not None:
        model = skeleton()
        head = model.get_output_embeddings()
        layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
        refuse_wrong_4bit_products(layers, device, quant_type)


@cache
def error_of_4bit_product(device: str, width: int, quant_type: str) -> float:
    """Relative error of the product of random numbers with a random matrix of this width."""
    import bitsandbytes

    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(PROBE_SIDE, width, generator=draws)
    given = torch.randn(PROBE_SIDE, width, generator=draws)
    layer = bitsandbytes.nn.Linear4bit(width, PROBE_SIDE, bias=False, quant_type=quant_type)
    layer.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type=quant_type)
    with torch.inference_mode():
        found = layer.to(device)(given.to(device)).cpu()
    exact = given @ weight.T
    return float((found - exact).norm() / exact.norm())


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """Why transformers' fp8 cannot run on `device`; None where it can."""
    if device.type != "cuda":
        return "float8 needs a GPU of compute capability 8.9 or more (such as L4 or H100), and this process has none"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"float8 needs a GPU of compute capability 8.9 or more (such as L4 or H100); this one has {found}"
    if not is_kernels_available():
        return "transformers' fp8 takes its kernels from the package kernels, which is not there (pip install kernels)"
    return None


def own_method(raw_config: Mapping[str, Any]) -> str | None:
    """How the weights of a checkpoint are quantised already, such as "gptq"; None where they are not."""
    for part in (raw_config, raw_config.get("text_config")):
        found = part.get("quantization_config") if isinstance(part, Mapping) else None
        if isinstance(found, Mapping):
            method = found.get("quant_method")
            is_bitsandbytes = found.get("load_in_4bit") or found.get("load_in_8bit")
            return "bitsandbytes" if is_bitsandbytes else str(method.value if isinstance(method, Enum) else method)
    return None


def refuse_impossible(config: QuantisationOptions, own: str | None, device: torch.device) -> None:
    """Raises ConfigurationError for a requested quantisation that the device or the checkpoint's own method does not
    allow.

    Raises:
        ImpossibleCombination: the checkpoint is quantised already.
        ConfigurationError: a package or an ability of the GPU is missing.
    """
    is_requested = config.quantization_config.quantization or config.fp_precision == "float8"
    if own is not None and is_requested:
        raise ImpossibleCombination(
            f"{config.model_name} is quantised already ({own}); it cannot be quantised further: drop "
            "quantization_config, and fp_precision float8"
        )
    reason = _own_unsupported_reason(own, device)
    if config.quantization_config.quantization:
        reason = bitsandbytes_unsupported_reason(device)
    if config.fp_precision == "float8":
        reason = fp8_unsupported_reason(device)
    if reason is not None:
        subject = f"{config.model_name} is quantised with {own}" if own is not None else "the requested quantisation"
        raise ConfigurationError(f"{subject} cannot be done here: {reason}")


def _own_unsupported_reason(own: str | None, device: torch.device) -> str | None:
    if own == "gptq" and not (is_gptqmodel_available() and is_optimum_available()):
        return "GPTQ needs the packages gptqmodel and optimum (pip install gptqmodel optimum)"
    if own == "awq" and not is_gptqmodel_available():
        return "AWQ needs the package gptqmodel (pip install gptqmodel)"
    if own == "bitsandbytes":
        return bitsandbytes_unsupported_reason(device)
    if own == "fp8":
        # transformers would turn it into bfloat16 and say so in a warning only.
        return fp8_unsupported_reason(device)
    return None


def transformers_config(
    config: QuantisationOptions, dtype: torch.dtype
) -> BitsAndBytesConfig | FineGrainedFP8Config | None:
    """The quantisation config for `from_pretrained`; None where nothing is requested.

    Args:
        dtype: that 4-bit weights are multiplied in.
    """
    requested = config.quantization_config
    if requested.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if requested.load_in_4bit:
        quant_type = requested.bnb_4bit_quant_type or DEFAULT_4BIT_TYPE
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_compute_dtype=dtype)
    return FineGrainedFP8Config() if config.fp_precision == "float8" else None


def dequantisation_of(layer: nn.Module) -> Callable[[], torch.Tensor] | None:
    """What computes the weight [out, in] in float32 that a quantised linear layer stands for; None for any other."""
    compute = _DEQUANTISED.get(type(layer).__name__)
    weight: Any = getattr(layer, "weight", None)
    # Such a layer can also be one that was left, or made, unquantised.
    return None if compute is None or weight is None or weight.element_size() > 1 else partial(compute, layer)


def _from_int8(layer: Any) -> torch.Tensor:
    """bitsandbytes' int8: a row's largest magnitude is 127."""
    scale = layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB
    weight: torch.Tensor = layer.weight.data.float() * (scale.float()[:, None] / 127)
    return weight


def _from_4bit(layer: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight: torch.Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight.float()


def _from_fp8(layer: Any) -> torch.Tensor:
    """transformers' fine-grained fp8: one scale for each block of `block_size`, or for all."""
    weight: torch.Tensor = layer.weight.data.float()
    scale = layer.weight_scale_inv.data.float()
    if layer.block_size is not None:
        for axis, size in enumerate(layer.block_size):
            scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, weight.shape[axis])
    return weight * scale


_DEQUANTISED: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "Linear8bitLt": _from_int8,
    "Linear4bit": _from_4bit,
    "FP8Linear": _from_fp8,
}
