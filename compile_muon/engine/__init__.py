"""The engine: one optimizer at work, and the hooks of its features. The files, in reading order:

a parameter      sharded_param, gradient; dtensor_parameter, dtensors, local
a frame          frame, whose backward asks the ledger; persistent; forwards, inside which weights are whole
a step           step: step_checks -> decision -> directions -> commit; and as a CUDA graph, recorded
    directions   step_graph
    commit       states, writes_ahead
weights          resident, other_holders
features         extension, hooks
all together     trained, engine
"""

from compile_muon.engine.engine import Engine
from compile_muon.engine.extension import Extension

__all__ = ["Engine", "Extension"]
