"""The options of training, the optimizer, checkpoints and processes.

They have a module of their own so that a run's configuration can be read without orbax.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from typing import Any

from scmoe.base.errors import ConfigError
from scmoe.base.options import Options, check_choice, option, section

TRACKERS = ("wandb", "trackio")
# For each field of `scmoe.training.variants.Variant` that `train.tune` may name, the words that it
# takes; (): it takes whole numbers.
TUNABLE: dict[str, tuple[str, ...]] = {
  "adaptive_r": (),
  "chunks": (),
  "transport": ("capacity", "packed", "dropless", "per_rank"),
  "num_sms": (),
}


def tuned_values(text: str) -> dict[str, list[Any]]:
  """The values that `train.tune` gives each of its fields; {} for the empty text.

  Raises:
    ConfigError: a name is not in `TUNABLE`, or named twice; a value is neither one of its words
      nor, where it has none, a whole number from 0 on; or a value is given twice. Whether the run
      can have that number is not checked here.
  """
  found: dict[str, list[Any]] = {}
  where = f"train.tune={text!r}"
  for part in text.split():
    name, _, given = part.partition("=")
    if name not in TUNABLE:
      near = difflib.get_close_matches(name, TUNABLE, n=1)
      hint = f"did you mean {near[0]!r}? " if near else ""
      raise ConfigError(
        f"{where}: {name!r} is none of {', '.join(TUNABLE)}; {hint}"
        "write NAME=VALUE,VALUE without spaces, e.g. 'adaptive_r=0,1 chunks=1,2'"
      )
    words, values = TUNABLE[name], given.split(",")
    for value in values:
      if not (value in words if words else value.isdecimal()):
        kind = f"one of {', '.join(words)}" if words else "a whole number from 0 on"
        raise ConfigError(
          f"{where}: {name} takes {kind}, got {value!r}; write {name}=VALUE,VALUE without spaces"
        )
    if name in found or len(set(values)) < len(values):
      raise ConfigError(f"{where} names {name}, or one of its values, twice; leave one out")
    found[name] = [value if words else int(value) for value in values]
  return found


@dataclasses.dataclass(frozen=True)
class TrainConfig(Options, path="train"):
  """Length, batch, teacher, cadence, limits, outputs and more of a run (section `train`)."""

  steps: int = option(1000, "optimizer steps; the schedule spans them", minimum=1)
  batch_size: int = option(8, "sequences per microbatch, over all devices", minimum=1)
  tokens_per_step: int = option(
    0,
    "tokens per optimizer step; 0: one microbatch. Gradients are accumulated over "
    "tokens_per_step / (batch_size x sequence length) microbatches",
    minimum=0,
  )
  seed: int = option(0, "seed of the initial weights and of the noise of training", minimum=0)
  init_from: str = option(
    "",
    "folder of a run with whose newest parameters this one begins, at step 0 and with a fresh "
    "optimizer; empty: fresh parameters",
  )
  teacher: str = option(
    "",
    "folder of a run, or of scmoe.convert --inference, from whose scores the model learns beside "
    "the text, or which is the reference of data.source=preference; of a run the newest checkpoint "
    "at the start; empty: text alone",
  )
  teacher_share: float = option(
    0.5, "share of the divergence from the teacher in the loss", minimum=0, maximum=1
  )
  teacher_temperature: float = option(
    2.0, "divides the scores of both before they are compared", minimum=0.01
  )
  teacher_hidden: float = option(
    0.0,
    "adds this times the squared distance of both models' hidden states after each pair, relative "
    "to the teacher's length, to the loss; teacher and model have the same width and layers; 0: "
    "scores alone",
    minimum=0,
  )
  preference_beta: float = option(
    0.1,
    "data.source=preference: how much a difference of log-probabilities from the reference counts",
    minimum=1e-6,
  )
  reference_free: bool = option(
    False,
    "data.source=preference: compare the answers' log-probabilities themselves, without a "
    "reference in train.teacher",
  )
  log_every: int = option(10, "steps between lines on the console and in metrics.jsonl", minimum=1)
  eval_every: int = option(0, "steps between evaluations; 0: only after the last step", minimum=0)
  eval_batches: int = option(8, "batches of one evaluation; 0: the whole validation set", minimum=0)
  sample_every: int = option(
    0, "steps between printed samples; 0: only after the last step", minimum=0
  )
  sample_tokens: int = option(
    64, "tokens of a printed sample; 0: never print samples during training", minimum=0
  )
  router_every: int = option(
    100, "steps between router/step_N.npz files of per-layer arrays; 0: never", minimum=0
  )
  stop_after: int = option(
    0,
    "stop after that step as if interrupted (save, exit 75); the schedule still spans steps; 0: no",
    minimum=0,
  )
  tune: str = option(
    "",
    "ways to move rows, and thread blocks of the experts' kernels, that are tried, the fastest of "
    "which trains on, e.g. 'adaptive_r=0,1 chunks=1,2 transport=dropless,per_rank "
    "num_sms=0,124': in the search of overlap.schedule=auto where there "
    "is one, else in the first steps; the choice changes results by rounding alone, but that with "
    "chunks a buffer of limited capacity is rounded up to a multiple of them; empty: no tuner",
  )
  tune_rounds: int = option(3, "measured steps of each of them", minimum=1)
  remat: str = option(
    "none",
    "what the backward pass recomputes: none; dots: all but matrix products; moe: the experts; "
    "full: every block",
    choices=("none", "dots", "moe", "full"),
  )
  max_skipped_in_row: int = option(
    10,
    "steps in a row that are skipped (their loss or gradient is not finite, or a spike); one more "
    "ends the run (exit 4)",
    minimum=0,
  )
  spike_sigma: float = option(
    0.0,
    "a step whose loss or gradient norm is so many standard deviations above the last 128 is "
    "skipped; 6 is usual; 0: none",
    minimum=0,
  )
  spike_action: str = option(
    "skip",
    "after such a step: skip (go on), or stop (exit 4 and leave what repeats it; each step is "
    "waited for)",
    choices=("skip", "stop"),
  )
  collapse_steps: int = option(
    200,
    "steps for which a layer's router may leave over a quarter of its experts without a token, or "
    "have a diversity below 0.3, before a warning names it; 0: never",
    minimum=0,
  )
  watchdog_seconds: float = option(
    0.0, "a step that takes longer ends the run with every stack (exit 86); 0: off", minimum=0
  )
  first_step_seconds: float = option(
    1800.0,
    "the watchdog's allowance for whatever compiles or writes: first step, first evaluation, save",
    minimum=0,
  )
  tensorboard: bool = option(True, "write TensorBoard files beside metrics.jsonl")
  trackers: str = option(
    "",
    "further places for the figures, joined by commas: wandb, trackio (pip install wandb); none of "
    "them can stop a run",
  )
  deterministic: bool = option(
    False, "ask XLA for bitwise reproducible GPU operations (slower; some have no such form)"
  )
  profile_step: int = option(
    0, "first step of a profiler trace into WORKDIR/profile; 0: none", minimum=0
  )
  profile_steps: int = option(3, "steps in the trace", minimum=1)

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in filter(None, self.trackers.split(",")):
      check_choice("train.trackers", name, TRACKERS)
    tuned_values(self.tune)

  def microbatches(self, sequence_length: int) -> int:
    """Number of microbatches A of one optimizer step, for sequences of `sequence_length` tokens.

    Raises:
      ConfigError: `tokens_per_step` is not a whole number of microbatches.
    """
    if not self.tokens_per_step:
      return 1
    tokens = self.batch_size * sequence_length
    if self.tokens_per_step % tokens:
      near = max(1, round(self.tokens_per_step / tokens)) * tokens
      raise ConfigError(
        f"train.tokens_per_step={self.tokens_per_step} is not a multiple of train.batch_size="
        f"{self.batch_size} x sequence length {sequence_length} = {tokens}; use {near}, or 0 for "
        "one microbatch"
      )
    return self.tokens_per_step // tokens

  def check_trackers(self) -> None:
    """Checks that the packages that `trackers` names are installed.

    Raises:
      ConfigError: a package is not installed.
    """
    for name in filter(None, self.trackers.split(",")):
      if importlib.util.find_spec(name) is None:
        raise ConfigError(f"train.trackers={name!r} is not installed; pip install {name}")

  def check_mesh(self, batch_shards: int, processes: int = 1) -> None:
    """Checks that `batch_size` is a multiple of `batch_shards` and of `processes`.

    Args:
      batch_shards: parts of a microbatch on different devices: mesh.data x mesh.expert.
      processes: number of processes of the run.

    Raises:
      ConfigError: it is not.
    """
    for parts, what in ((batch_shards, "mesh.data x mesh.expert"), (processes, "processes")):
      if self.batch_size % parts:
        near = -(-self.batch_size // parts) * parts
        raise ConfigError(
          f"train.batch_size={self.batch_size} is not divisible by {what} = {parts}; use {near}"
        )


# The largest decay of a moment that is allowed. With 1 a moment would stay 0, and Adam would divide
# 0 by 0.
_DECAY = 1 - 2**-20


@dataclasses.dataclass(frozen=True)
class OptimizerAblation(Options, path="optimizer.ablation"):
  """Options of the optimizer that only ablations change (section `optimizer.ablation`)."""

  masters: str = option(
    "auto",
    "how float32 parameters that the model reads in bfloat16 are kept: cast (every step makes a "
    "bfloat16 copy), halves (the bfloat16 number and the rest of it, 2 bytes each: the same values "
    "without a cast), or auto (halves on GPUs); checkpoints are the same",
    choices=("auto", "cast", "halves"),
  )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Options, path="optimizer"):
  """The update's rule, schedule, weight decay, clipping, loss scale, average and moments' type.

  Section `optimizer`.
  """

  name: str = option(
    "adamw",
    "adamw; or muon: the matrices of attention, MLPs and experts, and the kernels of a stem's "
    "convolutions, by Muon, all else by AdamW, both with the same learning rate and weight decay",
    choices=("adamw", "muon"),
  )
  learning_rate: float = option(3e-4, "peak learning rate", minimum=0)
  schedule: str = option(
    "cosine",
    "after warm-up: cosine to min_lr_ratio; wsd: constant, then linear to min_lr_ratio over the "
    "last decay_fraction; constant",
    choices=("cosine", "wsd", "constant"),
  )
  warmup_steps: int = option(
    100, "steps of linear warm-up; at most half of train.steps is used", minimum=0
  )
  min_lr_ratio: float = option(
    0.1, "learning rate at the end, as a share of the peak", minimum=0, maximum=1
  )
  decay_fraction: float = option(
    0.2, "wsd: share of train.steps spent decaying", minimum=0, maximum=1
  )
  beta1: float = option(0.9, "decay of the first moment", minimum=0, maximum=_DECAY)
  beta2: float = option(0.95, "decay of the second moment", minimum=0, maximum=_DECAY)
  eps: float = option(1e-8, "added to the root of the second moment", minimum=0)
  muon_beta: float = option(0.95, "muon: decay of the momentum", minimum=0, maximum=_DECAY)
  muon_rms: float = option(
    0.2, "muon: root mean square of a matrix's update, times the learning rate", minimum=0
  )
  weight_decay: float = option(
    0.1, "decoupled weight decay of matrices; none on biases, norms and gains", minimum=0
  )
  clip_norm: float = option(
    1.0, "global gradient norm above which gradients are scaled down; 0: no clipping", minimum=0
  )
  loss_scale: float = option(
    0.0,
    "factor of the loss while gradients are taken; 0: for model.dtype=float16 one that follows the "
    "overflows, else none",
    minimum=0,
  )
  loss_scale_window: int = option(
    1000, "steps without overflow after which that factor doubles", minimum=1
  )
  ema: float = option(
    0.0,
    "decay of an exponential moving average of the weights, which is evaluated beside them and can "
    "be exported; 0: none. In step n (from 1) it is at most n / (9 + n), so that the first weights "
    "are soon forgotten",
    minimum=0,
    maximum=1 - 2**-20,
  )
  moments: str = option(
    "float32",
    "type in which moments (muon: momentum) are kept: float32, or bfloat16, rounded at random: "
    "half of their memory and traffic (adamw: 4 and 8 bytes a parameter and step), for noise of "
    "1/256 a step in them",
    choices=("float32", "bfloat16"),
  )
  ablation: OptimizerAblation = section(
    OptimizerAblation, "parts of the update that only ablations set apart"
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Options, path="checkpoint"):
  """When checkpoints are written, how many stay, when failed saves end a run, what must match.

  Section `checkpoint`.
  """

  every: int = option(
    500, "steps between checkpoints; 0: only at the end or when told to stop", minimum=0
  )
  keep: int = option(3, "newest checkpoints that stay", minimum=1)
  keep_every: int = option(
    0, "checkpoints whose step is a multiple of this stay for ever; 0: none", minimum=0
  )
  async_save: bool = option(True, "go on training while a checkpoint is written")
  max_failures: int = option(
    3, "failed saves in a row that end the run (exit 6); fewer are logged and retried", minimum=1
  )
  allow_config_change: bool = option(
    False, "resume although the stored configuration or the data differ"
  )


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Options, path="distributed"):
  """How the processes of a run find each other and give up a silent one (section `distributed`).

  For tasks that SLURM's srun starts, or for one process, nothing has to be set. Otherwise every
  process gets the same coordinator and count and its own id, here or as SCMOE_COORDINATOR,
  SCMOE_NUM_PROCESSES and SCMOE_PROCESS_ID.
  """

  coordinator: str = option("", "host:port of process 0; empty: from SLURM or the environment")
  num_processes: int = option(
    0, "processes of the run; 0: from SLURM or the environment", minimum=0
  )
  process_id: int = option(
    -1, "number of this process; -1: from SLURM or the environment", minimum=-1
  )
  heartbeat_seconds: int = option(
    100, "a process that is silent for so long is given up and ends the others", minimum=5
  )
