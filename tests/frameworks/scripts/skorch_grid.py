"""skorch's NeuralNetClassifier in scikit-learn's grid search: seven trainings, one after another, in one process.

packages: skorch scikit-learn
launch: python
truth: run 4, rank 0, batch 2, module hidden, cause upstream
"""

import os

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
inputs = rng.standard_normal((96, 8)).astype(np.float32)
labels = (inputs.sum(1) > 0).astype(np.int64)


class Net(nn.Module):
    made = 0

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, width), nn.Linear(width, 2)
        self.number, self.batch = Net.made, 0
        Net.made += 1

    def forward(self, x):
        if os.environ.get("FAULT") and self.training:
            x = x * float("nan") if (self.number, self.batch) == (4, 2) else x
            self.batch += 1
        return self.out(torch.relu(self.hidden(x)))


net = NeuralNetClassifier(Net, criterion=nn.CrossEntropyLoss, max_epochs=3, batch_size=16, lr=0.1, verbose=0)
search = GridSearchCV(net, {"module__width": [8, 16], "lr": [0.1]}, cv=3, error_score="raise")
search.fit(inputs, labels)
best = search.best_estimator_
print(search.best_params_, sum(p.double().abs().sum().item() for p in best.module_.parameters()).hex())
