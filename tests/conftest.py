"""Shared by all tests: no network, few threads, and a tiny random model with the embedded tokenizer."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that wait by spinning slow each other down many times where cores are shared; processes of tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import AutoTokenizer, CLIPVisionConfig, OlmoeConfig

from experiment_core_utils.config.command import ERRORS_FILE
from experiment_core_utils.models.molmoe import (
    MolmoeConfig,
    MolmoeForConditionalGeneration,
    MolmoeImageProcessor,
    MolmoeProcessor,
)
from experiment_core_utils.models.molmoe.processing_molmoe import ImageTokens
from experiment_core_utils.primitives.files import EMBEDDED_MODEL
from experiment_core_utils.tasks import registry
from tests.processes.forked_runs import RunServer

torch.set_num_threads(1)
# Modules stay: until all are imported, looking for garbage among them only costs time.
gc.disable()


def tiny_config(
    num_hidden_layers: int = 4, num_experts: int = 8, num_experts_per_tok: int = 4, num_vision_layers: int = 2
) -> MolmoeConfig:
    """Blocks of width 32; ids of the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    ids = tokenizer.convert_tokens_to_ids
    text = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_vision_layers,
        num_attention_heads=2,
        image_size=336,
        patch_size=14,
    )
    return MolmoeConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layers=(-1, -2)[:num_vision_layers],
        projector_hidden_size=16,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        image_start_token_id=ids("<im_start>"),
        image_end_token_id=ids("<im_end>"),
        image_patch_token_id=ids("<im_patch>"),
        image_column_token_id=ids("<im_col>"),
    )


def save_tiny(config: MolmoeConfig, folder: Path) -> Path:
    """The folder, with a random MolmoE in the native layout."""
    torch.manual_seed(7)
    MolmoeForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    MolmoeProcessor(MolmoeImageProcessor(), tokenizer, ImageTokens.from_config(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random MolmoE of 4 blocks with 8 experts (top-4)."""
    return save_tiny(tiny_config(), tmp_path_factory.mktemp("tiny_molmoe"))


@pytest.fixture(autouse=True)
def nothing_unforeseen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No command of a test, in whatever process, ends in an error that is none of the project's, but where the test is
    about that: `@pytest.mark.unforeseen`.
    """
    path = Path(os.environ.setdefault(ERRORS_FILE, str(tmp_path_factory.getbasetemp() / "errors.txt")))
    path.write_text("")
    yield
    kinds = path.read_text().split() if path.exists() else []
    assert request.node.get_closest_marker("unforeseen") or "UnforeseenError" not in kinds, "a command ended unforeseen"


@pytest.fixture(autouse=True, scope="module")
def registries_of_this_file() -> Iterator[None]:
    """Tasks and metrics that the tests of a file register are gone after it, whatever worker runs the next file."""
    registered = (registry._registered_tasks, registry._registered_metrics)
    before = [dict(each) for each in registered]
    yield
    for each, entries in zip(registered, before, strict=True):
        each.clear()
        each.update(entries)


@pytest.fixture(scope="session")
def run_server(tiny_checkpoint: Path) -> Iterator[RunServer]:
    """Forks runs of the drivers from one process that has imported all they need."""
    with RunServer(tiny_checkpoint) as server:
        yield server


# In the order of their CPU time; what is not named takes less than about 5 s.
LONGEST_FILES = (
    "test_resume.py",
    "test_fault_injection.py",
    "test_predict.py",
    "test_notebooks.py",
    "test_verdict_words.py",
    "test_every_family.py",
    "test_odd_servers.py",
    "test_documented_commands.py",
    "test_multi_datasets.py",
    "test_runs_in_turn.py",
    "test_pipeline.py",
    "test_page_in_a_browser.py",
    "test_acc_lat_profiling.py",
    "test_network.py",
    "test_run_text_generation.py",
    "test_two_machines.py",
    "test_decode_kernels.py",
    "test_e2_knob_pareto.py",
    "test_slurm_sweep.py",
    "test_e3_latency_estimator.py",
    "test_prefill_kernels.py",
    "test_harness.py",
    "test_parts.py",
    "test_counted.py",
    "test_published.py",
    "test_hf_runs.py",
    "test_stored_journals.py",
    "test_recomputed_figures.py",
    "test_validation.py",
    "test_how_to.py",
    "test_evaluation.py",
    "test_energy_of_settings.py",
    "test_batched_answers.py",
    "test_batches_grouped_answers.py",
    "test_dense_sweeps.py",
    "test_e1_stage_latency.py",
    "test_steady_numbers.py",
    "test_own_data.py",
    "test_text_model.py",
    "test_original.py",
    "test_profiles.py",
)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that count what is left at the end find nothing frozen."""
    gc.unfreeze()


def pytest_runtest_setup() -> None:
    """A run without a number of threads takes all cores; what comes after it in this process does not."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the workers end together."""
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
