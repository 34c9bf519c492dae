"""The tutorials: notebooks become pages of the site, and can be run to refresh their outputs.

A hook of MkDocs makes a Markdown page of each notebook, so that its links are checked and it looks
like every other page. `python docs/extensions/notebooks.py` runs all notebooks, each in an empty
folder, and stores their outputs in them (it needs nbclient and ipykernel).
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Any, config: Any) -> Any:
    """MkDocs: a page in place of each notebook."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        uri = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, uri, content=to_markdown(notebook)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs: links to notebooks, which work on GitHub, lead to their pages."""
    return re.sub(r"\]\(([\w./-]+)\.ipynb(#[\w-]+)?\)", r"](\1.md\2)", markdown)


def to_markdown(notebook: dict[str, Any]) -> str:
    """The cells in order, with their outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "sh" if source.startswith("!") else "python"
        parts.append(f"```{language}\n{source.removeprefix('!')}\n```")
        parts += [_shown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/svg+xml" in data:  # as an image: its styles are its own
        code = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
        return f'<img alt="drawing" src="data:image/svg+xml;base64,{code}">'
    text = _COLOURS.sub("", "".join(data["text/plain"])).rstrip()
    return f"```text\n{text}\n```"


def run(path: Path) -> None:
    """Run a notebook in an empty folder and store its outputs."""
    import os
    import tempfile

    import nbformat
    from nbclient import NotebookClient

    os.environ["COLUMNS"] = "80"  # of tables
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times, which differ from run to run
        if cell.cell_type == "code":
            cell.outputs = _stored(cell.outputs)
    nbformat.write(notebook, path)


def _stored(outputs: list[Any]) -> list[Any]:
    """Outputs without warnings and folders of this machine; what is printed as one text."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if "text" in output:
            output.text = re.sub(r"/\S*/site-packages/", "", output.text)
            if kept and "text" in kept[-1]:
                kept[-1].text += output.text
                continue
        kept.append(output)
    return kept


if __name__ == "__main__":
    for tutorial in sorted(Path(__file__).parents[1].glob("tutorials/*.ipynb")):
        run(tutorial)
