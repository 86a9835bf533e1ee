"""Will it fit? Compiles a run's programs for a TPU that is not there, and counts the memory of a chip, of a host and on disk.

    python -m launch.plan CONFIG --topology v5e:8x8 [--option value ...]

The programs are those of the run itself: the learner step, `score`, the decode call and the refill after a publish, each in its
largest bucket. Beside the one that runs lies all that the others need. The verdict is about the moment when the sum is largest;
it may be the arrival of a new policy at the sampler, or the decoding of an evaluation, which has a sampler of its own.
Not counted: a warm start, prefills and what environments append (smaller than a refill as a rule), compiled code (some tens of
MiB), fragmentation. The exit status is 0 if it fits, 1 if it does not, and 2 on bad input.
"""

import os

# Read when jax and libtpu are loaded, so they come before every other import. The machine's own devices stay untouched, and
# libtpu neither looks for the metadata of a TPU machine nor complains that there are none.
os.environ.update(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-64", TPU_WORKER_HOSTNAMES="localhost"
)

import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import rich.console
import tyro

from launch.build import Foundation
from launch.config import Config, check, check_writable, parse
from launch.display import Display, duration
from launch.memory import Unit, anchor_table
from launch.mesh import by_process
from launch.topology import HbmExceeded, ProgramMemory, by_itself, compile_program, devices_of, hbm_bytes, sole_use
from models.sharding import placed
from rl.budget import NUM_PREFIXES, AnchorBytes, device_bytes
from rl.learner import Learner, published_shapes
from rl.sampling_programs import SamplingPrograms
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing

LIVE_VERSIONS = 2  # published parameters on the learner's chips: the newest version, and the one that the sampler still has
DIVIDE_SAMPLER = "divide the sampler's weights further: --tensor, or --sampler-tensor with several processes or --sampler-devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(Config):
    """An experiment, and the TPU to plan it for."""

    topology: str  # kind of TPU and shape, such as v5e:8x8, v5p:2x2x1 or v6e:4x4
    json: pathlib.Path | None = None  # also write the figures here, in bytes


class Work(NamedTuple):
    """A program to compile."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    arguments: int  # bytes on a chip, by arithmetic
    beside: int  # bytes of what lies there and is not among them
    remedy: str  # what makes it smaller


@dataclasses.dataclass(frozen=True)
class Moment:
    """A program while it runs, or an arrival: what it takes of a chip, and what lies beside it. In bytes."""

    name: str
    memory: ProgramMemory
    beside: int
    remedy: str

    @property
    def total(self) -> int:
        return self.memory.peak + self.beside


@dataclasses.dataclass(frozen=True)
class Plan:
    """All figures, in bytes."""

    hbm: int  # of a chip
    learner: dict[str, int]  # what lies on a chip of the learner at all times
    sampler: dict[str, int]  # and on one of the sampler; the same if they share their chips
    moments: list[Moment]
    anchors: AnchorBytes

    @property
    def largest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def too_large(self) -> list[Moment]:
        return [moment for moment in self.moments if moment.total > self.hbm]


def main(arguments: list[str]) -> int:
    console = rich.console.Console(highlight=False, soft_wrap=True)
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        options_of = functools.partial(PlanOptions, topology=tyro.MISSING)
        name, options = parse(arguments, program="python -m launch.plan", options_of=options_of)
        check(options)
        check_writable("--json", options.json)
        with sole_use(lambda: console.print("waiting for another process that compiles with libtpu")):
            foundation = Foundation.of(options, devices_of(options.topology))
            foundation.check_division()
            with Display(0, console) as display:
                plan = make_plan(foundation, options.topology, display)
                show(plan, foundation, display)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    if options.json is not None:
        content = {"config": name, "topology": options.topology, **figures(plan, foundation)}
        options.json.write_text(json.dumps({**content, "seconds": seconds, "cpu_seconds": cpu_seconds}, indent=2) + "\n")
    console.print(f"\n{name} on {options.topology}, planned in {duration(seconds)} ({duration(cpu_seconds)} of processor time)")
    console.print(verdict(plan))
    return 1 if plan.too_large else 0


def make_plan(foundation: Foundation, topology: str, display: Display) -> Plan:
    """Counts what lies on the chips, and compiles what runs there."""
    published = foundation.published_shapes
    programs = foundation.sampling_programs(by_itself(foundation.sampler_mesh, topology))
    is_dedicated = foundation.scorer_mesh is not foundation.mesh
    scorer = foundation.scorer(mesh=by_itself(foundation.scorer_mesh, topology))
    learning = dataclasses.replace(foundation, mesh=by_itself(foundation.mesh, topology))
    learner = learning.learner(learning.source(SnapshotRing(1), scorer))
    anchors = foundation.anchor_bytes()
    state = {
        "parameters": device_bytes(learner.state_shapes.params),
        "optimizer": device_bytes(learner.state_shapes.optimizer),
        "published": LIVE_VERSIONS * device_bytes(published),
    }
    if anchors.held:
        state["anchor_held"] = anchors.held
    sampling = {
        "weights": device_bytes(programs.weights),
        "cache": device_bytes(programs.state),
        "prompts": NUM_PREFIXES * device_bytes(programs.prefix_cache),
    }
    serving = foundation.serving_shardings
    if serving is not None and not foundation.shares_devices:
        state["gathered"] = device_bytes(placed(published, serving))  # until it has been copied on to the sampler's chips
    on_learner, on_sampler = (state | sampling,) * 2 if foundation.shares_devices else (state, sampling)
    replay = anchors.replay + (0 if is_dedicated else sum(on_learner.values()))
    works = make_works(learning, learner, scorer, programs, on_learner, on_sampler, replay)
    hbm = hbm_bytes(foundation.devices[0])
    moments = []
    for index, work in enumerate(works, 1):
        display.phase(f"compiling {index} of {len(works)}: {work.name}")
        moments.append(compile_work(work, hbm))
    # A stack of layers arrives and is laid out for decoding, while the version before it still lies there; in an evaluation too.
    stack = device_bytes(placed(published, programs.parameter_shardings)) + sampling["cache"]
    arrival = ProgramMemory(arguments=stack, temporary=0, peak=stack + sampling["weights"])
    moments.append(Moment("new policy", arrival, sum(on_sampler.values()), DIVIDE_SAMPLER))
    return Plan(hbm, on_learner, on_sampler, moments, anchors)


def make_works(
    foundation: Foundation,
    learner: Learner,
    scorer: Scorer,
    programs: SamplingPrograms,
    on_learner: dict[str, int],
    on_sampler: dict[str, int],
    replay: int,
) -> list[Work]:
    """The programs of a run that may be large, with the largest shapes they are called with.

    While anchors are scored, `replay` bytes lie on a chip that does it, the scored version among them.
    """
    config = foundation.config
    scored = published_shapes(foundation.model, scorer.mesh, config.snapshots.publish_dtype)
    rows, length = config.loop.groups_per_step * config.loop.group_size // config.step.minibatches, foundation.lengths[-1]
    refill_rows = min(config.sampler.refill_rows, config.sampler.slots)
    state, sampling = on_learner["parameters"] + on_learner["optimizer"], on_sampler["weights"] + on_sampler["cache"]
    beside_learner, beside_sampler = sum(on_learner.values()), sum(on_sampler.values())
    return [
        Work(
            "learner step",
            lambda: learner.lower_update(rows, length),
            arguments=state,
            beside=beside_learner - state,
            remedy="raise --microbatches, or take more chips",
        ),
        Work(
            "score",
            lambda: scorer.lower(scored, length),
            arguments=device_bytes(scored),
            beside=replay - device_bytes(scored),
            remedy="lower --score-rows, or take more chips",
        ),
        Work(
            "decode",
            programs.lower_decode,
            arguments=sampling,
            beside=beside_sampler + on_sampler["prompts"],  # an evaluation has a sampler of its own beside that of the training
            remedy=f"lower --slots, or {DIVIDE_SAMPLER}",
        ),
        Work(
            "refill",
            lambda: programs.lower_refill(refill_rows, length),
            arguments=sampling,
            beside=beside_sampler - sampling,
            remedy="lower --refill-rows",
        ),
    ]


def compile_work(work: Work, hbm: int) -> Moment:
    """What a program takes; if a chip cannot hold it, what the compiler says that it would take."""
    try:
        return Moment(work.name, compile_program(work.name, work.lower()), work.beside, work.remedy)
    except HbmExceeded as exceeded:
        # A message without a number leaves the arithmetic, and that it is more than a chip has.
        peak = exceeded.needed or max(hbm + 1, work.arguments)
        return Moment(work.name, ProgramMemory(work.arguments, peak - work.arguments, peak), work.beside, work.remedy)


def show(plan: Plan, foundation: Foundation, display: Display) -> None:
    """The tables, in one unit."""
    config, unit = foundation.config, Unit.of(plan.largest.total)
    chips = [("chip", plan.learner)]
    if plan.sampler is not plan.learner:
        chips = [("learner's chip", plan.learner), ("sampler's chip", plan.sampler)]
    labels = {
        "parameters": "parameters, float32",
        "optimizer": "optimizer, two moments, float32",
        "published": f"published parameters, {config.snapshots.publish_dtype.value}, {LIVE_VERSIONS} versions",
        "anchor_held": "held to score anchors with",
        "gathered": "published parameters, whole in each process",
        "weights": f"sampler's weights, {config.model.compute_dtype.value}",
        "cache": f"KV cache, {config.sampler.slots} slots of {config.model.max_length:,} tokens",
        "prompts": f"KV cache of prompts on their way into slots, {NUM_PREFIXES}",
    }
    rows = [
        (label, *(unit(sizes[key]) if key in sizes else "" for _, sizes in chips))
        for key, label in labels.items()
        if any(key in sizes for _, sizes in chips)
    ]
    rows.append(("together", *(unit(sum(sizes.values())) for _, sizes in chips)))
    display.table(f"a chip at all times, {unit.name}", [("", *(name for name, _ in chips)), *rows])
    rows = [("", "arguments", "temporary", "peak", "beside", "sum")]
    for moment in plan.moments:
        sizes = (moment.memory.arguments, moment.memory.temporary, moment.memory.peak, moment.beside, moment.total)
        rows.append((moment.name, *map(unit, sizes)))
    display.table(f"a chip while it runs, {unit.name} (temporary: gradients, activations)", rows)
    display.table(*anchor_table(foundation, unit))


def verdict(plan: Plan) -> str:
    """Whether it fits; if not, by how much, and what to do."""
    unit, largest = Unit.of(plan.hbm), plan.largest
    if not plan.too_large:
        return (
            f"fits: at most {unit(largest.total)} of a chip's {unit(plan.hbm)} {unit.name} are in use ({largest.name}), "
            f"{unit(plan.hbm - largest.total)} are free"
        )
    lines = [f"does not fit into a chip's {unit(plan.hbm)} {unit.name}"]
    lines += [
        f"  {moment.name}: {unit(moment.total - plan.hbm)} {unit.name} too much; {moment.remedy}" for moment in plan.too_large
    ]
    return "\n".join(lines)


def figures(plan: Plan, foundation: Foundation) -> dict:
    """The plan as one flat JSON object; sizes in bytes, of one chip unless they are the ring's."""
    moments = {}
    for moment in plan.moments:
        sizes = dataclasses.asdict(moment.memory) | {"beside": moment.beside, "total": moment.total}
        moments |= {f"{moment.name.replace(' ', '_')}_{name}_bytes": size for name, size in sizes.items()}
    return {
        "fits": not plan.too_large,
        "over_bytes": max(0, plan.largest.total - plan.hbm),
        "largest": plan.largest.name,
        "hbm_bytes": plan.hbm,
        "chip": foundation.devices[0].device_kind,
        "chips": len(foundation.devices),
        "learner_chips": foundation.mesh.size,
        "sampler_chips": foundation.sampler_mesh.size,  # of each process
        "processes": len(by_process(foundation.devices)),
        "num_parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(foundation.model.shapes)),
        **{f"{name}_bytes": size for name, size in (plan.learner | plan.sampler).items()},
        "scorer_chips": foundation.scorer_mesh.size,
        **{f"anchor_{tier}_bytes": size for tier, size in dataclasses.asdict(plan.anchors).items()},
        **moments,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
