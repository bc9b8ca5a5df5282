"""MkDocs hooks: reference pages from the specs, and pages of this repository outside docs/.

`make docs` uses them. A link to a file that is no page of the site is shown as the file's name.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md")  # pages of the repository that the site shows, by their place in the root
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and pages from outside docs/."""
    pages = {"reference/index.md": index, "reference/commands.md": commands, "reference/python.md": python}
    pages |= {f"reference/{kind}.md": maker for kind, maker in kinds().items()}
    for place, maker in pages.items():
        files.append(File.generated(config, place, content=maker()))
    for name in OUTSIDE:
        files.append(File.generated(config, name, content=_moved((ROOT / name).read_text())))
    section = next(part["Reference"] for part in config.nav or [] if "Reference" in part)
    section[1:] = [place for place in pages if place != "reference/index.md"]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show links to what is no page, such as a source file or a folder of results, as text."""
    here = PurePosixPath(page.file.src_uri).parent
    known = {f.src_uri for f in files}

    def shown(found: re.Match[str]) -> str:
        words, target, anchor = found.groups()
        place = normpath(str(here / target))
        if place in known or not (ROOT / "docs" / place).exists():
            return found[0]  # MkDocs refuses what does not exist
        if place.removeprefix("../") in OUTSIDE:
            return f"[{words}]({'../' * (len(here.parts))}{place.removeprefix('../')}{anchor or ''})"
        return words if words.startswith("`") else f"{words} (`{place.removeprefix('../')}`)"

    return LINK.sub(shown, markdown)


def _moved(markdown: str) -> str:
    """A page of the root as it would stand in docs/."""
    return re.sub(r"\]\(docs/", "](", markdown)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    head = list(head)
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def kinds() -> dict[str, Callable[[], str]]:
    from effuse.tools.names import KINDS

    return {kind: (lambda kind=kind: specs(kind)) for kind in ("recipe", "table", *KINDS, "other")}  # type: ignore[misc]


def index() -> str:
    from effuse.tools.names import KINDS, first_line

    rows = [["[recipe](recipe.md)", "a whole run"], ["[table](table.md)", "a published table, as recipes"]]
    rows += [[f"[{kind}]({kind}.md)", first_line(base)] for kind, base in KINDS.items()]
    rows += [["[other](other.md)", "what stands inside the others"]]
    return (
        "# Reference\n\nEvery name, key, type and default, as `effuse list NAME` prints them. The pages are made from the "
        f"source.\n\n{table(['kind', 'what'], rows)}\n\n- [Commands](commands.md)\n- [Python](python.md)\n"
    )


def specs(kind: str) -> str:
    """A page for all names of a kind."""
    parts = [f"# {kind}\n"]
    for entry in entries(kind):
        parts.append(f"## {entry.name}\n\n{entry.about}\n")
        if entry.keys:
            rows = [
                [f"`{key.name}`", key.type, "must be given" if key.default is None else f"`{key.default}`", key.remark]
                for key in entry.keys
            ]
            parts.append(table(["key", "type", "default", "meaning"], rows) + "\n")
    return "\n".join(parts)


def entries(kind: str) -> list[Any]:
    from effuse.core.registry import registry
    from effuse.core.spec import Spec
    from effuse.tools.names import OTHER, function_entry, functions, spec_entry

    if kind in functions():
        return [function_entry(kind, name, found) for name, found in sorted(functions()[kind].items())]
    wanted = OTHER if kind == "other" else kind
    found = [spec_entry(cls) for cls in registry(Spec).values()]
    return sorted((e for e in found if e.kind == wanted), key=lambda e: e.name)


def commands() -> str:
    """A page of all commands with their arguments and options."""
    parts = ["# Commands\n"]
    for name, command in leaves(typer.main.get_command(app())):
        parts.append(f"## effuse {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        rows = [row for parameter in command.params if (row := described(parameter))]
        if rows:
            parts.append(table(["argument or option", "default", "meaning"], rows) + "\n")
    return "\n".join(parts)


def app() -> typer.Typer:
    """The command line with all its commands: importing a module registers its own."""
    import effuse.cli

    for module in pkgutil.iter_modules(effuse.cli.__path__):
        importlib.import_module(f"effuse.cli.{module.name}")
    return effuse.cli.app


def leaves(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Commands without subcommands, by the words that call them."""
    if isinstance(command, click.Group):
        for word, inner in sorted(command.commands.items()):
            yield from leaves(inner, f"{name} {word}".strip())
    elif not command.hidden:
        yield name, command


def described(parameter: click.Parameter) -> list[str] | None:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    named = isinstance(parameter, click.Argument)
    names = str(parameter.metavar or parameter.name).upper() if named else ", ".join(parameter.opts)
    default = parameter.default
    shown = "" if default is None or callable(default) or default in ((), [], False) else f"`{default}`"
    return [f"`{names}`", "must be given" if parameter.required else shown, getattr(parameter, "help", None) or ""]


def python() -> str:
    """A page of what `import effuse` gives."""
    import effuse

    parts = [f"# Python\n\n```text\n{inspect.cleandoc(effuse.__doc__ or '')}\n```\n"]
    for name in effuse.__all__:
        thing = getattr(effuse, name)
        signature = str(inspect.signature(thing)).replace("effuse.", "")
        parts.append(f"## effuse.{name}\n\n```text\n{name}{signature}\n```\n\n{inspect.getdoc(thing) or ''}\n")
    return "\n".join(parts)
