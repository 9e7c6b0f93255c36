"""Recipes and the error boundary of commands: YAML and flags in, a frozen dataclass or one clear message out.

A recipe is a dataclass (nested ones are sections). Its keys are the keys of the YAML file and, dotted, the
flags: `data.path` is `--data.path P`. Flags win over the file wherever they stand on the command line. The
resolved recipe is itself a recipe that gives the same run.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import re
import sys
import traceback
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace

from foredraft.infer.atomic import write_text_atomic

Recipe = TypeVar("Recipe")


class KeyTree(dict[str, "KeyTree | None"]):
    """Section: its keys; None: a value."""

    is_optional = False  # the section may be a plain string instead


OWN_FLAGS = ("config", "print_config", "help")
EXTRAS = {
    "pyarrow": "train", "accelerate": "train", "datasets": "train", "peft": "train", "wandb": "train",
    "fastapi": "serve", "uvicorn": "serve", "prometheus_client": "serve", "gguf": "gguf",
    "httpx": "train", "matplotlib": "plots",
}  # fmt: skip
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class UserError(ValueError):
    """A mistake of the user, told in one message that names what was expected and what was found."""


def read_config(cls: type[Recipe], argv: Sequence[str], command: str) -> tuple[Recipe, str]:
    """Read `--config FILE.yaml` and overriding flags into an instance of the frozen dataclass `cls`.

    Returns the instance and the resolved recipe as YAML, headed by comments that tell where keys came from.
    Raises UserError for unknown or repeated keys (naming the nearest valid one), wrong types, missing keys,
    values that `cls` refuses, and files that cannot be read. `--help` and `--print_config` print and exit.
    """
    keys, hints = _key_tree(cls), _hints(cls)
    files, flags = _split_files(argv)
    in_files = {key for file in files for key in _check_recipe_file(Path(file), keys)}
    in_flags = _check_flags(flags, hints)
    if not {"--help", "-h", "--print_config"} & set(flags):
        _check_required(cls, in_files | in_flags, files)
    parser = _build_parser(cls, f"foredraft {command}")
    ordered = [arg for file in files for arg in ("--config", file)] + flags
    try:
        values = parser.parse_args(ordered)
    except ArgumentError as error:
        raise UserError(_explain(str(error), hints, files, in_flags)) from None
    instance = _instantiate(cls, values)
    return instance, _resolved_yaml(instance, command, in_files - in_flags, in_flags)


def save_resolved(folder: str | os.PathLike[str], resolved_yaml: str, name: str = "recipe.yaml") -> Path:
    """Write the resolved recipe into `folder` (made if missing) atomically."""
    return write_text_atomic(Path(folder) / name, resolved_yaml)


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean x?` for the closest of `valid`, or an empty string when nothing is close."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit code: 0, 1 (internal error), 2 (the user's mistake), 130 (interrupted).

    User mistakes (ValueError, OSError, a missing optional package) become one message on stderr; anything
    else keeps its traceback.
    """
    try:
        return command() or 0
    except KeyboardInterrupt:
        print("foredraft: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of stdout went away (`| head`); the interpreter must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (ValueError, OSError) as error:
        print(f"foredraft: error: {_describe(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            traceback.print_exc()
            return 1
        print(
            f"foredraft: error: this needs the package {error.name}: run `pip install 'foredraft[{extra}]'`",
            file=sys.stderr,
        )
        return 2
    except Exception:
        traceback.print_exc()
        return 1


def _describe(error: ValueError | OSError) -> str:
    """The message of a user error; those of other packages say where, as they may be bugs."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        advice = "; make room there and run the same command again" if error.errno in FULL_DISK else ""
        return f"{error.filename}: {error.strerror}{advice}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = frames[-1].f_globals.get("__name__", "?") if frames else "?"
    text = str(error) or type(error).__name__
    is_ours = module.startswith("foredraft.") or module == "__main__" or isinstance(error, UserError)
    return text if is_ours else f"{text} ({type(error).__name__} from {module})"


# Keys


def _fields(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """The fields of a dataclass with their resolved type hints."""
    hints = typing.get_type_hints(cls)
    return ((item, hints[item.name]) for item in dataclasses.fields(cls) if item.init)


def _nested_class(hint: Any) -> type[Any] | None:
    """The dataclass in `hint`: itself, or anywhere in `Section | None`, `str | tuple[Section, ...]`."""
    if _is_section(hint):
        return hint
    return next(filter(None, map(_nested_class, typing.get_args(hint))), None)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and isinstance(hint, type)


def _key_tree(cls: type[Any]) -> KeyTree:
    tree = KeyTree()
    for item, hint in _fields(cls):
        section = _nested_class(hint)
        tree[item.name] = _key_tree(section) if section else None
        if (below := tree[item.name]) is not None:
            below.is_optional = str in typing.get_args(hint)
    return tree


def _hints(cls: type[Any], prefix: str = "") -> dict[str, Any]:
    """The type of every dotted key, sections included."""
    found: dict[str, Any] = {}
    for item, hint in _fields(cls):
        found[prefix + item.name] = hint
        if nested := _nested_class(hint):
            found |= _hints(nested, f"{prefix}{item.name}.")
    return found


def _check_recipe_file(path: Path, keys: KeyTree) -> list[str]:
    """The dotted keys that a recipe file sets; UserError with line numbers for what is not a valid key."""
    if not path.is_file():
        raise UserError(f"recipe {path}: no such file")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"recipe {path}: expected `key: value` lines at the top level")
    return list(_walk_yaml(root, keys, "", str(path)))


def _walk_yaml(node: yaml.MappingNode, keys: KeyTree, prefix: str, file: str) -> Iterator[str]:
    seen: set[str] = set()
    for key_node, value in node.value:
        name, where = str(key_node.value), f"recipe {file}, line {key_node.start_mark.line + 1}"
        if name not in keys:
            valid = [prefix + key for key in keys]
            hint = nearest(prefix + name, valid) or f"; valid keys: {', '.join(valid)}"
            raise UserError(f"{where}: unknown key {prefix + name!r}{hint}")
        if name in seen:
            raise UserError(f"{where}: key {prefix + name!r} is given twice")
        seen.add(name)
        below = keys[name]
        if below and isinstance(value, yaml.MappingNode):
            yield from _walk_yaml(value, below, f"{prefix}{name}.", file)
        elif below and isinstance(value, yaml.SequenceNode):
            members = [member for member in value.value if isinstance(member, yaml.MappingNode)]
            yield from [
                key for member in members for key in _walk_yaml(member, below, f"{prefix}{name}.", file)
            ]
            yield prefix + name
        elif below and not value.tag.endswith(":null") and not below.is_optional:
            raise UserError(f"{where}: section {prefix + name!r} must hold keys of {', '.join(below)}")
        else:
            yield prefix + name


def _split_files(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part `--config FILE` (any number) from the other arguments, which then override the files."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(argv)
    for arg in rest:
        if arg == "--config":
            file = next(rest, None)
            if file is None:
                raise UserError("--config needs the path of a recipe")
            files.append(file)
        elif arg.startswith("--config="):
            files.append(arg.partition("=")[2])
        else:
            others.append(arg)
    return files, others


def _check_flags(flags: list[str], keys: Iterable[str]) -> set[str]:
    """The dotted keys that flags set; UserError for a flag that is no key."""
    valid = {f"--{name}" for name in (*keys, *OWN_FLAGS)}
    names = {flag.partition("=")[0].rstrip("+") for flag in flags if flag.startswith("--") and len(flag) > 2}
    for name in sorted(names - valid):
        raise UserError(f"unknown option {name}{nearest(name, valid)}")
    return {name[2:] for name in names} - set(OWN_FLAGS)


# Parsing


def _build_parser(cls: type[Any], prog: str) -> ArgumentParser:
    """One argument per value, with dotted names: jsonargparse itself cannot read sections with slots."""
    parser = ArgumentParser(prog=prog, description=cls.__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="recipe (YAML) with the keys below")
    _add_section(parser, cls, "", None)
    return parser


def _add_section(parser: Any, cls: type[Any], prefix: str, default: Any) -> None:
    title = f"{prefix.rstrip('.') or 'recipe'}: {(cls.__doc__ or cls.__name__).strip().splitlines()[0]}"
    group = parser.add_argument_group(title)
    for item, hint in _fields(cls):
        value = _default(item) if default is None else getattr(default, item.name)
        is_required = value is dataclasses.MISSING
        if _is_section(hint):
            _add_section(parser, hint, f"{prefix}{item.name}.", None if is_required else value)
        elif is_required:
            group.add_argument(f"--{prefix}{item.name}", type=hint, required=True)
        else:
            group.add_argument(f"--{prefix}{item.name}", type=hint, default=value)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _instantiate(cls: type[Recipe], values: Namespace, prefix: str = "") -> Recipe:
    """Build the dataclass bottom-up; what its `__post_init__` refuses is told with the section."""
    given: dict[str, Any] = {}
    for item, hint in _fields(cls):
        if item.name not in values:
            continue  # members of a list hold only what was given
        key, section, value = f"{prefix}{item.name}", _nested_class(hint), values[item.name]
        if section and isinstance(value, Namespace):
            value = _instantiate(section, value, f"{key}.")
        elif section and isinstance(value, list | tuple):
            members = enumerate(value)
            value = type(value)(_instantiate(section, member, f"{key}[{i}].") for i, member in members)
        given[item.name] = value
    try:
        return cls(**given)
    except ValueError as error:
        where = f"in section {prefix.rstrip('.')}: " if prefix else ""
        raise UserError(f"{where}{error}") from None


def _resolved_yaml(instance: Any, command: str, in_files: set[str], in_flags: set[str]) -> str:
    head = [f"# foredraft {command}, resolved; keys not named here have their defaults"]
    for origin, keys in (("recipe", in_files), ("command line", in_flags)):
        if keys:
            head.append(f"# from the {origin}: {', '.join(sorted(keys))}")
    return "\n".join(head) + "\n" + yaml.safe_dump(dataclasses.asdict(instance), sort_keys=False)


def _check_required(cls: type[Any], given: set[str], files: list[str]) -> None:
    missing = [key for key in _required(cls) if key not in given]
    if missing:
        where = f"recipe {', '.join(files)}: " if files else ""
        raise UserError(f"{where}missing keys: {', '.join(missing)}")


def _required(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys without a default."""
    for item, hint in _fields(cls):
        if _default(item) is dataclasses.MISSING:
            key = prefix + item.name
            yield from _required(hint, f"{key}.") if _is_section(hint) else [key]


def _explain(message: str, hints: Mapping[str, Any], files: list[str], in_flags: set[str]) -> str:
    """jsonargparse's message as one line: where the key was given, what it must be, what was found."""
    text = " ".join(message.split())
    key = ".".join(re.findall(r'[Kk]ey "([^"]+)"', text))
    value = re.search(r"Got value: (.+?)(?: - | Given value|$)", text) or re.search(
        r"Given value: (.+)$", text
    )
    if key not in hints:
        return text.removeprefix("argument ")
    where = "--" if key in in_flags else f"recipe {', '.join(files)}: "
    return f"{where}{key}: expected {_type_name(hints[key])}" + (f", got {value[1]}" if value else "")


def _type_name(hint: Any) -> str:
    """A type as a user would write its values."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if hint is type(None):
        return "null"
    if type(None) in typing.get_args(hint):
        return " or ".join(map(_type_name, typing.get_args(hint)))
    if _is_section(hint):
        return "a section"
    if _nested_class(hint):
        return "a list of sections"
    return hint.__name__ if type(hint) is type else str(hint)
