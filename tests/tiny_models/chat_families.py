"""Checkpoints without weights that are asked as those of a family are: its chat template, special tokens and processor.

The templates are written after the public ones of the repositories that are named beside them, with what they do to a
system message, a picture and a text; turns of tools and of earlier answers are left out. Formats were looked up in
these repositories, in vLLM's examples of offline inference and, for PaliGemma, in Google's page of its prompts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from experiment_core_utils.models.hf.processor import load_hf_processor
from experiment_core_utils.models.hf.requests import DEFAULT_CHAT, ChatOptions, HFRequests


@dataclass(frozen=True)
class ChatFamily:
    """What decides how a family is asked.

    Attributes:
        model_type: of its config.
        repository: where its template is public.
        bos: its begin of sequence; None for none.
        adds_bos: whether its tokenizer puts that before every text.
        specials: further special tokens; those under names that end in `_token` are attributes of the tokenizer.
        config: fields of its config; a text is the special token of which the id is meant.
        image_processor, processor: their files; None for a text model.
    """

    model_type: str
    repository: str
    template: str | None
    bos: str | None
    adds_bos: bool = False
    specials: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    image_processor: Mapping[str, Any] | None = None
    processor: Mapping[str, Any] | None = None


def _turns(user: str, picture: str, text: str, end: str, *, before: str = "", after: str) -> str:
    """A template that goes through the messages and, in each, through a text or its parts in order."""
    return (
        before + "{% for message in messages %}" + user + "{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + picture
        + "{% elif part['type'] == 'text' %}"
        + text
        + "{% endif %}{% endfor %}{% endif %}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + after
        + "{% endif %}"
    )


_PICTURES_FIRST = (
    "{{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}}{picture}{{% endfor %}}"
    "{{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}}{text}{{% endfor %}}"
)
_CHATML = "<|im_start|>{{ message['role'] }}\n"
_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_IDEFICS_USER = (
    "{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
)
_AYA_SYSTEM = (
    "You are Aya Vision, a brilliant, sophisticated, AI-assistant chatbot trained to assist human users by providing "
    "thorough responses. You are a large vision language model built by the Cohere For AI. You are capable of "
    "interpreting images, including describing them, answering questions about their contents, extracting textual "
    "information, and analyzing visual context."
)

_CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 24},
    "crop_size": {"height": 24, "width": 24},
}
_LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_QWEN_TOKENS = {
    "a": "<|im_start|>",
    "b": "<|im_end|>",
    "c": "<|vision_start|>",
    "d": "<|vision_end|>",
    "e": "<|image_pad|>",
    "f": "<|video_pad|>",
}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_PICTURES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4}
_IDEFICS_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}
_IDEFICS_SIZES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}}

CHAT_FAMILIES: Mapping[str, ChatFamily] = {
    "llava": ChatFamily(
        "llava",
        "llava-hf/llava-1.5-7b-hf",
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}"
        "{% endif %}"
        + _PICTURES_FIRST.format(picture="{{ '<image>\n' }}", text="{{ part['text'] + ' ' }}")
        + "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        bos="<s>",
        adds_bos=True,
        specials={"image_token": "<image>"},
        config={"image_token_index": "<image>"},
        image_processor=_CLIP,
        processor={"processor_class": "LlavaProcessor", **_LLAVA},
    ),
    "llava_next": ChatFamily(
        "llava_next",
        "llava-hf/llava-v1.6-mistral-7b-hf",
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ '<<SYS>>\n' + message['content'][0]['text'] + '\n<</SYS>>\n\n' }}{% elif message['role'] == 'user' %}"
        "[INST] "
        + _PICTURES_FIRST.format(picture="{{ '<image>\n' }}", text="{{ part['text'] }}")
        + " [/INST]{% endif %}{% endfor %}",
        bos="<s>",
        adds_bos=True,
        specials={"image_token": "<image>"},
        config={"image_token_index": "<image>"},
        image_processor={
            **_CLIP,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[24, 48]],
        },
        processor={"processor_class": "LlavaNextProcessor", **_LLAVA},
    ),
    "qwen2_5_vl": ChatFamily(
        "qwen2_5_vl",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        _turns(
            "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant."
            "<|im_end|>\n{% endif %}" + _CHATML,
            _QWEN_PICTURE,
            "{{ part['text'] }}",
            "<|im_end|>\n",
            after="<|im_start|>assistant\n",
        ),
        bos=None,
        specials=_QWEN_TOKENS,
        config=_QWEN_IDS,
        image_processor=_QWEN_PICTURES,
        processor={"processor_class": "Qwen2_5_VLProcessor"},
    ),
    "qwen3_vl": ChatFamily(
        "qwen3_vl",
        "Qwen/Qwen3-VL-8B-Instruct",
        _turns(_CHATML, _QWEN_PICTURE, "{{ part['text'] }}", "<|im_end|>\n", after="<|im_start|>assistant\n"),
        bos=None,
        specials=_QWEN_TOKENS,
        config=_QWEN_IDS,
        image_processor=_QWEN_PICTURES,
        processor={"processor_class": "Qwen3VLProcessor"},
    ),
    "smolvlm": ChatFamily(
        "smolvlm",
        "HuggingFaceTB/SmolVLM-Instruct",
        _turns(
            _IDEFICS_USER,
            "<image>",
            "{{ part['text'] }}",
            "<end_of_utterance>\n",
            before="<|im_start|>",
            after="Assistant:",
        ),
        bos="<|im_start|>",
        specials=_IDEFICS_TOKENS,
        config={"image_token_id": "<image>"},
        image_processor={"image_processor_type": "SmolVLMImageProcessor", **_IDEFICS_SIZES},
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    ),
    "internvl": ChatFamily(
        "internvl",
        "OpenGVLab/InternVL3-1B-hf",
        _turns(
            _CHATML, "{{ '<IMG_CONTEXT>\n' }}", "{{ part['text'] }}", "<|im_end|>\n", after="<|im_start|>assistant\n"
        ),
        bos=None,
        specials={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
            "a": "<|im_start|>",
            "b": "<|im_end|>",
        },
        config={"image_token_id": "<IMG_CONTEXT>"},
        image_processor={"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}},
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "idefics3": ChatFamily(
        "idefics3",
        "HuggingFaceM4/Idefics3-8B-Llama3",
        _turns(
            _IDEFICS_USER,
            "<image>",
            "{{ part['text'] }}",
            "<end_of_utterance>\n",
            before="<|begin_of_text|>",
            after="Assistant:",
        ),
        bos="<|begin_of_text|>",
        adds_bos=True,
        specials=_IDEFICS_TOKENS,
        config={"image_token_id": "<image>"},
        image_processor={"image_processor_type": "Idefics3ImageProcessor", **_IDEFICS_SIZES},
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
    ),
    "gemma3": ChatFamily(
        "gemma3",
        "google/gemma-3-4b-it",
        # A system message becomes the beginning of the first user turn; texts are stripped.
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = (messages[0]['content'] if "
        "messages[0]['content'] is string else messages[0]['content'][0]['text']) + '\n\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
        "{% for message in turns %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}<start_of_turn>{{ message['role'] }}\n{{ first if loop.first else '' }}"
        "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
        "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}"
        "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}"
        "<start_of_turn>model\n{% endif %}",
        bos="<bos>",
        adds_bos=True,
        specials={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
            "a": "<start_of_turn>",
            "b": "<end_of_turn>",
        },
        config={"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>"},
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "paligemma": ChatFamily(
        "paligemma",
        "google/paligemma-3b-mix-224",
        None,
        bos="<bos>",
        specials={"image_token": "<image>"},
        config={"image_token_index": "<image>"},
        image_processor={
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_seq_length": 4,
        },
        processor={"processor_class": "PaliGemmaProcessor"},
    ),
    "pixtral": ChatFamily(
        "llava",
        "mistral-community/pixtral-12b",
        # A system message, which must be a text, goes before the last user's.
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}"
        "{% for message in turns %}"
        "{% if loop.last and system is defined %}{{ '[INST]' + system + '\n\n' }}{% else %}[INST]{% endif %}"
        "{% if message['content'] is not string %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% elif part['type'] == 'image' %}[IMG]{% endif %}{% endfor %}{% else %}"
        "{{ message['content'] }}{% endif %}[/INST]{% endfor %}",
        bos="<s>",
        adds_bos=True,
        specials={"a": "[IMG]", "b": "[IMG_BREAK]", "c": "[IMG_END]", "d": "[INST]", "e": "[/INST]"},
        config={"image_token_index": "[IMG]", "vision_config": {"model_type": "pixtral"}},
        image_processor={"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 8, "width": 8}},
        processor={"processor_class": "PixtralProcessor", "patch_size": 8},
    ),
    "aya_vision": ChatFamily(
        "aya_vision",
        "CohereLabs/aya-vision-32b",
        "{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>" + _AYA_SYSTEM + "<|END_OF_TURN_TOKEN|>"
        "{% for message in messages %}<|START_OF_TURN_TOKEN|>{{ message.role | replace('user', '<|USER_TOKEN|>') | "
        "replace('system', '<|SYSTEM_TOKEN|>') }}{% if message.content is string %}{{ message.content }}{% else %}"
        + _PICTURES_FIRST.format(picture="<image>", text="{{ part.text }}")
        + "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}",
        bos="<BOS_TOKEN>",
        adds_bos=True,
        specials={
            "a": "<image>",
            "b": "<|START_OF_IMG|>",
            "c": "<|END_OF_IMG|>",
            "d": "<|IMG_PATCH|>",
            "e": "<|IMG_LINE_BREAK|>",
            "f": "TILE",
            "g": "TILE_GLOBAL",
        },
        config={"image_token_index": "<|IMG_PATCH|>"},
        image_processor={"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 16, "width": 16}},
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": 4,
            "img_size": 16,
            "downsample_factor": 2,
        },
    ),
    "gpt_oss": ChatFamily(
        "gpt_oss",
        "openai/gpt-oss-20b",
        # A system message of the chat becomes the developer's.
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "{% for message in messages %}{% if message['role'] == 'system' %}"
        "<|start|>developer<|message|># Instructions\n\n{{ message['content'] }}\n\n<|end|>"
        "{% else %}<|start|>user<|message|>{{ message['content'] }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        bos="<|startoftext|>",
        specials={"a": "<|start|>", "b": "<|message|>", "c": "<|end|>"},
    ),
    "llama3": ChatFamily(
        "llama",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "{% for message in messages %}"
        "{% set turn = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
        "message['content'] | trim + '<|eot_id|>' %}{{ bos_token + turn if loop.first else turn }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        bos="<|begin_of_text|>",
        adds_bos=True,
        specials={"a": "<|start_header_id|>", "b": "<|end_header_id|>", "c": "<|eot_id|>"},
    ),
    "olmoe": ChatFamily(
        "olmoe",
        "allenai/OLMoE-1B-7B-0924-Instruct",
        "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        bos="<|endoftext|>",
    ),
}


def write_chat_checkpoint(name: str, folder: Path) -> Path:
    """Config, tokenizer, processor and template of one of `CHAT_FAMILIES`, no weights; gives the folder."""
    family = CHAT_FAMILIES[name]
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(folder)
    ids = {key: _with_ids(value, tokenizer) for key, value in family.config.items()}
    config = {"model_type": family.model_type, **ids}
    (folder / "config.json").write_text(json.dumps(config))
    if family.template is not None:
        (folder / "chat_template.jinja").write_text(family.template)
    if family.image_processor is not None and family.processor is not None:
        named = {**family.image_processor, "processor_class": family.processor["processor_class"]}
        (folder / "preprocessor_config.json").write_text(json.dumps(named))
        (folder / "processor_config.json").write_text(json.dumps(dict(family.processor)))
    return folder


def chat_requests(name: str, folder: Path, chat: ChatOptions = DEFAULT_CHAT) -> HFRequests:
    """The request maker of such a checkpoint, which is written to the folder."""
    write_chat_checkpoint(name, folder)
    return HFRequests(load_hf_processor(folder), AutoConfig.from_pretrained(folder), name, chat)


def _with_ids(value: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    return tokenizer.convert_tokens_to_ids(value) if isinstance(value, str) else value


def tokenizer_of(family: ChatFamily) -> PreTrainedTokenizerFast:
    """One token for each byte, and the special ones behind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    named = {name: token for name, token in family.specials.items() if name.endswith("_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token=family.bos, eos_token="</s>", extra_special_tokens=named
    )
    others = [token for name, token in family.specials.items() if name not in named]
    tokenizer.add_tokens(others, special_tokens=True)
    if family.bos is not None and family.adds_bos:
        begin = (family.bos, tokenizer.convert_tokens_to_ids(family.bos))
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[begin]
        )
    return tokenizer
