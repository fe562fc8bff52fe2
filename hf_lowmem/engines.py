"""Which of two modules computes: a fast one where its bits are those of the reference on this machine, or else that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType


def proven(
    load: Callable[[], ModuleType], wrong: Callable[[ModuleType], str | None], reference: ModuleType, otherwise: str
) -> ModuleType:
    """A fast engine if it can be had and is right, else the reference, with a RuntimeWarning.

    Args:
        load: imports the engine; may raise whatever it likes: no Triton, no compiler, a GPU that it does not know.
        wrong: what the engine computes differently from the reference; None if nothing.
        reference: computes the same everywhere.
        otherwise: the warning, with ``{reason}`` in it.
    """
    try:
        engine = load()
        reason = wrong(engine)
    except Exception as error:  # whatever it is, the reference can do it
        reason = f"{type(error).__name__}: {error}"
    else:
        if reason is None:
            return engine
    warnings.warn(otherwise.format(reason=reason), RuntimeWarning, stacklevel=3)
    return reference
