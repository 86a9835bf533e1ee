"""From a config to the rooms of `rl/`, ready to run."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax

from launch import run_directory
from launch.config import Config, ConfigError
from launch.mesh import by_process, check_threads, make_mesh, make_sampler_mesh, make_scorer_mesh, make_serving_mesh
from launch.pretrained import conversation_of, locate
from models.config import ModelConfig, Precision
from models.conversation import Conversation
from models.pretrained import import_params
from models.sharding import DECODE_RULES, RULES, check_rows, num_batch_shards, parameter_shardings
from models.transformer import Model, Params
from rl import processes
from rl.admission import Admission
from rl.batching import length_buckets
from rl.budget import AnchorBytes, anchor_bytes, available_bytes, check_ring_fits, check_sampler_fits
from rl.decomposition import Decomposition
from rl.environments import Split
from rl.evaluation import Evaluation, evaluate
from rl.exactness import ExactnessProbe
from rl.learner import Learner, check_batch_rows, published_shapes
from rl.ledger import Ledger
from rl.loop import Loop, Schedule
from rl.metrics import MetricsWriter
from rl.old_logprobs import OldLogprobSource, make_source
from rl.reference import ReferencePolicy
from rl.rollout import Rollouts
from rl.rooms import Rooms
from rl.sampler import Sampler
from rl.sampling_programs import SamplingPrograms
from rl.scorer import Bucket, Scorer
from rl.snapshot_store import SnapshotStore
from rl.snapshots import SnapshotRing
from rl.timeline import Timeline
from rl.types import SamplingContract
from rl.warmstart import check_warm_rows


@dataclasses.dataclass(frozen=True)
class Foundation:
    """What training, evaluation and audit all stand on: the structure, the devices, the buckets."""

    config: Config
    model: Model
    devices: tuple[jax.Device, ...]
    mesh: jax.sharding.Mesh  # of learner and scorer
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, devices: Sequence[jax.Device] | None = None) -> "Foundation":
        """Of these devices; by default of those that are there."""
        devices = tuple(jax.devices() if devices is None else devices)
        model_config: ModelConfig = config.model
        lengths = length_buckets(model_config.max_length, config.length_buckets)
        reserved = config.sampler.sampler_devices + config.snapshots.scorer_devices
        mesh = make_mesh(config.mesh, devices, reserved=reserved)
        return cls(config, Model(model_config), devices, mesh, lengths)

    def check(self) -> None:
        """Refuses, before anything is compiled or written, what does not divide over the mesh or fit into memory."""
        self.check_division()
        check_ring_fits(self.published_shapes, self.config.snapshots.ring)
        available = available_bytes(self.sampler_mesh)
        if available is not None:
            programs = self.sampling_programs(self.sampler_mesh)
            check_sampler_fits(programs.weights, programs.state, programs.prefix_cache, num_slots=self.config.sampler.slots,
                               num_samplers=2 if self.config.evaluation_episodes else 1, available=available)  # fmt: skip

    def check_division(self) -> None:
        """Refuses what does not divide over the mesh."""
        config, options = self.config, self.config.loop
        parameter_shardings(self.model.axes, self.model.shapes, self.mesh)
        num_processes = len(by_process(self.devices))
        if options.groups_per_step % num_processes:
            raise ConfigError(
                f"--groups-per-step {options.groups_per_step} does not divide over {num_processes} processes; make it a multiple"
            )
        check_batch_rows(options.groups_per_step * options.group_size, config.step, self.mesh)
        check_rows("sampler --slots", config.sampler.slots, self.sampler_mesh)
        parameter_shardings(self.model.axes, self.model.shapes, self.sampler_mesh, DECODE_RULES)
        _ = self.serving_shardings
        if config.snapshots.scorer_devices:
            if num_processes > 1:
                raise ConfigError(
                    f"--old-logprobs dedicated runs in one process, here are {num_processes}; take --old-logprobs snapshot"
                )
            parameter_shardings(self.model.axes, self.model.shapes, self.scorer_mesh)
            check_threads(self.mesh, self.scorer_mesh)
        if config.warm_start.updates:
            check_warm_rows(config.warm_start, self.mesh)
        if num_processes > 1 and options.schedule is Schedule.THREADS and config.snapshots.exactness_every:
            raise ConfigError(
                "--exactness-every wants --schedule lockstep with several processes, where all of them serve the same versions "
                "in the same order; set --exactness-every 0"
            )

    @property
    def sampler_mesh(self) -> jax.sharding.Mesh:
        """Of this process."""
        return make_sampler_mesh(self.config.sampler, self.devices, self.mesh, processes.index())

    @property
    def scorer_mesh(self) -> jax.sharding.Mesh:
        """Of the old logprobs: the learner's, unless a dedicated scorer has devices of its own."""
        num_scorer, num_sampler = self.config.snapshots.scorer_devices, self.config.sampler.sampler_devices
        return make_scorer_mesh(num_scorer, num_sampler, self.devices, self.mesh) if num_scorer else self.mesh

    @property
    def shares_devices(self) -> bool:
        """Whether learner and sampler run on the same devices."""
        return not set(self.mesh.devices.flat).isdisjoint(self.sampler_mesh.devices.flat)

    @property
    def serving_shardings(self) -> Params | None:
        """Where a published policy must lie for the sampler of each process to get at it; None with one process, which has it."""
        mesh = make_serving_mesh(self.config.sampler, self.devices, self.mesh)
        rules = DECODE_RULES if self.shares_devices else RULES
        return mesh and parameter_shardings(self.model.axes, self.model.shapes, mesh, rules)

    @property
    def parameter_shardings(self) -> Params:
        return parameter_shardings(self.model.axes, self.model.shapes, self.mesh)

    @property
    def published_shapes(self) -> Params:
        """The published parameters' shapes, types and shardings."""
        return published_shapes(self.model, self.mesh, self.config.snapshots.publish_dtype)

    def anchor_bytes(self) -> AnchorBytes:
        """What the anchors of the whole run take, tier by tier."""
        config, snapshots = self.config, self.config.snapshots
        return anchor_bytes(
            snapshots.old_logprobs,
            self.published_shapes,
            scored_shapes=published_shapes(self.model, self.scorer_mesh, snapshots.publish_dtype),
            ring=snapshots.ring,
            num_publishes=config.steps // config.loop.publish_every,
            has_reference=config.objective.needs_reference,
        )

    def scorer(self, bucket: Bucket | None = None, *, mesh: jax.sharding.Mesh | None = None) -> Scorer:
        """The run's scorer, on its mesh or one like it; or, to repeat what was scored in one bucket, one for that bucket alone.

        Raises:
          ShardingError: the bucket's rows do not divide over this mesh.
        """
        mesh, lengths, rows_per_device = mesh or self.scorer_mesh, self.lengths, self.config.snapshots.score_rows
        if bucket is not None:
            check_rows("the recorded bucket", bucket.rows, mesh)
            lengths, rows_per_device = (bucket.length,), bucket.rows // num_batch_shards(mesh)
        return Scorer(
            self.model, mesh, rows_per_device=rows_per_device, lengths=lengths, temperature=self.config.sampler.temperature
        )

    def source(self, ring: SnapshotRing, scorer: Scorer) -> OldLogprobSource:
        """Where the run's anchors come from."""
        config = self.config
        return make_source(
            config.snapshots.old_logprobs,
            ring=ring,
            scorer=scorer,
            gone=config.snapshots.version_gone,
            interpolation=config.snapshots.interpolation,
            ewma=config.ewma,
            max_staleness=config.loop.max_staleness,
            precision=config.snapshots.publish_dtype,
        )

    def learner(self, source: OldLogprobSource) -> Learner:
        """The run's learner; it still wants its weights."""
        config = self.config
        return Learner(
            self.model,
            self.mesh,
            optimizer=config.optimizer,
            objective=config.objective,
            step=config.step,
            publish_dtype=config.snapshots.publish_dtype,
            temperature=config.sampler.temperature,
            anchor=source.inside,
            seed=config.seed,
        )

    def sampler_factory(self):
        """A function that makes samplers over one engine: training and evaluations share its compiled programs."""
        from rl.engine import PolicyEngine  # imports TensorFlow: processes without a sampler never get here

        options = self.config.sampler
        engine = PolicyEngine(
            self.model,
            self.sampler_mesh,
            **self._sampling_options,
            seed=self.config.seed,
            stop_tokens=self.conversation.stop_tokens,
            tokenizer=self.conversation.tokenizer,
        )
        return functools.partial(
            Sampler,
            engine,
            lengths=self.lengths,
            refill_rows=options.refill_rows,
            swap=options.swap,
            prefill_chunk=options.prefill_chunk,
        )

    @property
    def contract(self) -> SamplingContract:
        """What the learner takes sampled tokens for."""
        options = self.config.sampler
        return SamplingContract(
            temperature=options.temperature, compute_dtype=self.config.model.compute_dtype.value, swap=options.swap.value
        )

    def sampling_programs(self, mesh: jax.sharding.Mesh) -> SamplingPrograms:
        """What the samplers' engine will call, without the engine."""
        return SamplingPrograms(self.model, mesh, **self._sampling_options)

    @property
    def _sampling_options(self) -> dict:
        options = self.config.sampler
        return {
            "slots": options.slots,
            "max_steps": options.decode_steps_per_call,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }

    @functools.cached_property
    def conversation(self) -> Conversation:
        """How policy and environment talk."""
        stop = self.config.make_environment(Split.TRAIN).stop
        return conversation_of(self.config.pretrained, self.config.model.vocab_size, stop)

    def evaluate(self, sampler: Sampler, *, num_episodes: int, greedy: bool) -> Evaluation:
        """The sampler's policy on the held-out instances."""
        config = self.config
        return evaluate(
            sampler,
            config.environment_factory(Split.HELD_OUT),
            self.conversation,
            num_episodes=num_episodes,
            greedy=greedy,
            max_length=config.model.max_length,
            turn_tokens=config.pretrained.turn_tokens,
            options=config.runner,
        )

    def initial_params(self) -> Params:
        """Master weights in their shards: those of the pretrained model, or random ones.

        Raises:
          ValueError: the pretrained model is not as the config says.
        """
        path = self.config.pretrained.model_path
        if path is not None:
            shardings = self.parameter_shardings
            return import_params(locate(path), self.config.model, precision=Precision.FLOAT32, shardings=shardings)
        init = jax.jit(lambda: self.model.init(jax.random.key(self.config.seed)), out_shardings=self.parameter_shardings)
        return init()


def build_loop(foundation: Foundation, run_dir: pathlib.Path, sampler: Sampler, scorer: Scorer) -> Loop:
    """The rooms of a run and the loop that conducts them; the learner still wants its weights."""
    config = foundation.config
    options = config.loop
    ring_options = config.snapshots.ring
    store = SnapshotStore(run_dir / "snapshots", keyframe_every=ring_options.keyframe_every)
    own = run_directory.own_part(run_dir)
    ring = SnapshotRing(
        ring_options.capacity, store=store, persist_every=ring_options.persist_every, host_bytes=ring_options.host_bytes
    )
    source = foundation.source(ring, scorer)
    learner = foundation.learner(source)
    rollouts = Rollouts(
        sampler,
        config.environment_factory(Split.TRAIN),
        foundation.conversation,
        max_length=config.model.max_length,
        options=config.runner,
        turn_tokens=config.pretrained.turn_tokens,
        max_tokens=config.sampler.max_request_tokens,
        deadline=config.sampler.deadline,
    )
    admission = Admission(
        processes.share(options.groups_per_step, "--groups-per-step"),
        options.group_size,
        max_staleness=options.max_staleness,
        publish_every=options.publish_every,
        stale_policy=options.stale_policy,
        drop_uniform=config.objective.dynamic_sampling,
    )
    probe = ExactnessProbe(scorer, every=config.snapshots.exactness_every if source.exact else 0)
    rooms = Rooms(
        learner=learner,
        ring=ring,
        store=store,
        sampler=sampler,
        rollouts=rollouts,
        admission=admission,
        source=source,
        reference=ReferencePolicy(scorer, is_on=config.objective.needs_reference),
        probe=probe,
        decomposition=Decomposition(learner, source, ring, scorer, every=config.snapshots.decompose_every),
        ledger=Ledger(own / "ledger"),
        metrics=MetricsWriter(own / run_directory.METRICS),
        timeline=Timeline(own / "timeline.jsonl"),
        anchor_bytes=foundation.anchor_bytes(),
        contract=foundation.contract,
    )
    return Loop(
        rooms, options, lengths=foundation.lengths, seed=config.seed, serving_shardings=foundation.serving_shardings
    )
