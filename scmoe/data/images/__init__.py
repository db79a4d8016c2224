"""Labelled images: files of encoded images, generated ones, and batches of both."""
