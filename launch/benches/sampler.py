"""The sampler: tokens a second, beside what the machine could do.

Two workloads on random weights, sampled with logprobs. *static*: prompts of one length, all slots full, each with the same number
of new tokens. *ragged*: conversations as agents have them. Prompts come in groups; each of some turns samples a number of tokens
of its own, then the environment writes. The sampler refills a slot as soon as it is free and goes on from a conversation's cache.
In a run another conversation always waits, so its rate is taken until here none does. Its static-batch mode, the usual
alternative, fills all slots at once, waits for the longest of each turn, and prefills every turn again; its rate is that of the
first batch.

The limit is what the matrix products alone would take at the rates that this machine reaches, measured in the same run: those of
a decode step with as many rows as slots, or reading the weights if that takes longer, and those of all prompts, a row a token.
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from launch.benches._machine import matrix_peak, read_bandwidth
from launch.benches._training import SHAPES, check_shape
from launch.config import ConfigError
from launch.display import Display
from models import decode
from models.transformer import Model, Params
from rl import sampling
from rl.batching import length_buckets
from rl.engine import PolicyEngine
from rl.requests import Request, Swap
from rl.sampler import Sampler
from rl.sampling import LoadedPolicy

PROMPT, NEW_TOKENS = 64, 128
"""Of the static workload."""
RAGGED_PROMPT, GROUP, TURNS, TURN_TOKENS, OBSERVATION = 192, 8, 4, (16, 256), 32
REFILL_ROWS = 2
"""Two keep a CPU busy; every row more is padding as a rule."""
REPEATS = 5
WARM_ID = 10**8
"""Request ids of what only compiles start here."""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """The model, the slots and how much of each workload."""

    shape: str = "smollm2_135m"  # or small_3m
    slots: int = 16
    steps_per_call: int = 16
    conversations: int = 40  # of the ragged workload: more than slots, and a multiple of 8; 0 leaves it out
    calls: int = 200  # over which resident memory must not grow
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What will be said: a prompt, and for each turn how many tokens are sampled."""

    group_id: int
    prompt: np.ndarray
    turns: tuple[int, ...]


def run(options: Options, display: Display) -> dict[str, float | int]:
    """Figures: tokens a second of both workloads and of the ragged one in static batches, their ratios to each other and to the
    limit, what logprobs cost, and how much resident memory grew."""
    check_shape(options.shape)
    if options.slots < 1 or options.steps_per_call < 1 or options.calls < 0 or not _fills(options):
        raise ConfigError("wanted at least 1 --slots and 1 --steps-per-call, and --conversations for more than all slots, "
                          f"in groups of {GROUP}")
    display.phase("measuring the machine")
    limit = _limit(options)
    display.phase("static workload")
    figures = limit | _static(options, display)
    figures["fraction_of_limit"] = figures["static_tokens_per_second"] / figures["limit_tokens_per_second"]
    if options.conversations:
        figures |= _ragged(options, display)
    _show(figures, options, display)
    return figures


def _fills(options: Options) -> bool:
    """Whether there are as many conversations as the ragged workload needs."""
    return not options.conversations or (options.conversations > options.slots and options.conversations % GROUP == 0)


def _limit(options: Options) -> dict[str, float | int]:
    """Of the static workload, and what it is made of."""
    config = SHAPES[options.shape]
    params = sum(leaf.size for leaf in jax.tree.leaves(Model(config).shapes))
    in_blocks = params - config.padded_vocab_size * config.d_model  # a prompt's logits are wanted at its end alone
    prompts = options.slots * PROMPT
    peak, prompt_peak, bandwidth = matrix_peak(options.slots), matrix_peak(prompts, products=2), read_bandwidth()
    step_seconds = max(2 * params * options.slots / peak, 4 * params / bandwidth)
    seconds = NEW_TOKENS * step_seconds + 2 * in_blocks * prompts / prompt_peak
    return {
        "params": params,
        "slots": options.slots,
        "matrix_gflops": peak / 1e9,
        "prompt_matrix_gflops": prompt_peak / 1e9,
        "read_gb_per_second": bandwidth / 1e9,
        "decode_limit_tokens_per_second": options.slots / step_seconds,
        "limit_tokens_per_second": options.slots * NEW_TOKENS / seconds,
    }


# --- static ---


def _static(options: Options, display: Display) -> dict[str, float | int]:
    rng = np.random.default_rng(options.seed)
    model, params = _model(options, PROMPT + NEW_TOKENS)
    figures = {"logprobs_overhead": _logprobs_overhead(model, params, options)}
    sampler = _sampler(model, options, lengths=(PROMPT + NEW_TOKENS,))
    sampler.publish(0, params)
    del params
    request_ids = itertools.count()

    def fill() -> list[int]:
        prompts = rng.integers(model.config.vocab_size, size=(options.slots, PROMPT)).astype(np.int32)
        requests = [Request(next(request_ids), index, prompt, NEW_TOKENS) for index, prompt in enumerate(prompts)]
        for request in requests:
            sampler.submit(request)
        return [request.request_id for request in requests]

    def once() -> float:
        """Tokens a second, prefill included."""
        ids, before, started = fill(), sampler.num_sampled_tokens, time.perf_counter()
        while sampler.num_sampled_tokens - before < options.slots * NEW_TOKENS:
            sampler.step(options.steps_per_call)
        seconds = time.perf_counter() - started
        for request_id in ids:
            sampler.release(request_id)
        return options.slots * NEW_TOKENS / seconds

    once()
    figures["static_tokens_per_second"] = statistics.median(once() for _ in range(3))
    if options.calls:
        display.phase(f"resident memory over {options.calls} calls")
        figures["memory_growth_mib"] = _memory_growth(sampler, fill, options.calls)
    return figures


def _logprobs_overhead(model: Model, params: Params, options: Options) -> float:
    """Of a decode call, by its time over that of one whose logprobs nobody asks for: XLA leaves out what no result depends on."""
    loop = functools.partial(sampling.decode_loop, model, span=PROMPT + NEW_TOKENS, max_steps=options.steps_per_call,
                             temperature=1.0, top_k=0, top_p=1.0)  # fmt: skip

    def without(*arguments):
        state, sampled = loop(*arguments)
        return state, sampled.replace(logprobs=jnp.zeros_like(sampled.logprobs))

    programs = {True: jax.jit(loop, donate_argnums=1), False: jax.jit(without, donate_argnums=1)}
    policy = LoadedPolicy(weights=jax.jit(functools.partial(decode.prepare, model))(params), version=jnp.int32(0))
    slots, vocabulary = np.arange(options.slots, dtype=np.int32), model.config.padded_vocab_size
    start = {"lengths": slots * 0 + PROMPT, "remaining": slots * 0 + 10**6, "request_ids": slots}
    state = jax.jit(functools.partial(sampling.empty_state, model, options.slots))()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(REPEATS + 1):
        for with_logprobs, program in programs.items():
            state = jax.block_until_ready(state.replace(**{name: jnp.asarray(array) for name, array in start.items()}))
            started = time.perf_counter()
            state, _ = jax.block_until_ready(program(policy, state, jax.random.key(0), jnp.zeros(vocabulary, bool),
                                                     np.int32(options.steps_per_call)))  # fmt: skip
            if repeat:  # the first time compiles
                seconds[with_logprobs].append(time.perf_counter() - started)
    return statistics.median(seconds[True]) / statistics.median(seconds[False]) - 1


def _memory_growth(sampler: Sampler, fill: Callable[[], list[int]], calls: int) -> float:
    """MiB of resident memory more after so many calls, with slots that empty and fill, than after the first tenth of them."""
    process, resident = psutil.Process(), []
    for _ in range(calls):
        if not sampler.num_running:
            fill()
        for sampled in sampler.step(2):
            if sampled.turn_over:
                sampler.release(sampled.request_id)
        resident.append(process.memory_info().rss)
    tenth = max(calls // 10, 1)
    return (max(resident[-tenth:]) - max(resident[:tenth])) / MIB


# --- ragged ---


def _ragged(options: Options, display: Display) -> dict[str, float]:
    room = RAGGED_PROMPT + TURNS * TURN_TOKENS[1] + (TURNS - 1) * OBSERVATION
    model, params = _model(options, room)
    sampler = _sampler(model, options, lengths=length_buckets(room, 4))
    sampler.publish(0, params)
    del params
    conversations = _conversations(options, model.config.vocab_size)
    display.phase("ragged: compiling")
    _compile(sampler, length_buckets(room, 4), options)
    rates = {}
    for name, play in (("ragged", _continuous), ("static_batch", _in_a_batch)):
        display.phase(name.replace("_", " "))
        before, started = sampler.num_sampled_tokens, time.perf_counter()
        play(sampler, conversations, options)
        rates[name] = (sampler.num_sampled_tokens - before) / (time.perf_counter() - started)
    return {
        "ragged_tokens_per_second": rates["ragged"],
        "static_batch_tokens_per_second": rates["static_batch"],
        "ragged_over_static_batch": rates["ragged"] / rates["static_batch"],
    }


def _compile(sampler: Sampler, lengths: tuple[int, ...], options: Options) -> None:
    """Makes each program that the workloads use run once: prompts of every size, turns and observations in every span."""
    request_ids = itertools.count(WARM_ID)
    sizes = {length - 2 * OBSERVATION for length in lengths} | {RAGGED_PROMPT, 500, 1000}
    for size in sorted(size for size in sizes if size < lengths[-1] - 2 * OBSERVATION + 1):
        for together in range(1, REFILL_ROWS + 1):
            ids = [next(request_ids) for _ in range(together)]
            for request_id in ids:
                sampler.submit(Request(request_id, size, np.ones(size, np.int32), 1))
            sampler.step(1)
            for request_id in ids:
                sampler.extend(request_id, np.ones(OBSERVATION, np.int32))
            sampler.step(1)
            for request_id in ids:
                sampler.release(request_id)


def _conversations(options: Options, vocabulary: int) -> list[Conversation]:
    rng, low, high = np.random.default_rng(options.seed), *TURN_TOKENS
    prompts = rng.integers(vocabulary, size=(options.conversations // GROUP, RAGGED_PROMPT)).astype(np.int32)
    return [Conversation(index // GROUP, prompts[index // GROUP], tuple(rng.integers(low, high + 1, size=TURNS).tolist()))
            for index in range(options.conversations)]  # fmt: skip


def _observation(index: int, turn: int) -> np.ndarray:
    """What the environment writes."""
    return np.full(OBSERVATION, 1 + (index * TURNS + turn) % 100, np.int32)


def _continuous(sampler: Sampler, conversations: list[Conversation], options: Options) -> None:
    """Slots refill as they fall free, and a conversation goes on from its cache; until none waits."""
    turns_over = dict.fromkeys(range(len(conversations)), 0)
    for index, conversation in enumerate(conversations):
        sampler.submit(Request(index, conversation.group_id, conversation.prompt, conversation.turns[0]))
    while sampler.num_waiting:
        for sampled in sampler.step(options.steps_per_call):
            if not sampled.turn_over:
                continue
            index = sampled.request_id
            turn = turns_over[index] = turns_over[index] + 1
            if turn == TURNS:
                sampler.release(index)
                continue
            sampler.extend(index, _observation(index, turn), max_turn_tokens=conversations[index].turns[turn])
    for index in turns_over:
        sampler.release(index)


def _in_a_batch(sampler: Sampler, conversations: list[Conversation], options: Options) -> None:
    """As many conversations as slots, turn by turn: all wait for the longest, and each turn is prefilled from its beginning."""
    request_ids = itertools.count(len(conversations))
    batch = conversations[:options.slots]
    contexts = [conversation.prompt for conversation in batch]
    for turn in range(TURNS):
        index_of = {next(request_ids): index for index in range(len(batch))}
        for request_id, index in index_of.items():
            sampler.submit(Request(request_id, batch[index].group_id, contexts[index], batch[index].turns[turn]))
        waiting = set(index_of)
        while waiting:
            for sampled in sampler.step(options.steps_per_call):
                index = index_of[sampled.request_id]
                contexts[index] = np.append(contexts[index], sampled.tokens)
                if sampled.turn_over:
                    waiting.remove(sampled.request_id)
        for request_id, index in index_of.items():
            sampler.release(request_id)
            contexts[index] = np.append(contexts[index], _observation(index, turn + 1))


# --- rooms ---


def _model(options: Options, room: int) -> tuple[Model, Params]:
    model = Model(dataclasses.replace(SHAPES[options.shape], max_length=room))
    return model, jax.jit(model.init)(jax.random.key(options.seed))


def _sampler(model: Model, options: Options, *, lengths: tuple[int, ...]) -> Sampler:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    engine = PolicyEngine(model, mesh, slots=options.slots, max_steps=options.steps_per_call, temperature=1.0, seed=options.seed)
    return Sampler(engine, lengths=lengths, refill_rows=REFILL_ROWS, swap=Swap.REPREFILL)


def _show(figures: dict[str, float | int], options: Options, display: Display) -> None:
    rows = [
        ("parameters", f"{figures['params']:,}"),
        ("slots", f"{options.slots}"),
        (f"static: {PROMPT} tokens of prompt, {NEW_TOKENS} new", f"{figures['static_tokens_per_second']:.1f} tokens/s"),
        ("the machine's limit", f"{figures['limit_tokens_per_second']:.1f} tokens/s"),
        ("without prompts", f"{figures['decode_limit_tokens_per_second']:.1f} tokens/s"),
        ("share of it", f"{figures['fraction_of_limit']:.2f}"),
        (f"matrix products of {options.slots} rows", f"{figures['matrix_gflops']:.1f} GFLOP/s"),
        (f"matrix products of {options.slots * PROMPT} rows", f"{figures['prompt_matrix_gflops']:.1f} GFLOP/s"),
        ("reading", f"{figures['read_gb_per_second']:.1f} GB/s"),
        ("logprobs", f"{figures['logprobs_overhead']:+.1%} of a call"),
    ]
    if "memory_growth_mib" in figures:
        rows.append((f"resident memory over {options.calls} calls", f"{figures['memory_growth_mib']:+.1f} MiB"))
    if "ragged_tokens_per_second" in figures:
        rows += [
            (f"ragged: {TURNS} turns of {TURN_TOKENS[0]} to {TURN_TOKENS[1]} tokens",
             f"{figures['ragged_tokens_per_second']:.1f} tokens/s"),
            ("the same in static batches", f"{figures['static_batch_tokens_per_second']:.1f} tokens/s"),
            ("ragged over static batches", f"{figures['ragged_over_static_batch']:.2f} x"),
        ]
    display.table("sampling", rows)
