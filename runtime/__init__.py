"""From an immutable snapshot of a step to tensors: the contract, launch arguments, KV pool, runner, sampler.

`metadata` and `params` are free of torch, so that the scheduler can import them.
"""
