"""The real scheduler on a device that is a formula: what policies do to thousands of requests. No model, no torch, no GPU.

    workload ──> Scheduler.schedule() ──> work_of() ──> step_time() ──> the clock moves on
                        ^                    draw() ──> Scheduler.update() ──> who has ended, and when

Nothing here is a measurement: times are those of the cost model in `costs`, with the constants of `devices`.
"""

from .costs import StepTime, StepWork, step_time, work_of
from .devices import DEVICES, MODELS, Device, ModelShape, pool_tokens
from .plot import plot_simulation
from .policies import POLICIES, make_configs
from .result import SimulationResult, as_json
from .simulator import simulate
from .tables import comparison_table, step_table
from .workload import Request, Workload, make_workload

__all__ = [
    "DEVICES",
    "MODELS",
    "POLICIES",
    "Device",
    "ModelShape",
    "Request",
    "SimulationResult",
    "StepTime",
    "StepWork",
    "Workload",
    "as_json",
    "comparison_table",
    "make_configs",
    "make_workload",
    "plot_simulation",
    "pool_tokens",
    "simulate",
    "step_table",
    "step_time",
    "work_of",
]
