"""All mutable request state: groups, blocks, policy, the step loop and text output. Imports no torch."""

from .block_manager import BlockManager
from .config import SchedulerConfig
from .engine import Engine
from .outputs import CompletionOutput, RequestOutput
from .scheduler import Scheduler
from .sequence import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from .stats import SchedulerStats
from .step import SchedulerOutputs

__all__ = [
    "BlockManager",
    "CompletionOutput",
    "Engine",
    "RequestMetrics",
    "RequestOutput",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutputs",
    "SchedulerStats",
    "Sequence",
    "SequenceGroup",
    "SequenceStatus",
]
