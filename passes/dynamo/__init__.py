"""Passes over Dynamo's graph of a frame."""
