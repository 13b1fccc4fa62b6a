"""Extensions of one file each; sequence parallelism and offload have folders of their own."""
