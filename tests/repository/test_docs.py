"""The documents name files, pages and commands that exist, and their code runs as it stands."""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser as torchrun_parser

import revcompile
from revcompile import cli

PACKAGE = ROOT / "revcompile"
PAGES = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of the line before it."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start(1)].count("\n"), block.group(1)) for block in found]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


# -- links and names ------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The headings of a page as MkDocs and GitHub write them in addresses."""
    lines = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", lines, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_site_s_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", settings, re.MULTILINE)
    files = [*(ROOT / "docs").rglob("*.md"), *(page.with_suffix(".md") for page in TUTORIALS)]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in files]
    assert sorted(listed) == sorted(pages)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160 and len(text.split()) <= 1100


def test_files_named_in_the_architecture_exist() -> None:
    files = [f"/{file.relative_to(ROOT).as_posix()}" for file in ROOT.glob("*/**/*.py")]
    named = re.findall(r"`([\w/]+\.py)`", ARCHITECTURE)
    assert len(named) > 20
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_every_folder_of_the_package_is_in_the_architecture() -> None:
    listing = ARCHITECTURE.split("```")[3]
    parents = (PACKAGE, PACKAGE / "compiler", PACKAGE / "runtime")
    folders = [f for parent in parents for f in sorted(parent.iterdir()) if f.is_dir()]
    names = [folder.name for folder in folders if (folder / "__init__.py").exists()]
    assert len(names) > 15
    assert [name for name in names if f"  {name}/ " not in listing] == []


def test_the_newest_release_in_the_changelog_is_the_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changes, re.MULTILINE)
    assert releases[0] == revcompile.__version__
    numbers = [tuple(map(int, release.split("."))) for release in releases]
    assert numbers == sorted(set(numbers), reverse=True)


# -- Python ---------------------------------------------------------------------------------------


@pytest.fixture
def same_signals() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("same_signals")
@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page, "python")
    for package in ("transformers", "tensorboard"):
        if any(f"import {package}" in code or f"{package} import" in code for _, code in found):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in found:
        # The empty lines make a traceback name the page's own line.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.usefixtures("same_signals")
def test_the_recipe_for_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [code for _, code in blocks(ROOT / "docs/guides/checkpoints.md", "python")]
    (recipe,) = (code for code in codes if "signal.SIGTERM" in code)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(codes[0], namespace)
    make = namespace["make_trainer"]

    def interrupted(stages: int) -> Any:
        net, trainer = make(stages)
        step = trainer.step
        trainer.step = lambda *batch: (step(*batch), signal.raise_signal(signal.SIGTERM))
        return net, trainer

    namespace["make_trainer"] = interrupted
    with pytest.raises(SystemExit) as stopped:
        exec(recipe, namespace)
    assert stopped.value.code == 143
    assert (tmp_path / "runs/c/latest").read_text() == "step_00000010\n"
    namespace["make_trainer"] = make
    exec(recipe, namespace)
    assert namespace["trainer"].microbatches_seen == 40


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=name_of)
def test_a_tutorial_runs(tutorial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: starting a kernel would take longer than running the cells."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of commands
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    cells = json.loads(tutorial.read_text(encoding="utf-8"))["cells"]
    before = set(sys.modules)
    for cell in cells:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()
            assert shell.user_ns.get("_exit_code", 0) == 0  # of a command
    if "train" not in before:
        sys.modules.pop("train", None)
    stored = [output for cell in cells for output in cell.get("outputs", ())]
    assert stored and not [output for output in stored if output["output_type"] == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_script_for_ranks_gives_the_weights_of_one_process(ranks: int, tmp_path: Path) -> None:
    (_, script), *_ = blocks(ROOT / "docs/guides/machines.md", "python")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    weights = []
    for command in (torchrun, [sys.executable]):
        subprocess.run([*command, "train.py"], cwd=tmp_path, check=True)
        weights.append(load_file(tmp_path / "model.safetensors"))
    same = all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert same == (ranks == 2)  # four ranks are two replicas, which see other batches


@pytest.mark.slow
def test_the_readme_runs_with_a_stage_on_each_rank(tmp_path: Path) -> None:
    script = "\n".join(code for _, code in blocks(ROOT / "README.md", "python"))
    (tmp_path / "readme.py").write_text(script, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    subprocess.run([*torchrun, "readme.py"], cwd=tmp_path, check=True)


# -- commands -------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[Path, str]]:
    """Every command of every page, once."""
    seen: set[str] = set()
    for page in PAGES:
        for _, block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                command = shlex.join(shlex.split(line, comments=True))
                if command and command not in seen:
                    seen.add(command)
                    yield page, command
        text = page.read_text(encoding="utf-8")
        for inline in re.findall(r"`(python -m (?:benchmarks|tests)\.[^`]+)`", text):
            command = " ".join(re.sub(r"[\[\]]", "", inline).split())
            if command not in seen:
                seen.add(command)
                yield page, command


def check_make(page: Path, words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert words[1] in targets


def check_pip(page: Path, words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[1] == "install"
    for extra in re.findall(r"[\w-]+", words[-1]):
        assert extra in extras["optional-dependencies"]


def check_revcompile(page: Path, words: list[str]) -> None:
    assert cli.main(words[1:]) == 0


def check_python(page: Path, words: list[str]) -> None:
    if words[1] == "-m":
        module = f"{words[2]}.campaign" if words[2] == "tests.fuzz" else words[2]
        importlib.import_module(module).parse_args(words[3:])
    elif words[1] == "train.py":
        assert "Saved as `train.py`" in page.read_text(encoding="utf-8")
    else:
        assert (ROOT / words[1]).exists()
        parse = getattr(importlib.import_module(Path(words[1]).stem), "parse_args", None)
        if parse is not None:
            parse(words[2:])


def check_torchrun(page: Path, words: list[str]) -> None:
    args = torchrun_parser().parse_args(words[1:])
    check_python(page, ["python", args.training_script, *args.training_script_args])


CHECKS: dict[str, Callable[[Path, list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "revcompile": check_revcompile,
    "torchrun": check_torchrun,
}


@pytest.mark.parametrize(
    ("page", "command"), [pytest.param(*found, id=found[1]) for found in commands()]
)
def test_a_command_can_be_given(
    page: Path, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the package run; of scripts and trainings, names and options are checked."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    CHECKS[words[0]](page, words)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=name_of)
def test_pictures_follow_a_dark_page(picture: Path) -> None:
    assert "prefers-color-scheme" in picture.read_text(encoding="utf-8")
