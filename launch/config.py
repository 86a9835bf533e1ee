"""What a run is made of: one dataclass, a Python file per experiment in `launch/configs/`, and the command line on top.

Every choice that reaches `rl/` is checked here, together, before anything is compiled or written.
"""

import argparse
import dataclasses
import functools
import importlib
import pathlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TypeVar

import tyro

import launch.configs
from launch.pretrained import PretrainedOptions, check_context, check_weights, resolved, with_shape
from models.config import ModelConfig, Precision
from rl.budget import GIB, RingOptions
from rl.environments import (
    ArithmeticOptions,
    Environment,
    EnvironmentName,
    FrozenLakeOptions,
    ReasoningGymOptions,
    RunnerOptions,
    Split,
    ToyTextOptions,
    make,
)
from rl.learner import OptimizerOptions, StepOptions
from rl.loop import LoopOptions, RingFullPolicy
from rl.objective import Objective
from rl.old_logprobs import EwmaOptions, GonePolicy, Interpolation, SourceName
from rl.presets import PRESETS
from rl.requests import Swap
from rl.snapshots import check_capacity
from rl.warmstart import WarmStartOptions


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Devices along each mesh axis; -1 takes all that the others leave."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """The sampling engine, its devices and its slots."""

    sampler_devices: int = 0  # devices of its own, after those of the mesh; 0: it shares the learner's
    sampler_tensor: int = 1  # how many of them divide a layer's heads
    slots: int = 64
    decode_steps_per_call: int = 8  # most decode steps in one device call
    temperature: float = 1.0  # of sampling and of scoring: there is only one
    top_k: int = 0  # draw from so many of the likeliest tokens; only for evaluation: training refuses a truncated distribution
    top_p: float = 1.0  # draw from the likeliest tokens that hold this mass; likewise
    swap: Swap = Swap.REPREFILL
    refill_rows: int = 16  # contexts recomputed in one device call after a publish
    prefill_chunk: int = 512  # tokens of a prompt that the other slots wait for at a time
    max_request_tokens: int | None = None  # sampled in one episode over all its turns; it ends, truncated, when it has them
    deadline: int | None = None  # decode steps after which an episode is cancelled, wherever it is


@dataclasses.dataclass(frozen=True)
class SnapshotOptions:
    """The ring of parameter snapshots and how they are scored."""

    old_logprobs: SourceName = SourceName.SNAPSHOT  # where the proximal logprobs come from
    scorer_devices: int = 0  # for --old-logprobs dedicated: devices of its own, after those of learner and sampler
    interpolation: Interpolation = Interpolation.A3PO  # for --old-logprobs interpolate
    ring_capacity: int = 8  # versions; at least max_staleness + 1, unless full rings evict and gone versions are no error
    ring_host_gib: float | None = None  # host memory for them on each process; beyond it differences go to disk
    version_gone: GonePolicy = GonePolicy.ERROR  # what becomes of tokens whose version was let go before they were scored
    persist_every: int = 1  # every so many versions one is written to disk, for the audit
    keyframe_every: int = 16  # of versions written one after the other, one in so many is written whole
    score_rows: int = 1  # rows a device in one scored call; part of the bucket
    exactness_every: int = 1  # of the trajectories, one in so many is also scored live and compared; 0: none
    decompose_every: int = 8  # of the trajectories, one in so many has its log ratio taken apart; 0: none
    publish_dtype: Precision = Precision.BFLOAT16

    @property
    def replays(self) -> bool:
        """Whether versions are got from the ring."""
        return self.old_logprobs.replays(is_decomposed=self.decompose_every > 0)

    @property
    def kept_versions(self) -> int:
        """Versions that the ring really keeps: where nothing is got from it, the newest is enough."""
        return self.ring_capacity if self.replays else 1

    @property
    def ring(self) -> RingOptions:
        """The ring, as far as it takes memory."""
        host_bytes = None if self.ring_host_gib is None else int(self.ring_host_gib * GIB)
        return RingOptions(self.kept_versions, self.replays, self.persist_every, self.keyframe_every, host_bytes)


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment. Groups wrapped in `OmitArgPrefixes` appear on the command line without their names."""

    model: ModelConfig
    pretrained: tyro.conf.OmitArgPrefixes[PretrainedOptions] = PretrainedOptions()
    environment: EnvironmentName = EnvironmentName.FROZEN_LAKE
    frozen_lake: FrozenLakeOptions = FrozenLakeOptions()
    arithmetic: ArithmeticOptions = ArithmeticOptions()
    toy_text: ToyTextOptions = ToyTextOptions()
    reasoning_gym: ReasoningGymOptions = ReasoningGymOptions()
    runner: tyro.conf.OmitArgPrefixes[RunnerOptions] = RunnerOptions()
    mesh: tyro.conf.OmitArgPrefixes[MeshOptions] = MeshOptions()
    warm_start: WarmStartOptions = WarmStartOptions()
    optimizer: tyro.conf.OmitArgPrefixes[OptimizerOptions] = OptimizerOptions()
    objective: tyro.conf.OmitArgPrefixes[Objective] = Objective()
    step: tyro.conf.OmitArgPrefixes[StepOptions] = StepOptions()
    loop: tyro.conf.OmitArgPrefixes[LoopOptions] = LoopOptions()
    sampler: tyro.conf.OmitArgPrefixes[SamplerOptions] = SamplerOptions()
    snapshots: tyro.conf.OmitArgPrefixes[SnapshotOptions] = SnapshotOptions()
    ewma: EwmaOptions = EwmaOptions()  # for --old-logprobs ewma
    length_buckets: int = 1  # padded lengths between 0 and the context's; each costs its compilations
    evaluation_episodes: int = 256  # held-out instances
    seed: int = 0
    steps: int = 60  # learner steps
    checkpoint_every: int = 16  # learner steps between two checkpoints; 0: none but when asked to stop
    run_dir: pathlib.Path | None = None  # default: runs/, the date and time, and the config's name

    def make_environment(self, split: Split) -> Environment:
        """One environment of the configured family."""
        return self.environment_factory(split)()

    def environment_factory(self, split: Split) -> Callable[[], Environment]:
        """Makes environments of the configured family; it pickles, and pulls no accelerator's library into a worker."""
        options = {
            EnvironmentName.FROZEN_LAKE: self.frozen_lake,
            EnvironmentName.ARITHMETIC: self.arithmetic,
            EnvironmentName.TOY_TEXT: self.toy_text,
            EnvironmentName.REASONING_GYM: self.reasoning_gym,
        }
        return functools.partial(make, self.environment, split, options[self.environment])


@dataclasses.dataclass(frozen=True)
class Invocation(Config):
    """One call of `launch.train`: an experiment, and how to come by its run."""

    resume: bool = False  # go on from the newest checkpoint in --run-dir, with the config of that run
    repeat: pathlib.Path | None = None  # run again, in one thread, in the order that this run of --schedule threads recorded
    distributed: bool = False  # this is one of several processes; on a TPU pod they find each other
    coordinator: str | None = None  # elsewhere: host:port of process 0, the same for all
    num_processes: int | None = None  # elsewhere: how many there are
    process_id: int | None = None  # elsewhere: which one this is, from 0

    @property
    def config(self) -> Config:
        """The experiment alone."""
        return Config(**{field.name: self.__dict__[field.name] for field in dataclasses.fields(Config)})


Options = TypeVar("Options", bound=Config)


OBJECTIVE = "--objective"


class ConfigError(ValueError):
    """A configuration that cannot run."""


def check_writable(option: str, path: pathlib.Path | None) -> None:
    """Refuses a file that an option names where there is no directory for it: better before hours of work than after.

    Raises:
      ConfigError: so it is.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path} lies in no directory; make {path.parent} first")


def config_names() -> list[str]:
    """The files of `launch/configs/`."""
    return sorted(module.name for module in pkgutil.iter_modules(launch.configs.__path__))


def load_config(name: str) -> Config:
    """The config of that name.

    Raises:
      ConfigError: there is none.
    """
    if name not in config_names():
        raise ConfigError(f"there is no config {name!r} in launch/configs/; wanted one of: {', '.join(config_names())}")
    return importlib.import_module(f"launch.configs.{name}").config()


def parse(arguments: Sequence[str], *, program: str, options_of: Callable[..., Options] = Invocation) -> tuple[str, Options]:
    """`[CONFIG] [--option value ...]` to the config's name and what is asked for; see `parse_options`.

    Raises:
      ConfigError: there is no such config or objective.
    """
    arguments = list(arguments)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "quickstart"
    config = load_config(name)
    return name, parse_options(arguments, config, program=f"{program} {name}", options_of=options_of)


def load_objective(name: str) -> Objective:
    """The preset of that name.

    Raises:
      ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no objective {name!r}; wanted one of: {', '.join(PRESETS)}")
    return PRESETS[name]()


def _take_objective(arguments: Sequence[str], program: str) -> tuple[str | None, list[str]]:
    """The value of `--objective`, and the other arguments: which options there are depends on it."""
    parser = argparse.ArgumentParser(program, add_help=False, allow_abbrev=False)
    parser.add_argument(OBJECTIVE, action="append", default=[], metavar="NAME")
    taken, others = parser.parse_known_args(arguments)
    if len(taken.objective) > 1:
        raise ConfigError(f"{OBJECTIVE} is given {len(taken.objective)} times, wanted once: {', '.join(taken.objective)}")
    return (taken.objective or [None])[0], others


def parse_options(
    arguments: Sequence[str], default: Config, *, program: str, options_of: Callable[..., Options] = Invocation
) -> Options:
    """Options on top of a config; a command with more of them than `Config` has says so by `options_of`.

    `--objective NAME` replaces the config's whole objective; its options come on top. A pretrained model brings its shape. Exits
    with a message on unknown options.

    Raises:
      ConfigError, ValueError: there is no such objective, or no such model.
    """
    objective, arguments = _take_objective(arguments, program)
    if objective is not None:
        default = dataclasses.replace(default, objective=load_objective(objective))
    default = options_of(**default.__dict__)
    options = tyro.cli(
        type(default),
        default=default,
        args=arguments,
        prog=program,
        description=f"Configs: {', '.join(config_names())} (the first argument; default quickstart).\n\n"
        f"Objectives ({OBJECTIVE} NAME, in place of the config's own): {', '.join(PRESETS)}. An objective comes with options of "
        f"its own, which are shown below: those of NAME with {OBJECTIVE} NAME --help.",
        config=(tyro.conf.EnumChoicesFromValues, tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
    )
    pretrained = resolved(options.pretrained)
    return dataclasses.replace(options, pretrained=pretrained, model=with_shape(options.model, pretrained, default.model))


def check(config: Config) -> None:
    """Refuses what cannot run, or would break the meaning of a ratio.

    Raises:
      ConfigError, ValueError: what, got, wanted, what to do.
    """
    if config.sampler.top_p != 1.0 or config.sampler.top_k:
        raise ConfigError(
            f"--top-p is {config.sampler.top_p} and --top-k {config.sampler.top_k}, wanted 1 and 0 for training: a truncated "
            "distribution gives the tokens it cuts off probability 0, and every ratio loses its meaning; use them only in "
            "launch.evaluate"
        )
    if not config.sampler.temperature > 0:
        raise ConfigError(
            f"--temperature is {config.sampler.temperature}, wanted more than 0: greedy tokens have no ratio to train on"
        )
    environment = config.make_environment(Split.TRAIN)
    check_weights(config.pretrained, config.model)
    check_context(config.pretrained, config.model, environment)
    if config.warm_start.updates and not environment.has_expert:
        raise ConfigError(f"{config.environment.value} has no expert to warm-start from; set --warm-start.updates 0")
    if config.loop.group_size < 2:
        raise ConfigError(
            f"--group-size is {config.loop.group_size}, wanted at least 2: an advantage compares the members of a group"
        )
    for option, (value, minimum) in {
        "--steps": (config.steps, 1),
        "--groups-per-step": (config.loop.groups_per_step, 1),
        "--publish-every": (config.loop.publish_every, 1),
        "--decode-steps": (config.loop.decode_steps, 1),
        "--max-staleness": (config.loop.max_staleness, 0),
        "--decode-steps-per-call": (config.sampler.decode_steps_per_call, 1),
        "--prefill-chunk": (config.sampler.prefill_chunk, 1),
        "--max-request-tokens": (1 if config.sampler.max_request_tokens is None else config.sampler.max_request_tokens, 1),
        "--deadline": (1 if config.sampler.deadline is None else config.sampler.deadline, 1),
        "--turn-tokens": (1 if config.pretrained.turn_tokens is None else config.pretrained.turn_tokens, 1),
        "--sampler-devices": (config.sampler.sampler_devices, 0),
        "--sampler-tensor": (config.sampler.sampler_tensor, 1),
        "--persist-every": (config.snapshots.persist_every, 1),
        "--keyframe-every": (config.snapshots.keyframe_every, 1),
        "--scorer-devices": (config.snapshots.scorer_devices, 0),
        "--ring-capacity": (config.snapshots.ring_capacity, 1),
        "--exactness-every": (config.snapshots.exactness_every, 0),
        "--decompose-every": (config.snapshots.decompose_every, 0),
        "--checkpoint-every": (config.checkpoint_every, 0),
    }.items():
        if value < minimum:
            raise ConfigError(f"{option} is {value}, wanted at least {minimum}")
    config.objective.check()
    _check_source(config)


def _check_source(config: Config) -> None:
    """What the old-logprob source needs."""
    config.ewma.check()
    snapshots = config.snapshots
    is_dedicated = snapshots.old_logprobs is SourceName.DEDICATED
    if is_dedicated and not snapshots.scorer_devices:
        raise ConfigError(
            "--old-logprobs dedicated wants devices of its own: set --scorer-devices, as many as the learner's mesh has for "
            "the same bits; or take --old-logprobs snapshot, which scores on the learner's"
        )
    if snapshots.scorer_devices and not is_dedicated:
        raise ConfigError(
            f"--scorer-devices {snapshots.scorer_devices} would idle with --old-logprobs {snapshots.old_logprobs.value}; "
            "leave it out, or set --old-logprobs dedicated"
        )
    if snapshots.ring_host_gib is not None and (snapshots.persist_every != 1 or not snapshots.ring_host_gib > 0):
        raise ConfigError(
            f"--ring-host-gib is {snapshots.ring_host_gib} with --persist-every {snapshots.persist_every}, wanted more than 0 "
            "with --persist-every 1: what leaves the memory must be on disk"
        )
    wanted, name = config.loop.max_staleness + 1, snapshots.old_logprobs.value
    if snapshots.replays and not snapshots.old_logprobs.needs_ring and snapshots.ring_capacity < wanted:
        raise ConfigError(
            f"--decompose-every {snapshots.decompose_every} compares {name} with exact old logprobs, so it wants --ring-capacity "
            f"{wanted} or more, got {snapshots.ring_capacity}; raise it, or leave the comparison out with --decompose-every 0"
        )
    if snapshots.replays:
        if snapshots.ring_capacity < 2:
            raise ConfigError(
                f"--ring-capacity is {snapshots.ring_capacity}, wanted 2 or more where versions are replayed: the sampler still "
                "uses one while the next is put"
            )
        may_miss = config.loop.ring_full is RingFullPolicy.EVICT and snapshots.version_gone is not GonePolicy.ERROR
        if not may_miss:
            check_capacity(snapshots.ring_capacity, config.loop.max_staleness)
        elif is_dedicated and snapshots.ring_capacity < wanted:
            raise ConfigError(
                f"--ring-capacity is {snapshots.ring_capacity}, wanted {wanted} or more with --old-logprobs dedicated: which of "
                "the tokens have been scored when their version is evicted would be a matter of chance"
            )
