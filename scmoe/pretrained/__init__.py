"""Reads and writes released models: configurations, tensor names, folders of safetensors."""
