"""In: a folder in the published layout of MolmoE; out: its tokenizer, with the ids that the model was trained with."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from experiment_core_utils.models.molmoe.published_checkpoint import EOS_TOKEN_ID, IMAGE_TOKEN_IDS
from experiment_core_utils.models.vendor_errors import vendor_errors_named
from experiment_core_utils.primitives.errors import ConfigurationError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_EXPECTED = {
    "<|endoftext|>": EOS_TOKEN_ID,
    "<im_start>": IMAGE_TOKEN_IDS["image_start"],
    "<im_end>": IMAGE_TOKEN_IDS["image_end"],
    "<im_patch>": IMAGE_TOKEN_IDS["image_patch"],
    "<im_col>": IMAGE_TOKEN_IDS["image_column"],
    "<|image|>": 50284,
}


def load_published_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `tokenizer.json` and `tokenizer_config.json`, padding on the left.

    Read directly: `AutoTokenizer` would want to run the code that a published config names.

    Raises:
        ConfigurationError: a file is missing or cannot be read, or a special token has another id than in MolmoE.
    """
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise ConfigurationError(f"{folder} has no usable tokenizer or image processor: {name} is not there")
    with vendor_errors_named(f"the tokenizer in {folder} cannot be read"):
        tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
            folder, padding_side="left", trust_remote_code=False
        )
    ids = tokenizer.get_vocab()
    other = [
        f"{token} has id {ids.get(token)}, not {wanted}"
        for token, wanted in _EXPECTED.items()
        if ids.get(token) != wanted
    ]
    if other:
        raise ConfigurationError(f"the tokenizer in {folder} is not MolmoE's: {', '.join(other)}")
    return tokenizer
