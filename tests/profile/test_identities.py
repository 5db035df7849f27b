"""Objects are told apart for good, and what is kept of them keeps nothing alive."""

import weakref

import pytest

from oomfix.profile.identities import Identities


class Thing:
    pass


def test_an_object_at_the_address_of_another_that_is_gone_is_another():
    identities = Identities()
    addresses, numbers = set(), set()
    for _ in range(100):
        thing = Thing()
        addresses.add(id(thing))
        numbers.add(identities.of(thing))
        assert identities.of(thing) in numbers
        del thing
    assert len(numbers) == 100 > len(addresses)


def test_containers_are_told_by_what_they_hold():
    identities, thing = Identities(), Thing()
    kept = [thing]
    before = identities.told({"kept": kept})
    assert identities.told({"kept": [thing]}) == before
    kept.append(1)
    assert identities.told({"kept": kept}) != before
    assert identities.told({"kept": [Thing()]}) != before


@pytest.mark.parametrize("value", [iter([1]), [[[[[1]]]]], list(range(10_001))], ids=["iterator", "deep", "long"])
def test_what_cannot_be_told_is_said_so(value):
    assert Identities().told([value]) is None


def test_nothing_is_kept_alive():
    identities, thing = Identities(), Thing()
    told, gone = identities.told({"thing": [thing]}), weakref.ref(thing)
    del thing
    assert told is not None and gone() is None
