"""Losses: what do loss and correction cost beside the train step?

For every preset of `rl/presets.py`, the loss of a minibatch with its metrics and its gradient by logprobs and entropy, compiled
and dispatched by itself; and real AdamW steps on random weights of a shape, whose forward, backward and update are the rest. They
take turns, and what is compared are medians. A loss by itself pays for a dispatch, which inside the step it shares, so its share
of a step is an upper bound: at the default shape, 1 % or less is what we hold ourselves to.

Some presets look at the whole minibatch before they know what a token counts. Their step takes a forward more, which is no part
of the loss, and the same for all of them: it shows in how long the step of one takes over a plain one.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from launch.benches._training import SHAPES, Training, check_shape
from launch.config import ConfigError
from launch.display import Display
from models.config import Precision
from rl.losses import LossInputs, objective_loss
from rl.objective import Objective
from rl.presets import PRESETS, ppo

LIMIT = 0.01
"""The largest share of the default shape's step."""
DISPATCHES = 30
"""Of each loss, between two train steps."""
WARM_DISPATCHES = 3
TURN, PAUSE = 24, 8
"""Tokens of the policy, and of the environment after them."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The model and the batch, and how often."""

    shape: str = "smollm2_135m"  # or small_3m
    rows: int = 2  # sequences in a learner step
    length: int = 128  # tokens in each
    repeats: int = 6  # train steps of either kind; all losses are timed before the first one and after each
    seed: int = 0


def run(options: Options, display: Display) -> dict[str, float | int | str]:
    """Figures: `step_seconds` of a plain step, `loss_over_step_PRESET`, the worst of these and its name, and
    `batch_statistics_step_over_plain`, for the first of the presets that look at the whole minibatch."""
    check_shape(options.shape)
    longest = SHAPES[options.shape].max_length
    if options.rows < 1 or options.repeats < 1 or not 2 <= options.length <= longest or options.seed < 0:
        raise ConfigError(f"wanted at least 1 --rows and 1 --repeats, a --length of 2 to {longest} and no negative --seed")
    objectives = {name: preset() for name, preset in PRESETS.items()}
    display.phase(f"compiling {len(objectives)} losses")
    losses = _losses(objectives, _inputs(options))
    display.phase("compiling two train steps")
    training = Training(
        options.shape,
        rows=options.rows,
        length=options.length,
        learning_rate=1e-6,
        publish_dtype=Precision.BFLOAT16,
        seed=options.seed,
    )
    of_batch = [name for name, objective in objectives.items() if objective.needs_batch]
    kinds = {"plain": ppo(), "batch": objectives[of_batch[0]]}
    for objective in kinds.values():
        _step(training, objective)
    loss_seconds: dict[str, list[float]] = {name: [] for name in losses}
    step_seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    _dispatch(losses, loss_seconds)
    for repeat in range(options.repeats):
        display.phase(f"losses and train steps, {repeat + 1} of {options.repeats}")
        for kind, objective in kinds.items():
            step_seconds[kind].append(_step(training, objective))
        _dispatch(losses, loss_seconds)
    step, step_of_batch = (statistics.median(step_seconds[kind]) for kind in ("plain", "batch"))
    shares = {name: statistics.median(times) / step for name, times in loss_seconds.items()}
    worst = max(shares, key=shares.get)
    figures = {
        "params": sum(leaf.size for leaf in jax.tree.leaves(training.published())),
        "rows": options.rows,
        "length": options.length,
        "step_seconds": step,
        "worst_preset": worst,
        "worst_loss_over_step": shares[worst],
        **{f"loss_over_step_{name}": share for name, share in shares.items()},
        "batch_statistics_step_over_plain": step_of_batch / step,
    }
    _show(figures, shares, of_batch, display)
    return figures


def _inputs(options: Options) -> LossInputs:
    """Three policies and a reference that differ a little, on rows of turns; on the device, where the forward leaves its own."""
    generator, shape = np.random.default_rng(options.seed), (options.rows, options.length)

    def near(logprobs: np.ndarray, scale: float) -> np.ndarray:
        return np.minimum(logprobs + scale * generator.normal(size=shape), 0)

    current = -generator.exponential(size=shape)
    proximal = near(current, 0.1)
    mask = np.tile(np.arange(options.length) % (TURN + PAUSE) < TURN, (options.rows, 1))
    mask[:, 0] = False
    arrays = LossInputs(
        logprobs=current,
        proximal_logprobs=proximal,
        sampler_logprobs=np.where(mask, near(proximal, 0.03), np.nan),  # none where no policy sampled
        advantages=np.repeat(generator.normal(size=(options.rows, 1)), options.length, 1),
        mask=mask,
        entropy=generator.exponential(size=shape),
        reference_logprobs=near(current, 0.3),
    )
    return jax.tree.map(lambda array: jax.device_put(array if array.dtype == bool else array.astype(np.float32)), arrays)


def _losses(objectives: dict[str, Objective], inputs: LossInputs) -> dict[str, Callable[[], object]]:
    """Of each objective, what computes its loss once, compiled and warm."""

    def compiled(objective: Objective) -> Callable[[], object]:
        given = inputs if objective.needs_reference else inputs._replace(reference_logprobs=None)

        def loss(logprobs: jax.Array, entropy: jax.Array, given: LossInputs):
            return objective_loss(objective, given._replace(logprobs=logprobs, entropy=entropy))

        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        return lambda: program(given.logprobs, given.entropy, given)

    losses = {name: compiled(objective) for name, objective in objectives.items()}
    for loss in losses.values():
        for _ in range(WARM_DISPATCHES):
            jax.block_until_ready(loss())
    return losses


def _dispatch(losses: dict[str, Callable[[], object]], seconds: dict[str, list[float]]) -> None:
    """Adds to each loss's times. The losses take turns, so that what else the machine does meets all of them."""
    for _ in range(DISPATCHES):
        for name, loss in losses.items():
            started = time.perf_counter()
            jax.block_until_ready(loss())
            seconds[name].append(time.perf_counter() - started)


def _step(training: Training, objective: Objective) -> float:
    """The seconds of a train step."""
    training.change(objective)
    started = time.perf_counter()
    training.step()
    return time.perf_counter() - started


def _show(figures: dict[str, float | int | str], shares: dict[str, float], of_batch: list[str], display: Display) -> None:
    step, worst = figures["step_seconds"], figures["worst_loss_over_step"]
    rows = [("", "milliseconds", "share of a step", "its step takes")]
    for name in sorted(shares, key=shares.get, reverse=True):
        forwards = "a forward more" if name in of_batch else ""
        rows.append((name, f"{1000 * shares[name] * step:.2f}", f"{shares[name]:.4%}", forwards))
    display.table("loss and correction, with their gradient", rows)
    display.table("beside the train step", [
        ("parameters", f"{figures['params']:,}"),
        ("a batch", f"{figures['rows']} rows of {figures['length']} tokens"),
        ("a plain step", f"{step:.3g} s"),
        (f"a step with a forward more ({of_batch[0]})", f"{figures['batch_statistics_step_over_plain']:.2f} x as long"),
        ("the dearest loss", f"{figures['worst_preset']}, {worst:.4%} of a plain step"),
        (f"{LIMIT:.0%} or less", "yes" if worst <= LIMIT else "NO"),
    ])  # fmt: skip
