"""``hf-lowmem demo``: a real pretrained model, fine-tuned in full on real text by the stock Trainer.

Nothing here is special to this library except one string, ``optim="cpu_adam4bit"``: what the demo does, a user's own
script does. Model and text come from the machine itself or from the package registry, so that the demo needs no hub.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .demo_data import BadInput, Source, find_model, heldout_split, read_texts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELDOUT_BLOCKS = 16  # enough for a loss with two stable decimals; more would cost a slow CPU its ten minutes
# Bytes a parameter of fp32 AdamW: its two moments, and the fp32 copy that it keeps of a 16-bit weight.
FP32_STATES, FP32_MASTER = 8.0, 4.0
MARK = ".hf_lowmem_demo"  # a file that says whose folder this is: the demo overwrites only what is its own


@dataclass(frozen=True)
class Report:
    """What a run of the demo found out.

    Args:
        loss_before, loss_after: mean nats a token on text that was never trained on.
        loss_reloaded: the same of the saved folder, read back by the stock ``from_pretrained``.
        tokens_per_second: of training alone, without loading, evaluation and saving.
        states, master: the optimizer's bytes a parameter.
        seconds: of the whole demo.
    """

    loss_before: float
    loss_after: float
    loss_reloaded: float
    tokens_per_second: float
    states: float
    master: float
    has_16bit_weights: bool
    output: Path
    seconds: float

    def lines(self) -> list[str]:
        fp32_master = FP32_MASTER if self.has_16bit_weights else 0.0
        fp32, ours = FP32_STATES + fp32_master, self.states + self.master
        return [
            f"held-out loss      {self.loss_before:.4f} before, {self.loss_after:.4f} after",
            f"training speed     {self.tokens_per_second:,.0f} tokens/s",
            f"optimizer state    {ours:.2f} bytes a parameter (states {self.states:.2f}, master {self.master:.2f})",
            f"  of fp32 AdamW    {fp32:.2f} (states {FP32_STATES:.2f}, master {fp32_master:.2f}), {fp32 / ours:.1f}x",
            f"saved              {self.output}  (read back by from_pretrained: loss {self.loss_reloaded:.4f})",
            f"whole demo         {self.seconds:.0f} s",
        ]


def run(options: argparse.Namespace) -> Report:
    """Runs the demo and prints as it goes.

    Args:
        options: the parsed arguments of ``hf-lowmem demo``.

    Raises:
        BadInput: a model, a text or a folder that cannot be used; nothing was trained.
    """
    start = time.monotonic()
    with output_folder(options.output, options.model) as output:
        return _run(options, output, start)


def _run(options: argparse.Namespace, output: Path, start: float) -> Report:
    texts = read_texts(options.text)
    training_text, heldout_text = heldout_split(texts)

    import torch
    import transformers

    import hf_lowmem  # noqa: F401  (registers the optimizer names)

    transformers.set_seed(options.seed)
    source = find_model(options.model)
    _say(f"model  {source.origin}")
    dtype = _fastest_dtype()
    model, tokenizer = load(source, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]  # transformers' stub hides nn.Module.to behind a decorator
    training = blocks_of(training_text, tokenizer, options.seq)
    heldout = blocks_of(heldout_text, tokenizer, options.seq)[:HELDOUT_BLOCKS]
    _check_size(training, heldout, options)
    count = sum(p.numel() for p in model.parameters())
    _say(
        f"       {count / 1e6:.1f}M parameters, all of them trained, {str(dtype).removeprefix('torch.')} on {device}\n"
        f"text   {len(training)} blocks of {options.seq} tokens to train on, {len(heldout)} held out"
    )

    before = heldout_loss(model, heldout, options.batch, "loss before")
    trainer = train(model, training, options, output)
    after = heldout_loss(model, heldout, options.batch, "loss after")

    trainer.save_model(str(output))
    tokenizer.save_pretrained(output)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    nbytes = optimizer.nbytes()
    speed = trainer.state.global_step * options.batch * options.seq / trainer.state.log_history[-1]["train_runtime"]
    del trainer, optimizer, model

    saved = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=dtype)
    saved.to(device)  # type: ignore[arg-type]
    reloaded = heldout_loss(saved, heldout, options.batch, "loss of what was saved")
    report = Report(
        loss_before=before,
        loss_after=after,
        loss_reloaded=reloaded,
        tokens_per_second=speed,
        states=nbytes["states"] / count,
        master=nbytes["master"] / count,
        has_16bit_weights=dtype.itemsize == 2,
        output=output,
        seconds=time.monotonic() - start,
    )
    _say("\n" + "\n".join(report.lines()))
    return report


@contextmanager
def output_folder(name: str, model: str | None) -> Iterator[Path]:
    """The folder of the result, made and marked as the demo's own; if it stays empty, it is removed again.

    Args:
        name: what ``--output`` says.
        model: what ``--model`` says.

    Raises:
        BadInput: no folder can be there, it cannot be written, or it holds what the demo has not written.
    """
    if not name.strip():
        raise BadInput("--output is empty: give the name of a folder, or leave it out.")
    mark = Path(MARK)
    made: list[Path] = []
    try:
        path = Path(name).expanduser().resolve()
        mark = path / MARK
        if path.exists() and not path.is_dir():
            raise BadInput(f"--output {name}: this is a file. Give a folder.")
        if model is not None and path == Path(model).expanduser().resolve():
            raise BadInput(f"--output {name}: this is the model's own folder. Give another one.")
        if path.is_dir() and not mark.exists() and any(path.iterdir()):
            raise BadInput(
                f"--output {name}: the folder holds files that the demo has not written, and might overwrite. Give "
                "a new or an empty folder."
            )
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        mark.write_text("Written by `hf-lowmem demo`, which may overwrite what is in this folder.\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such home, or links in a circle
        _remove_empty(mark, made)
        raise BadInput(
            f"--output {name}: no folder that can be written: {getattr(error, 'strerror', error)}."
        ) from error
    try:
        yield path
    except BaseException:
        _remove_empty(mark, made)
        raise


def _remove_empty(mark: Path, made: list[Path]) -> None:
    """Removes the mark where nothing else is beside it, and then the folders that were made and are empty."""
    with suppress(OSError):
        if [item.name for item in mark.parent.iterdir()] == [MARK]:
            mark.unlink()
    for folder in made:
        with suppress(OSError):
            folder.rmdir()


def load(source: Source, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, by the stock ``from_pretrained``.

    Raises:
        BadInput: the folder or the name holds no causal language model that transformers can read.
    """
    import transformers

    arguments: dict[str, Any] = {}
    if source.gguf_file:
        if find_spec("gguf") is None:
            raise BadInput(f'reading {source.gguf_file} needs the package gguf: pip install "hf_lowmem[demo]"')
        arguments["gguf_file"] = source.gguf_file
    model_arguments = dict(arguments)
    if source.gguf_file and hasattr(transformers, "GgufConfig"):
        # Without dequantize=True transformers keeps the file's blocks packed: a frozen, very slow model.
        model_arguments["quantization_config"] = transformers.GgufConfig(gguf_file=source.gguf_file, dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.name, **arguments)
        model = transformers.AutoModelForCausalLM.from_pretrained(source.name, dtype=dtype, **model_arguments)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--model {source.name}: transformers cannot load it as a causal language model: {error}\n"
            "Give a folder with config.json, weights and tokenizer, a .gguf file, or the name of a model on the hub."
        ) from error
    return model, tokenizer


def blocks_of(text: str, tokenizer: PreTrainedTokenizerBase, length: int) -> list[dict[str, torch.Tensor]]:
    """The text as consecutive examples of ``int64[length]``; the remainder is dropped."""
    # verbose=False: the tokenizer would warn that the whole text is longer than the model's context
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
    blocks = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": block, "labels": block} for block in blocks]


def heldout_loss(model: PreTrainedModel, blocks: list[dict[str, torch.Tensor]], batch: int, title: str) -> float:
    """Mean loss in nats a token; every block weighs the same, whatever the batch."""
    import torch
    from tqdm import tqdm

    total = 0.0
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for first in tqdm(range(0, len(blocks), batch), desc=title, leave=False):
            ids = torch.stack([b["input_ids"] for b in blocks[first : first + batch]]).to(model.device)
            total += model(input_ids=ids, labels=ids, use_cache=False).loss.float().item() * len(ids)
    model.train(was_training)
    return total / len(blocks)


def train(
    model: PreTrainedModel, blocks: list[dict[str, torch.Tensor]], options: argparse.Namespace, output: Path
) -> Any:
    """Trains with the stock Trainer, for ``--steps`` or until ``--minutes`` are over, and returns it."""
    import torch
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(output),
        optim=options.optim,
        optim_args=f"threads={options.threads}" if options.threads else None,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, options.steps // 10),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    end = time.monotonic() + 60 * options.minutes

    class StopInTime(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= time.monotonic() > end

    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks,  # type: ignore[arg-type]  # a list of examples is a map-style dataset
        data_collator=transformers.default_data_collator,
        callbacks=[StopInTime()],
    )
    trainer.train()
    if trainer.state.global_step < options.steps:
        _say(f"stopped after {trainer.state.global_step} of {options.steps} steps: {options.minutes:g} min are over")
    return trainer


def _fastest_dtype() -> torch.dtype:
    """bfloat16 on a GPU and on CPUs that multiply it in hardware, else float32.

    Measured, not looked up: whether torch's CPU build reaches the instructions is what counts, and where it does not,
    bfloat16 products are several times slower than float32 ones.
    """
    import torch

    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        a @ b  # the first call chooses and prepares the kernel
        trials = []
        for _ in range(5):
            begin = time.perf_counter()
            a @ b
            trials.append(time.perf_counter() - begin)
        seconds[dtype] = min(trials)
    return torch.bfloat16 if seconds[torch.bfloat16] < 0.9 * seconds[torch.float32] else torch.float32


def _check_size(training: list[Any], heldout: list[Any], options: argparse.Namespace) -> None:
    if not training or not heldout:
        raise BadInput(
            f"--text: too short for --seq {options.seq}: {len(training)} blocks to train on, {len(heldout)} held out. "
            "Give more text (a tenth of it is held out) or a smaller --seq."
        )


def _say(text: str) -> None:
    print(text, flush=True)
