"""Whether modules keep something of a request that another request would see, found by what requests compute.

A model's stages can be run one by one only where all that a request leaves is in its cache. What exists in modules
after a first prompt need not be of a request: many keep tables that they make once.
"""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from experiment_core_utils.engines.engine_proof import relative_distance
from experiment_core_utils.models.common.block_modules import text_decoder
from experiment_core_utils.models.common.placement import device_of
from experiment_core_utils.models.common.vendor_errors import HF_CODE_ERRORS
from experiment_core_utils.models.hf.generate import GenerateStages, GenerationState
from experiment_core_utils.primitives.private_apis import takes_dynamic_cache

# Tokens of the prompts, of which the longer one comes between the steps of the shorter one.
SHORT, LONG = 7, 35
_STEPS = 2
_ABOUT_STATE = "its blocks keep the state of a request in themselves and not in the cache"


def stages_unsupported_reason(model: PreTrainedModel) -> str | None:
    """The reason why the stages of a model cannot be run one by one; None where they can, and where prompts fail.

    Without storage there are no values to be compared: see `state_in_question`.
    """
    if not takes_dynamic_cache(model):
        return "it has its own kind of cache, which prefill and decode steps cannot share outside generate()"
    try:
        name = _written(model)
        if name is None or device_of(text_decoder(model).get_input_embeddings()).type == "meta":
            return None
        is_alike = _is_undisturbed(GenerateStages(model), _ids(model, SHORT), _ids(model, LONG))
    except HF_CODE_ERRORS:  # not lost: the model's first prompt says it
        return None
    return None if is_alike else f"{_ABOUT_STATE} ({name})"


def state_in_question(model: PreTrainedModel) -> str | None:
    """Why it shows only in the loaded model whether its stages can be run one by one; None where nothing hints at it.

    Args:
        model: without storage.
    """
    try:
        name = _written(model)
    except HF_CODE_ERRORS:  # not lost: the model's first prompt says it
        return None
    return None if name is None else f"{name} may be the state of a request, which its values show"


def _ids(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    """A prompt [1, T] of different tokens."""
    embeddings = text_decoder(model).get_input_embeddings()
    rows = embeddings.weight.shape[0]
    return (torch.arange(tokens, device=device_of(embeddings))[None] * 3 + 1) % rows


def _written(model: PreTrainedModel) -> str | None:
    """The name of a tensor beside the weights that a later request writes; None where there is none.

    Without storage, of one that it replaces.
    """
    decoder = text_decoder(model)
    before: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    after: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for tokens, seen in ((SHORT, before), (LONG, after)):
            decoder(input_ids=_ids(model, tokens))
            seen += [(name, tensor, tensor.clone()) for name, tensor in _small_tensors(model)]
    known = {name: (tensor, values) for name, tensor, values in before}
    for name, tensor, values in after:
        if name not in known:
            return name
        old, old_values = known[name]
        is_same = tensor is old if tensor.is_meta else torch.equal(values, old_values)
        if not is_same:
            return name
    return None


# Elements of what is not a weight; packed weights are buffers too.
_MOST_ELEMENTS = 2**22


def _small_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules have beside their parameters, buffers included, by name."""
    for place, module in model.named_modules():
        for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if isinstance(value, torch.Tensor) and value.numel() <= _MOST_ELEMENTS:
                yield f"{place}.{name}", value


@torch.no_grad()
def _is_undisturbed(stages: GenerateStages, short: torch.Tensor, long: torch.Tensor) -> bool:
    """Whether a request computes the same alone, after another one, and with another one between its steps."""
    alone = _logits(stages, *stages.prefill({"input_ids": short}, None))
    _logits(stages, *stages.prefill({"input_ids": long}, None))
    begun = stages.prefill({"input_ids": short}, None)
    _logits(stages, *stages.prefill({"input_ids": long}, None))
    found = _logits(stages, *begun)
    # The same operations on the same numbers; only their order may differ on a GPU.
    return relative_distance(found, alone) <= torch.finfo(alone.dtype).eps ** 0.5


def _logits(stages: GenerateStages, logits: torch.Tensor, state: GenerationState) -> torch.Tensor:
    """The logits [1 + N, V] of a prompt and of N steps after it."""
    found = [logits]
    for _ in range(_STEPS):
        found.append(stages.decode_step(found[-1].argmax(dim=-1, keepdim=True), state))
    return torch.cat(found)


def forget_longer_requests(model: torch.nn.Module) -> None:
    """Make rotary positions that depend on the length of a request those of each request alone.

    `dynamic` ones keep the frequencies of the longest request so far for every later one beyond the model's length as
    it was trained, so that an answer depends on what was asked before. In a new model each pass computes with its own
    length; so it does from now on.
    """
    for module in model.modules():
        if "original_max_seq_len" in vars(module) and "dynamic" in str(getattr(module, "rope_type", "")):
            module.register_forward_pre_hook(_begin_anew)


def _begin_anew(rotary: torch.nn.Module, _inputs: object) -> None:
    for name in [name for name, _ in rotary.named_buffers(recurse=False) if name.endswith("inv_freq")]:
        original = getattr(rotary, f"{name.removesuffix('inv_freq')}original_inv_freq", None)
        if original is not None and "original" not in name:
            setattr(rotary, name, original.to(getattr(rotary, name).device))
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)
