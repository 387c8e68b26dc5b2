"""Average the weights of two training stages: ``(1 - share) * first + share * second``, in float32."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from train import save_pieces


def load(folder: Path) -> dict[str, Tensor]:
    return {k: v for piece in sorted(folder.glob("best-*.safetensors")) for k, v in load_file(piece).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--share", type=float, required=True, help="of the second, 0 to 1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    first, second = load(args.first), load(args.second)
    save_pieces({k: (1 - args.share) * first[k] + args.share * second[k] for k in first}, args.out)
    about = json.loads((args.first / "best.json").read_text())
    (args.out / "best.json").write_text(json.dumps({"shape": about["shape"], "share": args.share}, indent=1))


if __name__ == "__main__":
    main()
