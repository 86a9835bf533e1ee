"""FrozenLake as a text game: find the goal of an unknown 4x4 map in twelve moves, seeing only the neighbouring cells.

The game is gymnasium's, without slipping, on gymnasium's random maps, so nothing but the policy is random. Each turn it reads
six bytes, for instance `a#FF#>`, and writes one:

    a       where it stands: cells are lettered row by row from the top left, where it starts; the goal is at the bottom right
    #FF#    the cells to the Left, Down, Right and Up: `F` frozen, `H` hole, `G` goal, `#` the wall around the map
    >       its turn: one byte out of `LDRU`

The goal gives reward 1, a hole ends the episode with 0. Any other byte than `LDRU`, like a walk into the wall, wastes the turn. A
rule that looks at the last observation only walks in circles on many maps, so the history in the context matters.

The scripted expert is cautious and homesick: it has learned the alphabet and not to fall, but it is a little fonder of the moves
that lead back to the start, so it rarely arrives, and whoever takes its likeliest move never does. It leaves to reinforcement
learning what there is to learn.
"""

import dataclasses
import functools
import itertools
import string

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import DOWN, LEFT, RIGHT, UP, FrozenLakeEnv, generate_random_map

from rl.environments import base

NUM_HELD_OUT = 256
ACTIONS = {"L": LEFT, "D": DOWN, "R": RIGHT, "U": UP}
POSITIONS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+/"
HOMEWARD = "LU"  # the start is at the top left
OFFSETS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}  # rows, columns

Map = tuple[str, ...]
"""Rows of `S` (start), `F` (frozen), `H` (hole) and `G` (goal)."""


@dataclasses.dataclass(frozen=True)
class FrozenLakeOptions:
    """The defaults are the quickstart's game.

    Raises:
      ValueError: a value is out of its range. A smaller map, or one nearly always or nearly never frozen, has too few different
        maps to hold 256 of them out and still train on others.
    """

    size: int = 4  # cells on a side
    frozen_probability: float = 0.8  # of each cell other than start and goal, before maps without a way to the goal are dropped
    max_turns: int = 12
    expert_noise: float = 0.1  # probability that the expert moves blindly
    expert_homesickness: float = 1.2  # how many times as likely it goes left or up as down or right

    def __post_init__(self):
        ranges = {"size": (4, 8), "frozen_probability": (0.5, 0.9), "max_turns": (1, 1024), "expert_noise": (0, 1),
                  "expert_homesickness": (0.1, 10)}
        for name, (low, high) in ranges.items():
            value = self.__dict__[name]
            if not low <= value <= high:
                raise ValueError(f"FrozenLakeOptions: {name} is {value}, wanted {low} to {high}; choose a value in that range")


@functools.cache
def held_out_maps(size: int, frozen_probability: float) -> tuple[Map, ...]:
    """The first 256 distinct maps that gymnasium draws from the seeds 0, 1, 2, ...: the same for every run, whatever its seed."""
    distinct = {}
    for seed in itertools.count():
        distinct.setdefault(tuple(generate_random_map(size, frozen_probability, seed=seed)))
        if len(distinct) == NUM_HELD_OUT:
            return tuple(distinct)


@functools.lru_cache(maxsize=1024)
def transitions(rows: Map) -> dict:
    """Gymnasium's own table of the game on a map: position -> action -> [(1.0, next position, reward, done)].

    Without slipping it holds all that `FrozenLakeEnv.step` does, minus a random draw. Building the game takes longer than playing
    it, and small maps come again: hence the cache.
    """
    return FrozenLakeEnv(desc=list(rows), is_slippery=False).P


class FrozenLake(base.Environment):
    """The game of the module docstring. A held-out seed plays held-out map `seed % 256`; a training seed draws any other map."""

    stop = None
    max_turn_tokens = 1
    max_observation_tokens = 6
    has_expert = True

    def __init__(self, split: base.Split, options: FrozenLakeOptions):
        super().__init__()
        self.split = split
        self.options = options
        self.max_turns = options.max_turns
        self._held_out = held_out_maps(options.size, options.frozen_probability)
        self._excluded = frozenset(self._held_out)
        self._map: Map  # of the running episode
        self._position: int  # row * size + column

    def _begin(self, seed: int) -> str:
        self._map = self._held_out[seed % NUM_HELD_OUT] if self.split is base.Split.HELD_OUT else self._draw_training_map(seed)
        self._position = 0
        return self._observation()

    def _draw_training_map(self, seed: int) -> Map:
        rng = np.random.default_rng(seed)
        while True:
            map_seed = int(rng.integers(2**63))
            rows = tuple(generate_random_map(self.options.size, self.options.frozen_probability, seed=map_seed))
            if rows not in self._excluded:
                return rows

    def _neighbours(self) -> str:
        """The cells to the left, below, to the right and above."""
        row, column = divmod(self._position, self.options.size)
        cells = ""
        for down, right in OFFSETS.values():
            inside = 0 <= row + down < self.options.size and 0 <= column + right < self.options.size
            cells += self._map[row + down][column + right] if inside else "#"
        return cells.replace("S", "F")  # the start is frozen like any other cell, and its letter already names it

    def _observation(self) -> str:
        return f"{POSITIONS[self._position]}{self._neighbours()}>"

    def _advance(self, action: str) -> base.Step:
        if action not in ACTIONS:
            return base.Step(self._observation(), reward=0.0, done=False)
        [(_, self._position, reward, done)] = transitions(self._map)[self._position][ACTIONS[action]]
        return base.Step("" if done else self._observation(), float(reward), done, success=reward > 0)

    def _expert_action(self, rng: np.random.Generator) -> str:
        """One of the moves that do not fall, into the wall included, the homeward ones preferred; at times blindly any move."""
        if rng.random() < self.options.expert_noise:
            return str(rng.choice(list(ACTIONS)))
        # On a map with a way to the goal, the cell one came from is no hole, so there is always a safe move.
        moves = [action for action, cell in zip(ACTIONS, self._neighbours(), strict=True) if cell != "H"]
        weights = np.asarray([self.options.expert_homesickness if move in HOMEWARD else 1.0 for move in moves])
        return moves[np.searchsorted(np.cumsum(weights), rng.random() * weights.sum(), side="right")]

    def _instance_state(self) -> dict:
        return {"map": list(self._map), "position": self._position}

    def _restore_instance(self, state: dict) -> None:
        if len(state["map"]) != self.options.size:
            raise ValueError(f"FrozenLake.restore: the state's map has {len(state['map'])} rows, wanted {self.options.size}; "
                             "restore into an environment with the options that made the state")
        self._map, self._position = tuple(state["map"]), state["position"]
