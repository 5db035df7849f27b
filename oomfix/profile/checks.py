"""Checks of `oomfix.runtime` under simulation, where tensors hold no numbers to compare."""

from oomfix.profile.boundary import CardTrace
from oomfix.profile.patches import Patches
from oomfix.profile.process import COUPLED, INDEPENDENT
from oomfix.runtime import simulation
from oomfix.runtime.simulation import Assumption


def answer_checks(patches: Patches, trace: CardTrace, independent: bool) -> None:
    """Let the runtime's checks run as they do, but for their comparisons of numbers.

    Args:
        patches: what is to be put back later.
        trace: is told what was assumed.
        independent: what the comparisons find: whether samples do not depend on each other.
    """
    coupled = None if independent else COUPLED
    patches.set(simulation, assumption=Assumption(coupled, lambda: trace.assume(coupled or INDEPENDENT)))
