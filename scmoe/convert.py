"""python -m scmoe.convert: turns a released model into a run, and a run into a released model.

  python -m scmoe.convert --from ~/models/OLMoE-1B-7B --workdir runs/olmoe
  python -m scmoe.convert --workdir runs/olmoe --to exports/olmoe
  python -m scmoe.convert --from ~/models/OLMoE-1B-7B --workdir runs/a --upcycle wiring=scmoe_pos2
  python -m scmoe.convert --from runs/top2 --workdir runs/b --upcycle wiring=farskip
  python -m scmoe.convert --workdir runs/a --inference exports/a --dtype int8
  python -m scmoe.convert --workdir runs/adapted --peft exports/adapter
  python -m scmoe.convert --from ~/models/OLMoE-1B-7B --adapter exports/adapter --workdir runs/b
  python -m scmoe.convert --from runs/a --workdir runs/placed --place devices=4
  python -m scmoe.convert --from runs/tuned --workdir runs/small --prune keep=0.5 --start runs/base

Reads and writes model folders in the layout of Hugging Face transformers: config.json, safetensors,
tokenizer.json, and the files that say how texts begin and end. --from makes the model step 0 of a
run, in the types of its tensors, for scmoe.evaluate, scmoe.generate and scmoe.train. With
--upcycle it begins a run of another architecture, from a released model or from a run.
Families: OLMoE, Mixtral, Granite-MoE, Qwen3-MoE, DeepSeek-V2 and V3, GLM-4.5, LongCat-Flash,
GPT-OSS, the text part of Llama-4, and Llama, Mistral and Qwen3 as sources of experts. A run that
none of them can express leaves with its own code, which transformers runs with
trust_remote_code=True. Everything is checked before anything is written.
--inference writes a folder for --model of scmoe.generate, scmoe.evaluate and scmoe.serve: any run's
weights without optimizer, with checksums.
--peft writes the low-rank adapters of a run alone, in the layout of PEFT; --adapter adds such a
folder to the released model in --from, so that every command can read the sum as a run.
--place and --prune read a run and make another one, step 0 of --workdir: the same experts in an
order for the devices that will hold them, or some of the experts of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scmoe.base.errors import ConfigError, run_main
from scmoe.base.paths import expanded
from scmoe.pretrained.imported import import_model
from scmoe.run.command_line import HELP, Flag, check_environment, help_text, parse
from scmoe.run.exported import export_adapters, export_inference, export_model
from scmoe.run.names import check_workdir
from scmoe.run.rearranged import Source, place_run, prune_run
from scmoe.run.upcycled import Fit, is_run, upcycle_run

FLAGS = (
  Flag(
    "from",
    str,
    "",
    "folder of a released model to read; with --upcycle, --place, --prune also of a run",
  ),
  Flag("to", str, "", "folder to write the run's model to; must not exist yet"),
  Flag(
    "inference",
    str,
    "",
    "folder to write the run's model to, for --model of other commands; must not exist yet",
  ),
  Flag(
    "peft",
    str,
    "",
    "folder to write the run's adapters (lora.rank) to, in PEFT's layout; must not exist yet",
  ),
  Flag(
    "adapter",
    str,
    "",
    "with --from: folder of adapters in PEFT's layout, which are added to the released model",
  ),
  Flag("workdir", str, "", "folder of the run", required=True),
  Flag("step", int, -1, "step of the checkpoint of the run that is read; -1: the newest"),
  Flag("ema", bool, False, "of the run that is read: the moving average of the weights instead"),
  Flag(
    "task",
    str,
    "",
    "with --to, --peft, --inference: of several tasks the one whose gates are written",
  ),
  Flag(
    "dtype",
    str,
    "",
    "with --to: bfloat16, float16 or float32; default: that of the released model. With --peft: "
    "the same; default: float32. With "
    "--inference: bfloat16, float32 or int8 (experts; the rest bfloat16); default: the run's dtype",
  ),
  Flag(
    "mesh",
    str,
    "",
    "axes such as data=2,expert=2; default: all devices on the expert axis if they divide the "
    "experts, else one device",
  ),
  Flag(
    "upcycle",
    str,
    "",
    "with --from: start another architecture from the model: wiring=scmoe_pos2 from one with "
    "experts, experts=8 (or experts=8,top_k=2,wiring=...) from a dense one",
  ),
  Flag(
    "place",
    str,
    "",
    "with --from RUN: order of the experts for devices=W, made from the choices on text; "
    "by=balance (the default: equal rows for all devices), by=together (a token's experts of one "
    "layer on one device) or by=affinity (of consecutive layers); batches=16",
  ),
  Flag(
    "prune",
    str,
    "",
    "with --from RUN: experts to keep in each layer, keep=4 or a share such as keep=0.5; "
    "by=router_norm (the default: whose gate weights have grown most since --start), by=use (that "
    "tokens choose most; batches=16) or by=random (seed=0)",
  ),
  Flag(
    "start",
    str,
    "",
    "with --prune by=router_norm: folder of the run from which the training began; default: "
    "train.init_from",
  ),
  Flag(
    "text",
    str,
    "",
    "with --place, --prune by=use: file or folder of text in place of the validation text; with "
    "--fit: in place of the run's training text",
  ),
  Flag(
    "fit",
    int,
    0,
    "with --upcycle of a run: training sequences to which the norm of the new shortcut is fitted, "
    "e.g. 1000; 0: it stays a copy",
  ),
  HELP,
)

# The flags that write a folder, and what writes it.
_WRITERS = {"to": export_model, "inference": export_inference, "peft": export_adapters}


def main(argv: list[str]) -> None:
  """Runs the command line: one of --from, --to, --inference and --peft."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS, values["help"]))
  check_environment()
  workdir = check_workdir(values["workdir"])
  step = None if values["step"] < 0 else values["step"]
  if values["place"] or values["prune"]:
    return print(_rearranged(values, workdir, step))
  if sum(bool(values[name]) for name in ("from", *_WRITERS)) != 1:
    raise ConfigError(
      "give one of: --from FOLDER to read a released model, --to FOLDER to write one, --inference "
      "FOLDER to write a folder for inference, --peft FOLDER to write adapters alone"
    )
  names = ("start",) if values["fit"] else ("start", "text")
  if lost := next((name for name in names if values[name]), None):
    others = ", or with --fit" if lost == "text" else ""
    raise ConfigError(f"--{lost} goes with --place or --prune{others}; leave it out")
  if values["fit"] < 0:
    raise ConfigError(f"--fit={values['fit']} is no number of sequences; give e.g. --fit=1000")
  if values["from"] and values["task"]:
    raise ConfigError(
      "--task goes with --to, --peft and --inference, which write the model of one task"
    )
  if values["from"] and values["dtype"]:
    raise ConfigError(
      "--dtype goes with --to, --peft and --inference; --from keeps the types of the tensors, "
      "leave it out"
    )
  if values["from"]:
    options: dict[str, Any] = {"mesh": values["mesh"], "upcycle": values["upcycle"]}
    if is_run(source := expanded(values["from"], "--from")):
      if values["adapter"]:
        raise ConfigError(
          f"--adapter goes with --from of a released model, and {source} is a run; give the folder "
          "that the adapters are for (scmoe.convert --workdir RUN --to FOLDER writes a run's)"
        )
      fit = Fit(values["fit"], values["text"]) if values["fit"] else None
      return print(upcycle_run(source, workdir, step=step, ema=values["ema"], fit=fit, **options))
    if values["fit"]:
      raise ConfigError(
        "--fit goes with --from RUN; make the released model a run first, without --upcycle"
      )
    if values["ema"] or step is not None:
      raise ConfigError("--ema and --step are of a run; a released model has neither")
    return print(import_model(values["from"], workdir, adapter=values["adapter"], **options))
  if values["adapter"]:
    raise ConfigError(
      "--adapter goes with --from FOLDER, to whose model it is added; --peft FOLDER writes adapters"
    )
  if values["upcycle"] or values["fit"]:
    raise ConfigError("--upcycle and --fit go with --from: they start a run from another model")
  options = {name: values[name] for name in ("dtype", "mesh", "ema", "task")} | {"step": step}
  flag = next(name for name in _WRITERS if values[name])
  folder = expanded(values[flag], f"--{flag}")
  return print(_WRITERS[flag](workdir, folder, **options))


def _rearranged(values: Mapping[str, Any], workdir: Path, step: int | None) -> str:
  """Runs --place or --prune; returns lines for the user.

  Raises:
    ConfigError: the flags do not go together; else see `place_run` and `prune_run`.
  """
  if values["place"] and values["prune"]:
    raise ConfigError("give one of --place and --prune; the second can read the run of the first")
  flag = "place" if values["place"] else "prune"
  if not values["from"]:
    raise ConfigError(f"--{flag} reads a run and makes another one: give --from RUN, --workdir NEW")
  without = (*_WRITERS, "adapter", "dtype", "upcycle", "task", "fit")
  if lost := next((name for name in without if values[name]), None):
    raise ConfigError(f"--{lost} has no effect with --{flag}; leave it out")
  if values["start"] and flag == "place":
    raise ConfigError("--start goes with --prune; leave it out")
  folder = expanded(values["from"], "--from")
  source = Source(folder, step, values["ema"], values["mesh"], values["text"])
  if not is_run(folder):
    raise ConfigError(
      f"--from={str(folder)!r} is not the folder of a run, which --{flag} needs; read a released "
      "model first: scmoe.convert --from FOLDER --workdir RUN"
    )
  if values["place"]:
    return place_run(source, workdir, values["place"])
  start = str(expanded(values["start"], "--start")) if values["start"] else ""
  return prune_run(source, workdir, values["prune"], start)


if __name__ == "__main__":
  run_main(main)
