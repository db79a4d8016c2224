"""python -m scmoe.generate: text from a trained model.

  python -m scmoe.generate --workdir runs/quickstart --prompt "def main(" --max_new_tokens 200
  python -m scmoe.generate --workdir runs/a --prompt "import " --prompt "class " --temperature 0

Reads the configuration stored in the checkpoint. An empty prompt begins a new document.
"""

from __future__ import annotations

from scmoe import build
from scmoe.command_line import HELP, Flag, help_text, parse
from scmoe.errors import ConfigError, run_main
from scmoe.inference.decode import generate
from scmoe.inference.sampling import Sampling
from scmoe.summary import load_tokenizer, open_run
from scmoe.training.checkpoint import restore_part

FLAGS = (
  Flag("workdir", str, "", "folder of the run", required=True),
  Flag("step", int, -1, "step of the checkpoint; -1: the newest"),
  Flag("prompt", str, "", "text to continue", repeat=True, required=True),
  Flag("max_new_tokens", int, 64, "tokens to add"),
  Flag("temperature", float, 1.0, "divides the logits; 0 takes the most probable token"),
  Flag("top_k", int, 0, "draw from the k most probable tokens; 0: from all"),
  Flag("top_p", float, 1.0, "draw from the most probable tokens that make up this probability"),
  Flag("seed", int, 0, "of the draws"),
  HELP,
)


def main(argv: list[str]) -> None:
  """Continues every prompt and prints it with its continuation."""
  values, _ = parse(argv, FLAGS)
  if values["help"]:
    return print(help_text(__doc__ or "", FLAGS))
  sampling = Sampling(values["temperature"], values["top_k"], values["top_p"])
  sampling.check()
  options = {name: values[name] for name in ("step", "max_new_tokens", "seed")}
  texts = generate_texts(values["workdir"], values["prompt"], sampling, **options)
  for index, (prompt, text) in enumerate(zip(values["prompt"], texts)):
    if len(texts) > 1:
      print(f"--- prompt {index + 1}")
    print(prompt + text)


def generate_texts(
  workdir: str,
  prompts: list[str],
  sampling: Sampling = Sampling(),
  *,
  step: int = -1,
  max_new_tokens: int = 64,
  seed: int = 0,
) -> list[str]:
  """The continuation of every prompt, by the model of a run.

  Args:
    workdir: folder of the run.
    prompts: texts; each is read as the beginning of a document.
    sampling, max_new_tokens, seed: see `scmoe.inference.decode.generate`.
    step: of the checkpoint; -1 for the newest.
  """
  stored = open_run(workdir, None if step < 0 else step)
  run = build.single_device(stored.run)
  tokenizer = load_tokenizer(run, workdir)
  # As in training, a document follows an end-of-text token.
  tokens = [[tokenizer.eos_id, *tokenizer.encode(_valid(prompt))] for prompt in prompts]
  built = build.build(run)
  wanted = {"params": built.shapes, "router": built.router_shapes}
  state = restore_part(workdir, wanted, stored.step)
  new = generate(
    built.model(state["params"]),
    tokens,
    sampling,
    max_new_tokens=max_new_tokens,
    seed=seed,
    eos_id=tokenizer.eos_id,
    router=state["router"],
    mesh=built.mesh,
  )
  return [tokenizer.decode(row) for row in new]


def _valid(prompt: str) -> str:
  try:
    prompt.encode("utf-8")
  except UnicodeEncodeError:
    raise ConfigError(f"--prompt={prompt!r} is not valid UTF-8") from None
  return prompt


if __name__ == "__main__":
  run_main(main)
