"""``LowMemConfig``: every setting of this library, where it may come from, and what is refused.

A setting comes from one of four places, all with the same names and the same checks: the dataclass, a command line or a
YAML or JSON file through ``transformers.HfArgumentParser``, a plain dict, or the stock ``optim_args`` string of
``TrainingArguments`` (``"threads=8,seed=1"``). Needs neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

OPTIM_BITS = {"cpu_adam4bit": 4, "cpu_adam8bit": 8, "cpu_adam32bit": 32}  # optim name -> state_bits
DEFAULT_OPTIM = "cpu_adam4bit"
STOCK_FLAGS = {  # what people write into optim_args, and the flag of TrainingArguments that holds it
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "epsilon": "adam_epsilon",
    "adam_epsilon": "adam_epsilon",
    "weight_decay": "weight_decay",
}
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(size: str | int, name: str = "size") -> int:
    """Bytes of an amount of memory: ``"24GB"`` is 24e9, ``"24GiB"`` 24 * 2**30, ``"1.5GB"`` 1.5e9, ``512`` 512.

    Args:
        size: a number of bytes, or a number with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB; case does not matter).
        name: the setting's name, for the message.

    Raises:
        ValueError: ``size`` is none of these, or not more than 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if isinstance(size, bool) or match is None or unit is None:
        raise ValueError(
            f'{name}={size!r} is not an amount of memory: write a number and a unit, such as "512MB" (512e6 bytes) or '
            '"24GiB" (24 * 2**30 bytes)'
        )
    nbytes = int(float(match.group(1)) * unit)
    if nbytes <= 0:
        raise ValueError(f'{name}={size!r} is no memory at all: write at least "1MB"')
    return nbytes


def _takes_shared_fields(cls: type) -> type:
    """Lets a dataclass be made with fields that HfArgumentParser must not see, because TrainingArguments has them too.

    argparse refuses two options of one name, and the parser makes an option of every field of ``__init__``. So these
    have ``init=False``, and here ``__init__`` learns to take them all the same.
    """
    shared = [f.name for f in dataclasses.fields(cls) if not f.init]
    generated = cls.__init__  # type: ignore[misc]

    @functools.wraps(generated)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in shared:
            setattr(self, name, kwargs.pop(name, getattr(cls, name)))
        generated(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


@_takes_shared_fields
@dataclass
class LowMemConfig:
    """Settings of the optimizer whose states live in host memory in few bits, and of the blocks that rest there.

    Args:
        offload: which of the model's blocks rest in host memory and pass through the device one after another, in the
            Trainers of this library: ``"none"``, ``"cpu"`` (all), a share from 0 to 1 (``0.5``: every second one), or
            ``"auto"``: all of them in the first step, whose memory is measured, and then as few as the GPU has no room
            for.
        gpu_memory: what this process may take of the GPU, such as ``"24GB"``, its CUDA context included. None: what is
            free there. torch is told to stay within it.
        cpu_memory: what may rest in host memory: weights, masters, states and gradients of streamed blocks. None: what
            the machine has.
        nvme_path: a folder on a solid-state drive, or several on several drives (a list, or with ";" between them), for
            optimizer states and masters of streamed blocks that ``cpu_memory`` has no room for. None: nothing rests on
            a drive.
        offload_activations: whether the inputs of the blocks, which gradient checkpointing keeps for backward, wait in
            host memory. None: only where ``offload="auto"`` finds no room for them.
        gradient_dtype: ``"model"``: gradients have the weights' dtype, as torch has it. ``"fp32"``: four bytes a
            parameter, in which those of several micro-batches are added without rounding them to 16 bits.
            ``"stochastic"``: two bytes, each sum rounded stochastically. ``"auto"``: with several micro-batches fp32
            if host memory has room for that, or else stochastic.
        compute: what linear layers compute their products in, forward and backward: ``"model"``, the dtype of their
            weights and activations; ``"int8"``, 8-bit integers; ``"int4"``, 4-bit ones, on GPUs of compute capability
            7.5 to 8.9; ``"auto"``, ``"int8"`` on a GPU where that is fast.
        grad_weight: with ``compute="int8"`` or ``"int4"``, what the products that make weight gradients are computed
            in: ``"int8"`` in both, or ``"model"``.
        weights: how the weights of linear layers within blocks cross the link, and what the device sees of them:
            ``"model"``, as they are; ``"int8"`` or ``"int4"``, written in 8 or 4 bits after each update. They rest at
            home as they are, with their masters.
        micro_batch_size: samples of a batch that a checkpointed block computes at a time, while its weights are on the
            device. None: all. Instead of ``gradient_accumulation_steps``, where blocks are streamed.
        debug: fill the device's memory of a block with NaN when it has been used, so that whoever reads it too late
            computes NaN. It keeps that memory, and so saves none.
        state_bits: bits of each of AdamW's two moments, 4, 8 or 32 (32: plain AdamW). Norms, biases and small tensors
            keep 32, embeddings and the output head at least 8. The optim names say the same: ``cpu_adam8bit`` is 8.
        master_bits: bits of the weight that the update is added to, for weights in bf16 or fp16. 24: one more byte a
            parameter holds what 16 bits round away. 16: none, stochastic rounding instead. 32: a fp32 copy of
            the weight, two more bytes than 24. fp32 weights are their own master. 8, with ``weights="int8"``: none, nor
            the weights themselves; those of blocks exist in 8 bits alone, which updates are rounded to stochastically.
            Their parameters read as NaN: ``state_dict`` has the weights.
        threads: worker threads of the update. None: the physical cores less one; OMP_NUM_THREADS plays no part.
        seed: of the random rounding. Equal seeds give equal bits, whatever the machine and the number of threads. None:
            ``TrainingArguments.seed``, or 0 where there is none.
        staging_memory: host memory through which gradients and weights of a GPU pass, such as ``"512MB"`` or
            ``"1GiB"``; a number is bytes. Unused where the parameters rest in host memory.
        max_skipped_steps: this many steps in a row with a NaN or infinite gradient, each of them skipped and
            counted, end the training.

    Raises:
        ValueError: a value is not one of these; the message says what to write.

    ``HfArgumentParser`` makes no option of ``seed`` and ``debug``: on a command line, these are ``TrainingArguments``'
    own (this class follows its seed; its ``debug`` is something else). ``--optim_args "seed=1,debug=true"`` sets ours.
    Use ``replaced``, not ``dataclasses.replace``, which drops such fields.
    """

    debug: bool = field(
        default=False, init=False, metadata={"help": "Fill released device memory with NaN; saves no memory."}
    )
    state_bits: int = field(default=4, metadata={"help": "Bits of each AdamW moment: 4, 8 or 32."})
    master_bits: int = field(default=24, metadata={"help": "Bits of the master of a 16-bit weight: 8, 16, 24 or 32."})
    threads: int | None = field(
        default=None, metadata={"help": "Threads of the update; default: physical cores less one."}
    )
    seed: int | None = field(default=None, init=False, metadata={"help": "Seed of the random rounding."})
    staging_memory: str = field(default="512MB", metadata={"help": "Host memory for transfers, such as 512MB or 1GiB."})
    max_skipped_steps: int = field(default=10, metadata={"help": "Skipped steps in a row that end the training."})
    offload: str = field(
        default="none", metadata={"help": "Blocks that rest in RAM: auto, none, cpu, or a share 0..1."}
    )
    gpu_memory: str | None = field(default=None, metadata={"help": "GPU memory to take, such as 24GB."})
    cpu_memory: str | None = field(default=None, metadata={"help": "Host memory for what is offloaded, such as 64GB."})
    nvme_path: list[str] | None = field(
        default=None, metadata={"help": "Folders on solid-state drives, for states that RAM has no room for."}
    )
    offload_activations: bool | None = field(
        default=None, metadata={"help": "Keep checkpointed block inputs in RAM; default: where auto finds no room."}
    )
    gradient_dtype: str = field(
        default="model", metadata={"help": "How gradients are accumulated: model, fp32, stochastic or auto."}
    )
    compute: str = field(
        default="model", metadata={"help": "What linear layers compute in: model, int8, int4 or auto."}
    )
    grad_weight: str = field(
        default="int8", metadata={"help": "What they compute weight gradients in then: int8 or model."}
    )
    weights: str = field(
        default="model", metadata={"help": "How weights of blocks cross the link: model, int8 or int4."}
    )
    micro_batch_size: int | None = field(
        default=None, metadata={"help": "Samples that a block computes at a time; default: all of a batch."}
    )

    def __post_init__(self) -> None:
        self.offload = str(self.offload)
        self._share_of_offload()
        if not isinstance(self.debug, bool):
            raise ValueError(f"debug={self.debug!r} is neither true nor false: write debug=true or leave it out")
        self._check_choice("state_bits", (4, 8, 32), "4 bits are cpu_adam4bit's, 32 are plain AdamW")
        self._check_choice("master_bits", (8, 16, 24, 32), "24 is the default, 16 has no master")
        if self.threads is not None:
            self._check_integer("threads", 1, None, "leave it out for the physical cores less one")
        if self.seed is not None:
            self._check_integer("seed", 0, 2**63 - 1, "leave it out for that of TrainingArguments")
        self._check_integer("max_skipped_steps", 1, None, "1 ends the training at the first skipped step")
        self._check_word("gradient_dtype", ("fp32", "stochastic", "auto", "model"), "that gradients are accumulated in")
        self._check_word("compute", ("int8", "int4", "auto", "model"), "that linear layers compute in")
        self._check_word("grad_weight", ("int8", "model"), "that weight gradients are computed in")
        self._check_word("weights", ("int8", "int4", "model"), "that weights can cross the link in")
        if self.master_bits == 8 and self.weights == "model":
            raise ValueError(
                'master_bits=8 leaves weights nothing but the 8 bits that they cross the link in: write weights="int8" '
                "too, or master_bits=16"
            )
        if self.micro_batch_size is not None:
            self._check_integer("micro_batch_size", 1, None, "leave it out for whole batches")
        parse_bytes(self.staging_memory, "staging_memory")
        for name in ("gpu_memory", "cpu_memory"):
            size = getattr(self, name)
            if size is not None and parse_bytes(size, name) < 10**4:
                number = re.split(r"\s*[A-Za-z]", str(size))[0]
                raise ValueError(f'{name}={size!r} is {parse_bytes(size)} bytes: write a unit, such as "{number}GB"')
        self._check_folders()
        if not isinstance(self.offload_activations, bool | None):
            raise ValueError(
                f"offload_activations={self.offload_activations!r} is neither true nor false: write "
                "offload_activations=true, or leave it out"
            )

    def _check_folders(self) -> None:
        given = self.nvme_path
        if given is None:
            return
        parts = given.split(";") if isinstance(given, str) else given if isinstance(given, Sequence) else [given]
        folders = [part.strip() if isinstance(part, str) else os.fspath(part) for part in parts]
        self.nvme_path = [folder for folder in folders if folder]
        if not self.nvme_path:
            raise ValueError(f"nvme_path={given!r} names no folder: write one on each drive, or leave it out")

    @property
    def gpu_bytes(self) -> int | None:
        """``gpu_memory`` in bytes."""
        return None if self.gpu_memory is None else parse_bytes(self.gpu_memory, "gpu_memory")

    @property
    def cpu_bytes(self) -> int | None:
        """``cpu_memory`` in bytes."""
        return None if self.cpu_memory is None else parse_bytes(self.cpu_memory, "cpu_memory")

    @property
    def resting(self) -> str:
        """What it says of where weights rest, for messages."""
        return f'offload="{self.offload}"' + (f', weights="{self.weights}"' if self.weights != "model" else "")

    @property
    def offload_share(self) -> Fraction:
        """The share of the blocks that rest in host memory, from 0 to 1; with ``"auto"``, that at first: 1."""
        return self._share_of_offload()

    def _share_of_offload(self) -> Fraction:
        if self.offload in ("none", "cpu", "auto"):
            return Fraction(self.offload != "none")
        try:
            share = Fraction(self.offload).limit_denominator(10_000)  # 0.333 as it was meant
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if not 0 <= share <= 1:
            raise ValueError(
                f'offload={self.offload!r} is no share of the blocks: write "auto", "none", "cpu" (all), or a number '
                "from 0 to 1, such as 0.5 for every second one"
            )
        return share

    def _check_choice(self, name: str, choices: tuple[int, ...], hint: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or value not in choices:
            wanted = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
            raise ValueError(f"{name}={value!r} is not a width that exists: write {name}={wanted} ({hint})")

    def _check_word(self, name: str, choices: tuple[str, ...], what: str) -> None:
        value = getattr(self, name)
        if value not in choices:
            wanted = ", ".join(f'"{word}"' for word in choices[:-1]) + f' or "{choices[-1]}"'
            raise ValueError(
                f'{name}={value!r} is none {what}: write {wanted} ("model" is the dtype that the model has)'
            )

    def _check_integer(self, name: str, low: int, high: int | None, hint: str) -> None:
        value = getattr(self, name)
        bad_type = isinstance(value, bool) or not isinstance(value, int)
        if bad_type or value < low or (high is not None and value > high):
            span = f"of {low} or more" if high is None else f"from {low} to {high}"
            raise ValueError(f"{name}={value!r} is not a whole number {span}: write one ({hint})")

    @property
    def staging_bytes(self) -> int:
        """``staging_memory`` in bytes."""
        return parse_bytes(self.staging_memory, "staging_memory")

    def replaced(self, **changes: Any) -> LowMemConfig:
        """A copy with some fields changed."""
        return type(self).from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON or YAML; ``from_dict`` reads them back.

        ``seed`` and ``debug`` only where they are set: ``HfArgumentParser`` refuses a file that has them but no
        ``TrainingArguments``.
        """
        settings = dataclasses.asdict(self)
        for name in ("seed", "debug"):
            if settings[name] == getattr(LowMemConfig, name):
                del settings[name]
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> LowMemConfig:
        """Raises: ValueError for a key that is not a field, or a value that is refused."""
        for key in settings:
            if key not in _fields():
                raise ValueError(f"{key!r} is not a field of LowMemConfig{_meant(key)}: the fields are {_listed()}")
        return cls(**settings)

    @classmethod
    def from_optim_args(cls, name: str, optim_args: str | Mapping[str, Any] | None = None) -> LowMemConfig:
        """The settings that ``TrainingArguments(optim=name, optim_args=...)`` ask for.

        Args:
            name: ``"cpu_adam4bit"``, ``"cpu_adam8bit"`` or ``"cpu_adam32bit"``.
            optim_args: ``"key=value,key=value"``, or the same as a mapping; keys are the fields of this class.

        Raises:
            ValueError: another name, text that is not key=value, a key that is not a field, a bad value, or a
                ``state_bits`` other than the name's.
        """
        return cls(**parse_optim_args(name, optim_args))


def parse_optim_args(name: str, optim_args: str | Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields that ``optim`` and ``optim_args`` set, each with its own type; ``state_bits`` is always one of them.

    Raises: as ``LowMemConfig.from_optim_args``, but for the values, which ``LowMemConfig`` checks.
    """
    name = str(getattr(name, "value", name))
    if name not in OPTIM_BITS:
        raise ValueError(f"optim={name!r} is not a name of ours: write one of {', '.join(map(repr, OPTIM_BITS))}")
    pairs = _pairs(optim_args) if isinstance(optim_args, str) else dict(optim_args or {})
    settings = {key: _value(key, value) for key, value in pairs.items()}
    bits = OPTIM_BITS[name]
    asked = settings.setdefault("state_bits", bits)
    if asked != bits:
        raise ValueError(
            f'optim="{name}" has {bits}-bit states, but optim_args says state_bits={asked}: {_instead(asked)}'
        )
    return settings


def merge(lowmem: LowMemConfig | Mapping[str, Any] | None, optim: str | None, optim_args: str | None) -> LowMemConfig:
    """One config from a ``lowmem=`` argument and from ``optim`` and ``optim_args``.

    A field that only one of them sets is taken from it. A ``LowMemConfig`` sets the fields that differ from their
    defaults; a dict sets its keys.

    Args:
        optim: a name of ours, or None where ``TrainingArguments.optim`` was left at its default.

    Raises:
        ValueError: they set one field to two values, or one of them is refused alone.
    """
    if lowmem is None:
        given: dict[str, Any] = {}
    elif isinstance(lowmem, LowMemConfig):
        default = LowMemConfig().to_dict()
        given = {key: value for key, value in lowmem.to_dict().items() if value != default.get(key)}
    else:
        checked = LowMemConfig.from_dict(lowmem)
        given = {key: getattr(checked, key) for key in lowmem}
    stock = parse_optim_args(optim or _name_of_bits(given.get("state_bits", 4)), optim_args)
    for key, value in given.items():
        if stock.get(key, value) == value:
            continue
        if key == "state_bits":
            raise ValueError(
                f'optim="{optim}" has {stock[key]}-bit states, but lowmem says state_bits={value}: {_instead(value)}'
            )
        raise ValueError(
            f"optim_args says {key}={stock[key]!r}, but lowmem says {key}={value!r}: write {key} in one of the two"
        )
    return LowMemConfig(**{**given, **stock})


def _pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f'optim_args has {part!r}, which is not key=value: write it as "threads=8,seed=1"')
        if key in pairs:
            raise ValueError(f"optim_args sets {key} twice, to {pairs[key]} and to {value}: write it once")
        pairs[key] = value
    return pairs


def _value(key: str, value: Any) -> Any:
    """A value of ``optim_args``, where everything is text, as the field's own type."""
    if key in STOCK_FLAGS:
        flag = STOCK_FLAGS[key]
        raise ValueError(f"optim_args sets {key}, which is a flag of TrainingArguments: write {flag} there instead")
    if key not in _fields():
        raise ValueError(f"optim_args has the unknown key {key!r}{_meant(key)}: the keys are {_listed()}")
    if not isinstance(value, str) or key in (
        "staging_memory",
        "offload",
        "gradient_dtype",
        "compute",
        "grad_weight",
        "weights",
    ):
        return value
    optional = ("threads", "seed", "gpu_memory", "cpu_memory", "nvme_path", "offload_activations", "micro_batch_size")
    if key in optional and value.lower() == "none":
        return None
    if key in ("debug", "offload_activations"):
        return {"true": True, "false": False}.get(value.lower(), value)
    if key in ("gpu_memory", "cpu_memory", "nvme_path"):
        return value
    try:
        return int(value)
    except ValueError:
        return value  # LowMemConfig refuses it with the message that fits the field


def _fields() -> list[str]:
    return sorted(f.name for f in dataclasses.fields(LowMemConfig))


def _listed() -> str:
    return ", ".join(_fields())


def _meant(key: str) -> str:
    close = difflib.get_close_matches(key, _fields(), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _name_of_bits(bits: int) -> str:
    return next((name for name, width in OPTIM_BITS.items() if width == bits), DEFAULT_OPTIM)


def _instead(bits: Any) -> str:
    name = next((name for name, width in OPTIM_BITS.items() if width == bits), None)
    if name is None:
        return f"write one of {', '.join(map(repr, OPTIM_BITS))} and leave state_bits out"
    return f'write optim="{name}" and leave state_bits out'
