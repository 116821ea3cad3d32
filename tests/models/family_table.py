"""A CSV file with a row for each family of models, whose rows are found out in processes of their own."""

import argparse
import csv
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from experiment_core_utils.primitives.files import REPOSITORY, write_text_atomically


def made_with(device: torch.device) -> str:
    """The versions and the device that a row was found out with."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"transformers {transformers.__version__}, torch {torch.__version__}, {where}"


def told(error: BaseException) -> str:
    """The whole of an error, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def table_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all of the installed transformers")
    parser.add_argument("--cuda", action="store_true", help="on the first GPU")
    parser.add_argument("--alone", action="store_true", help="one family, in this process, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; 0: all families in this one")
    parser.add_argument("--limit_s", type=float, default=300, help="seconds for a family")
    parser.add_argument("--table", type=Path, help="CSV file whose rows of the families are replaced")
    return parser


def rows_of(
    module: str,
    given: argparse.Namespace,
    families: Sequence[str],
    row_of: Callable[[str, torch.device], Any],
    failed: Callable[[str, str], Any],
) -> list[Any]:
    """The rows of families, printed and put into the table as they come.

    Args:
        module: that is run for one family `--alone`.
        given: from `table_parser`.
        row_of: the row of a family, a dataclass whose first field is the family.
        failed: the row of a family whose process ended without one, for this reason.
    """
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda", 0) if given.cuda else torch.device("cpu")
    if given.alone:
        rows = [row_of(family, device) for family in given.families]
        print(json.dumps([asdict(row) for row in rows]))
        return rows
    rows = []
    with ThreadPoolExecutor(max(given.jobs, 1)) as pool:
        find = row_of if not given.jobs else lambda family, _: _alone(module, family, given, failed)
        for done in as_completed([pool.submit(find, family, device) for family in families]):
            found = done.result()
            values = asdict(found) if not isinstance(found, dict) else found
            rows.append(values)
            print(", ".join(str(value) for value in values.values()), flush=True)
            if given.table is not None:
                put_row(given.table, values)
    return rows


def _alone(module: str, family: str, given: argparse.Namespace, failed: Callable[[str, str], Any]) -> Any:
    options = [each for each in sys.argv[1:] if each not in given.families]
    command = [sys.executable, "-m", module, "--alone", family, *options]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=given.limit_s)
    except subprocess.TimeoutExpired:
        return failed(family, f"it was not decided within {given.limit_s} s")
    if done.returncode:
        said = " ".join(done.stderr[-300:].split())
        return failed(family, f"its process ended with code {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])[0]


def put_row(path: Path, values: dict[str, Any]) -> None:
    """Put a row into the table, in place of that of the same family."""
    rows = {row["family"]: row for row in read_rows(path)} if path.is_file() else {}
    rows[values["family"]] = values
    text = io.StringIO()
    writer = csv.DictWriter(text, list(values), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows[family] for family in sorted(rows))
    write_text_atomically(text.getvalue(), path)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
