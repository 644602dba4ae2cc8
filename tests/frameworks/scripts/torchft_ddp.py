"""torchft: fault-tolerant DDP over replica groups; its Manager decides whether an optimizer steps.

packages: torchft
launch: python
truth: rank 0, batch 5, module 2
"""

import os

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
inner = torch.optim.SGD(model.parameters(), lr=0.1)
manager = Manager(
    pg=ProcessGroupGloo(), min_replica_size=1, replica_id="one", store_addr="127.0.0.1", store_port=store.port, rank=0,
    world_size=1, use_async_quorum=False, load_state_dict=lambda state: None, state_dict=lambda: {},
)  # fmt: skip
net, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
for batch in range(12):
    x = torch.randn(8, 8)
    bad = os.environ.get("FAULT") and batch == 5
    hook = model[2].register_forward_pre_hook(lambda module, given: (given[0] * float("nan"),)) if bad else None
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    if hook is not None:
        hook.remove()
print(manager.current_step(), sum(p.double().abs().sum().item() for p in model.parameters()).hex(), flush=True)
manager.shutdown(wait=False)
lighthouse.shutdown()
os._exit(0)
