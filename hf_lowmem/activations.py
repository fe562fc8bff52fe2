"""``InputOffload``: the inputs of checkpointed blocks, in host memory between forward and backward.

Activation checkpointing keeps of each block its input alone, until backward computes the block again: blocks × tokens ×
hidden size × bytes of a value, which long sequences make the largest part of a GPU's memory. Here an input is copied to
pinned host memory while its block computes, and comes back before its block's backward.

[Note: what it hangs on] We stand in the place of a block's checkpoint function (``checkpointing.py``), hand an empty
tensor to the checkpoint for the input, and put the input in again inside of ``function``. The empty tensor is on the
input's device: the checkpoint keeps the random state of the devices that its arguments are on, and without it dropout
would drop other values in backward.
That needs ``use_reentrant=False``, whose second run only makes what autograd has saved: the gradient of the input flows
through the graph of the first run. With ``use_reentrant=True`` it flows through ``args``, and would be lost.

[Note: who waits for whom] The CPU waits for nothing. On the device every input, also one that came back, is memory of
the computing stream. That stream waits for the event of an input's copy, up or down, before it reads the input or lets
go of it; so whoever gets the memory next, in that stream's order, finds no copy under way. A copy waits for all that
the computing stream was given before: the input has been computed, what had its memory before is over, and a copy down
begins after the copy up, which that stream waited for when it let go.
A host buffer is written anew when nobody can ask for its input any more. Copies down from it are over then, if anyone
has read what they brought: the computing stream waited for them, and the copy up waits for the computing stream.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .checkpointing import InPlace, is_checkpointed, own_function, put_innermost, standing, take_out
from .memory import PinnedArena


class InputOffload:
    """Keeps the inputs of a model's checkpointed blocks in host memory from their forward to their backward.

    It is the first positional argument that is a tensor which is kept so, if its values are floating point. Results are
    the same bits. A block that is not checkpointed is left alone, and so is one whose forward needs no gradients.

    Args:
        modules: the blocks.
        device: where they compute.
        ahead: so many inputs come back before it is their blocks' turn. In the forward as many, the latest, stay on the
            device: while they are copied, and because backward begins with them.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device, ahead: int = 2) -> None:
        self.modules, self.ahead = list(modules), ahead
        self._copies: _CudaCopies | _HostCopies = _CudaCopies(device) if device.type == "cuda" else _HostCopies(device)
        self._pool = _Pool(pin=device.type == "cuda")
        self._count = 0
        self._latest: Callable[[], _Input | None] = _nothing
        self._there: dict[int, _There] = {}  # by the input's number, the longest there first

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held, in use or free."""
        return self._pool.nbytes

    def install(self) -> int:
        """Takes the place of the blocks' checkpoint functions. Where that has been done it does nothing: call it before
        each step, because whoever enables checkpointing anew puts other functions there.

        Returns: of how many blocks the inputs are kept in host memory now.

        Raises: ValueError where a block is checkpointed with ``use_reentrant=True``.
        """
        count = 0
        for module in self.modules:
            if not is_checkpointed(module):
                continue
            if self._ours(module) is None:
                if _is_reentrant(own_function(module)):
                    raise _refusal()
                put_innermost(module, functools.partial(_Offloaded, self))
            count += 1
        return count

    def remove(self) -> None:
        """Puts the blocks' own functions back. Backward of earlier forwards still works."""
        for module in self.modules:
            ours = self._ours(module)
            if ours is not None:
                take_out(module, ours)
        self._let_go([])
        self._pool.clear()

    def _ours(self, module: nn.Module) -> _Offloaded | None:
        return next((x for x in standing(module) if isinstance(x, _Offloaded) and x.offload is self), None)

    # -- for the functions that are installed --------------------------------------------------------------------------
    def takes(self, tensor: Tensor) -> bool:
        """Whether it is an input that can be kept in host memory. A parameter stays on the device anyway."""
        return (
            type(tensor) is Tensor
            and tensor.is_floating_point()
            and tensor.numel() > 0
            and tensor.device == self._copies.device
        )

    def keep(self, tensor: Tensor) -> _Input:
        """Starts an input's copy up. Of those before it, the device lets go."""
        self._count += 1
        kept = _Input(self._count, tensor, self._pool, self._latest)
        source = tensor.detach()  # shares the memory and its version, and keeps no graph alive
        done = self._copies.up(kept.home, source)
        self._latest = weakref.ref(kept)
        self._there[kept.number] = _There(source, done, source._version, self._latest)
        self._let_go(list(self._there)[-self.ahead :] if self.ahead else [])
        return kept

    def restore(self, kept: _Input) -> Tensor:
        """An input on the device again, as a leaf. Those of the blocks that were used before it begin to come.

        Raises: RuntimeError if it was written to before its copy was done.
        """
        wanted = [kept]
        while len(wanted) <= self.ahead and (earlier := wanted[-1].before()) is not None:
            wanted.append(earlier)
        for one in wanted:
            if one.number not in self._there:
                tensor, done = self._copies.down(one.home)
                self._there[one.number] = _There(tensor, done, tensor._version, weakref.ref(one))
        tensor = self._there[kept.number].tensor
        self._let_go([one.number for one in wanted[1:]])  # and of what came for a backward that went another way
        if kept.spoiled:
            raise RuntimeError(
                f"the input of a checkpointed block, {tensor.dtype} of shape {tuple(tensor.shape)}, was written to in "
                "place after its block had begun, so what backward would compute again is not what the forward "
                "computed: write to a copy of it (x = x + y instead of x += y)"
            )
        return tensor.detach().requires_grad_(kept.requires_grad)

    def _let_go(self, but: Sequence[int]) -> None:
        """Gives up what is on the device, except for the inputs of these numbers."""
        for number in [number for number in self._there if number not in but]:
            there = self._there.pop(number)
            self._copies.wait(there.done)
            kept = there.kept()
            if kept is not None and there.tensor._version != there.version:
                kept.spoiled = True  # perhaps while it was copied; what is written from here on comes after the copy


# -- what takes the place of a checkpoint function -----------------------------------------------------------------
class _Offloaded(InPlace):
    """A block's checkpoint function whose first tensor is kept in host memory.

    Args:
        offload: which keeps it.
        function: the block's own checkpoint function.
    """

    def __init__(self, offload: InputOffload, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.offload = offload

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = next((i for i, x in enumerate(args) if isinstance(x, Tensor)), None)
        wanted = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if place is None or not wanted or not self.offload.takes(args[place]):
            return self.function(forward, *args, **kwargs)
        tensor = args[place]
        run = _Run(self.offload, forward, place, tensor)
        return self.function(run, *args[:place], tensor.new_empty(0), *args[place + 1 :], **kwargs)


class _Run:
    """A block's forward that is run once in the forward and once in each backward, and puts its input in.

    Args:
        offload: which keeps the input.
        forward: the block's forward.
        place: of the input among the positional arguments.
        tensor: the input.
    """

    def __init__(self, offload: InputOffload, forward: Callable[..., Any], place: int, tensor: Tensor) -> None:
        self._offload, self._forward, self._place = offload, forward, place
        self._first: Tensor | None = tensor  # until it has been run once
        self._kept = offload.keep(tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensor, self._first = self._first, None
        if tensor is None:
            tensor = self._offload.restore(self._kept)
        elif not torch.is_grad_enabled():  # what _is_reentrant could not see
            raise _refusal()
        return self._forward(*args[: self._place], tensor, *args[self._place + 1 :], **kwargs)


def _is_reentrant(function: Any) -> bool:
    """Whether a checkpoint function is seen to be reentrant; torch's is unless it is told otherwise."""
    reentrant = None
    while isinstance(function, functools.partial):
        reentrant = function.keywords.get("use_reentrant") if reentrant is None else reentrant
        function = function.func
    return bool(reentrant) if reentrant is not None else function is checkpoint


def _refusal() -> ValueError:
    return ValueError(
        "activation checkpointing with use_reentrant=True does not go together with offload_activations: the gradient "
        'of a block\'s input would be lost. Write gradient_checkpointing_kwargs={"use_reentrant": False}'
    )


def _nothing() -> None:
    return None


# -- inputs and their memory ---------------------------------------------------------------------------------------
class _Input:
    """One block's input in one forward. Its buffer goes back to the pool when the graph that may ask for it is gone.

    Args:
        number: a new one.
        tensor: the input.
        pool: where the buffer comes from.
        before: gives the input of the block that was used before, or None where that is gone.

    Attributes:
        home: where its values are in host memory, in the order that they have on the device.
        spoiled: whether it was written to while the device held it for its copy up.
    """

    def __init__(self, number: int, tensor: Tensor, pool: _Pool, before: Callable[[], _Input | None]) -> None:
        self.number, self.before, self.requires_grad = number, before, tensor.requires_grad
        self.spoiled = False
        nbytes = tensor.numel() * tensor.element_size()
        self.buffer, self._returned = pool.take(nbytes), pool.returned
        self.home = self.buffer.memory[:nbytes].view(tensor.dtype).as_strided(tensor.shape, _strides(tensor))

    def __del__(self) -> None:
        # Of any thread, at any moment: the garbage collector's. Appending to a deque is atomic.
        if hasattr(self, "_returned"):
            self._returned.append(self.buffer)


@dataclass
class _There:
    """An input on the device, from where it came or to where it has come back.

    Args:
        tensor: it, without a graph.
        done: the event of its copy, up or down.
        version: the tensor's when that began.
        kept: gives the input, or None where it is gone.
    """

    tensor: Tensor
    done: Any
    version: int
    kept: Callable[[], _Input | None]


class _Buffer:
    """Host memory of one input at a time.

    Args:
        nbytes: of exactly this size.
        pin: for copies from and to a GPU.

    Attributes:
        memory: ``uint8[nbytes]``.
    """

    def __init__(self, nbytes: int, pin: bool) -> None:
        self._arena = PinnedArena([nbytes]) if pin else None  # the memory is pinned as long as it lives
        self.memory = torch.empty(nbytes, dtype=torch.uint8) if self._arena is None else self._arena.parts[0]


class _Pool:
    """Buffers that are used again.

    A buffer that is too large is taken where none fits better, and one that is too small makes room for a larger one:
    so there are never more of them than were in use at once, nor larger ones than the largest input needs, and with
    batches of all lengths the pinning, which is slow, soon comes to an end.

    Args:
        pin: for copies from and to a GPU.

    Attributes:
        nbytes: of all buffers, in use or free.
        returned: buffers that are free from now on.
    """

    def __init__(self, pin: bool) -> None:
        self.nbytes, self._pin = 0, pin
        self.returned: deque[_Buffer] = deque()
        self._free: list[_Buffer] = []

    def take(self, nbytes: int) -> _Buffer:
        """The smallest free buffer that is large enough, or else a new one in the place of the largest."""
        self._collect()
        large = [buffer for buffer in self._free if buffer.memory.numel() >= nbytes]
        if large:
            buffer = min(large, key=lambda buffer: buffer.memory.numel())
            self._free.remove(buffer)
            return buffer
        if self._free:
            self._drop(max(self._free, key=lambda buffer: buffer.memory.numel()))
        buffer = _Buffer(nbytes, self._pin)
        self.nbytes += nbytes
        return buffer

    def clear(self) -> None:
        """Gives up the free buffers."""
        self._collect()
        for buffer in list(self._free):
            self._drop(buffer)

    def _collect(self) -> None:
        while self.returned:
            self._free.append(self.returned.popleft())

    def _drop(self, buffer: _Buffer) -> None:
        self._free.remove(buffer)
        self.nbytes -= buffer.memory.numel()


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Its own where its values lie without gaps, in whatever order, so that its copies are single ones and kernels find
    what they found; else those of a contiguous tensor.
    """
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()


# -- copies --------------------------------------------------------------------------------------------------------
class _CudaCopies:
    """Copies on streams of their own, one for each direction; the module's docstring says who waits for whom.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._down, self._up = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def up(self, home: Tensor, source: Tensor) -> torch.cuda.Event:
        """Starts a copy up. Returns the event that it is done. The source must be kept until then."""
        self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            home.copy_(source, non_blocking=True)
        return self._up.record_event()

    def down(self, home: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Starts a copy down. Returns where to, and the event that it is done.

        The memory is the computing stream's, where autograd gives it back at a moment that we do not see. Memory of the
        down stream would need ``record_stream`` for that, with which the allocator frees late and irregularly. The
        price is that the copy begins after all that the computing stream was given so far: fetched some blocks ahead,
        it has these blocks' time.
        """
        tensor = torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=self.device)
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            tensor.copy_(home, non_blocking=True)
        return tensor, self._down.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        """Makes the computing stream wait for a copy. The CPU does not wait."""
        torch.cuda.current_stream(self.device).wait_event(done)


class _HostCopies:
    """The same between two places in host memory: at once, for machines without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def up(self, home: Tensor, source: Tensor) -> None:
        home.copy_(source)

    def down(self, home: Tensor) -> tuple[Tensor, None]:
        return torch.empty_strided(home.shape, home.stride(), dtype=home.dtype, device=self.device).copy_(home), None

    def wait(self, done: None) -> None: ...
