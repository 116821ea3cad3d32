"""Loading the processor of a transformers checkpoint, or its tokenizer where the model takes text only."""

from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PROCESSOR_MAPPING,
    AutoProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import is_torchvision_available

from experiment_core_utils.models.common.gguf_files import config_in, tokenizer_in
from experiment_core_utils.models.common.vendor_errors import vendor_errors_named

_FROM_FOLDER: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_VIDEO = "video_processor"
# Parts for what no request has.
_UNUSED = (_VIDEO, "feature_extractor")


def load_hf_processor(folder: Path) -> ProcessorMixin | PreTrainedTokenizerBase:
    """The processor of a model that takes pictures, the tokenizer of any other; from local files only.

    Without torchvision, pictures are processed by PIL and numpy, and a processor of pictures and videos is read without
    its parts for videos and sounds.

    Raises:
        ConfigurationError: neither can be read.
    """
    needed = "; give a folder with config.json, the tokenizer's files and, with vision, preprocessor_config.json"
    with vendor_errors_named(f"the processor or tokenizer in {folder} cannot be read", needed):
        config = config_in(folder)
        return _processor(folder, config) if takes_pictures(config) else _tokenizer(folder)


def takes_pictures(config: PreTrainedConfig) -> bool:
    """Whether transformers has an image-text model for the config, or a causal one with a vision part."""
    kind = type(config)
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or (is_causal and "vision_config" in kind.sub_configs)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = tokenizer_in(folder, **_FROM_FOLDER)
    return tokenizer


def _processor(folder: Path, config: PreTrainedConfig) -> ProcessorMixin:
    known = type(config) in PROCESSOR_MAPPING
    if is_torchvision_available() or not known or _VIDEO not in PROCESSOR_MAPPING[type(config)].get_attributes():
        processor = AutoProcessor.from_pretrained(folder, **_FROM_FOLDER)
        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"there is no processor of pictures for {config.model_type}")
        return processor
    kind = PROCESSOR_MAPPING[type(config)]
    parts = {
        "tokenizer": _tokenizer(folder),
        "image_processor": AutoImageProcessor.from_pretrained(folder, **_FROM_FOLDER),
        **dict.fromkeys(_UNUSED),
    }
    unknown = [part for part in kind.get_attributes() if part not in parts]
    if unknown:
        raise ValueError(f"{kind.__name__} has the part {unknown[0]}, which can be read only where torchvision is")
    written, _ = kind.get_processor_dict(folder, **_FROM_FOLDER)
    processor = without_video(kind).from_args_and_dict([parts[part] for part in kind.get_attributes()], written)
    assert isinstance(processor, ProcessorMixin)
    return processor


def without_video(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The same kind of processor with nothing in place of the part for videos, which needs torchvision, and sounds."""

    class WithoutVideo(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name in _UNUSED and argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

        def __reduce__(self) -> tuple[Any, ...]:
            return _again, (kind,), self.__dict__

    WithoutVideo.__name__ = kind.__name__
    # What `from_args_and_dict` looks up: the names of the arguments.
    WithoutVideo.__init__ = kind.__init__  # type: ignore[method-assign]
    return WithoutVideo


def _again(kind: type[ProcessorMixin]) -> ProcessorMixin:
    """An empty processor without video, used by unpickling."""
    made = without_video(kind)
    processor: ProcessorMixin = object.__new__(made)
    return processor
