"""Table 5 of the paper: positions of the shortcut and mixing on images.

  python experiments/quality/table5_vision/run.py --scale gpu --limit_seconds 570 \\
      --config.data.path=FOLDER

FOLDER holds CIFAR-10 as Parquet. What is compared and how: README.md.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import study

MODEL = "cifar10_vit"


def images(scale: str) -> study.RunConfig:
  """The model of `configs/cifar10_vit.py`: whole, small enough for a CPU, or in three steps.

  Raises:
    ConfigError: there is no such configuration.
  """
  load = lambda form: study.load_config(study.find_config(MODEL), form)
  run, whole = load("smoke" if scale == "smoke" else "get_config"), load("get_config")
  # A smoke run has no average of the weights, which is what the study evaluates.
  run = dataclasses.replace(
    run, optimizer=dataclasses.replace(run.optimizer, ema=whole.optimizer.ema)
  )
  quiet = {"sample_tokens": 0, "router_every": 0, "tensorboard": False}
  if scale != "cpu":
    return dataclasses.replace(run, train=dataclasses.replace(run.train, **quiet))
  short = {"steps": 50, "batch_size": 32, "log_every": 10, "eval_every": 50, "eval_batches": 16}
  small = {"num_layers": 4, "width": 32, "num_heads": 2, "mlp_hidden": 64, "dtype": "float32"}
  vision = dataclasses.replace(run.model.vision, stem_convolutions=1)
  return dataclasses.replace(
    run,
    model=dataclasses.replace(run.model, vision=vision, **small),
    train=dataclasses.replace(run.train, **short, **quiet),
    # An average over 500 steps would be of weights from before the training.
    optimizer=dataclasses.replace(run.optimizer, warmup_steps=5, ema=0.9),
    checkpoint=dataclasses.replace(run.checkpoint, every=0),
  )


DESIGN = study.Design(
  folder=Path(__file__).resolve().parent,
  title="Does a ViT whose experts read an earlier value classify as well as top-2?",
  variants={
    "top2": {"model.wiring": "top2"},
    "top1": {"model.wiring": "top1"},
    "shared_expert": {"model.wiring": "shared_expert"},
    "scmoe_pos1": {"model.wiring": "scmoe_pos1"},
    "scmoe_pos2": {"model.wiring": "scmoe_pos2"},
    "scmoe_pos3": {"model.wiring": "scmoe_pos3"},
    "pos2_direct": {"model.wiring": "scmoe_pos2", "model.mix": "direct"},
  },
  contrasts=(
    *study.against(
      "top2",
      "scmoe_pos2",
      "scmoe_pos1",
      "scmoe_pos3",
      "shared_expert",
      "top1",
      margins={"scmoe_pos2": 0.003},
    ),
    *study.against("scmoe_pos2", "scmoe_pos1", "scmoe_pos3", "pos2_direct"),
  ),
  seeds={"smoke": 2, "cpu": 3, "gpu": 5},
  configs={scale: (lambda scale=scale: images(scale)) for scale in study.SCALES},
  metric="ema_accuracy",
)

if __name__ == "__main__":
  study.main(DESIGN)
