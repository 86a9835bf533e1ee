"""Gymnasium's other toy-text games as text games of one byte a turn, without chance once an episode has begun.

    taxi           24RB>   row, column, where the passenger is (R, G, Y, B, or T: in the taxi), where to; answer S N E W P D,
                           the moves and pick up and drop. The walls are not shown, but they never change.
    cliff_walking  3a>     row, column; answer U R D L. A step over the cliff leads back to the bottom left.
    blackjack      13h5>   the player's sum, hard or soft (an ace counts 11), the dealer's card (A 2-9 T); answer S or H, stick
                           or hit.

Rules and tables are gymnasium's; rewards are ours: 1 for what the task wants (the passenger delivered, the goal reached, the hand
won), 1/2 for a draw, else 0. With gymnasium's own, which charge for every move and every lost hand, saying nonsense until the
turns run out would be a way to do well. Any other answer, like a move into a wall, wastes the turn.

Held-out instances differ by content: one in four places to start from, one in four hands to open with, by a hash.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import string
from collections.abc import Callable

import numpy as np
from gymnasium.envs.toy_text.blackjack import BlackjackEnv, sum_hand, usable_ace
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv

from rl.environments import base

HELD_OUT_ONE_IN = 4
CLIFF_SHAPE = (4, 12)  # rows, columns
CLIFF = range(37, 47)  # cells that nobody can stand on, between start and goal
CARDS = "A23456789T"
STICK, HIT = "S", "H"


class Game(enum.Enum):
    """Which game is played."""

    TAXI = "taxi"
    CLIFF_WALKING = "cliff_walking"
    BLACKJACK = "blackjack"


MAX_TURNS = {Game.TAXI: 24, Game.CLIFF_WALKING: 20, Game.BLACKJACK: 12}
"""The longest shortest ways are 18 and 14 moves."""


@dataclasses.dataclass(frozen=True)
class ToyTextOptions:
    """Which game, and how well its expert plays.

    Raises:
      ValueError: a value is out of its range.
    """

    game: Game = Game.TAXI
    max_turns: int | None = None  # default: 24 in taxi, 20 in cliff_walking, 12 in blackjack
    expert_noise: float = 0.1  # probability that the expert answers blindly

    def __post_init__(self):
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"ToyTextOptions: max_turns is {self.max_turns}, wanted 1 or more")
        if not 0 <= self.expert_noise <= 1:
            raise ValueError(f"ToyTextOptions: expert_noise is {self.expert_noise}, wanted 0 to 1")


def make_game(split: base.Split, options: ToyTextOptions) -> "TableGame | Blackjack":
    """The environment of the options' game."""
    return Blackjack(split, options) if options.game is Game.BLACKJACK else TableGame(split, options)


def _digest(content: object) -> bytes:
    """Python's own hash of a string differs from process to process."""
    return hashlib.sha256(str(content).encode()).digest()


def _split_of(content: object) -> base.Split:
    """Where an instance belongs, for ever."""
    return base.Split.HELD_OUT if _digest(content)[0] % HELD_OUT_ONE_IN == 0 else base.Split.TRAIN


# --- taxi and cliff walking: a table says where each move leads ---


@dataclasses.dataclass(frozen=True)
class _Rules:
    """A game of one agent on a table: position -> action -> [(1.0, next position, gymnasium's reward, done)]. Done is success."""

    table: dict
    actions: str  # letters, in the order of gymnasium's numbers
    starts: tuple[int, ...]
    observe: Callable[[int], str]  # what stands before the `>`

    @functools.cached_property
    def distances(self) -> dict[int, int]:
        """Moves to success on the shortest way, by position, as far as there is one: breadth-first, backwards."""
        predecessors = collections.defaultdict(set)
        distances = {}
        for position, moves in self.table.items():
            for [(_, target, _, done)] in moves.values():
                if done:
                    distances[position] = 1
                else:
                    predecessors[int(target)].add(position)
        frontier = collections.deque(distances)
        while frontier:
            position = frontier.popleft()
            for predecessor in predecessors[position] - distances.keys():
                distances[predecessor] = distances[position] + 1
                frontier.append(predecessor)
        return distances

    def advance(self, position: int, letter: str) -> tuple[int, bool]:
        """The position after a move, and whether it is success."""
        [(_, target, _, done)] = self.table[position][self.actions.index(letter)]
        return int(target), bool(done)

    def ways(self, position: int) -> list[str]:
        """The moves that begin a shortest way to success."""
        ways = []
        for letter in self.actions:
            target, done = self.advance(position, letter)
            if done or self.distances[target] < self.distances[position]:
                ways.append(letter)
        return ways


@functools.cache
def rules(game: Game) -> _Rules:
    """The rules of a table game."""
    if game is Game.TAXI:
        environment = TaxiEnv()

        def observe(position: int) -> str:
            row, column, passenger, destination = (int(number) for number in environment.decode(position))
            return f"{row}{column}{'RGYBT'[passenger]}{'RGYB'[destination]}"

        return _Rules(environment.P, "SNEWPD", tuple(np.flatnonzero(environment.initial_state_distrib).tolist()), observe)

    def observe_cell(position: int) -> str:
        row, column = divmod(position, CLIFF_SHAPE[1])
        return f"{row}{string.ascii_lowercase[column]}"

    goal = CLIFF_SHAPE[0] * CLIFF_SHAPE[1] - 1
    starts = tuple(cell for cell in range(goal) if cell not in CLIFF)
    return _Rules(CliffWalkingEnv().P, "URDL", starts, observe_cell)


@functools.cache
def starts(game: Game, split: base.Split) -> tuple[int, ...]:
    """Where the episodes of a split begin, in an order without order, so that the first few are no worse a sample than others."""
    mine = [start for start in rules(game).starts if _split_of((game.value, start)) is split]
    return tuple(sorted(mine, key=lambda start: _digest((game.value, start))))


class TableGame(base.Environment):
    """Taxi or cliff walking. A held-out seed plays held-out start `seed % their number`; a training seed draws any other."""

    stop = None
    max_turn_tokens = 1
    has_expert = True

    def __init__(self, split: base.Split, options: ToyTextOptions):
        super().__init__()
        self.split = split
        self.options = options
        self.max_turns = options.max_turns or MAX_TURNS[options.game]
        self._rules = rules(options.game)
        self._starts = starts(options.game, split)
        self.max_observation_tokens = len(self._rules.observe(0)) + len(">")
        self._position: int  # of the running episode

    def _begin(self, seed: int) -> str:
        is_held_out, number = self.split is base.Split.HELD_OUT, len(self._starts)
        self._position = self._starts[seed % number if is_held_out else np.random.default_rng(seed).integers(number)]
        return self._observation()

    def _observation(self) -> str:
        return f"{self._rules.observe(self._position)}>"

    def _advance(self, action: str) -> base.Step:
        if len(action) != 1 or action not in self._rules.actions:
            return base.Step(self._observation(), reward=0.0, done=False)
        self._position, done = self._rules.advance(self._position, action)
        return base.Step("" if done else self._observation(), float(done), done, success=done)

    def _expert_action(self, rng: np.random.Generator) -> str:
        blindly = rng.random() < self.options.expert_noise
        return str(rng.choice(list(self._rules.actions) if blindly else self._rules.ways(self._position)))

    def _instance_state(self) -> dict:
        return {"game": self.options.game.value, "position": self._position}

    def _restore_instance(self, state: dict) -> None:
        if state.get("game") != self.options.game.value or state["position"] not in self._rules.table:
            raise ValueError(f"TableGame.restore: the state is {state}, wanted a position in {self.options.game.value}; "
                             "restore into an environment with the options that made the state")
        self._position = state["position"]


# --- blackjack ---


class Blackjack(base.Environment):
    """One hand by the rules of Sutton and Barto, from an endless deck. All cards follow from the deal's number."""

    stop = None
    max_turn_tokens = 1
    max_observation_tokens = len("13h5>")
    has_expert = True

    def __init__(self, split: base.Split, options: ToyTextOptions):
        super().__init__()
        self.split = split
        self.options = options
        self.max_turns = options.max_turns or MAX_TURNS[Game.BLACKJACK]
        self._game = BlackjackEnv(sab=True)  # as gymnasium registers it
        self._deal = self._num_hits = 0  # of the running episode

    def _begin(self, seed: int) -> str:
        rng = np.random.default_rng(seed)
        self._start(int(rng.integers(2**31)), num_hits=0)
        while _split_of(("blackjack", *sorted(self._game.player), self._game.dealer[0])) is not self.split:
            self._start(int(rng.integers(2**31)), num_hits=0)
        return self._observation()

    def _start(self, deal: int, num_hits: int) -> None:
        self._game.reset(seed=deal)
        for _ in range(num_hits):
            self._game.step(1)
        self._deal, self._num_hits = deal, num_hits

    def _hand(self) -> tuple[int, bool, int]:
        """The player's sum, whether an ace counts 11 in it, and the dealer's card."""
        player = self._game.player
        return sum_hand(player), bool(usable_ace(player)), self._game.dealer[0]

    def _observation(self) -> str:
        total, soft, dealer = self._hand()
        return f"{total:02}{'s' if soft else 'h'}{CARDS[dealer - 1]}>"

    def _advance(self, action: str) -> base.Step:
        if action not in (STICK, HIT):
            return base.Step(self._observation(), reward=0.0, done=False)
        self._num_hits += action == HIT
        _, outcome, done, _, _ = self._game.step(int(action == HIT))
        if not done:
            return base.Step(self._observation(), reward=0.0, done=False)
        return base.Step("", reward=(1 + float(outcome)) / 2, done=True, success=outcome > 0)

    def _expert_action(self, rng: np.random.Generator) -> str:
        """Basic strategy without doubling and splitting."""
        if rng.random() < self.options.expert_noise:
            return str(rng.choice([STICK, HIT]))
        total, soft, dealer = self._hand()
        if soft:
            enough = 19 if dealer in (9, 10, 1) else 18
        elif 2 <= dealer <= 6:
            enough = 12 if dealer >= 4 else 13
        else:
            enough = 17
        return STICK if total >= enough else HIT

    def _instance_state(self) -> dict:
        return {"deal": self._deal, "hits": self._num_hits}

    def _restore_instance(self, state: dict) -> None:
        if state.keys() != {"deal", "hits"}:
            raise ValueError(f"Blackjack.restore: the state is {state}, wanted the number of a deal and of hits; "
                             "restore into an environment with the options that made the state")
        self._start(state["deal"], state["hits"])
