"""The documents name files, folders and pages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "revcompile"
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [k for k in links if "://" not in k and not (page.parent / k).exists()]
    assert not missing


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
