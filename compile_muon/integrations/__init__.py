"""Trainers of other libraries with a sharded model: one module per library, to be imported only by its users."""
