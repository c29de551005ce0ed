"""Rebuilds the committed gRPC stubs; `--check` fails when they are stale.

Stubs of grpcio-tools 1.76 load on protobuf 6.31 and 7; those of 1.85 fail on
older runtimes. So the generator is pinned and the runtime range is wide.
"""

import argparse
import pathlib
import sys
import tempfile

import grpc_tools
from grpc_tools import protoc

PINNED = "1.76.0"
ROOT = pathlib.Path(__file__).parent
PROTOS = sorted(ROOT.glob("strata_api/v1/*.proto"))


def generate(out: pathlib.Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `out`."""
    include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    argv = ["protoc", f"-I{ROOT}", f"-I{include}"]
    argv += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(argv + [str(p) for p in PROTOS]) != 0:
        raise SystemExit("protoc failed")
    for path in out.glob("strata_api/v1/*_pb2_grpc.py"):
        if "\nclass " not in path.read_text():
            path.unlink()  # a proto without services


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    from importlib.metadata import version

    if version("grpcio-tools") != PINNED:
        raise SystemExit(f"grpcio-tools {version('grpcio-tools')} is installed, the stubs are made with {PINNED}")
    if not check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        generate(pathlib.Path(tmp))
        made = sorted(p for p in pathlib.Path(tmp).rglob("*") if p.is_file())
        stale = [
            str(p.relative_to(tmp))
            for p in made
            if not (ROOT / p.relative_to(tmp)).exists() or (ROOT / p.relative_to(tmp)).read_bytes() != p.read_bytes()
        ]
    if stale:
        print("stale stubs, run `python protos/generate.py`:", ", ".join(stale))
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
