"""What may stand in the place of a block's checkpoint function.

A layer of transformers that is checkpointed calls ``_gradient_checkpointing_func(function, *args)``, a partial of
torch's ``checkpoint``, which keeps ``args`` and calls ``function(*args)`` once in the forward and once in each
backward. ``function`` is a ``functools.partial`` that has the keyword arguments already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

FUNCTION = "_gradient_checkpointing_func"  # transformers' name for what a layer calls


class InPlace:
    """Stands in the place of a checkpoint function, and calls it.

    Args:
        function: the block's own, or another one of these.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.function(forward, *args, **options)

    def __reduce__(self) -> Any:
        """A copied or pickled model has the block's own function."""
        return _itself, (self.function,)


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def is_checkpointed(module: nn.Module) -> bool:
    """Whether gradient checkpointing is on for a block."""
    return bool(getattr(module, FUNCTION, None) is not None and getattr(module, "gradient_checkpointing", False))


def any_checkpointed(model: nn.Module | None) -> bool:
    """Whether any layer's activations are computed again in backward."""
    return model is not None and any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules())


def standing(module: nn.Module) -> Iterator[InPlace]:
    """What stands in the place of a block's checkpoint function, the outermost first."""
    function: Any = getattr(module, FUNCTION, None)
    while isinstance(function, InPlace):
        yield function
        function = function.function


def own_function(module: nn.Module) -> Callable[..., Any]:
    """A block's own checkpoint function."""
    outer = list(standing(module))
    function: Callable[..., Any] = outer[-1].function if outer else getattr(module, FUNCTION)
    return function


def put_innermost(module: nn.Module, make: Callable[[Callable[..., Any]], InPlace]) -> None:
    """Puts one in the place of the block's own function, within those that stand there."""
    outer = list(standing(module))
    made = make(own_function(module))
    if outer:
        outer[-1].function = made
    else:
        setattr(module, FUNCTION, made)


def put_outermost(module: nn.Module, make: Callable[[Callable[..., Any]], InPlace]) -> None:
    """Puts one around those that stand there."""
    setattr(module, FUNCTION, make(getattr(module, FUNCTION)))


def take_all_out(module: nn.Module) -> None:
    """Puts a block's own function back."""
    if any(standing(module)):
        setattr(module, FUNCTION, own_function(module))


def take_out(module: nn.Module, one: InPlace) -> None:
    """Takes one of those that stand there out, if it is there."""
    outer: InPlace | None = None
    for one_there in standing(module):
        if one_there is one:
            if outer is None:
                setattr(module, FUNCTION, one.function)
            else:
                outer.function = one.function
            return
        outer = one_there
