"""The size and the habits of the code in figures, which may only fall: `python -m tests.documents.house` writes them.

A figure that has to rise is raised by hand in `house.json`, in the commit that raises it, with the reason.
"""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from experiment_core_utils.primitives.files import REPOSITORY

FIGURES = Path(__file__).with_name("house.json")
PRODUCT = (".py", ".cpp", ".h", ".js", ".html", ".css", ".sh")
MOST_LINES = 400
#: By McCabe, without the operands of `and` and `or`.
MOST_PATHS = 10
#: Adjectives, participles and pronouns that name nothing where they stand alone.
VAGUE = frozenset(
    "alone beside chosen done drawn each found further given held kept known made named other others own place places "
    "rest seen shown taken together used wanted whole".split()
)


def tracked() -> list[Path]:
    """The tracked files of code, relative to the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    paths = map(Path, listed.splitlines())
    return [path for path in paths if path.suffix in PRODUCT and (REPOSITORY / path).is_file()]


def room_of(path: Path) -> str:
    """The folder of at most two names in which a file lies; the letters, which lie side by side, are one room."""
    if path.parts[0] == "tests":
        return "tests"
    return "/".join(path.parent.parts[:2]) or "."


def figures() -> dict[str, float]:
    """Every figure by its name, in the order in which they are written."""
    paths = tracked()
    lines = {path: (REPOSITORY / path).read_bytes().count(b"\n") for path in paths}
    product = [path for path in paths if path.parts[0] != "tests"]
    rooms: Counter[str] = Counter()
    for path in paths:
        rooms[room_of(path)] += lines[path]
    modules = {path: ast.parse((REPOSITORY / path).read_bytes()) for path in product if path.suffix == ".py"}
    names = Counter(path.name for path in modules if path.name not in ("__init__.py", "__main__.py"))
    bound = [name for module in modules.values() for name in bound_names(module)]
    return {
        "product lines": sum(lines[path] for path in product),
        **{f"lines of {room}": number for room, number in sorted(rooms.items())},
        f"files over {MOST_LINES} lines": sum(lines[path] > MOST_LINES for path in product),
        f"functions of more than {MOST_PATHS} paths": num_branched(),
        "names of modules that occur twice": sum(number > 1 for number in names.values()),
        "docstrings that only say See": sum(map(num_only_see, modules.values())),
        "vague names in 1000": round(1000 * sum(name.strip("_") in VAGUE for name in bound) / len(bound), 1),
    }


def bound_names(module: ast.Module) -> Iterator[str]:
    """Names of variables and of arguments where they are bound."""
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def num_only_see(module: ast.Module) -> int:
    """Docstrings of one sentence that refers to another."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(module) if isinstance(node, kinds)]
    return sum(text.startswith("See ") and "\n" not in text for text in texts)


def num_branched() -> int:
    """Functions of the product with more than MOST_PATHS independent paths (McCabe), by ruff."""
    flags = ["--select", "C901", "--config", f"lint.mccabe.max-complexity={MOST_PATHS}", "--output-format", "json"]
    command = ["ruff", "check", "--isolated", *flags, "--exclude", "tests", "."]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return len(json.loads(found.stdout))


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(figures(), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(FIGURES.read_text(encoding="utf-8"))
