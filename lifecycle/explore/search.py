"""Go through every state that can be come to, the cheapest first: by faults, then by steps."""

import heapq
from array import array
from collections.abc import Iterator

import anyio.lowlevel
from attrs import define, field

from lifecycle.states import State

from .moves import Move, Outside, Step, happenings, operations
from .oracle import Answers
from .predicates import AT_REST
from .snapshot import Key
from .stage import Stage

_RUNS_IN_A_ROW = 2000
"""After so many the event loop comes round, so that whoever waits is not kept from it."""

CLOSED: Key = (-1,)
"""What comes after CLOSE: nothing. All such states are one."""


@define
class Node:
    """A state, and how it was come to with the fewest faults, and then steps."""

    key: Key
    faults: int
    depth: int
    parent: int = -1
    step: Step | None = None
    breach: str | None = None
    expanded: bool = False


@define
class Search:
    """The closure of everything that can happen, with at most `faults` faults."""

    stage: Stage
    faults: int
    publish: bool = False
    nodes: list[Node] = field(factory=list)
    edges: int = 0
    runs: int = 0
    depth: int = 0
    _bound: int = field(init=False)
    """Faults with which a cheaper breach than those found so far could still be come to."""
    _indices: dict[Key, int] = field(factory=dict)
    _queue: list[tuple[int, int, int]] = field(factory=list)
    _calm: "dict[int, array[int]]" = field(factory=dict)
    """By state: what can follow without a fault and without CLOSE."""
    _known: dict[object, tuple[int, int]] = field(factory=dict)
    """Places in the middle of operations, with the cheapest way there."""

    def __attrs_post_init__(self) -> None:
        self._bound = self.faults

    def start(self, key: Key, *, faults: int = 0) -> None:
        """Begin at `key`, which takes `faults` faults."""
        self._come_to(Node(key, faults, 0))

    async def close(self) -> Node | None:
        """Go through everything. Returns the cheapest node in which a predicate does not hold, or `None`.

        Cancellation: what was found so far is kept.
        """
        moves = operations(self.stage, publish=self.publish)
        while self._queue:
            faults, depth, index = heapq.heappop(self._queue)
            node = self.nodes[index]
            if node.expanded or (node.faults, node.depth) != (faults, depth):
                continue
            if node.breach is not None:
                return node
            node.expanded = True
            self.depth = max(self.depth, depth)
            await self._expand(index, moves)
        return self._dead_end()

    @property
    def states(self) -> int:
        """How many states were come to."""
        return len(self._indices)

    # ------------------------------------------------------------------------------------------------------ expanding

    async def _expand(self, index: int, moves: tuple[Move, ...]) -> None:
        node, stage = self.nodes[index], self.stage
        if node.key == CLOSED:
            return
        calm: set[int] = set()
        stage.load(node.key)
        possible = [move for move in moves if move.possible(stage)]
        for outside, name in happenings(stage):
            self._happen(index, outside, name, calm)
        for move in possible:
            await self._all_ways(index, move, calm)
        self._calm[index] = array("l", calm)

    def _happen(self, index: int, outside: Outside, name: str, calm: set[int]) -> None:
        node, stage = self.nodes[index], self.stage
        if node.faults + outside.fault > self._bound:
            return
        stage.load(node.key)
        stage.world.truths[name] = outside.change(stage.world.truths[name], stage.world.base)
        found = self._arrive(index, outside.fault, Step(outside, name))
        if not outside.fault:
            calm.add(found)

    async def _all_ways(self, index: int, move: Move, calm: set[int]) -> None:
        """Make `move` with every sequence of outcomes that the faults left allow."""
        node, oracle = self.nodes[index], self.stage.oracle
        budget = 0 if move.faultless else self._bound - node.faults
        open_prefixes: list[Answers] = [()]
        while open_prefixes:
            self.stage.load(node.key)
            oracle.begin(open_prefixes.pop(), budget)
            self.stage.world.known = lambda: self._is_known(node, move, budget)
            ending = await move.make(self.stage)
            open_prefixes.extend(oracle.alternatives())
            self.runs += 1
            if not self.runs % _RUNS_IN_A_ROW:
                await anyio.lowlevel.checkpoint()
            if ending is not None:
                used = budget - oracle.left
                found = self._arrive(index, used, Step(move, answers=oracle.answers))
                if not used and self.nodes[found].key != CLOSED:
                    calm.add(found)

    def _is_known(self, node: Node, move: Move, budget: int) -> bool:
        used = budget - self.stage.oracle.left
        if not used:
            return False  # what can happen without faults is wanted of every state
        place = (move.name, self.stage.place())
        cost = (node.faults + used, node.depth)
        known = self._known.get(place)
        if known is not None and known <= cost:
            return True
        self._known[place] = cost
        return False

    # -------------------------------------------------------------------------------------------------------- arriving

    def _arrive(self, parent: int, used: int, step: Step) -> int:
        stage, before = self.stage, self.nodes[parent]
        node = Node(CLOSED, before.faults + used, before.depth + 1, parent, step)
        breaches = stage.world.breaches
        over = stage.machine.state is State.CLOSED and isinstance(step.move, Move)
        if not over:
            node.key, _ = stage.save()
        known = self._indices.get(node.key)
        if not breaches and (over or known is None):
            breaches = list(self._at_rest())
        self.edges += 1
        if breaches:
            node.breach = breaches[0]
            self._bound = min(self._bound, node.faults)
            self.nodes.append(node)
            heapq.heappush(self._queue, (node.faults, node.depth, len(self.nodes) - 1))
            return len(self.nodes) - 1
        return self._come_to(node)

    def _at_rest(self) -> Iterator[str]:
        for predicate in AT_REST:
            if (reason := predicate(self.stage.now)) is not None:
                yield f"{predicate.__name__}: {reason}"

    def _come_to(self, node: Node) -> int:
        index = self._indices.get(node.key)
        if index is None:
            index = self._indices[node.key] = len(self.nodes)
            self.nodes.append(node)
        elif (node.faults, node.depth) < (self.nodes[index].faults, self.nodes[index].depth):
            self.nodes[index] = node
        else:
            return index
        heapq.heappush(self._queue, (node.faults, node.depth, index))
        return index

    # -------------------------------------------------------------------------------------------------------- liveness

    def _dead_end(self) -> Node | None:
        """Return the cheapest state from which nothing without faults and CLOSE leads to RUNNING."""
        before: dict[int, list[int]] = {}
        for index, following in self._calm.items():
            for successor in following:
                before.setdefault(successor, []).append(index)
        alive = [index for index in self._calm if self._runs(index)]
        reached = set(alive)
        while alive:
            for index in before.get(alive.pop(), ()):
                if index not in reached:
                    reached.add(index)
                    alive.append(index)
        dead = [self.nodes[index] for index in self._calm if index not in reached]
        if not dead:
            return None
        worst = min(dead, key=lambda node: (node.faults, node.depth))
        worst.breach = "running_can_be_reached: nothing but CLOSE or another fault leads out of here"
        return worst

    def _runs(self, index: int) -> bool:
        shared = self.stage.numbers.value(self.nodes[index].key[-1])
        return bool(shared.state is State.RUNNING)
