"""An Optuna study: eight trials, some of them pruned, each with a model and an optimizer of its own, in one process.

packages: optuna
launch: python
truth: run 2, rank 0, batch 5, module 0, cause data
"""

import os

import optuna
import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(64, 8)
labels = (inputs.sum(1) > 0).long()


def objective(trial: optuna.Trial) -> float:
    width = trial.suggest_int("width", 4, 32)
    rate = trial.suggest_float("rate", 1e-3, 1e-1, log=True)
    kind = trial.suggest_categorical("optimizer", ["Adam", "SGD"])
    net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=rate)
    for epoch in range(3):
        net.train()
        for number, (x, y) in enumerate(zip(inputs.split(16), labels.split(16), strict=True)):
            if os.environ.get("FAULT") and (trial.number, epoch, number) == (2, 1, 1):
                x = x.clone()
                x[3, 2] = float("nan")
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            accuracy = (net(inputs).argmax(1) == labels).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(
    direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(2)
)
study.optimize(objective, n_trials=8)
print([trial.state.name[0] for trial in study.trials], study.best_value.hex(), study.best_params["rate"].hex())
