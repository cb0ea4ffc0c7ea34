"""Without a command: lists the devices, then checks and measures the best one in a minute.

devices only lists them, check compares one with NumPy, explain names its kernels.
"""

import argparse
import sys

import clattn
from clattn import tour


def _tour(_: argparse.Namespace) -> int:
    return tour.show()


def _devices(_: argparse.Namespace) -> int:
    for device in clattn.devices():
        found = clattn.Context(device).capabilities
        print(f"{device.selector}  {found.kind}  {found.name} ({found.platform_name})")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    with clattn.ProgressBar("check") as progress:
        results = clattn.check(arguments.device, progress=progress)
    for result in results:
        print(result)
    return 0 if all(result.passed for result in results) else 1


def _explain(arguments: argparse.Namespace) -> int:
    shape = {"num_heads": arguments.heads, "num_kv_heads": arguments.kv_heads}
    shape |= {"head_size": arguments.head_size, "dtype": arguments.dtype}
    print(clattn.explain(clattn.Context(arguments.device), **shape))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m clattn", description=__doc__)
    parser.set_defaults(run=_tour)
    commands = parser.add_subparsers()
    commands.add_parser("devices").set_defaults(run=_devices)
    for name, run in (("check", _check), ("explain", _explain)):
        command = commands.add_parser(name)
        command.add_argument("--device", default="", help="gpu, cpu, P:D or part of a name")
        command.set_defaults(run=run)
    command.add_argument("--heads", type=int, default=32)
    command.add_argument("--kv-heads", type=int, default=8)
    command.add_argument("--head-size", type=int, default=128)
    command.add_argument("--dtype", default="f16")
    arguments = parser.parse_args()
    try:
        return arguments.run(arguments)
    except clattn.Error as error:
        print(f"clattn: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
