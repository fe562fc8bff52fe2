"""Streaming a model's blocks, against the same model unstreamed: the same bits. The "device" is host memory here."""

from __future__ import annotations

import gc
import random
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hf_lowmem import LowMemConfig, attachment
from hf_lowmem.attachment import attach, detach, find_blocks, streamer_of
from hf_lowmem.link import HostLink, Slot

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT asks for it
CHECKPOINTING = ["off", "non-reentrant", "reentrant"]


def checkpoint(model: nn.Module, kind: str) -> None:
    if kind == "off":
        return
    kwargs = {"use_reentrant": kind == "reentrant"}
    if hasattr(model, "activation_checkpointing_enable"):  # its name since 5.24
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


class LateLink(HostLink):
    """Copies that take their time, in another thread and in any order, as a GPU's do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._pool, self._others = ThreadPoolExecutor(4), ThreadPoolExecutor(40)
        self.updates = 0
        self._filling: dict[Slot, Future[None]] = {}
        self._sent: list[Future[None]] = []

    def _late(self, target: torch.Tensor, source: torch.Tensor) -> Future[None]:
        delay = self._random.choice([0.0, 0.0, 0.0005, 0.002])

        def copy() -> None:
            time.sleep(delay)
            target.copy_(source)

        return self._pool.submit(copy)

    def fetch(self, slot, home):
        slot.fill()
        slot.buffer.fill_(0xFF)  # who does not wait computes NaN
        self._filling[slot] = self._late(slot.buffer, home)
        return self._filling[slot]

    def begin(self, slot, home, nbytes):
        fetched = self.fetch(slot, home)
        self._updates = [self._others.submit(fetched.result)]
        self._copies = []

    def update(self, part):
        state, grad, step = part
        before = self._updates[-1]

        def updating():
            before.result()
            copy = state.clone()
            step(copy, grad.clone())
            return copy

        self._updates.append(self._others.submit(updating))
        self._copies.append((state, self._updates[-1]))

    def end(self, slot, home):
        updated, copies, pause = self._updates[-1], self._copies, self._random.choice([0.0, 0.002])

        def sending():
            updated.result()
            time.sleep(pause)
            home.copy_(slot.buffer)
            for state, copy in copies:
                state.copy_(copy.result())

        sent = self._others.submit(sending)
        self._filling[slot] = sent
        self._sent.append(sent)
        self.updates += 1
        return updated, [sent]

    def has_arrived(self, sent):
        return all(copy.done() for copy in sent)

    def use(self, ticket):
        ticket.result()

    def release(self, slot):
        self._filling[slot].result()
        slot.empty()

    def send(self, pairs, slot=None):
        sent = [self._late(home, source.clone()) for home, source in pairs]
        self._sent += sent
        if slot is not None:
            self.release(slot)
        return sent

    def arrived(self, sent):
        for copy in sent:
            copy.result()

    def finish(self):
        for sent in self._sent:
            sent.result()
        self._sent.clear()


@pytest.fixture(params=["host", "late"])
def link(request, monkeypatch):
    if request.param == "late":
        monkeypatch.setattr(attachment, "HostLink", LateLink)
    return request.param


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=1.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return MixtralForCausalLM(config)


def build(tiny, kind: str) -> nn.Module:
    model = mixtral() if kind == "experts" else tiny.model(num_hidden_layers=5)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    for name, p in model.named_parameters():
        if (kind == "frozen embedding" and "embed" in name) or (kind == "norms alone" and "layernorm" not in name):
            p.requires_grad_(False)
    return model.train()


def run(model: nn.Module, micro_batches: int = 2) -> tuple[float, dict[str, torch.Tensor | None]]:
    device = model.get_input_embeddings().weight.device
    tokens = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(1)).to(device)
    torch.manual_seed(7)
    for _ in range(micro_batches):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return loss.item(), gradients(model)


def assert_same(one, other) -> None:
    assert one[0] == other[0]
    for name, gradient in one[1].items():
        if gradient is None:
            assert other[1][name] is None, name
        else:
            assert torch.equal(other[1][name], gradient), name


def assert_at_home(streamer) -> None:
    for block in streamer.blocks:
        place = streamer._places[block]
        assert not block.backward
        assert not place.bound
        if not block.kept:
            for (_, p), home in zip(block.params, place.home, strict=True):
                assert p.data_ptr() == home.data_ptr()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("offload", ["cpu", 0.5])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", ["full", "frozen embedding", "norms alone", "lora", "experts"])
def test_streamed_is_unstreamed(tiny, link, kind, checkpointing, offload, debug) -> None:
    reference, model = build(tiny, kind), build(tiny, kind)
    for m in (reference, model):
        checkpoint(m.get_base_model() if kind == "lora" else m, checkpointing)
    streamer = attach(model, LowMemConfig(offload=offload, debug=debug))
    assert_same(run(reference), run(model))
    assert_at_home(streamer)
    assert len(streamer._there) == 0
    tokens = torch.tensor([[5, 6, 7]])
    made = [m.eval().generate(input_ids=tokens, max_new_tokens=5, do_sample=False) for m in (reference, model)]
    assert torch.equal(*made)
    assert_at_home(streamer)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_at_most_a_few_blocks_are_there(tiny, checkpointing) -> None:
    model = tiny.model(num_hidden_layers=8).train()
    checkpoint(model, checkpointing)
    streamer = attach(model, LowMemConfig(offload="cpu"))
    slots = [place.weights.slot for place in streamer._places.values()]
    fetch, held = streamer.link.fetch, []

    def counted(slot, home):
        ticket = fetch(slot, home)
        held.append(sum(s.buffer.untyped_storage().nbytes() > 0 for s in slots))
        return ticket

    streamer.link.fetch = counted
    run(model)
    assert max(held) == streamer.ahead + 1
    assert not any(s.buffer.untyped_storage().nbytes() for s in slots)


def test_blocks_are_fetched_once_a_pass(tiny) -> None:
    model = tiny.model(num_hidden_layers=8).train()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    run(model, 1)
    before = streamer.fetches
    run(model, 1)
    assert streamer.fetches - before == 8 + 8 - streamer.ahead  # the last ones stay for backward
    with torch.no_grad():
        before = streamer.fetches
        model(input_ids=torch.tensor([[5, 6]]))
    assert streamer.fetches - before == 8


def test_weights_changed_at_home_are_seen(tiny) -> None:
    """Also where a forward has left copies on the device that no backward has taken away."""
    model, tokens = tiny.model().train(), torch.tensor([[5, 6, 7]])
    streamer = attach(model, LowMemConfig(offload="cpu"))
    first = model(input_ids=tokens).logits
    assert streamer._there
    with torch.no_grad():
        for _, p in streamer.blocks[-1].params:
            p.data.mul_(1.5)
    again = model(input_ids=tokens).logits
    assert not torch.equal(first, again)
    detach(model)
    assert torch.equal(model(input_ids=tokens).logits, again)


def test_two_forwards_before_one_backward(tiny) -> None:
    losses = []
    for streamed in (False, True):
        model = tiny.model(num_hidden_layers=4).train()
        if streamed:
            streamer = attach(model, LowMemConfig(offload="cpu"))
        a, b = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8, 7, 6]])
        loss = model(input_ids=a, labels=a).loss - 0.5 * model(input_ids=b, labels=b).loss
        loss.backward()
        losses.append((loss.item(), gradients(model)))
    assert_same(*losses)
    assert_at_home(streamer)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_model_at_home(tiny, where, error) -> None:
    reference, model = tiny.model(num_hidden_layers=4).train(), tiny.model(num_hidden_layers=4).train()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    start = tiny.weights(model)

    def fail(*args):
        raise error("on purpose")

    block = model.model.layers[2].mlp
    handle = block.register_forward_hook(fail) if where == "forward" else block.register_full_backward_hook(fail)
    with pytest.raises(error, match="on purpose"):
        run(model)
    handle.remove()
    streamer.go_home()
    assert_at_home(streamer)
    assert not streamer._there
    assert tiny.equal_bits(start, tiny.weights(model))
    model.zero_grad()
    assert_same(run(reference), run(model))


def test_the_next_forward_recovers_by_itself(tiny) -> None:
    reference, model = tiny.model(num_hidden_layers=4).train(), tiny.model(num_hidden_layers=4).train()
    attach(model, LowMemConfig(offload="cpu"))
    handle = model.model.layers[2].mlp.register_full_backward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model)
    handle.remove()
    model.zero_grad()
    assert_same(run(reference), run(model))


def test_gradients_given_at_home_are_added_to(tiny) -> None:
    results = []
    for streamed in (False, True):
        model = tiny.model().train()
        if streamed:
            attach(model, LowMemConfig(offload="cpu"))
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.25)
        results.append(run(model, 1))
    assert_same(*results)


def test_norms_are_those_of_the_gradients(tiny) -> None:
    model = tiny.model().train()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    run(model)
    params = [p for block in streamer.blocks for p in block.trained]
    assert params
    for p in params:
        assert torch.equal(streamer.gradient_norm(p), torch._foreach_norm([p.grad])[0])
    params[0].grad.mul_(2)
    assert streamer.gradient_norm(params[0]) is None
    params[1].grad = None
    assert streamer.gradient_norm(params[1]) is None
    assert streamer.gradient_norm(model.lm_head.weight) is None


# -- attaching ----------------------------------------------------------------------------------------------------
def test_at_rest_it_is_an_ordinary_model(tiny, tmp_path) -> None:
    reference, model = tiny.model(), tiny.model()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    assert streamer_of(model) is streamer
    assert tiny.equal_bits(tiny.weights(reference), tiny.weights(model))
    assert model.num_parameters() == reference.num_parameters()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert tiny.equal_bits(tiny.weights(again), tiny.weights(reference))
    assert list(model.state_dict()) == list(reference.state_dict())
    for moved in (model.to("cpu"), model.cpu(), model.float()):
        assert moved is model
        assert_at_home(streamer)
    detach(model)
    assert streamer_of(model) is None
    assert not any("_apply" in vars(module) for module in model.modules())


def test_a_cast_is_refused_by_name(tiny) -> None:
    model = tiny.model()
    attach(model, LowMemConfig(offload="cpu"))
    with pytest.raises(ValueError, match=r"streamed in torch.float32 and cannot be cast to torch.bfloat16 now: cast"):
        model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p is not None for p in model.parameters())


def test_shares(tiny) -> None:
    for offload, numbers in (("0.5", [1, 3, 5]), (1 / 3, [2, 5]), ("1", [0, 1, 2, 3, 4, 5]), ("cpu", list(range(6)))):
        model = tiny.model(num_hidden_layers=6)
        streamer = attach(model, LowMemConfig(offload=offload))
        assert [block.name for block in streamer.blocks] == [f"model.layers.{i}" for i in numbers]
    assert attach(tiny.model(), LowMemConfig(offload="none")) is None
    assert attach(tiny.model(), LowMemConfig(offload=0)) is None


def test_what_cannot_be_streamed_says_so(tiny) -> None:
    with pytest.raises(ValueError, match=r'Linear has no blocks that could be streamed.*offload="none"'):
        attach(nn.Linear(3, 3), LowMemConfig(offload="cpu"))
    model = tiny.model()
    attach(model, LowMemConfig(offload="cpu"))
    for again in (model, model.model):
        with pytest.raises(ValueError, match="or a model within it or around it, is attached already"):
            attach(again, LowMemConfig(offload="cpu"))
    with pytest.raises(
        ValueError, match=r"offload=0.1 of the 2 blocks of LlamaForCausalLM is less than one block: write 1/2 or more"
    ):
        attach(tiny.model(), {"offload": 0.1})
    with pytest.raises(TypeError, match="attach takes a LowMemConfig, not 'cpu'"):
        attach(tiny.model(), "cpu")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no streamer"):
        detach(tiny.model())


@pytest.mark.parametrize("offload", [1.5, -0.1, "all", "gpu", "nan", "1/0", True])
def test_offload_that_is_none_is_refused(offload) -> None:
    with pytest.raises(ValueError, match="is no share of the blocks: write"):
        LowMemConfig(offload=offload)


def test_modules_of_ones_own_are_found() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), nn.ModuleList([nn.Tanh()])
    )
    assert [name for name, _ in find_blocks(model)] == ["1.0", "1.1", "1.2"]


def test_shared_parameters_stay_on_the_device(tiny) -> None:
    model = tiny.model(num_hidden_layers=3).train()
    reference = tiny.model(num_hidden_layers=3).train()
    for m in (model, reference):
        m.model.layers[2].mlp = m.model.layers[0].mlp
    streamer = attach(model, LowMemConfig(offload="cpu"))
    names = {f"{block.name}.{name}" for block in streamer.blocks for name, _ in block.params}
    assert not any("layers.0.mlp" in name or "layers.2.mlp" in name for name in names)
    assert any("layers.1.mlp" in name for name in names)
    assert_same(run(reference), run(model))


class Twice(nn.Module):
    """Blocks that are used several times, skipped, and in another order the next time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)])

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


@pytest.mark.parametrize("link_class", [HostLink, LateLink])
def test_any_order(monkeypatch, link_class) -> None:
    monkeypatch.setattr(attachment, "HostLink", link_class)
    reference, model = Twice(), Twice()
    streamer = attach(model, LowMemConfig(offload="cpu"))
    x = torch.randn(3, 8)
    for order in ((0, 1, 2, 3, 4), (0, 2, 4), (4, 3, 2, 1, 0), (0, 1, 0, 2, 0), (3, 3, 3), (1,), (0, 1, 2, 3, 4)):
        results = []
        for m in (reference, model):
            m.zero_grad()
            loss = m(x, order).square().sum()
            loss.backward()
            results.append((loss.item(), gradients(m)))
        assert_same(*results)
        assert_at_home(streamer)
        assert len(streamer._there) == 0


def test_a_model_takes_its_streamer_along() -> None:
    model = Twice()
    streamer = weakref.ref(attach(model, LowMemConfig(offload="cpu")))
    model(torch.randn(3, 8), (0, 1)).sum().backward()
    del model
    gc.collect()
    assert streamer() is None


def test_blocks_outlive_the_model_around_them(tiny) -> None:
    """As after PEFT's merge_and_unload, when the wrapper that was attached is gone."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    attach(model, LowMemConfig(offload="cpu"))
    run(model)
    inner = model.merge_and_unload()
    del model
    gc.collect()
    tokens = torch.tensor([[5, 6, 7]])
    before = inner(input_ids=tokens).logits
    inner.state_dict()
    detach(inner)
    assert torch.equal(inner(input_ids=tokens).logits, before)
    inner.to(torch.bfloat16)


def test_detached_between_forward_and_backward(tiny) -> None:
    results = []
    for streamed in (False, True):
        model = tiny.model().train()
        if streamed:
            attach(model, LowMemConfig(offload="cpu"))
        tokens = torch.tensor([[5, 6, 7]])
        loss = model(input_ids=tokens, labels=tokens).loss
        if streamed:
            detach(model)
        loss.backward()
        results.append((loss.item(), gradients(model)))
    assert_same(*results)


def test_unfrozen_after_it_was_attached(tiny) -> None:
    model = tiny.model().train()
    model.model.layers[1].requires_grad_(False)
    attach(model, LowMemConfig(offload="cpu"))
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers\.1\..*was frozen when the model was attached.*call detach"):
        run(model)
