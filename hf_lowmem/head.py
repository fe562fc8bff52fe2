"""Logits that are not computed before somebody reads them, so that the loss can take head and softmax together.

While ``defer_logits`` is on, a model's output head answers a large training forward with ``DeferredLogits``: by shape,
dtype and device a tensor, without memory, that knows the hidden states and the head's weight. Scalings, soft caps and
casts of it are written down. ``loss.py`` recognises it and never makes the logits as a whole. Whatever else touches it
gets the real logits, computed then, with the graph that they would have had.

[Note: two ways in] Python code is caught by ``__torch_function__``: the call is done with the real logits instead, and
everything after it is ordinary. Code that looks past that (``Function.apply``, hooks written in C++) sees the tensor
itself. For this it is born in an autograd function, so that a gradient which reaches it goes on to the hidden states
and the weight, and ``__torch_dispatch__`` gives such code the values.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

WHOLE = 2**27  # bytes of logits (tokens x words x bytes of a value) up to which they are made as a whole: 128 MiB
_LABELS = "_hf_lowmem_labels"  # the attribute of a model, and of its head, under which its Labels lie


# -- the logits ---------------------------------------------------------------------------------------------------
class Op(NamedTuple):
    """An elementwise operation ``function(logits, *args)``; the arguments are numbers or a dtype."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]


@dataclass
class Source:
    """What deferred logits are computed from.

    Args:
        hidden: ``[..., hidden]``, as the head was given it.
        weight: ``[words, hidden]``.
        bias: ``[words]``, or None.
        dtype: of the product, to which all three are cast first: autocast's, or their own.
        ops: what has been done to the product since.
        version: of hidden, weight and bias when the head was called.
        logits: the real ones, once they have been made.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    ops: tuple[Op, ...]
    version: tuple[int, ...]
    logits: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias

    def compute(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits of these inputs."""
        with torch.autocast(hidden.device.type, enabled=False):  # the casts are made here
            own = None if bias is None else bias.to(self.dtype)
            return replayed(self.ops, F.linear(hidden.to(self.dtype), weight.to(self.dtype), own))

    def real(self) -> Tensor:
        """The logits, with their graph; made once. Raises: RuntimeError if the weight has been changed since."""
        if self.logits is None:
            self._check()
            with torch.inference_mode(False), torch.enable_grad():
                self.logits = self.compute(*self.inputs)
        return self.logits

    def values(self) -> Tensor:
        """The logits without a graph."""
        if self.logits is not None:
            return self.logits.detach()
        self._check()
        return self.compute(*(None if x is None else x.detach() for x in self.inputs))  # type: ignore[arg-type]

    def _check(self) -> None:
        if versions(*self.inputs) != self.version:
            raise RuntimeError(
                f"the logits of {self.hidden.shape[:-1].numel()} tokens and {self.weight.shape[0]} words are computed "
                "when they are first read, and the head's weight or its input has been changed in place since the "
                "forward: read output.logits before the optimizer's step, or call use_stock_loss(model)"
            )


def versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(x._version for x in tensors if x is not None)


def replayed(ops: tuple[Op, ...], logits: Tensor) -> Tensor:
    for op in ops:
        logits = op.function(logits, *op.args)
    return logits


class DeferredLogits(Tensor):
    """Logits ``[..., words]`` without memory. See the module's docstring.

    Attributes:
        source: what they are computed from.
    """

    source: Source

    @classmethod
    def of(cls, source: Source) -> DeferredLogits:
        with torch._C.DisableTorchFunctionSubclass():
            made = _Deferred.apply(*source.inputs, source)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if type(first) is cls and first.source_if_pending is not None:
            if func in _PASSIVE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            op = _recorded(func, args, kwargs)
            if op is not None:
                return first._after(op)
            if func is Tensor.contiguous and len(args) == 1 and not kwargs:
                return first
        elif func is Tensor.__hash__:
            return id(first)
        args, kwargs = tree_map_only(cls, lambda x: x.source.real(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.source.values(), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @property
    def source_if_pending(self) -> Source | None:
        """None once the logits have been made: then they are what counts, somebody may have changed them."""
        return self.source if self.source.logits is None else None

    def _after(self, op: Op) -> DeferredLogits:
        if op.function is Tensor.to and op.args[0] == self.dtype:
            return self
        return DeferredLogits.of(dataclasses.replace(self.source, ops=(*self.source.ops, op)))


class _Deferred(torch.autograd.Function):
    """Gives birth to deferred logits, with a place in the graph for code that does not ask for the real ones."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: Source) -> Tensor:
        ctx.source = source
        dtype = replayed(source.ops, torch.empty(0, dtype=source.dtype)).dtype
        shape = (*hidden.shape[:-1], weight.shape[0])
        return Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device)  # type: ignore[attr-defined]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        given = (*ctx.source.inputs, None)
        inputs = [
            None if x is None else x.detach().requires_grad_(needed)
            for x, needed in zip(given, ctx.needs_input_grad, strict=True)
        ]
        with torch.enable_grad():
            logits = ctx.source.compute(*inputs[:3])
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(logits, wanted, gradient))
        return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


# What deferred logits answer themselves: all that concerns neither values nor graph.
_PASSIVE = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "nbytes",
            "itemsize",
            "requires_grad",
            "is_leaf",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_nested",
        )
    ),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.__len__,
    Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_CASTS = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16}
_OF_A_NUMBER = {
    *(torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide, torch.add, torch.sub),
    *(Tensor.mul, Tensor.multiply, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.add, Tensor.sub),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__add__, Tensor.__radd__, Tensor.__sub__),
}
_OF_NOTHING = {torch.tanh, Tensor.tanh, torch.neg, Tensor.neg, Tensor.__neg__}


def _recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
    """The call of ``func``, whose first argument is the logits, as an operation; None if it is none of ours."""
    rest = args[1:]
    if func is Tensor.to and (*rest, *kwargs.values()) in ((torch.float32,), (torch.bfloat16,), (torch.float16,)):
        return Op(Tensor.to, (*rest, *kwargs.values()))
    if kwargs:
        return None
    if func is Tensor.to and len(rest) == 1 and isinstance(rest[0], torch.device | str):
        same = torch.device(rest[0]) == args[0].device
        return Op(Tensor.to, (args[0].dtype,)) if same else None
    if func in _CASTS and not rest:
        return Op(Tensor.to, (_CASTS[func],))
    if func in _OF_NOTHING and not rest:
        return Op(func, ())
    if func in _OF_A_NUMBER and len(rest) == 1 and type(rest[0]) in (int, float):
        return Op(func, rest)
    return None


# -- the head -----------------------------------------------------------------------------------------------------
class Labels:
    """Looks at a model's calls for labels.

    Args:
        model: on which it hangs its hooks.

    Attributes:
        given: whether the model is in a forward that was given labels.
    """

    def __init__(self, model: nn.Module) -> None:
        self.given = False
        self.handles = (
            model.register_forward_pre_hook(self.before, with_kwargs=True),
            model.register_forward_hook(self.after, always_call=True),
        )

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = kwargs.get("labels") is not None or _positional(model, args, "labels") is not None

    def after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.given = False


def _positional(module: nn.Module, args: tuple[Any, ...], name: str) -> Any:
    """The argument of this name among positional ones of ``forward``, or None."""
    if not args:
        return None
    try:
        return inspect.signature(type(module).forward).bind_partial(module, *args).arguments.get(name)
    except TypeError:  # more than it takes: forward is about to say so
        return None


class DeferringLinear(nn.Linear):
    """The class that a head has while its logits may be deferred. It is an ``nn.Linear`` in all other respects."""

    def forward(self, input: Tensor) -> Tensor:
        """See ``nn.Linear``."""
        if torch.compiler.is_compiling() or not (self.training and vars(self)[_LABELS].given):
            return super().forward(input)
        dtype = self._dtype_of_product(input) if torch.is_grad_enabled() else None
        if dtype is None or input.numel() // self.in_features * self.out_features * dtype.itemsize <= WHOLE:
            return super().forward(input)
        inputs = (input, self.weight, self.bias)
        return DeferredLogits.of(Source(*inputs, dtype, (), versions(*inputs)))

    def _dtype_of_product(self, input: Tensor) -> torch.dtype | None:
        """None where the logits are not to be deferred: somebody else looks in, or the tensors are no ordinary ones."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        if any(hooks) or "forward" in vars(self):
            return None
        tensors = [x for x in (input, self.weight, self.bias) if x is not None]
        if type(input) is not Tensor or any(type(x) is not nn.Parameter for x in tensors[1:]):
            return None
        kind = input.device.type
        if any(x.device != input.device or x.is_inference() for x in tensors):
            return None
        if not any(x.requires_grad for x in tensors) or input.ndim < 2 or not torch.amp.is_autocast_available(kind):
            return None
        if torch.is_autocast_enabled(kind):
            return None if any(x.dtype is torch.float64 for x in tensors) else torch.get_autocast_dtype(kind)
        return input.dtype if all(x.dtype == input.dtype for x in tensors) else None

    def _get_name(self) -> str:
        return "Linear"


def defer_logits(model: nn.Module) -> None:
    """Has the output head of a model defer large logits, in training forwards that are given labels.

    Nothing happens where the head is anything but a plain ``nn.Linear``.

    Args:
        model: with ``get_output_embeddings()``, and called through its ``__call__``, from within a wrapper or not.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        return
    if _LABELS not in vars(model):
        vars(model)[_LABELS] = Labels(model)
    vars(head)[_LABELS] = vars(model)[_LABELS]
    head.__class__ = DeferringLinear


def never_defer(model: nn.Module) -> None:
    """Undoes ``defer_logits`` in a model and in all within it."""
    for module in model.modules():
        labels = vars(module).pop(_LABELS, None)
        for handle in () if labels is None else labels.handles:
            handle.remove()
        if type(module) is DeferringLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
