"""What a run takes in memory and on disk, in words and in one unit."""

import pathlib
import shutil
from typing import NamedTuple

from launch.build import Foundation
from models.config import Precision
from rl.budget import LIKELY_DIFFERENCE, check_disk_fits


class Unit(NamedTuple):
    """A unit in which sizes are readable."""

    name: str
    size: int

    @classmethod
    def of(cls, size: int) -> "Unit":
        return cls("GiB", 2**30) if size >= 2**30 else cls("MiB", 2**20)

    def __call__(self, size: float) -> str:
        return f"{size / self.size:,.2f}"


def anchor_table(foundation: Foundation, unit: Unit | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Title and rows: what anchors take, by tier. By default in the unit that suits what they take on the host."""
    config, snapshots, anchors = foundation.config, foundation.config.snapshots, foundation.anchor_bytes()
    unit = unit or Unit.of(anchors.host)
    whose = "learner's" if foundation.scorer_mesh is foundation.mesh else "scorer's"
    rows = [
        ("", unit.name),
        ("a learner's device, at all times", unit(anchors.held)),
        (f"a {whose} device, while versions are replayed", unit(anchors.replay)),
        ("host memory of a process: whole versions, the newest and others", unit(anchors.host - anchors.differences)),
        ("host memory of a process: differences between versions, at most", unit(anchors.differences)),
        (f"disk: what {config.steps} steps persist, at most", unit(anchors.disk)),
    ]
    if snapshots.publish_dtype is Precision.BFLOAT16:
        label, at_most = "  rather, at learning rates up to 1e-5", rows.pop()
        on_host = min(LIKELY_DIFFERENCE * anchors.most_differences, anchors.differences)
        on_disk = anchors.keyframes + LIKELY_DIFFERENCE * (anchors.disk - anchors.keyframes)
        rows += [(label, unit(on_host)), at_most, (label, unit(on_disk))]
    return f"anchors: {snapshots.old_logprobs.value}, a ring of {snapshots.kept_versions}", rows


def check_disk(foundation: Foundation) -> None:
    """Refuses a run that the disk where its directory shall be cannot hold.

    Raises:
      ValueError: so it is.
    """
    directory = (foundation.config.run_dir or pathlib.Path()).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    check_disk_fits(foundation.anchor_bytes(), available=shutil.disk_usage(existing).free)
