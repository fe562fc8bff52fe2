"""What ``load`` takes of RAM at its peak, measured, and that the measurement sees more where there is more."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's"),
]
MB = 1e6
SLACK = 30 * MB

MEASURE = """if True:
    import json, sys, threading, time
    import torch
    from transformers import AutoModelForCausalLM
    from hf_lowmem import LowMemConfig, attach, load
    from hf_lowmem.attachment import streamer_of

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    def sample():
        global peak
        while not done.wait(0.0005):
            peak = max(peak, anonymous())

    def run(folder):
        if how == "load":
            return load(folder, config, "cpu", dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        attach(model, config, "cpu")
        return model

    warm, folder, how, offload = sys.argv[1:]
    config = LowMemConfig(offload=offload)
    run(warm)  # imports, thread pools
    start = peak = anonymous()
    done = threading.Event()
    sampler = threading.Thread(target=sample)
    sampler.start()
    model = run(folder)
    done.set()
    sampler.join()
    params = {name: p.nbytes for name, p in model.named_parameters()}
    shelf = streamer_of(model).shelf
    streamed = sum(p.nbytes for block in streamer_of(model).blocks for _, p in block.params)
    resident = sum(params.values()) - streamed
    print(json.dumps([max(peak, anonymous()) - start, shelf.nbytes, resident, max(params.values())]))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two models of some 340 MB in bf16, and a small one of each kind to warm up with, in files in fp32 and in bf16."""
    root = tmp_path_factory.mktemp("memory")
    for size, layers, width in (("warm", 2, 64), ("real", 10, 1024)):
        dense = LlamaConfig(
            vocab_size=8 * width,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
        experts = MixtralConfig(
            vocab_size=8 * width,
            hidden_size=width // 2,
            intermediate_size=width,
            num_hidden_layers=min(layers, 6),
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=16,
        )
        for kind, make, config in (("dense", LlamaForCausalLM, dense), ("experts", MixtralForCausalLM, experts)):
            model = make(config)
            model.save_pretrained(root / f"{size}-{kind}-float32", max_shard_size="200MB")
            model.to(torch.bfloat16).save_pretrained(root / f"{size}-{kind}-bfloat16", max_shard_size="200MB")
    return root


def measured(tiny, checkpoints, kind, dtype, how, offload="cpu") -> tuple[int, ...]:
    folders = [str(checkpoints / f"{size}-{kind}-{dtype}") for size in ("warm", "real")]
    done = tiny.python(MEASURE, *folders, how, offload)
    peak, home, resident, largest = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{kind} {dtype} {how}: peak {peak / MB:.0f} MB, home {home / MB:.0f}, resident {resident / MB:.0f}, ", end=""
    )
    print(f"largest {largest / MB:.0f}")
    assert home + resident > 300 * MB
    return peak, home, resident, largest


@pytest.mark.parametrize("offload", ["cpu", "0.5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_what_rests_there_and_one_tensor(tiny, checkpoints, dtype, offload) -> None:
    peak, home, resident, largest = measured(tiny, checkpoints, "dense", dtype, "load", offload)
    assert home <= peak <= home + resident + largest + SLACK


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_with_merged_experts(tiny, checkpoints, dtype) -> None:
    """transformers casts all of a group, stacks the two halves and puts them together: three times the group."""
    peak, home, resident, largest = measured(tiny, checkpoints, "experts", dtype, "load")
    assert home <= peak <= home + resident + (3 if dtype == "float32" else 2) * largest + SLACK


def test_the_measurement_sees_stock_loading(tiny, checkpoints) -> None:
    """Which casts the experts ahead of their merging, in threads whose freed memory malloc keeps."""
    peak, home, resident, largest = measured(tiny, checkpoints, "experts", "float32", "stock")
    assert peak > home + resident + 3 * largest + SLACK
    assert peak > 1.5 * (home + resident)
