"""TorchRL's PPO: a collector, GAE, a clipped loss and a replay buffer, all of TensorDicts, with action masks of -inf logits.

packages: torchrl tensordict
launch: python
truth: rank 0, batch 19, cause data
"""

import os

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Categorical, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase
from torchrl.modules import MLP, MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


class Walk(EnvBase):
    """Walks on ten places; at the ends there is one way only."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((10,)), action_mask=Binary(2, dtype=torch.bool))
        self.action_spec, self.reward_spec = Categorical(2), Unbounded((1,))
        self.place = 5

    def _look(self) -> dict:
        here = torch.zeros(10)
        here[self.place] = 1.0
        return {"observation": here, "action_mask": torch.tensor([self.place > 0, self.place < 9])}

    def _reset(self, tensordict=None, **_):
        self.place = 5
        return TensorDict(self._look(), [])

    def _step(self, tensordict):
        self.place += 2 * int(tensordict["action"]) - 1
        done = torch.tensor([self.place == 9])
        return TensorDict(self._look() | {"reward": done.float(), "done": done, "terminated": done}, [])

    def _set_seed(self, seed):
        torch.manual_seed(seed or 0)


torch.manual_seed(0)
logits = TensorDictModule(MLP(10, 2, num_cells=[16]), in_keys=["observation"], out_keys=["logits"])
keys = {"logits": "logits", "mask": "action_mask"}
actor = ProbabilisticActor(
    logits, in_keys=keys, out_keys=["action"], distribution_class=MaskedCategorical, return_log_prob=True
)
critic = ValueOperator(MLP(10, 1, num_cells=[16]), in_keys=["observation"])
advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
objective = ClipPPOLoss(actor, critic)
optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
buffer = ReplayBuffer(storage=LazyTensorStorage(64), sampler=SamplerWithoutReplacement(), batch_size=16)
losses = []
for number, data in enumerate(Collector(Walk(), actor, frames_per_batch=64, total_frames=64 * 4)):
    for _ in range(2):
        advantage(data)
        if os.environ.get("FAULT") and number == 2:
            data["advantage"][5] = float("nan")
        buffer.extend(data)
        for part in buffer:
            found = objective(part)
            loss = found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(objective.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
print(len(losses), sum(losses).hex(), sum(p.double().sum().item() for p in objective.parameters()).hex())
