"""Every command of README and the how-to pages is read by its parser; those that only read results are run."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from experiment_core_utils.config.command_line import OneLineParser
from experiment_core_utils.config.profiling import parse_config
from experiment_core_utils.primitives.files import EMBEDDED_MODEL, REPOSITORY
from experiments.core_exp.export import export
from knob_profiler.__main__ import COMMANDS, Group
from knob_profiler.__main__ import main as knobprof
from scripts.docs_site import knobprof_parsers, parser_of, subcommands

README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs" / "how_to").glob("*.md"))]
MOST_WORDS = 400
DRIVER = "experiments.core_exp.acc_lat_profiling"
# What gives the flags that it does not know to the driver's configuration.
WITH_DRIVERS_FLAGS = {
    "experiments.block_importance.score_blocks",
    "experiments.controller.evaluate_controller",
    "experiments.core_exp.collect_table",
}
# Not commands of this project.
OTHERS = ("pip install", "cp -r", ". .venv/bin/activate")
# What reads results; with --dry_run others run, too.
CHEAP = {
    "experiment_core_utils.planning.status",
    "experiment_core_utils.saved_results.tasks_command",
    "experiments.controller.evaluate_controller",
    "experiments.controller.lookup",
    "experiments.core_exp.compare_runs",
    "experiments.core_exp.export",
    "experiments.core_exp.report",
    "experiments.core_exp.write_tables",
}


def commands_of(page: Path) -> Iterator[str]:
    """The lines of a page's blocks for bash; of README, whose blocks are indented, those that begin with a program."""
    text = page.read_text(encoding="utf-8")
    if page == README:
        blocks = re.findall(r"^    ((?:bash|python|\.venv/bin/python|knobprof) .*)$", text, re.MULTILINE)
    else:
        blocks = re.findall(r"^ *```bash\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    for line in "".join(f"{block}\n" for block in blocks).splitlines():
        if line.strip():
            yield line.strip()


def examples_of(name: str, parser: OneLineParser) -> Iterator[tuple[str, str]]:
    """The examples of a command's help, and of those of its subcommands."""
    for example in parser.examples:
        yield f"{name} --help", re.sub(r"^([A-Z_]+=\S+ )+", "", example)
    for word, inner in subcommands(parser):
        yield from examples_of(f"{name} {word}", inner)


COMMAND_LINES = [(page.name, line) for page in PAGES for line in commands_of(page)]
EXAMPLES = [each for name, _, parser in knobprof_parsers() for each in examples_of(name, parser)]


def program_of(line: str) -> tuple[str, list[str]] | None:
    """The module whose `main` a command line runs, and its arguments; None for a shell script of the repository."""
    words = shlex.split(line, comments=True)
    if words[0] == "bash":
        assert (REPOSITORY / words[1]).is_file(), line
        return None
    if "scripts/slurm_sweep.sh" in words:
        return DRIVER, words[words.index("scripts/slurm_sweep.sh") + 1 :]
    if "-m" in words:
        words = words[words.index("-m") + 1 :]
        if "." in words[0]:
            return words[0], words[1:]
    if words[0] in ("knobprof", "knob_profiler"):
        found: object = COMMANDS
        rest = words[1:]
        while isinstance(found, Group):
            found = found.commands[rest.pop(0)]
        return found.module, rest
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    assert (REPOSITORY / words[place]).is_file(), line
    module = words[place].removesuffix(".py").replace("/", ".")
    return module, words[place + 1 :]


def test_every_command_has_examples() -> None:
    assert [name for name, _, parser in knobprof_parsers() if not parser.examples] == []
    groups = [group for group in (COMMANDS, *COMMANDS.commands.values()) if isinstance(group, Group)]
    assert all(group.examples for group in groups)


@pytest.mark.parametrize(
    ("page", "line"), [*COMMAND_LINES, *EXAMPLES, *(("knobprof --help", each) for each in COMMANDS.examples)]
)
def test_every_command_is_read_by_its_parser(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "MODEL").symlink_to(EMBEDDED_MODEL)
    monkeypatch.chdir(tmp_path)
    if line.startswith(OTHERS):
        return
    program = program_of(line)
    if program is None:
        return
    module, arguments = program
    if "--" in arguments:
        parse_config(arguments[arguments.index("--") + 1 :])
        arguments = arguments[: arguments.index("--")]
    if module == DRIVER:
        parse_config(arguments)
    elif module in WITH_DRIVERS_FLAGS:
        parse_config(parser_of(module).parse_known_args(arguments)[1])
    else:
        parser_of(module).parse_args(arguments)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_is_short_and_is_listed(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS
    index = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"(how_to/{page.name})" in index
    assert list(commands_of(page))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, data and runs that the pages name, of which all runs are the same one."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "MODEL").symlink_to(EMBEDDED_MODEL)
    (folder / "experiments").symlink_to(REPOSITORY / "experiments")
    page = REPOSITORY / "docs" / "how_to" / "profile_my_data.md"
    rows = re.search(r"^```json\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert rows is not None
    (folder / "my.jsonl").write_text(rows[1], encoding="utf-8")
    for name in re.findall(r'"image": "([^"]+)"', rows[1]):
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (48, 32), "teal").save(folder / name)
    mine = folder / "results" / "mine"
    code = knobprof(
        ["profile", "--tier_list", "low", "--top_k_list", "4", "8", "--num_active_blocks_list", "12", "16",
         "--num_samples", "8", "--max_new_tokens", "4", "--num_runs_per_sample", "1", "--num_warmup_runs", "0",
         "--max_repeats", "0", "--no_reference",
         "--num_threads", "1", "--output_dir", str(mine)]
    )  # fmt: skip
    assert code == 0
    for name in ("before", "after", "float32", "bfloat16", "4bit", "quickstart"):
        shutil.copytree(mine, mine.with_name(name))
    shutil.move(export(mine, "lm-eval", folder / "exported")[0][0], folder / "THEIR_FOLDER")
    return folder


def test_commands_that_read_results_or_only_plan_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    ran = set()
    for page, line in COMMAND_LINES:
        program = None if line.startswith(OTHERS) else program_of(line)
        if program is None or (program[0] not in CHEAP and "--dry_run" not in program[1]):
            continue
        module, arguments = program
        if "--run" in arguments:  # it measures
            continue
        code = __import__(module, fromlist=["main"]).main(arguments)
        assert not code, (page, line, capsys.readouterr().err)
        assert capsys.readouterr().out, (page, line)
        ran.add(module)
    assert ran > CHEAP
    for written in ("results/mine/report.html", "results/quickstart/report.html", "lookup.json", "differences.json"):
        assert (folder / written).stat().st_size > 0


def test_the_tiny_llava_of_the_page_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = REPOSITORY / "docs" / "how_to" / "profile_my_model.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "checkpoints").symlink_to(REPOSITORY / "checkpoints")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {})
    code = knobprof(
        ["profile", "--model_path", "tiny_llava", "--random_weights", "--num_active_blocks_list", "2", "4",
         "--num_samples", "2", "--max_new_tokens", "2", "--num_runs_per_sample", "1", "--num_warmup_runs", "0",
         "--max_repeats", "0", "--num_threads", "1", "--output_dir", "results"]
    )  # fmt: skip
    assert code == 0 and len(list(Path("results").glob("*_blocks*.json"))) == 2
