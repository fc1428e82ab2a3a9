# SPDX-License-Identifier: MIT
"""Which pages hold which positions: the bookkeeping of clattn.PagedKVCache, without a device.

Memory is a list, to which a change copies and writes as it says. The oracle is references/pages.py.
"""

import itertools

import numpy as np
import pytest
from clattn._caches.pages import PagedSequence, Pages
from hypothesis import given
from hypothesis import strategies as st
from references.pages import PagesModel
from support.loops import looped
from support.random_calls import bounded


def copy(draft, memory):
    """The copies of a change. Rows that nobody has written are not copied."""
    for target, source in draft.moves().reshape(2, -1).T:
        assert memory[source] != "unset"
        memory[target] = memory[source]


class Pool:
    """Pages and their oracle: each change happens to both, then what they hold is compared."""

    def __init__(self, num_pages, page_size):
        self.pages = Pages(num_pages, page_size)
        self.model = PagesModel(num_pages, page_size)
        self.memory = ["unset"] * (num_pages * page_size)
        self.open_sequences = {}
        self.names = itertools.count()
        self.positions = itertools.count()

    def compare(self):
        size = self.model.page_size
        assert self.pages.free == self.model.free
        names = list(self.open_sequences)
        table, lengths = self.pages.table([self.open_sequences[name] for name in names])
        assert lengths.tolist() == [self.model.lengths[name] for name in names]
        for name, row, length in zip(names, table.tolist(), lengths.tolist(), strict=True):
            needed = -(-length // size)
            assert all(page == -1 for page in row[needed:])
            assert all(0 <= page < self.model.num_pages for page in row[:needed])
            rows = [self.memory[page * size + n] for page in row[:needed] for n in range(size)]
            assert rows[:length] == self.model.positions(name)
        return self

    def open(self):
        name = next(self.names)
        self.open_sequences[name] = PagedSequence(self.pages)
        self.model.open(name)
        return name

    def append(self, counts):
        """True if the pages suffice. `counts` has the new positions of each name."""
        new = {name: list(itertools.islice(self.positions, n)) for name, n in counts.items()}
        fits = self.model.append(new)
        draft = self.pages.draft()
        try:
            places = {
                name: draft.extend(self.open_sequences[name], len(positions), str(name))
                for name, positions in new.items()
            }
        except MemoryError:
            assert not fits, "pages suffice"
            self.compare()
            return False
        assert fits, "pages do not suffice"
        copy(draft, self.memory)
        for name, found in places.items():
            for place, position in zip(found, new[name], strict=True):
                self.memory[place] = position
        self.pages.settle(draft)
        self.compare()
        return True

    def fork(self, name):
        other = next(self.names)
        draft = self.pages.draft()
        self.open_sequences[other] = draft.fork(self.open_sequences[name])
        self.pages.settle(draft)
        self.model.fork(name, other)
        self.compare()
        return other

    def truncate(self, name, length):
        draft = self.pages.draft()
        draft.truncate(self.open_sequences[name], length)
        self.pages.settle(draft)
        self.model.truncate(name, length)
        self.compare()

    def close(self, name):
        draft = self.pages.draft()
        draft.close(self.open_sequences[name])
        self.pages.settle(draft)
        assert self.open_sequences.pop(name).held is None
        self.model.close(name)
        self.compare()


CALLS = st.one_of(
    st.tuples(st.just("open")),
    st.tuples(st.just("append"), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)))),
    st.tuples(st.just("append"), st.lists(st.tuples(st.integers(0, 9), st.just(1)))),
    st.tuples(st.just("fork"), st.integers(0, 9)),
    st.tuples(st.just("truncate"), st.integers(0, 9), st.floats(0, 1)),
    st.tuples(st.just("close"), st.integers(0, 9)),
)


@bounded
@given(
    num_pages=st.sampled_from([1, 3, 6, 40]),
    page_size=st.sampled_from([1, 3, 4]),
    calls=st.lists(CALLS, min_size=8, max_size=40),
)
def test_random_changes(num_pages, page_size, calls):
    pool = Pool(num_pages, page_size)
    pool.open()
    for call, *arguments in calls:
        names = list(pool.open_sequences)
        if call == "open" or not names:
            pool.open()
        elif call == "append":
            pool.append({names[n % len(names)]: count for n, count in arguments[0]})
        else:
            name = names[arguments[0] % len(names)]
            if call == "truncate":
                pool.truncate(name, round(arguments[1] * pool.model.lengths[name]))
            else:
                getattr(pool, call)(name)
    for name in list(pool.open_sequences):
        pool.close(name)
    assert pool.pages.free == num_pages


def test_a_partly_filled_page_is_used_first():
    """No free page is no full cache."""
    pool = Pool(1, 4)
    name = pool.open()
    assert pool.append({name: 3})
    assert pool.pages.free == 0
    assert pool.append({name: 1})
    assert not pool.append({name: 1})
    assert pool.model.lengths[name] == 4


def test_out_of_pages_changes_no_sequence():
    """The first of two sequences would have room."""
    pool = Pool(3, 2)
    first, second = pool.open(), pool.open()
    assert pool.append({first: 3, second: 1})
    assert not pool.append({first: 1, second: 2})
    assert pool.append({first: 1, second: 1})


@looped("order", list(itertools.permutations(range(3))))
def test_forks_are_closed_in_any_order(order):
    pool = Pool(9, 4)
    chain = [pool.open()]
    assert pool.append({chain[0]: 6})
    for _ in range(2):
        chain.append(pool.fork(chain[-1]))
        assert pool.append({chain[-1]: 3})
    for n in order:
        pool.close(chain[n])
    assert pool.pages.free == 9


def test_shared_pages_count_once():
    pool = Pool(5, 4)
    name = pool.open()
    assert pool.append({name: 12})
    other = pool.fork(name)
    assert pool.pages.free == 2
    pool.close(name)
    assert pool.pages.free == 2
    pool.close(other)
    assert pool.pages.free == 5


def test_the_last_owner_writes_in_place():
    """Two forks and their origin, each of which appends in the page that they share."""
    pool = Pool(3, 4)
    names = [pool.open()]
    assert pool.append({names[0]: 2})
    shared = pool.pages.table(list(pool.open_sequences.values()))[0].item()
    names += [pool.fork(names[0]) for _ in range(2)]
    assert pool.append(dict.fromkeys(names, 1))
    tables = pool.pages.table(list(pool.open_sequences.values()))[0].ravel().tolist()
    assert tables[2] == shared and len(set(tables)) == 3
    for name in names:
        pool.close(name)


def test_a_truncated_owner_does_not_write_what_others_see():
    pool = Pool(2, 4)
    parent = pool.open()
    assert pool.append({parent: 3})
    child = pool.fork(parent)
    pool.truncate(child, 1)
    assert pool.append({child: 1})
    pool.truncate(parent, 1)
    assert pool.append({parent: 3})


def test_a_fork_after_a_truncation():
    """The pages that were given back have other owners meanwhile."""
    pool = Pool(5, 4)
    first = pool.open()
    assert pool.append({first: 10})
    pool.truncate(first, 3)
    second = pool.open()
    assert pool.append({second: 13})
    third = pool.fork(first)
    assert not pool.append({third: 1})
    pool.truncate(second, 12)
    assert pool.append({third: 1})


class Interrupted(BaseException):
    pass


@looped("moment", range(12))
def test_a_change_that_is_interrupted_happens_as_a_whole(moment):
    """An exception that comes at any store of `settle`, as that of a signal's handler may."""
    pool = Pool(7, 2)
    names = [pool.open(), pool.open()]
    assert pool.append(dict.fromkeys(names, 3))
    names.append(pool.fork(names[0]))
    left = moment

    class Watched(dict):
        def items(self):
            nonlocal left
            for item in super().items():
                left -= 1
                if left == 0:
                    raise Interrupted
                yield item

    model_fits = pool.model.append({names[2]: ["a", "b"], names[1]: ["c", "d"]})
    draft = pool.pages.draft()
    places = [draft.extend(pool.open_sequences[names[n]], 2, "") for n in (2, 1)]
    copy(draft, pool.memory)
    for place, position in zip([*places[0], *places[1]], "abcd", strict=True):
        pool.memory[place] = position
    plain = draft.owners, draft.following
    draft.owners, draft.following = Watched(plain[0]), Watched(plain[1])
    try:
        pool.pages.settle(draft)
    except Interrupted:
        draft.owners, draft.following = plain
        pool.pages.settle()
    assert model_fits
    pool.compare()


def test_a_sequence_of_many_positions():
    """Small pages of many positions hold more of them than 31 bits count."""
    pages = Pages(3, 2**31)
    sequence = PagedSequence(pages)
    draft = pages.draft()
    draft.sequences.append((sequence, (np.int32([2, 0]), 2**31)))
    pages.settle(draft)
    draft = pages.draft()
    assert draft.extend(sequence, 1, "") == [0]
    pages.settle(draft)
    table, lengths = pages.table([sequence])
    assert (table.tolist(), lengths.tolist()) == ([[2, 0]], [2**31 + 1])


def test_a_sequence_is_not_copied_by_others():
    import copy
    import pickle

    sequence = PagedSequence(Pages(1, 1))
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="fork it"):
            take(sequence)
    assert repr(sequence) == "<PagedSequence, 0 positions>"
