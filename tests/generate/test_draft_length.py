"""DraftLength: the best draft depth is found, kept and tried again."""

import random

import pytest

from generate.draft_length import FIRST_PAUSE, GUARD_PAUSE, MAX_DEPTH, DraftLength
from generate.forward_time import ForwardCost, ForwardTime

EXPERTS = 40  # requested by one token row


class SimulatedForwards:
    """Forwards of known cost: seconds of arithmetic for each row, seconds for a missed expert, and the acceptance rate
    of draft tokens."""

    def __init__(self, row=0.1, missing=0.0, wait=0.01, acceptance=0.8, making=0.005, seed=1):
        self.row, self.missing, self.wait, self.acceptance, self.making = row, missing, wait, acceptance, making
        self.random = random.Random(seed)

    def cost(self, depth):
        experts = EXPERTS * (1 + depth) ** 0.9
        waited = experts * self.missing * self.wait
        return 0.1 + self.row * 0.1 * depth + waited, waited, experts, experts * self.missing

    def run(self, controller, forwards, offers=None):
        """-> (tokens, seconds) of that many forwards."""
        tokens = seconds = 0
        for _ in range(forwards):
            [(source, depth)] = controller.choose([offers or {"MTP": MAX_DEPTH}])
            accepted = 0
            while accepted < depth and self.random.random() < self.acceptance:
                accepted += 1
            took, *rest = self.cost(depth)
            controller.update([(source, depth, accepted)], 1, {source: depth * self.making}, ForwardCost(took, *rest))
            tokens, seconds = tokens + 1 + accepted, seconds + took + depth * self.making
        return tokens, seconds


def rate(machine, depth):
    """Expected tokens a second at a fixed depth."""
    tokens = sum(machine.acceptance**i for i in range(depth + 1))
    return tokens / (machine.cost(depth)[0] + depth * machine.making)


MACHINES = {
    "in memory, good": dict(),
    "in memory, bad": dict(acceptance=0.1),
    "in memory, useless": dict(acceptance=0.0),
    "rows are expensive": dict(row=1.0, acceptance=0.6),
    "from disk, good": dict(missing=0.6, acceptance=0.9),
    "from disk, fair": dict(missing=0.6, acceptance=0.5),
    "from disk, useless": dict(missing=0.6, acceptance=0.0),
    "half from disk": dict(missing=0.2, acceptance=0.7),
}


def test_a_fixed_depth_that_is_never_right_is_paused_and_tried_again():
    """DRAFT=5 with a head that is never right went on for 298 forwards at half the speed."""
    said = []
    controller = DraftLength(5, say=said.append)
    SimulatedForwards(acceptance=0.0).run(controller, 300)
    assert controller.depths == {5: 27, 0: 273} and controller.statistics()["draft_paused_forwards"] == 273
    start = "[draft] 0 of 45 draft tokens accepted: none for"
    assert said == [f"{start} {n} forwards, then another try (DRAFT_GUARD=0 never pauses)" for n in (64, 128, 256)]


def test_the_guard_leaves_a_useful_fixed_depth_and_can_be_turned_off():
    useful, unguarded = DraftLength(5), DraftLength(5, guard=False, say=pytest.fail)
    SimulatedForwards(acceptance=0.5).run(useful, 300)
    SimulatedForwards(acceptance=0.0).run(unguarded, 300)
    assert useful.depths == unguarded.depths == {5: 300}


def test_a_depth_that_becomes_useful_is_used_again():
    controller, machine = DraftLength(3, say=lambda line: None), SimulatedForwards(acceptance=0.0)
    machine.run(controller, 60)
    machine.acceptance = 0.9
    machine.run(controller, 200)
    assert controller.depths == {3: 196, 0: 64} and controller.guard_pause == GUARD_PAUSE


@pytest.mark.parametrize("options", MACHINES.values(), ids=MACHINES)
def test_within_a_few_percent_of_the_best_depth(options):
    machine, controller = SimulatedForwards(**options), DraftLength()
    tokens, seconds = machine.run(controller, 3000)
    best = max(rate(machine, depth) for depth in range(MAX_DEPTH + 1))
    assert tokens / seconds > 0.95 * best
    assert tokens / seconds > 0.97 * rate(machine, 0)


@pytest.mark.parametrize("options", MACHINES.values(), ids=MACHINES)
def test_a_short_generation_is_not_slowed_down(options):
    machine = SimulatedForwards(**options)
    runs = [machine.run(DraftLength(), 100) for _ in range(40)]
    assert sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs) > 0.95 * rate(machine, 0)


def test_a_change_of_acceptance_is_followed():
    """A topic on which drafts are accepted, after one on which they never were; and back."""
    controller, machine = DraftLength(), SimulatedForwards(acceptance=0.0)
    machine.run(controller, 1500)
    machine.acceptance = 0.9
    machine.run(controller, 1000)
    tokens, seconds = machine.run(controller, 500)
    assert tokens / seconds > 0.9 * max(rate(machine, depth) for depth in range(MAX_DEPTH + 1))
    machine.acceptance = 0.0
    machine.run(controller, 300)
    tokens, seconds = machine.run(controller, 500)
    assert tokens / seconds > 0.95 * rate(machine, 0)


def test_the_better_proposer_is_chosen():
    controller, machine = DraftLength(), SimulatedForwards()
    for _ in range(200):
        for source, acceptance in (("MTP", 0.3), ("long n-gram", 0.95)):
            machine.acceptance = acceptance
            accepted = sum(1 for _ in range(3) if machine.random.random() < acceptance)
            controller.update([(source, 3, accepted)], 1, {source: 0.015}, ForwardCost(*machine.cost(3)))
            controller.update([(None, 0, 0)], 1, {}, ForwardCost(*machine.cost(0)))
    chosen = [controller.choose([{"MTP": 8, "long n-gram": 4}])[0][0] for _ in range(FIRST_PAUSE - 1)]
    assert set(chosen) == {"long n-gram"}
    assert controller.choose([{"MTP": 8}])[0][0] in ("MTP", None)


def test_a_fixed_depth_is_kept():
    controller = DraftLength("3")
    assert controller.choose([{"MTP": 3}]) == [("MTP", 3)] and controller.choose([{"n-gram": 2}]) == [("n-gram", 2)]
    assert controller.choose([{"n-gram": 3, "MTP": 3}]) == [("MTP", 3)] and controller.choose([{}]) == [(None, 0)]
    assert DraftLength("0").choose([{"MTP": 0}]) == [(None, 0)]


def test_without_offers_there_is_no_draft():
    controller = DraftLength()
    assert controller.choose([{}]) == [(None, 0)]
    assert list(controller.summary_lines()) == [] and controller.statistics()["draft_acceptance"] == {}


def test_the_statistics():
    controller, machine = DraftLength(), SimulatedForwards(acceptance=1.0)
    machine.run(controller, 60)
    first, second = controller.summary_lines()
    assert (
        first.startswith("[draft] accepted by position: MTP 100% 100%") and "| forwards by draft tokens: 0: " in first
    )
    assert "1 rows 40.0" in second and "| auto expected" in second and "measured" in second
    numbers = controller.statistics()
    assert numbers["draft_acceptance"]["MTP"][0][0] == numbers["draft_acceptance"]["MTP"][0][1] > 30
    assert sum(numbers["draft_depths"].values()) == 60
    expected, measured = numbers["draft_expected_tokens_seconds"], numbers["draft_measured_tokens_seconds"]
    assert expected[1] == pytest.approx(measured[1], rel=0.05) and expected[0] <= measured[0]


# --- several sequences in one forward ---------------------------------------------------------------------------------


class SimulatedBatch(SimulatedForwards):
    """Forwards over several sequences. Drafts of some of them are accepted less often."""

    def __init__(self, num_rows=8, noise=0.0, **options):
        super().__init__(**options)
        self.num_rows, self.noise = num_rows, noise

    def cost(self, num_drafts):
        rows = self.num_rows + num_drafts
        experts = EXPERTS * rows**0.8
        waited = experts * self.missing * self.wait
        arithmetic = (0.1 + self.row * 0.1 * (rows - 1)) * (1 + self.noise * self.random.uniform(-1, 1))
        return arithmetic + waited, waited, experts, experts * self.missing

    def acceptances(self):
        """The acceptance rate of each sequence."""
        return [self.acceptance] * self.num_rows

    def run(self, controller, forwards, offers=None):
        tokens = seconds = 0
        for _ in range(forwards):
            choices = controller.choose(offers or [{"MTP": MAX_DEPTH}] * self.num_rows, room=56)
            turns = []
            for (source, depth), acceptance in zip(choices, self.acceptances(), strict=True):
                accepted = 0
                while accepted < depth and self.random.random() < acceptance:
                    accepted += 1
                turns.append((source, depth, accepted))
            num_drafts = sum(depth for _, depth, _ in turns)
            took, *rest = self.cost(num_drafts)
            by_mtp = sum(depth for source, depth, _ in turns if source == "MTP")
            making = {"MTP": by_mtp * self.making, "n-gram": 0.0, "long n-gram": 0.0}
            controller.update(turns, self.num_rows, making, ForwardCost(took, *rest))
            tokens += sum(1 + accepted for _, _, accepted in turns)
            seconds += took + making["MTP"]
        return tokens, seconds

    def rate(self, depth):
        """Expected tokens a second if each sequence has `depth` draft tokens."""
        num_drafts = depth * self.num_rows
        noise, self.noise = self.noise, 0.0
        took = self.cost(num_drafts)[0] + num_drafts * self.making
        self.noise = noise
        return self.num_rows * sum(self.acceptance**i for i in range(depth + 1)) / took


@pytest.mark.parametrize("num_rows", [2, 16])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("options", MACHINES.values(), ids=MACHINES)
def test_several_sequences_within_a_few_percent_of_the_best_depth(options, noise, num_rows):
    machine, controller = SimulatedBatch(num_rows, noise, **options), DraftLength()
    tokens, seconds = machine.run(controller, 400)
    best = max(machine.rate(depth) for depth in range(min(MAX_DEPTH, 56 // num_rows) + 1))
    assert tokens / seconds > 0.95 * best
    assert tokens / seconds > 0.97 * machine.rate(0)


def test_only_sequences_with_good_proposers_draft():
    """Long n-gram matches of some are accepted, short ones of others hardly ever, and rows are expensive."""

    class Mixed(SimulatedBatch):
        def acceptances(self):
            return [0.95, 0.05] * 4

    controller, machine = DraftLength(), Mixed(row=0.2, making=0.0)
    offers = [{"long n-gram": 6}, {"n-gram": 6}] * 4
    machine.run(controller, 400, offers)
    choices = controller.choose(offers)
    assert all(choice[0] == "long n-gram" and choice[1] > 3 for choice in choices[::2])
    assert sum(depth for _, depth in choices[1::2]) <= 1  # a trial at most


def test_each_sequence_uses_its_own_proposers():
    controller, machine = DraftLength(), SimulatedBatch(3)
    machine.run(controller, 60, [{"MTP": 4}, {"long n-gram": 4}, {}])
    for _ in range(4):  # a trial lasts no longer
        machine.run(controller, 1, [{"MTP": 4}, {"long n-gram": 4}, {}])
        [first, second, third] = controller.choose([{"MTP": 4}, {"long n-gram": 4}, {}])
        assert first[0] in ("MTP", None) and second[0] in ("long n-gram", None) and third == (None, 0)
    assert first[1] > 0 and second[1] > 0


def test_drafts_stay_within_the_room():
    controller, machine = DraftLength(), SimulatedBatch(8, acceptance=1.0)
    machine.run(controller, 200)
    assert sum(depth for _, depth in controller.choose([{"MTP": MAX_DEPTH}] * 8)) > 20
    for room in (0, 1, 5, 20):
        assert sum(depth for _, depth in controller.choose([{"MTP": MAX_DEPTH}] * 8, room=room)) <= room
    assert DraftLength("3").choose([{"MTP": 3}] * 4, room=9) == [("MTP", 2)] * 4
    assert DraftLength("3").choose([{"MTP": 3}] * 4, room=3) == [(None, 0)] * 4


def test_the_cost_of_a_number_of_rows_not_seen_yet():
    """Interpolated between two known ones, else scaled from the nearest."""
    time = ForwardTime()
    for rows, seconds, experts in ((4, 1.0, 40), (8, 2.0, 60)):
        time.add(rows, ForwardCost(seconds, 0.0, experts, 0))
    assert time.parts(6) == pytest.approx((1.5, 50)) and time.parts(8) == (2.0, 60)
    assert time.parts(12) == pytest.approx((2.0 * 2.65 / 2.05, 60 * 1.5**0.8))
    assert time.parts(3) == pytest.approx((1.0 * 1.3 / 1.45, 40 * 0.75**0.8)) and time.seconds(3) == time.parts(3)[0]
    assert time.parts(1) == time.scaled(4, 1)
    assert not time.is_known(4)
    time.add(4, ForwardCost(1.0, 0.0, 40, 0))
    assert time.is_known(2) and time.is_known(8) and not time.is_known(1) and not time.is_known(9)
