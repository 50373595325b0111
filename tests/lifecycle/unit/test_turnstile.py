"""The turnstile: in order, exactly those who fit, and nobody else is woken."""

from attrs import define, field

from lifecycle.errors import LifecycleClosed, LifecycleError
from lifecycle.turnstile import Turnstile


@define(eq=False)
class Room:
    """A room of so many places, its turnstile, and who went through it."""

    places: int
    inside: list["Guest"] = field(factory=list)
    asked: int = 0
    turnstile: Turnstile = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.turnstile = Turnstile(self._has_room)

    def _has_room(self, size: int) -> bool:
        self.asked += 1
        return sum(guest.size for guest in self.inside) + size <= self.places

    def queue(self, *sizes: int) -> list["Guest"]:
        """Put guests of these sizes into the queue."""
        guests = [Guest(size, self) for size in sizes]
        for guest in guests:
            self.turnstile.join(guest)
        return guests


@define(eq=False)
class Guest:
    """Somebody who waits for so many places."""

    size: int
    room: Room
    told: list[object] = field(factory=list)

    def go(self) -> None:
        self.told.append("go")
        self.room.inside.append(self)

    def refuse(self, error: LifecycleError) -> None:
        self.told.append(error)


def _told(guests: list[Guest]) -> list[list[object]]:
    return [guest.told for guest in guests]


def test_exactly_those_who_fit_go_through_in_order() -> None:
    """Each is told once, and the first who does not fit stops all behind it."""
    room = Room(3)
    guests = room.queue(1, 2, 1, 1)
    room.turnstile.wake()
    assert _told(guests) == [["go"], ["go"], [], []]
    room.turnstile.wake()
    assert (_told(guests), len(room.turnstile)) == ([["go"], ["go"], [], []], 2)


def test_a_big_group_is_not_starved_by_small_ones() -> None:
    """Small ones behind it, and newcomers, wait until it has gone, though there is room for them."""
    room = Room(4)
    [small, big, late] = room.queue(3, 4, 1)
    room.turnstile.wake()
    assert _told([small, big, late]) == [["go"], [], []]
    assert (room.turnstile.may_pass(1), room._has_room(1)) == (False, True)
    room.inside.clear()
    room.turnstile.wake()
    assert _told([small, big, late]) == [["go"], ["go"], []]


def test_who_leaves_lets_those_behind_it_go() -> None:
    """From wherever it stands; leaving twice, or from outside the queue, is harmless."""
    room = Room(2)
    [big, small, other] = room.queue(3, 1, 1)
    room.turnstile.wake()
    room.turnstile.leave(small)
    assert _told([big, small, other]) == [[], [], []]
    room.turnstile.leave(big)
    room.turnstile.leave(big)
    room.turnstile.leave(small)
    assert (_told([big, small, other]), len(room.turnstile)) == ([[], [], ["go"]], 0)


def test_all_are_refused_at_once() -> None:
    """With the same error, and the queue is empty; who joins while being refused stays."""
    room = Room(0)
    guests = room.queue(1, 1)

    class Persistent(Guest):
        def refuse(self, error: LifecycleError) -> None:
            super().refuse(error)
            self.room.turnstile.join(self)

    stubborn = Persistent(1, room)
    room.turnstile.join(stubborn)
    room.turnstile.refuse(error := LifecycleClosed("closed"))
    assert (_told([*guests, stubborn]), len(room.turnstile)) == ([[error], [error], [error]], 1)


def test_a_guest_who_makes_room_as_it_goes_loses_nobody() -> None:
    """Going through may wake the turnstile again, from within."""
    room = Room(1)

    class Hasty(Guest):
        def go(self) -> None:
            super().go()
            self.room.inside.clear()
            self.room.turnstile.wake()

    guests: list[Guest] = [Hasty(1, room) for _ in range(5)]
    for guest in guests:
        room.turnstile.join(guest)
    room.turnstile.wake()
    assert (_told(guests), len(room.turnstile)) == ([["go"]] * 5, 0)


def test_ten_thousand_who_wait_cost_one_look_each() -> None:
    """Whoever cannot go is not looked at, however many wait."""
    room = Room(1)
    guests = room.queue(*[1] * 10_000)
    room.turnstile.wake()
    assert (room.asked, sum(map(len, _told(guests)))) == (2, 1)
    room.places = 10_000
    room.turnstile.wake()
    assert (room.asked, sum(map(len, _told(guests))), room.inside) == (2 + 9_999, 10_000, guests)
