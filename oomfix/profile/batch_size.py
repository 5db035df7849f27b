"""The search for the largest batch that fits. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass

# the answer is this exact: a card that is full to the last sample is of no use
_PRECISION = 1 / 16
_MOST_TIMES_THE_START = 1024


@dataclass(frozen=True)
class Trial:
    """A run with batches of one size.

    Attributes:
        batch_size: samples in a batch.
        fits: whether it gets through.
        needs_bytes: the memory it would reserve if it could, None where it was stopped before that was known.
        has_bytes: the memory it may reserve.
    """

    batch_size: int
    fits: bool
    needs_bytes: int | None
    has_bytes: int


def find_largest(attempt: Callable[[int], Trial], start: int, most: int | None = None) -> list[Trial]:
    """Trials, in order of batch size, among them the largest that fits and one at most 1/16 (or one sample) larger.

    Memory grows nearly in proportion to the batch, so the next size to try is where the line through the two trials
    nearest to the limit meets it.

    Args:
        attempt: what happens with a batch size.
        start: the size to try first.
        most: the largest size of interest (a data set has no more samples); 1024 times the start if that is less.

    Returns:
        All trials. If none fits, a single sample is too much; if all fit, the limit lies beyond `most`.

    Raises:
        ValueError: `start` is below 1.
    """
    if start < 1:
        raise ValueError(f"start: got {start!r}, expected at least 1 sample")
    most = max(start, min(most or _MOST_TIMES_THE_START * start, _MOST_TIMES_THE_START * start))
    trials = {start: attempt(start)}
    while (size := _next(trials, most)) is not None:
        trials[size] = attempt(size)
    return [trials[size] for size in sorted(trials)]


def largest_fitting(trials: list[Trial]) -> int | None:
    """The largest batch size that fits; None if none does."""
    return max((trial.batch_size for trial in trials if trial.fits), default=None)


def _next(trials: dict[int, Trial], most: int) -> int | None:
    fitting = max((size for size, trial in trials.items() if trial.fits), default=0)
    # memory is not quite monotone: what fits above a size that does not is believed
    failing = min((size for size, trial in trials.items() if not trial.fits and size > fitting), default=most + 1)
    if failing - fitting <= max(1, int(fitting * _PRECISION)):
        return None
    guess = _where_it_is_full(list(trials.values()))
    if guess is None:
        guess = (fitting + failing) // 2 if failing <= most else 2 * fitting
    # a guess that fits so far is tested from above, so that the bracket closes from both sides
    if fitting and guess <= fitting:
        guess = fitting + max(1, int(fitting * _PRECISION))
    return min(max(guess, fitting + 1), failing - 1, max(4 * fitting, 1) if failing > most else failing - 1)


def _where_it_is_full(trials: list[Trial]) -> int | None:
    """The batch size at which memory runs out, from the two trials nearest to that; None: they do not tell."""
    known = [(abs(trial.needs_bytes - trial.has_bytes), trial) for trial in trials if trial.needs_bytes is not None]
    if len(known) < 2:
        return None
    (_, one), (_, other) = sorted(known, key=lambda pair: pair[0])[:2]
    assert one.needs_bytes is not None and other.needs_bytes is not None
    grown = one.needs_bytes - other.needs_bytes
    if grown * (one.batch_size - other.batch_size) <= 0:
        return None
    per_sample = grown / (one.batch_size - other.batch_size)
    return int(one.batch_size + (one.has_bytes - one.needs_bytes) / per_sample)
