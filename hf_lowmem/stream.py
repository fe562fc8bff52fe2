"""``Streamer``: blocks of a model that rest on a shelf and are on the device only while they are used.

A block is *bound* while its parameters' ``data`` lie in its slot on the device, and *home* otherwise: then they are
ordinary tensors in host memory. It is fetched ahead of its use, in the order in which the blocks were used last time.

| what happens                     | IDLE                                    | BACKWARD                  |
| -------------------------------- | --------------------------------------- | ------------------------- |
| its forward begins               | use                                     | use (a recomputation)     |
| its forward ends                 | home; release, unless backward is next  | nothing                   |
| a gradient reaches its outputs   | use; -> BACKWARD                        | nothing                   |
| gradients have left its inputs   | nothing                                 | send, release; -> IDLE    |
| the whole backward ends          | release                                 | send, release; -> IDLE    |

[Note: what the hooks hang on] Module hooks see a block's forward, whether a checkpoint lies inside of them (as in
transformers 5.24, which checkpoints a layer's ``forward``) or outside (as in 5.17, which checkpoints its ``__call__``:
then they fire again in the recomputation). Full backward hooks would miss blocks none of whose inputs needs a gradient,
so backward is seen by hooks on what made the outputs and the latest input, and by a callback at the end for the blocks
that have no such input.
Forward hooks alone, or slots that another block takes over before autograd is done with what it saved, give wrong
gradients without a word. Slots of their own, whose memory comes and goes under the same storage, do not: what autograd
has saved of a weight is the weight again once it has been fetched again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from .block import AfterBackward, Block, Updates, Whole
from .coded import BarePlace, CodedPlace, place_of
from .link import Link
from .place import Place
from .shelf import Shelf

AHEAD = 2  # so many blocks are fetched before they are used


class Streamer:
    """Streams a model's blocks; the module's docstring has the transitions.

    Args:
        model: the root. Each of its forwards starts a new round, and so does a block that is used a second time: copies
            that an earlier round left are not trusted.
        blocks: what is streamed, in the order in which it is likely to be used. Their parameters move to the shelf.
        shelf: where the blocks rest.
        link: how they get to the device.
        ahead: so many blocks are fetched before they are used.
        debug: fill what is given back with NaN.

    Attributes:
        fetches: number of fetches of weights so far.
        updates: of the optimizer that goes on writing the blocks' weights after its step; None without one.
        early: whether a block is updated as soon as its gradients have arrived, in the next backward, which must be the
            last one before the step. Its parameters then have no ``grad``, which is kept nowhere.
        early_norms: the norms of these gradients, by parameter, of the last backward.
        observer: is called with a block and "forward" or "backward" before that begins, and "end" after the latter. Of
            a block that stays on the device it sees the forwards only.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        shelf: Shelf,
        link: Link,
        ahead: int = AHEAD,
        debug: bool = False,
    ) -> None:
        self.blocks, self.shelf, self.link, self.ahead = list(blocks), shelf, link, ahead
        self.fetches = 0
        self.updates: Updates | None = None
        self.early = False
        self.early_norms: dict[nn.Parameter, Tensor] = {}
        self.observer: Callable[[Block, str], None] | None = None
        self._places: dict[Block, Place] = {}
        for number, block in enumerate(self.blocks):
            block.number = number
            self._places[block] = place_of(block, shelf, link.device, debug)
        self._after: dict[Block, Block] = {}  # what was used after, and before, each block the last time
        self._before: dict[Block, Block] = {}
        self._expect_the_order_of_blocks()
        self._latest: Block | None = None  # whose forward began last in this round
        self._round = 0
        self._used: set[Block] = set()  # in this round
        self._there: dict[Block, None] = {}  # whose weights are on the device, the longest there first
        self._given: set[Any] = set()  # what made the inputs of the block whose forward is under way
        self._sent: set[Block] = set()  # whose gradients may not have come home yet
        self._ending = False  # the callback at the end of backward is on its way
        self._norms: dict[nn.Parameter, tuple[Tensor, Tensor, int]] = {}
        self._handles = list(self._hooks(model))

    # -- for others -------------------------------------------------------------------------------------------------
    def go_home(self) -> None:
        """Brings every parameter home, whatever was going on. Gradients that were on the device are lost."""
        for block in self.blocks:
            for p in block.trained:
                if p.grad is not None and self._places[block].bound and block.backward:
                    p.grad = None
            block.backward = block.under_way = block.in_parts = False
            block.to_come = 0
            self._release(block)
        self._ending = False
        self.link.finish()
        self._sent.clear()
        self.synchronize()

    def synchronize(self) -> None:
        """Returns when the optimizer has written every block's weights. Raises: what has gone wrong in it."""
        if self.updates is not None:
            self.updates.synchronize()

    def begin(self) -> None:
        """Fetches what the next forward begins with. Only where nobody writes weights before it but through torch."""
        block = self._first
        for _ in range(self.ahead + 1):
            if block is None or block in self._there:
                return
            try:
                self._fetch(block, False, wait=False)
            except torch.OutOfMemoryError:  # the forward will say so, where something can be done about it
                return
            self._places[block].is_for(self._round + 1)
            block = self._after.get(block)

    def keep(self, block: Block) -> None:
        """Moves a block to the device, where it stays, with its gradients; what it took of the shelf is free.

        Only while no forward or backward is under way. Raises: torch.OutOfMemoryError; the block is where it was then.
        """
        if block.kept:
            return
        if self.updates is not None:
            self.updates.wait(block.number)
        self._release(block)
        self.link.finish()
        moved = self._places[block].on_device(self.link.device)
        grads = [None if p.grad is None else p.grad.to(self.link.device, copy=True) for _, p in block.params]
        self._exchange(block, moved, grads)
        block.kept = True
        self._places[block].has_moved(moved)
        self.shelf.drop(block.number)
        self._expect_the_order_of_blocks()

    def give_up(self, block: Block) -> None:
        """Moves a block that was kept back to the shelf, with its gradients. Only between forwards, like ``keep``."""
        if not block.kept:
            return
        home = self._places[block].on_shelf()
        grads: dict[nn.Parameter, Tensor] = {}
        if block.gradient_layer is not None and any(p.grad is not None for p in block.trained):
            views = block.gradient_layer.views(self.shelf.gradients(block.number))
            grads = {p: view for p, view in zip(block.trained, views, strict=True) if p.grad is not None}
        for p, grad in grads.items():
            assert p.grad is not None
            grad.copy_(p.grad)
        self._exchange(block, home, [grads.get(p) for _, p in block.params])
        block.kept = False
        self._places[block].has_moved(home)
        self._expect_the_order_of_blocks()

    def _exchange(self, block: Block, data: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        for (_, p), tensor, grad in zip(block.params, data, grads, strict=True):
            p.grad = None  # a parameter and its gradient are on one device
            p.data, p.grad = tensor, grad
            self._norms.pop(p, None)
            self.early_norms.pop(p, None)

    def _expect_the_order_of_blocks(self) -> None:
        streamed = [block for block in self.blocks if not block.kept]
        self._after = dict(itertools.pairwise(streamed))
        self._before = {later: earlier for earlier, later in self._after.items()}
        self._latest = None
        self._first = streamed[0] if streamed else None  # with which the latest round has begun

    def whole(self, module: nn.Module) -> Whole | None:
        """For whoever has a block compute in parts within its forward. None where the block's hooks are around that."""
        blocks = self.blocks if self._handles else []  # none after `remove`
        block = next((block for block in blocks if block.module is module), None)
        return None if block is None or block.under_way else Whole(self, block)

    @property
    def passing_bytes(self) -> int:
        """Bytes of the device for blocks that are there and will not stay."""
        return sum(self._places[block].passing_bytes for block in self._there)

    def encode(self, number: int, threads: int | None = None) -> None:
        """Writes what crosses the link of a block, after an update of its weights at home; any thread may."""
        if isinstance(place := self._places[self.blocks[number]], CodedPlace):
            place.encode(threads)

    def gradient_norm(self, p: nn.Parameter) -> Tensor | None:
        """The 2-norm of a streamed parameter's gradient, taken on the device on its way; None where that is not known.

        A gradient that has been written since, through torch, has none.
        """
        norm, gradient, version = self._norms.get(p, (None, None, -1))
        return norm if gradient is not None and p.grad is gradient and gradient._version == version else None

    def codes(self) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """Codes and scales of the weights that exist in few bits alone, where they rest now."""
        bare = [place for place in self._places.values() if isinstance(place, BarePlace)]
        return {p: pair for place in bare for p, pair in place.coded().items()}

    def remove(self) -> None:
        """Takes the hooks off. The parameters stay at home, as tensors of their own where they were stand-ins."""
        self.go_home()
        for place in self._places.values():
            place.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks ------------------------------------------------------------------------------------------------------
    def _hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Hooks, and what they leave in graphs, keep the streamer alive: blocks and graphs may outlive the root."""
        yield model.register_forward_pre_hook(lambda module, args: self._new_round(), prepend=True)
        for module in model.modules():  # who reads weights by one of these waits for the optimizer
            yield module.register_state_dict_pre_hook(lambda module, prefix, keep_vars: self.synchronize())
            yield module.register_load_state_dict_pre_hook(self._before_load)
        for place in self._places.values():
            yield from place.hooks()
        for block in self.blocks:
            yield block.module.register_forward_pre_hook(
                lambda module, args, kwargs, block=block: self._before_forward(block, args, kwargs),
                with_kwargs=True,
                prepend=True,
            )
            yield block.module.register_forward_hook(
                lambda module, args, out, block=block: self._after_forward(block, out), always_call=True
            )

    def _before_load(self, module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                f"load_state_dict(assign=True) would replace parameters of {prefix or 'the model'} that the streamer "
                "knows: leave assign out, or call detach(model) first"
            )
        self.synchronize()

    def _new_round(self) -> None:
        self._round += 1
        self._used.clear()
        if self._latest is not None:
            self._after.pop(self._latest, None)
            self._latest = None
        stranded = any(block.backward or self._places[block].bound for block in self.blocks)
        if stranded and torch._C._current_graph_task_id() == -1:
            self.go_home()  # an exception has ended a forward or a backward in the middle

    def _before_forward(self, block: Block, args: Any, kwargs: Any) -> Any:
        if block.in_parts:
            return None
        block.under_way, recomputed = True, torch._C._current_graph_task_id() != -1
        if self.observer is not None and not recomputed:
            self.observer(block, "forward")
        if block.kept and not block.forms:
            return None
        if block.backward:  # a checkpoint outside of the hooks computes it again
            self._use(block)
            return None
        if not recomputed:
            if block in self._used:
                self._new_round()
            if not block.kept:
                if self._latest is not None:
                    self._after[self._latest], self._before[block] = block, self._latest
                self._latest, self._first = block, self._first if self._used else block
            self._used.add(block)
        place = self._places[block]
        if place.there and not place.is_of(self._round):
            self._release(block)  # the copy of an earlier forward, whose weights may have changed since
        self._use(block)
        self._fetch_ahead(block, self._before if recomputed else self._after)
        return self._watch_inputs(block, args, kwargs) if torch.is_grad_enabled() else None

    def _watch_inputs(self, block: Block, args: Any, kwargs: Any) -> Any:
        """Has backward tell when it is over for this block: when it comes to what made the latest of its inputs.

        Autograd does what was recorded last first, so the block's own part is done by then. The graph and the inputs
        stay as they are: one more node on an input that others use too would sum its gradient in another order, and a
        block may write into a dict, a list or a tensor that it is given.
        """
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
        if not inputs:
            return None
        self._given = {x.grad_fn for x in inputs}
        latest = max(inputs, key=lambda x: -1 if x.grad_fn is None else x.grad_fn._sequence_nr())
        if latest.grad_fn is not None:
            latest.register_hook(lambda gradient: self._after_backward(block))
            return None
        watched = AfterBackward.apply(lambda: self._after_backward(block), latest)  # a leaf's turn is at once
        args = tuple(watched if x is latest else x for x in args)
        return args, {name: watched if x is latest else x for name, x in kwargs.items()}

    def _after_forward(self, block: Block, out: Any) -> None:
        block.under_way = block.in_parts
        if (block.kept and not block.forms) or block.in_parts:
            return
        given, self._given = self._given, set()
        if block.backward:
            return
        outputs = {x.grad_fn for x in tree_flatten(out)[0] if isinstance(x, Tensor) and x.requires_grad}
        outputs -= {*given, None}  # what only passes through is not of this block
        for node in outputs:  # after the hook of the block that takes the output, which is one on the tensor
            node.register_prehook(lambda gradients: self._before_backward(block))  # type: ignore[union-attr]
        block.to_come += bool(outputs)
        if outputs and not block.kept and self._is_among_last(block):
            self._places[block].unbind()  # its copy stays: backward begins with it
        else:
            self._release(block)
        if out is not None and torch._C._current_graph_task_id() == -1:  # None: the block has failed
            self._fetch_ahead(block, self._after)  # what the optimizer had not written when this block began
        if not self._there and block not in self._after and not block.kept:
            self.link.flush()  # the last one, and no backward is to come

    def _before_backward(self, block: Block) -> None:
        if block.backward:
            return
        if not self._ending:
            self._ending = True
            self.early_norms.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        if self.observer is not None and not block.kept:
            self.observer(block, "backward")
        block.backward = True
        self._use(block)
        self._fetch_ahead(block, self._before)

    def _after_backward(self, block: Block) -> None:
        if block.backward:
            block.to_come -= 1
            self._send(block)
            self._release(block)
            block.backward = False
            if self.observer is not None and not block.kept:
                self.observer(block, "end")

    def _end_of_backward(self) -> None:
        self._ending = False
        for block in self.blocks:
            self._after_backward(block)
            self._release(block)
            block.to_come = 0
        self.link.finish()
        self._sent.clear()

    def _is_among_last(self, block: Block) -> bool:
        follower: Block | None = block
        for _ in range(self.ahead):
            follower = self._after.get(follower) if follower is not None else None
        return follower is None

    # -- the verbs --------------------------------------------------------------------------------------------------
    def _fetch(self, block: Block, backward: bool, wait: bool = True) -> None:
        """Starts what is not there yet on its way, but for a block that the CPU is updating, unless told to wait."""
        place = self._places[block]
        if block.kept:
            return
        if not place.there:
            luggage = self._take_luggage(block, wait)
            if luggage is None and self.updates is not None:
                if not wait and not self.updates.done(block.number):
                    return
                self.updates.wait(block.number)
            self._make_room()
            if luggage is None:
                place.fetch(self.link)
            else:
                place.fetch_updated(self.link, luggage)
            place.is_for(self._round)
            self._there[block] = None
            self.fetches += 1
        gradients = place.gradients
        if backward and gradients is not None and not gradients.there:
            homes = [p.grad for p in block.trained]
            if any(home is not None for home in homes):  # of an earlier micro-batch: this one's is added on the device
                slab = self.shelf.gradients(block.number)
                assert block.gradient_layer is not None
                for home, view in zip(homes, block.gradient_layer.views(slab), strict=True):
                    if home is not None and home.data_ptr() != view.data_ptr():
                        view.copy_(home)
                if block in self._sent:  # used twice in one backward: its gradients may still be on their way home
                    self.link.finish()
                    self._sent.clear()
                gradients.ticket = self.link.fetch(gradients.slot, slab)
                gradients.there = True

    def _take_luggage(self, block: Block, needed: bool) -> Any:
        """A block's update, if the device may do it and has it sooner than the optimizer; or None."""
        place = self._places[block]
        if self.updates is None or not place.gradient_home or self.updates.done(block.number):
            return None
        assert block.gradient_layer is not None
        more = place.link_bytes + block.gradient_layer.nbytes
        seconds = 0.0 if needed else self.link.seconds(more)
        weights: dict[Tensor, Tensor] = {p: home for (_, p), home in zip(block.params, place.home, strict=True)}
        grads: dict[Tensor, Tensor] = dict(zip(block.trained, place.gradient_home, strict=True))
        return self.updates.take(block.number, weights, grads, seconds)

    def _fetch_ahead(self, block: Block, order: Mapping[Block, Block]) -> None:
        backward = order is self._before
        for _ in range(self.ahead):
            following = order.get(block)
            if following is None:
                return
            block = following
            self._fetch(block, backward, wait=False)  # or else the device would have nothing to do meanwhile

    def _make_room(self) -> None:
        """Gives up copies that were fetched and not used: the order was another one than last time."""
        idle = [block for block in self._there if not self._places[block].bound]
        for block in idle[: max(0, len(self._there) - self.ahead)]:
            self._release(block)

    def _use(self, block: Block) -> None:
        """Binds a block, and for its backward the gradients that it has already."""
        place = self._places[block]
        self._fetch(block, block.backward)
        place.bind(self.link)
        if block.backward and place.gradients is not None and place.gradients.there:
            self.link.use(place.gradients.ticket)
            for p, view in zip(block.trained, place.gradients.views, strict=True):
                if p.grad is not None and p.grad.data_ptr() != view.data_ptr():
                    p.grad = view

    def _release(self, block: Block) -> None:
        self._places[block].release(self.link)
        self._there.pop(block, None)

    def _send(self, block: Block) -> None:
        """Sends a block's gradients home, where they are its parameters' from here on; or to the optimizer at once."""
        place = self._places[block]
        if block.kept:
            return
        trained = set(block.trained)
        for name, p in block.params:
            if p.grad is not None and p not in trained:
                raise RuntimeError(
                    f"{block.name}.{name} was frozen when the model was attached and has a gradient now: call "
                    "detach(model) and attach(model, config) after a parameter has been unfrozen"
                )
        params = [p for p in block.trained if p.grad is not None]
        if not params:
            return
        assert block.gradient_layer is not None and place.gradients is not None  # noqa: PT018
        early = self.early and self.updates is not None and block.to_come <= 0  # not if more is to be added
        passing = early and not place.gradients.there
        slab = self.shelf.borrow(block.number) if passing else self.shelf.gradients(block.number)
        views = block.gradient_layer.views(slab)
        if not passing:
            place.gradient_home = views
        homes: dict[Tensor, Tensor] = {
            p: view for p, view in zip(block.trained, views, strict=True) if p.grad is not None
        }
        sources = [p.grad for p in params if p.grad is not None]
        norms = torch._foreach_norm(sources)
        slot = place.gradients.slot if place.gradients.there else None
        sent = self.link.send(list(zip(homes.values(), sources, strict=True)), slot)
        self._sent.add(block)
        place.gradients.there = False
        for p in params:
            p.grad = None  # a parameter and its gradient are on one device
        place.unbind()
        if early:
            self.early_norms.update(zip(params, norms, strict=True))
            self._update(block, homes, sent, slab if passing else None)
            return
        for p, norm in zip(params, norms, strict=True):
            p.grad = homes[p]
            self._norms[p] = (norm, homes[p], homes[p]._version)

    def _update(self, block: Block, grads: dict[Tensor, Tensor], sent: Any, passing: Tensor | None) -> None:
        def used() -> None:
            if passing is not None:
                shelf.give_back(block.number, passing)

        shelf, link = self.shelf, self.link
        assert self.updates is not None
        try:
            self.updates.update(block.number, grads, lambda: link.arrived(sent), used)
        except BaseException:
            used()  # nobody else will, and a later backward would wait for the place for ever
            raise
