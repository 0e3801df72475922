"""Which kernel inode number stands for which file and version."""

from mount.numbers import VERSION_BASE, VIEW_BASE, Numbers


def test_a_file_has_its_own_number_until_it_moves() -> None:
    numbers = Numbers(lambda number: number == 7)
    assert numbers.current(7) == 7
    assert numbers.ino(7) == 7
    assert numbers.is_current(7)
    new = numbers.move(7)
    assert VERSION_BASE < new < VIEW_BASE
    assert numbers.current(7) == new
    assert numbers.ino(new) == 7
    assert numbers.is_current(new)
    assert not numbers.is_current(7)
    assert numbers.move(8) > new


def test_a_new_number_stays_while_the_kernel_knows_it() -> None:
    open_numbers = {7}
    numbers = Numbers(open_numbers.__contains__)
    new = numbers.move(7)
    numbers.count(new)
    numbers.count(new)
    open_numbers.clear()
    numbers.settle(7)
    assert numbers.current(7) == new
    numbers.forget(new, 1)
    assert numbers.current(7) == new
    numbers.forget(new, 1)
    assert numbers.current(7) == 7
    assert numbers.ino(new) == 0
    assert not numbers.is_current(new)
    assert len(numbers) == 0


def test_a_new_number_stays_while_an_older_version_is_open() -> None:
    open_numbers = {7}
    numbers = Numbers(open_numbers.__contains__)
    new = numbers.move(7)
    numbers.count(new)
    numbers.forget(new, 1)
    assert numbers.current(7) == new
    open_numbers.clear()
    numbers.settle(7)
    assert numbers.current(7) == 7


def test_an_older_version_in_between_goes_by_itself() -> None:
    open_numbers = {7}
    numbers = Numbers(open_numbers.__contains__)
    middle = numbers.move(7)
    open_numbers.add(middle)
    newest = numbers.move(7)
    open_numbers.discard(middle)
    numbers.settle(7)
    assert numbers.ino(middle) == 0
    assert numbers.current(7) == newest
    open_numbers.clear()
    numbers.settle(7)
    assert len(numbers) == 0


def test_the_newest_stays_while_an_older_one_could_be_taken_for_it() -> None:
    numbers = Numbers(lambda number: False)
    middle = numbers.move(7)
    numbers.count(middle)
    newest = numbers.move(7)
    numbers.settle(7)
    assert numbers.current(7) == newest
    assert not numbers.is_current(middle)
    numbers.forget(middle, 1)
    assert numbers.current(7) == 7


def test_ordinary_numbers_are_not_counted() -> None:
    numbers = Numbers(lambda number: False)
    numbers.count(7)
    numbers.forget(7, 100)
    numbers.settle(7)
    assert len(numbers) == 0
