"""Look at what the compiler did: the table, a stage's code, how a block was rewired, drawings.

python examples/inspect_stages.py
python examples/inspect_stages.py --model vit_base_patch16_224 --stages 8 --block blocks.3
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import timm

import revcompile


def main(argv: Sequence[str] | None = None) -> Path:
    """Compile a model and show it from all sides; returns the folder with the drawings."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="resnet50", help="name of a timm model")
    parser.add_argument("--stages", type=int, default=18)
    parser.add_argument("--stage", type=int, help="whose code to print (default: in the middle)")
    parser.add_argument("--block", help="block to explain (default: the first of that stage)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the drawings")
    args = parser.parse_args(argv)
    folder: Path = args.out
    folder.mkdir(parents=True, exist_ok=True)

    net = revcompile.petrafy(timm.create_model(args.model), num_stages=args.stages)
    print(net)
    index = net.num_stages // 2 if args.stage is None else args.stage
    stage = net.stages[index]
    print(stage.code)  # stage.source(verbose=True): the flat graphs that run
    print(stage.program)
    print(net.explain(args.block or stage.part.pieces[0].name))

    net.draw(folder / "net.svg")
    net.draw(folder / "net.html")  # one file: click on a stage, search for a module
    net.draw_schedule(folder / "timeline.svg")
    print(f"drawings: {folder / 'net.svg'}, {folder / 'net.html'}, {folder / 'timeline.svg'}")
    return folder


if __name__ == "__main__":
    main()
