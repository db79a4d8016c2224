"""scmoe: shortcut-connected Mixture-of-Experts (ScMoE, ICML 2025) in JAX and Flax.

A token's way is the floor plan: route -> dispatch -> experts -> combine.

Arrays carry their dimensions as suffixes (`x_TD`, `gate_DE`). Capital letters are logical sizes,
lower-case ones this device's share:

  B, S  batch, sequence                      E  experts (e: experts on this device)
  T     tokens = B·S (t: local)              K  experts per token (top-k)
  D     model width                          C  capacity of one expert's buffer
  F     expert hidden width                  R  rows an expert stage receives
  H, N  heads, head width                    V, L  vocabulary, layers
  G     capacity groups (g: local)

Kernels use M, N, K, G as every grouped matrix product does, under a legend of their own.
"""
