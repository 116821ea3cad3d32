"""The hooks of the site: parsers found, flags described, links out of docs/ led to their copies."""

from pathlib import Path

import pytest
import yaml
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from experiment_core_utils.config.profiling import build_parser
from experiment_core_utils.primitives.files import REPOSITORY
from knob_profiler.__main__ import COMMANDS, Group
from scripts.docs_site import knobprof_parsers, on_page_markdown, parser_of, subcommands


@pytest.fixture(scope="module")
def config() -> MkDocsConfig:
    return load_config(str(REPOSITORY / "mkdocs.yml"))


def page_of(config: MkDocsConfig, place: str) -> Page:
    return Page(None, File(place, config.docs_dir, config.site_dir, use_directory_urls=False), config)


def test_the_parser_of_a_command_is_the_one_that_its_main_makes() -> None:
    flags = {
        flag
        for action in parser_of("experiments.core_exp.acc_lat_profiling")._actions
        for flag in action.option_strings
    }
    assert flags == {flag for action in build_parser()._actions for flag in action.option_strings}
    assert [name for name, _ in subcommands(parser_of("experiments.controller.lookup"))] == ["build", "predict"]


def leaves(group: Group) -> int:
    return sum(leaves(each) if isinstance(each, Group) else 1 for each in group.commands.values())


def test_every_subcommand_and_every_flag_is_on_the_page_of_commands(config: MkDocsConfig) -> None:
    page = (REPOSITORY / "docs" / "reference" / "command_line.md").read_text(encoding="utf-8")
    described = on_page_markdown(page, page_of(config, "reference/command_line.md"), config, Files([]))
    assert described.count("\n\n`python -m ") == leaves(COMMANDS)
    for name, _, parser in knobprof_parsers():
        assert f"## {name}\n" in described
        for action in parser._actions:
            assert action.dest == "help" or all(flag in described for flag in action.option_strings)
    assert described.count("| `--num_runs_per_sample") == described.count("| `--until_precision") == 1
    assert "| `--measure accuracy answer_loss` |" in described
    assert "| `--beam_width N` | width of --select beam (default: 3) |" in described
    assert "%(default)s" not in described
    assert "\n\n    knobprof report results/core_exp\n" in described


def test_links_out_of_the_folder_lead_to_copies(config: MkDocsConfig) -> None:
    text = "[a](../CONTRIBUTING.md) [b](../scripts/test.sh) [c](../scripts) [d](energy.md#windows) [e](https://x.org/y)"
    changed = on_page_markdown(text, page_of(config, "profiling.md"), config, Files([]))
    assert changed == (
        "[a](repository/CONTRIBUTING.md) [b](repository/scripts/test.sh.txt) [c](repository/scripts/files.txt) "
        "[d](energy.md#windows) [e](https://x.org/y)"
    )
    deeper = on_page_markdown(
        "[a](../../README.md) [b](../energy.md)", page_of(config, "how_to/x.md"), config, Files([])
    )
    assert deeper == "[a](../repository/README.md) [b](../energy.md)"


def test_copies_are_files_of_the_site(config: MkDocsConfig) -> None:
    page = File("architecture.md", config.docs_dir, config.site_dir, use_directory_urls=False)
    files = config.plugins.on_files(Files([page]), config=config)
    copy = files.get_file_from_path("repository/experiment_core_utils/pipeline.py.txt")
    assert copy is not None
    assert copy.content_string == (REPOSITORY / "experiment_core_utils" / "pipeline.py").read_text(encoding="utf-8")


def test_the_site_asks_no_server(config: MkDocsConfig) -> None:
    assert config.theme["font"] is False
    assert not [each for each in (*config.extra_css, *map(str, config.extra_javascript)) if "//" in each]


def test_every_page_of_the_navigation_is_there() -> None:
    text = Path(REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    pages = [page for each in nav for page in _pages(each)]
    assert len(pages) == len(set(pages)) > 40
    assert [page for page in pages if not (REPOSITORY / "docs" / page).is_file()] == []


def _pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inner = entry if isinstance(entry, list) else list(entry.values())  # type: ignore[attr-defined]
    return [page for each in inner for page in _pages(each)]
