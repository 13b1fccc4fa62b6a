"""Expert parallelism for Transformers' mixtures: plan, token dispatch, and loading of expert stacks from files.

``plan`` and ``dispatch`` import Transformers; import them only for a model that shares its experts.
"""
