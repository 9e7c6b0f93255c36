"""The house rules that a machine can check: import direction, sizes, names, and the tree in the README."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("train", "infer", "kernels", "recipes")
LISTED_FOLDERS = (*PACKAGES, "scripts")

# what each folder may import of ours
ALLOWED_IMPORTS = {
    "kernels": {"kernels"},
    "recipes": {"recipes"},
    "infer": {"infer", "kernels", "recipes"},
    "train": {"train", "infer", "kernels", "recipes"},
}
TRAINING_ONLY = {"datasets", "wandb", "peft", "accelerate", "pyarrow"}
# recording is asked for by a flag, and says what to install
MAY_USE_PYARROW = "infer/outcome_file.py"
TORCH_FREE = ("tree", "kv_pool", "step_plan", "messages")
DUMPING_GROUNDS = re.compile(r"(utils?|helpers?|common|misc)\.py")


def tracked(*patterns: str) -> list[str]:
    """Paths in git that still exist, relative to the repository."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a git checkout")
    # the checkout may belong to another user, as in a container
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in output.split("\0") if path and (REPOSITORY / path).exists())


def source_files(*folders: str) -> list[str]:
    return [path for path in tracked(*folders) if path.endswith(".py")]


def parse(path: str) -> ast.Module:
    return ast.parse((REPOSITORY / path).read_text(encoding="utf-8"), path)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported anywhere in a module, relative imports with their dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def num_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_import_direction() -> None:
    wrong = []
    for folder, allowed in ALLOWED_IMPORTS.items():
        for path in source_files(folder):
            ours = [name for name in imported_names(parse(path)) if name.split(".")[0] == "foredraft"]
            wrong += [f"{path}: {name}" for name in ours if name.split(".")[1] not in allowed]
    assert not wrong, "imports against the direction kernels <- infer <- train"


def test_no_relative_imports() -> None:
    wrong = []
    for path in source_files(*LISTED_FOLDERS, "tests"):
        wrong += [f"{path}: {name}" for name in imported_names(parse(path)) if name.startswith(".")]
    assert not wrong


def test_serving_needs_no_training_packages() -> None:
    wrong = []
    for path in source_files("infer", "kernels"):
        roots = {name.split(".")[0] for name in imported_names(parse(path))}
        roots -= {"pyarrow"} if path == MAY_USE_PYARROW else set()
        wrong += [f"{path}: {root}" for root in roots & TRAINING_ONLY]
    assert not wrong


def test_bookkeeping_needs_no_torch() -> None:
    modules = ", ".join(f"foredraft.infer.{name}" for name in TORCH_FREE)
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "False", result.stderr


def test_no_dynamic_cache_in_infer() -> None:
    wrong = []
    for path in source_files("infer"):
        names = {node.id for node in ast.walk(parse(path)) if isinstance(node, ast.Name)}
        names |= {name.rpartition(".")[2] for name in imported_names(parse(path))}
        wrong += [path] if "DynamicCache" in names else []
    assert not wrong


def test_no_dumping_grounds() -> None:
    files = source_files(*LISTED_FOLDERS, "tests")
    assert not [path for path in files if DUMPING_GROUNDS.fullmatch(Path(path).name)]


def test_no_file_shadows_the_standard_library() -> None:
    # `accelerate launch train/x.py` puts train/ first on the path
    files = source_files(*LISTED_FOLDERS)
    assert not [path for path in files if Path(path).stem in sys.stdlib_module_names]


def test_kernels_and_root_are_not_packages() -> None:
    # a PyPI package `kernels` exists and transformers looks for it
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
    assert not (REPOSITORY / "__init__.py").exists()


def test_files_are_short() -> None:
    files = source_files(*LISTED_FOLDERS, "tests")
    sizes = {path: len((REPOSITORY / path).read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {path: lines for path, lines in sizes.items() if lines > 400}


def test_functions_are_short_and_take_few_arguments() -> None:
    lengths, crowded = [], []
    for path in source_files(*LISTED_FOLDERS):
        for function in functions(parse(path)):
            if is_triton_kernel(function):
                continue
            lengths.append(function.end_lineno - function.lineno + 1)
            if num_arguments(function) > 7:
                crowded.append(f"{path}: {function.name} has {num_arguments(function)} arguments")
    assert np.percentile(lengths, 95) <= 60
    assert not crowded


def test_public_names_are_documented() -> None:
    missing = []
    for path in source_files(*LISTED_FOLDERS):
        module = parse(path)
        if module.body and not ast.get_docstring(module):
            missing.append(f"{path}: module")
        for node in module.body:
            is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_definition and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{path}: {node.name}")
    assert not missing


def readme_tree() -> list[tuple[str, str]]:
    """(path, description) of every file in the README's tree."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## The tree\n.*?^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block under '## The tree'"
    entries, folder = [], ""
    for line in block[1].splitlines():
        name, _, description = line.strip().partition(" ")
        if name.endswith("/"):
            folder = name
        elif name:
            entries.append((folder + name, description.strip()))
    return entries


def test_readme_tree_is_the_tree() -> None:
    entries = readme_tree()
    listed = Counter(path for path, _ in entries if path.split("/")[0] in LISTED_FOLDERS)
    existing = [path for path in tracked(*LISTED_FOLDERS) if path.endswith((".py", ".yaml"))]
    assert not [path for path, count in listed.items() if count > 1], "listed twice"
    assert not sorted(set(existing) - set(listed)), "missing from the README's tree"
    assert not [path for path in listed if not (REPOSITORY / path).exists()], "listed but gone"
    assert not [path for path, description in entries if not description], "listed without a description"
