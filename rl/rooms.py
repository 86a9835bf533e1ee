"""The rooms of a run, side by side: `launch.build` furnishes them, `rl.loop` conducts them."""

import dataclasses

from rl.admission import Admission
from rl.budget import AnchorBytes
from rl.decomposition import Decomposition
from rl.exactness import ExactnessProbe
from rl.learner import Learner
from rl.ledger import Ledger
from rl.metrics import MetricsWriter
from rl.old_logprobs import OldLogprobSource
from rl.reference import ReferencePolicy
from rl.rollout import Rollouts
from rl.sampler import Sampler
from rl.snapshot_store import SnapshotStore
from rl.snapshots import SnapshotRing
from rl.timeline import Timeline
from rl.types import SamplingContract


@dataclasses.dataclass
class Rooms:
    """Each room has its own module and story."""

    learner: Learner
    ring: SnapshotRing
    store: SnapshotStore  # where the ring persists
    sampler: Sampler
    rollouts: Rollouts
    admission: Admission
    source: OldLogprobSource
    reference: ReferencePolicy
    probe: ExactnessProbe
    decomposition: Decomposition
    ledger: Ledger
    metrics: MetricsWriter
    timeline: Timeline
    anchor_bytes: AnchorBytes
    contract: SamplingContract  # what the learner takes sampled tokens for; others are refused

    @property
    def needs_ring(self) -> bool:
        """Whether versions must stay in the ring until their last token is scored."""
        return self.source.name.replays(is_decomposed=self.decomposition.is_on)
