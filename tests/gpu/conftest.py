"""Several processes share one GPU (`make gpu-test`): its memory, and the longest tests first."""

import os

import pytest

# Each process takes memory as it needs it; by default the first one would take three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# In minutes, most of them compilation. Begun last they would run alone in the end.
LONG = ("test_what_tune_measures", "test_the_same_command_twice", "test_every_way")
LONG += ("test_two_experts_of_a_token", "test_each_token_has_the_logits", "test_tokens_in_place")
LONG += ("test_wide_experts", "test_padded_experts", "test_layer_is_deterministic", "test_gate[")


@pytest.hookimpl(trylast=True)  # after the order of files in tests/conftest.py
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """`LONG` first, in its order."""

  def rank(item: pytest.Item) -> int:
    return next((i for i, name in enumerate(LONG) if item.name.startswith(name)), len(LONG))

  items.sort(key=rank)
