"""Benchmarks: what things cost here.

Timings on a machine with other work are noisy, so what is compared runs side by side, in one call. NAME is a module of
`launch/benches/`. The figures come as tables, and with --json as one flat JSON object.
"""

import dataclasses
import importlib
import json
import pathlib
import pkgutil
import sys

import tyro

import launch.benches
from launch.config import check_writable
from launch.display import Display

USAGE = "usage: python -m launch.bench NAME [--json FILE] [--option value ...]"


@dataclasses.dataclass(frozen=True)
class Common:
    """What every benchmark takes."""

    json: pathlib.Path | None = None  # also write the figures here


def names() -> list[str]:
    """The modules of `launch/benches/` that can be run."""
    modules = (module.name for module in pkgutil.iter_modules(launch.benches.__path__))
    return sorted(name for name in modules if not name.startswith("_"))


def main(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name not in names():
        if name in ("-h", "--help"):
            print(f"{USAGE}\n\n{__doc__}\nNAME is one of: {', '.join(names())}")
            return 0
        print(f"error: there is no benchmark {name!r} in launch/benches/; wanted one of: {', '.join(names())}", file=sys.stderr)
        return 2
    bench = importlib.import_module(f"launch.benches.{name}")
    options_type = dataclasses.make_dataclass("Options", [], bases=(bench.Options, Common), frozen=True)
    options = tyro.cli(options_type, args=rest, prog=f"python -m launch.bench {name}", description=bench.__doc__,
                       config=(tyro.conf.EnumChoicesFromValues,))
    try:
        check_writable("--json", options.json)
        with Display(0) as display:
            figures = bench.run(options, display)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
