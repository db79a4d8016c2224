"""scmoe: shortcut-connected Mixture-of-Experts (ScMoE, ICML 2025) in JAX and Flax.

A MoE layer has four stages: route -> dispatch -> experts -> combine.

Arrays carry their dimensions as suffixes (`x_TD`, `gate_DE`). Capital letters are logical sizes,
lower-case ones this device's share:

  B, S  batch, sequence                      E  experts (e: experts on this device)
  T     tokens = B·S (t: local)              K  experts per token (top-k)
  D     model width                          C  capacity of one expert's buffer
  F     expert hidden width                  R  rows an expert stage receives
  H, N  heads, head width                    V, L  vocabulary, layers
  G     capacity groups (g: local)

Kernels use M, N, K, G as grouped matrix products usually do; each explains them in its file.

The names below are the library's interface; docs/library.md shows their use:

  >>> import scmoe
  >>> from flax import nnx
  >>> moe = scmoe.MoE(scmoe.MoEConfig(width=64, hidden=128, num_experts=8), rngs=nnx.Rngs(0))

`import scmoe` imports neither jax nor the modules of these names. A module is imported when one of
its names is first read, so that flags and environment variables can still be set after it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from scmoe.base import moved

__version__ = "0.3.0"
moved.install()

if TYPE_CHECKING:
  from scmoe.base.errors import ConfigError as ConfigError
  from scmoe.blocks.block import BlockConfig as BlockConfig
  from scmoe.blocks.options import OverlapConfig as OverlapConfig
  from scmoe.blocks.pair import BlockPair as BlockPair
  from scmoe.blocks.schedule import make_schedule as make_schedule
  from scmoe.blocks.timeline import Times as Times
  from scmoe.blocks.timeline import describe as describe
  from scmoe.blocks.timeline import draw as draw
  from scmoe.blocks.timeline import timeline as timeline
  from scmoe.blocks.timeline import unit_times as unit_times
  from scmoe.blocks.walk import Context as Context
  from scmoe.blocks.wiring import WIRINGS as WIRINGS
  from scmoe.inference.offload.model import Offload as Offload
  from scmoe.inference.offload.model import Usage as Usage
  from scmoe.inference.offload.model import offloaded as offloaded
  from scmoe.inference.sampling import Sampling as Sampling
  from scmoe.inference.serving.server import Server as Server
  from scmoe.kernels.grouped_matmul import FFNConfig as FFNConfig
  from scmoe.kernels.grouped_matmul import FFNOptions as FFNOptions
  from scmoe.kernels.grouped_matmul import FFNWeights as FFNWeights
  from scmoe.kernels.grouped_matmul import expert_ffn as expert_ffn
  from scmoe.models.config import ModelConfig as ModelConfig
  from scmoe.models.gpt import GPT as GPT
  from scmoe.models.gpt import Pass as Pass
  from scmoe.models.vision.model import VisionModel as VisionModel
  from scmoe.models.vision.options import VisionConfig as VisionConfig
  from scmoe.moe.dispatch import Capacity as Capacity
  from scmoe.moe.dispatch import DispatchConfig as DispatchConfig
  from scmoe.moe.dispatch import Dropless as Dropless
  from scmoe.moe.dispatch import Local as Local
  from scmoe.moe.dispatch import Packed as Packed
  from scmoe.moe.dispatch import PerRank as PerRank
  from scmoe.moe.dispatch import Transport as Transport
  from scmoe.moe.dispatch import make_transport as make_transport
  from scmoe.moe.experts import ExpertRows as ExpertRows
  from scmoe.moe.experts import Experts as Experts
  from scmoe.moe.gates import Gate as Gate
  from scmoe.moe.layer import MoE as MoE
  from scmoe.moe.layer import MoECall as MoECall
  from scmoe.moe.layer import MoEConfig as MoEConfig
  from scmoe.moe.losses import balance_loss as balance_loss
  from scmoe.moe.losses import statistics as statistics
  from scmoe.moe.options import RouterConfig as RouterConfig
  from scmoe.moe.route import route as route
  from scmoe.moe.types import RouterSums as RouterSums
  from scmoe.moe.types import Routing as Routing
  from scmoe.parallel.collectives import total as total
  from scmoe.parallel.gradients import reduce_gradients as reduce_gradients
  from scmoe.parallel.mesh import BATCH_AXES as BATCH_AXES
  from scmoe.parallel.mesh import MeshConfig as MeshConfig
  from scmoe.parallel.mesh import make_mesh as make_mesh
  from scmoe.parallel.mesh import manual as manual
  from scmoe.parallel.mesh import parameter_specs as parameter_specs
  from scmoe.profiling.roofline import MACHINES as MACHINES
  from scmoe.profiling.roofline import Machine as Machine
  from scmoe.profiling.roofline import Sizes as Sizes
  from scmoe.profiling.roofline import model_times as model_times

# The same names for the interpreter, by the module that it imports for them.
_NAMES = {
  "scmoe.moe.layer": ("MoE", "MoECall", "MoEConfig"),
  "scmoe.moe.options": ("RouterConfig",),
  "scmoe.moe.gates": ("Gate",),
  "scmoe.moe.route": ("route",),
  "scmoe.moe.types": ("RouterSums", "Routing"),
  "scmoe.moe.losses": ("balance_loss", "statistics"),
  "scmoe.moe.dispatch": (
    "Capacity", "DispatchConfig", "Dropless", "Local", "Packed", "PerRank",
    "Transport", "make_transport",
  ),
  "scmoe.moe.experts": ("ExpertRows", "Experts"),
  "scmoe.kernels.grouped_matmul": ("FFNConfig", "FFNOptions", "FFNWeights", "expert_ffn"),
  "scmoe.blocks.wiring": ("WIRINGS",),
  "scmoe.blocks.options": ("OverlapConfig",),
  "scmoe.blocks.block": ("BlockConfig",),
  "scmoe.blocks.pair": ("BlockPair",),
  "scmoe.blocks.walk": ("Context",),
  "scmoe.blocks.schedule": ("make_schedule",),
  "scmoe.blocks.timeline": (
    "Times", "describe", "draw", "timeline", "unit_times",
  ),
  "scmoe.profiling.roofline": ("MACHINES", "Machine", "Sizes", "model_times"),
  "scmoe.models.config": ("ModelConfig",),
  "scmoe.models.gpt": ("GPT", "Pass"),
  "scmoe.models.vision.model": ("VisionModel",),
  "scmoe.models.vision.options": ("VisionConfig",),
  "scmoe.inference.sampling": ("Sampling",),
  "scmoe.inference.serving.server": ("Server",),
  "scmoe.inference.offload.model": ("Offload", "Usage", "offloaded"),
  "scmoe.parallel.mesh": (
    "BATCH_AXES", "MeshConfig", "make_mesh", "manual", "parameter_specs",
  ),
  "scmoe.parallel.collectives": ("total",),
  "scmoe.parallel.gradients": ("reduce_gradients",),
  "scmoe.base.errors": ("ConfigError",),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  value = getattr(importlib.import_module(_HOME[name]), name)
  globals()[name] = value  # the next read finds it without a call
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
