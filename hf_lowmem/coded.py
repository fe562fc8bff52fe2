"""Places of blocks whose weights cross the link in few bits: ``CodedPlace``, and ``BarePlace`` if they are all."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .block import Block
from .coding import decode, encode
from .kernels.weights import FINDS_CODES, is_stand_in, stand_in
from .link import Link
from .place import Copy, Place
from .shelf import Shelf

SAMPLE = 61  # values of a weight that are looked at, to see whether somebody has written it unnoticed


class CodedPlace(Place):
    """The same for a block whose weights cross the link in few bits, and are seen by the device as those bits say.

    [Note: what the device sees] Weights are written in few bits at home, by the optimizer's thread after each update,
    and read on the device, into a slot of the computing stream's own, when the block begins. A block that stays on the
    device does both there, so that what it computes does not depend on where it rests. Gradients are those of the
    weights as they were read (straight through), the update is of those at home.

    Home may be written by others between two steps. Through torch, that shows in the versions of the parameters; a
    sample of their values shows most of what is written through ``.data``.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{self.block.name} is attached with weights in few bits, and so cannot be copied or pickled: copy the "
            "model before it is attached, or call detach(model) first; its state_dict can be copied at any time"
        )

    def __init__(self, block: Block, shelf: Shelf, device: torch.device, debug: bool) -> None:
        super().__init__(block, shelf, device, debug)
        assert block.coded_layer is not None
        self.codes = Copy(block.coded_layer, device, debug)
        self._encoded: list[tuple[int, int]] = []

    @property
    def there(self) -> bool:
        """See ``Place``."""
        return self.codes.there or self.weights.there

    @property
    def passing_bytes(self) -> int:
        """See ``Place``."""
        return sum(copy.slot.nbytes for copy in (self.codes, self.weights) if copy.there)

    def has_moved(self, home: list[Tensor]) -> None:
        """See ``Place``."""
        super().has_moved(home)
        self._encoded = []

    def encode(self, threads: int | None = None) -> None:
        """Writes the codes at home anew."""
        found = self._state_of_home()
        assert self.block.coded_layer is not None
        slab = self.shelf.coded(self.block.number)
        self._write(self.home, self.block.coded_layer.views(slab), threads)
        self._encoded = found

    def _state_of_home(self) -> list[tuple[int, int]]:
        return [(p._version, _sample(home)) for (_, p), home in zip(self.block.params, self.home, strict=True)]

    def _write(self, home: list[Tensor], coded: list[Tensor], threads: int | None = None) -> None:
        work, parts = [], iter(coded)
        for (_, p), tensor in zip(self.block.params, home, strict=True):
            form, part = self.block.forms.get(p), next(parts)
            if form is None:
                part.copy_(tensor)
            else:
                work.append((tensor, form, part, next(parts)))
        encode(work, threads)

    def _see_itself(self) -> None:
        """What a block that stays on the device sees."""
        self.home = [p.data for _, p in self.block.params]  # it may have been assigned to
        self.codes.slot.fill()
        self._write(self.home, self.codes.views)
        self._read(self.codes.views)
        self.codes.slot.empty()

    def _read(self, coded: list[Tensor]) -> None:
        self.weights.slot.fill()
        self.weights.there = True
        work, parts = [], iter(coded)
        for (_, p), view in zip(self.block.params, self.weights.views, strict=True):
            form, part = self.block.forms.get(p), next(parts)
            if form is None:
                view.copy_(part)
            else:
                work.append((part, next(parts), form, view))
        decode(work)

    def fetch(self, link: Link) -> None:
        """See ``Place``."""
        self.take_in()
        if self._encoded != self._state_of_home():
            self.encode()
        self.codes.ticket = link.fetch(self.codes.slot, self.shelf.coded(self.block.number))
        self.codes.there = True

    def bind(self, link: Link) -> None:
        """See ``Place``."""
        if self.bound:
            return
        if not self.weights.there:
            if self.block.kept:
                self._see_itself()
            else:
                link.use(self.codes.ticket)
                self._read(self.codes.views)
                link.release(self.codes.slot)
                self.codes.there = False
        for (_, p), view in zip(self.block.params, self.weights.views, strict=True):
            p.data = view
        self.bound = True

    def release(self, link: Link) -> None:
        """See ``Place``."""
        self.unbind()
        if self.codes.there:
            link.release(self.codes.slot)
            self.codes.there = False
        if self.weights.there:  # the computing stream's own
            self.weights.slot.empty()
            self.weights.there = False
        if self.gradients is not None and self.gradients.there:
            link.release(self.gradients.slot)
            self.gradients.there = False


class BarePlace(CodedPlace):
    """A coded place of weights that exist in few bits alone: these bits are at home what others have weights for.

    The parameters are stand-ins there, a NaN of their shape, which cannot be written. ``state_dict`` gives what the
    bits say instead, and ``load_state_dict`` writes bits.
    """

    def __init__(self, block: Block, shelf: Shelf, device: torch.device, debug: bool) -> None:
        self._staying: list[Tensor] = []  # codes, scales and other tensors of a block that stays on the device
        super().__init__(block, shelf, device, debug)
        for p in block.forms:
            setattr(p, FINDS_CODES, functools.partial(_codes_in, weakref.ref(self)))

    @property
    def parts(self) -> list[Tensor]:
        """Codes, scales and other tensors where they rest, in the order of the coded layer."""
        assert self.block.coded_layer is not None
        return self._staying or self.block.coded_layer.views(self.shelf.coded(self.block.number))

    def _moved_in(self) -> list[Tensor]:
        parts, work = self.parts, []
        for p, part, scale in self._rows(parts):
            if scale is None:
                if p.data_ptr() != part.data_ptr():  # not loaded into its place
                    part.copy_(p.data)
            elif not is_stand_in(p):
                work.append((p.data.contiguous(), self.block.forms[p], part, scale))
        encode(work)
        return self._as_parameters(parts)

    def take_in(self) -> None:
        """See ``Place``. Raises: RuntimeError where somebody has written to a stand-in."""
        if self.bound:
            return
        for (name, p), home in self._at_home():
            if p in self.block.forms and home.is_cpu and not bool(home.view(-1)[:1].isnan().all()):
                raise RuntimeError(
                    f"somebody has written to {self.block.name}.{name}, of which nothing but 8 or 4 bits exist: what "
                    "was written is lost. Load a state_dict instead, or assign a whole tensor to its data"
                )
        if all(p.data_ptr() == home.data_ptr() for (_, p), home in self._at_home()):
            return
        for (_, p), home in self._at_home():
            if p in self.block.forms and p.data_ptr() != home.data_ptr():
                self.set(p, p.data)
            elif p.data_ptr() != home.data_ptr():
                home.copy_(p.data)
            p.data = home

    def _at_home(self) -> Iterator[tuple[tuple[str, nn.Parameter], Tensor]]:
        return zip(self.block.params, self.home, strict=True)

    def on_device(self, device: torch.device) -> list[Tensor]:
        """See ``Place``."""
        self._staying = [part.to(device, copy=True) for part in self.parts]
        return self._as_parameters(self._staying)

    def on_shelf(self) -> list[Tensor]:
        """See ``Place``."""
        staying, self._staying = self._staying, []
        for part, source in zip(self.parts, staying, strict=True):
            part.copy_(source)
        return self._as_parameters(self.parts)

    def _as_parameters(self, parts: list[Tensor]) -> list[Tensor]:
        return [stand_in(p, part.device) if p in self.block.forms else part for p, part, _ in self._rows(parts)]

    def _rows(self, parts: list[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor, Tensor | None]]:
        """Each parameter, its codes or itself, and its scales."""
        left = iter(parts)
        for _, p in self.block.params:
            yield p, next(left), next(left) if p in self.block.forms else None

    def coded(self) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
        """The codes and scales of each weight."""
        return {p: (codes, scale) for p, codes, scale in self._rows(self.parts) if scale is not None}

    def hooks(self) -> Iterator[RemovableHandle]:
        """See ``Place``."""
        for module in self.block.module.modules():
            held = {name: p for name, p in module._parameters.items() if p is not None and p in self.block.forms}
            if held:
                yield from _hooks_of(self, module, held)

    def leave(self) -> None:
        """See ``Place``."""
        for p in self.block.forms:
            p.data = self.decoded(p)
            if hasattr(p, FINDS_CODES):
                delattr(p, FINDS_CODES)

    def encode(self, threads: int | None = None) -> None:
        """See ``CodedPlace``: there is nothing to be done."""

    def fetch(self, link: Link) -> None:
        """See ``Place``."""
        self.take_in()
        self.codes.ticket = link.fetch(self.codes.slot, self.shelf.coded(self.block.number))
        self.codes.there = True

    def fetch_updated(self, link: Link, luggage: Any) -> None:
        """See ``Place``."""
        views = {p: part if scale is None else (part, scale) for p, part, scale in self._rows(self.codes.views)}
        self.codes.ticket = luggage.travel(link, self.codes.slot, self.shelf.coded(self.block.number), views)
        self.codes.there = True

    @property
    def link_bytes(self) -> int:
        """See ``Place``."""
        return self.codes.slot.nbytes

    def _see_itself(self) -> None:
        self.take_in()
        self._read(self._staying)

    def decoded(self, p: nn.Parameter) -> Tensor:
        """What a weight's bits say, where they rest."""
        codes, scale = self.coded()[p]
        out = torch.empty(p.shape, dtype=p.dtype, device=codes.device)
        decode([(codes, scale, self.block.forms[p], out)])
        return out

    def set(self, p: nn.Parameter, value: Tensor) -> None:
        """Writes a weight's bits anew."""
        codes, scale = self.coded()[p]
        encode([(value.to(codes.device, p.dtype).contiguous(), self.block.forms[p], codes, scale)])
        torch.autograd.graph.increment_version(p)  # a copy on the device is no more what it was


def _codes_in(place: weakref.ref[BarePlace], p: nn.Parameter) -> tuple[Tensor, Tensor] | None:
    alive = place()
    return None if alive is None else alive.coded().get(p)  # of a copy of the parameter: none


def _hooks_of(place: BarePlace, module: nn.Module, held: dict[str, nn.Parameter]) -> Iterator[RemovableHandle]:
    taken: set[str] = set()  # keys that have been loaded here, and are not missing

    def give(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, p in held.items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = place.decoded(p)

    def take(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        *_, errors = args
        taken.clear()
        for name, p in held.items():
            value = state_dict.pop(prefix + name, None)
            if value is None:
                continue
            taken.add(prefix + name)
            if value.shape != p.shape:
                errors.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {value.shape} from checkpoint, the "
                    f"shape in current model is {p.shape}."
                )
            else:
                place.set(p, value)

    def after(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in taken]

    yield module.register_state_dict_post_hook(give)
    yield module.register_load_state_dict_pre_hook(take)
    yield module.register_load_state_dict_post_hook(after)


def put_at_home(block: Block, number: int, value: Tensor, shelf: Shelf) -> Tensor:
    """Brings a tensor of a block that is being loaded to the shelf.

    Args:
        number: of its parameter within the block.
        value: of the parameter's shape and dtype.

    Returns: what the parameter is there.
    """
    p = block.params[number][1]
    if not block.bare:
        home = block.layer.specs[number].view(shelf.weights(block.number))
        home.copy_(value)
        return home
    assert block.coded_layer is not None
    first = sum(2 if q in block.forms else 1 for _, q in block.params[:number])
    parts = [spec.view(shelf.coded(block.number)) for spec in block.coded_layer.specs[first : first + 2]]
    if p not in block.forms:
        parts[0].copy_(value)
        return parts[0]
    encode([(value.contiguous().cpu(), block.forms[p], parts[0], parts[1])])
    return stand_in(value, parts[0].device)


def restore(block: Block, module: nn.Module, shelf: Shelf) -> None:
    """Gives a module that was loaded for a block its weights back, where they exist in few bits alone."""
    if not block.bare:
        return
    assert block.coded_layer is not None
    parts = iter(block.coded_layer.views(shelf.coded(block.number)))
    for name, p in block.params:
        codes, scale = next(parts), next(parts) if p in block.forms else None
        now = module.get_parameter(name)
        if scale is not None and is_stand_in(now):
            now.data = torch.empty(now.shape, dtype=now.dtype)
            decode([(codes, scale, block.forms[p], now.data)])


def _sample(x: Tensor) -> int:
    values = x.view(-1)[:: max(1, x.numel() // SAMPLE)]
    integer = {2: torch.int16, 4: torch.int32}.get(x.element_size())
    return int(values.view(integer).sum()) if integer is not None else 0


def place_of(block: Block, shelf: Shelf, device: torch.device, debug: bool) -> Place:
    """A block's place, of the kind that it needs."""
    kind = BarePlace if block.bare else CodedPlace if block.forms else Place
    return kind(block, shelf, device, debug)
