"""What a trace of torch.profiler shows of a step."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_parstrat.distributed.gradients.clipping import gradient_norm, step_gradients
from tests.distributed.engines import backward, make_engine
from tests.pool import RankPool

IN_ORDER = (
    "zero1_custom: reduce-scatter gradients of bucket 0",
    "lightning_parstrat: send control message",
    "lightning_parstrat: wait for control message",
    "zero1_custom: wait for gradients of bucket 0",
    "zero1_custom: agree on the norm of gradients",
    "zero1_custom: step bucket 0",
    "zero1_custom: all-gather parameters of bucket 0",
    "zero1_custom: wait for parameters of bucket 0",
)


def marks_of_a_step() -> list[str]:
    """The marks of a step and of the forward after it, in the order in which they begin."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    engine = make_engine(module, optimizer, bucket_cap_mb=1.0)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        backward(engine, module(torch.ones(3, 4)).square().sum())
        gradient_norm(step_gradients([optimizer]))
        optimizer.step()
        module(torch.ones(3, 4))
    engine.close()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(("zero1_custom:", "lightning_parstrat:"))]


def test_a_trace_names_what_a_step_does_in_its_order(pool: RankPool) -> None:
    for names in pool.run(2, marks_of_a_step):
        assert [name for name in names if name in IN_ORDER] == list(IN_ORDER)
