"""Features that are a file each; sequence parallelism and offload have folders of their own."""
