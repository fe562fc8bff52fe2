"""Makes ``optim="cpu_adam4bit"`` a name that stock transformers knows. docs/decisions/0002-registration.md says why so.

transformers has no registration of optimizers. Three modules of it get something put in, each the moment it is imported
(or now, if it has been), so that importing this package imports nothing:

* ``training_args``: members of the enum ``OptimizerNames``, which the constructor, the command line and YAML ask;
* ``trainer_optimizer``: entries in the Trainer's table of handlers. Where a version has no such table, the public
  static method ``Trainer.get_optimizer_cls_and_kwargs`` is wrapped instead;
* ``trainer``: ``Trainer.train`` first looks whether the optimizer is ours. If so it checks the model and the checkpoint
  to resume from, and adds a callback that logs skipped steps.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .config import OPTIM_BITS

_MARK = "_hf_lowmem"  # attribute of what has been wrapped


def register() -> None:
    """Makes transformers know the optim names: now, if its modules are imported, else as soon as they are.

    May be called any number of times. If this transformers does not take the names, a RuntimeWarning says so;
    ``LowMemTrainer`` needs none of this.
    """
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name, action in _ACTIONS.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _apply(action, module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: asks the other finders and has the found loader call us when the module has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = _ACTIONS.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(fullname, path, target)
            if spec is not None:
                _call_after(spec, action)
                return spec
        return None


def _call_after(spec: importlib.machinery.ModuleSpec, action: Callable[[ModuleType], None]) -> None:
    # The loader keeps its type, which inspect and linecache look at; only this one load goes through us.
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        _apply(action, module)

    loader.exec_module = exec_module


def _apply(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:  # an import of transformers must not fail because of us
        warnings.warn(
            f"hf_lowmem could not register the optim names {', '.join(OPTIM_BITS)} in {module.__name__}: {error!r}. "
            'Use hf_lowmem.LowMemTrainer with optim left at its default and lowmem={"state_bits": 4} instead.',
            RuntimeWarning,
            stacklevel=2,
        )


# -- transformers.training_args ---------------------------------------------------------------------------------
def _add_names(training_args: ModuleType) -> None:
    names = training_args.OptimizerNames
    for value in OPTIM_BITS:
        add_enum_member(names, value.upper(), value)
    _check_names(names)


def add_enum_member(cls: Any, name: str, value: str) -> Any:
    """Appends a member to a ``(str, Enum)`` class, as EnumType itself would have, and returns it.

    The member pickles as the plain string ``value``, so that a ``training_args.bin`` loads where this package is not
    imported; strings and members of such a class are equal and hash alike.
    """
    if value in cls._value2member_map_:
        return cls._value2member_map_[value]
    member = str.__new__(cls, value)
    member._name_, member._value_, member.__objclass__ = name, value, cls
    member._sort_order_ = len(cls._member_names_)
    member.__reduce_ex__ = lambda protocol: (str, (value,))
    member.__deepcopy__ = lambda memo: member  # Python 3.10 copies through __reduce_ex__
    type.__setattr__(cls, name, member)
    cls._member_map_[name] = member
    cls._member_names_.append(name)
    cls._value2member_map_[value] = member
    if hasattr(cls, "_hashable_values_"):  # Python 3.13: what `value in cls` asks
        cls._hashable_values_.append(value)
    return member


def _check_names(names: Any) -> None:
    """The table of an enum is private to Python: ask it in every way that transformers asks."""
    for value in OPTIM_BITS:
        member = names(value)
        found = [m for m in names if m.value == value]
        if found != [member] or names[value.upper()] is not member or not isinstance(member, names):
            raise RuntimeError(f"OptimizerNames does not hold {value} after it was put in: {found}")
        if member != value or hash(member) != hash(value):
            raise RuntimeError(f"{member!r} is not equal to the string {value!r}")


# -- transformers.trainer_optimizer -----------------------------------------------------------------------------
def _add_handlers(trainer_optimizer: ModuleType) -> None:
    table = getattr(trainer_optimizer, "_OPTIMIZER_HANDLERS", None)
    if isinstance(table, dict):
        table.update(dict.fromkeys(OPTIM_BITS, _handler))


def _handler(ctx: Any) -> tuple[Any, dict[str, Any]]:
    """Of the Trainer's table: an ``OptimizerContext`` to the optimizer's class and its arguments."""
    from .factory import stock_optimizer

    cls, kwargs = stock_optimizer(ctx.args, ctx.model)
    return cls, {**kwargs, **ctx.optimizer_kwargs, **ctx.adam_kwargs}


# -- transformers.trainer ---------------------------------------------------------------------------------------
def _extend_trainer(trainer: ModuleType) -> None:
    if not _handled(trainer):
        _wrap_class_and_kwargs(trainer.Trainer)
    _wrap_train(trainer.Trainer)


def _handled(trainer: ModuleType) -> bool:
    """Whether the table that this Trainer reads is there and holds our names."""
    table = getattr(trainer, "_OPTIMIZER_HANDLERS", None)
    return isinstance(table, dict) and all(table.get(name) is _handler for name in OPTIM_BITS)


def _wrap_class_and_kwargs(cls: Any) -> None:
    stock = cls.get_optimizer_cls_and_kwargs
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        if args.optim in OPTIM_BITS:
            from .factory import stock_optimizer

            return stock_optimizer(args, model)
        return stock(args, model)

    setattr(get_optimizer_cls_and_kwargs, _MARK, True)
    cls.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)


def _wrap_train(cls: Any) -> None:
    stock = cls.train
    if getattr(stock, _MARK, False):
        return

    @functools.wraps(stock)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if uses_our_optimizer(self):
            from .checks import prepare_training

            prepare_training(self, resume_from_checkpoint)
        return stock(self, resume_from_checkpoint, *args, **kwargs)

    setattr(train, _MARK, True)
    cls.train = train


def uses_our_optimizer(trainer: Any) -> bool:
    """Whether a Trainer has, or is about to make, a ``LowBitAdamW``."""
    optim = sys.modules.get("hf_lowmem.optim")
    ours = getattr(optim, "LowBitAdamW", None)
    if trainer.optimizer is not None:
        inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        return ours is not None and isinstance(inner, ours)
    given = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if given is not None:
        return ours is not None and given[0] is ours
    return trainer.args.optim in OPTIM_BITS


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.training_args": _add_names,
    "transformers.trainer_optimizer": _add_handlers,
    "transformers.trainer": _extend_trainer,
}
