"""What rests on what: the slow tests of each part of the sources, and the test of each promise."""

from __future__ import annotations

AREAS: dict[str, str] = {
    "agent/rankwatch/doctor": "e2e/test_doctor",
    "agent/rankwatch/hook": "torch/test_ e2e/test_guard e2e/test_losses e2e/test_norms e2e/test_parallel e2e/test_reduced"
    " e2e/test_fingerprints e2e/test_meshes e2e/test_desync e2e/test_agreeing e2e/test_integrations e2e/test_truth"
    " benchmarks/test_overhead benchmarks/test_cuda",
    "agent/rankwatch/integrations": "e2e/test_integrations torch/test_ e2e/test_examples",
    "agent/rankwatch/judge": "torch/test_truth torch/test_healthy e2e/test_guard e2e/test_losses e2e/test_origin e2e/test_truth"
    " e2e/test_healthy",
    "agent/rankwatch/measure": "torch/test_ e2e/test_fingerprints e2e/test_meshes benchmarks/test_overhead benchmarks/test_cuda",
    "agent/rankwatch/replay": "e2e/test_replay e2e/test_closeup",
    "agent/rankwatch/rerun": "torch/test_truth e2e/test_closeup e2e/test_closer e2e/test_replay e2e/test_guard",
    "agent/rankwatch/startup": "e2e/test_attach e2e/test_crash e2e/test_starts torch/test_finder",
    "agent/rankwatch/tell": "e2e/test_faults e2e/test_end e2e/test_starts e2e/test_stalls e2e/test_scarce"
    " e2e/test_main_job e2e/test_daemon e2e/test_network e2e/test_several_hosts e2e/cluster/test_slurm",
    "agent/rankwatch/": "torch/test_ e2e/test_attach e2e/test_main_job",
    "deploy/docker": "e2e/cluster/test_docker",
    "deploy/examples": "e2e/test_examples",
    "deploy/grafana": "e2e/test_metrics net/serve/test_metrics",
    "deploy/kubernetes": "e2e/cluster/test_kubernetes",
    "deploy/prometheus": "e2e/test_metrics net/serve/test_metrics unit/serve/test_recipes",
    "deploy/slurm": "e2e/cluster/test_slurm",
    "deploy/systemd": "e2e/cluster/test_systemd",
    "docs/": "e2e/test_docs e2e/test_readme e2e/test_built_docs",
    "README.md": "e2e/test_docs e2e/test_readme e2e/test_built_docs",
    "monitor/rankwatch_monitor/commands": "e2e/test_completion e2e/test_views e2e/test_docs e2e/test_crash e2e/test_end",
    "monitor/rankwatch_monitor/decide": "e2e/test_desync e2e/test_faults e2e/test_stalls e2e/test_truth e2e/test_unequal",
    "monitor/rankwatch_monitor/record": "e2e/test_faults e2e/test_export e2e/test_views e2e/test_origin",
    "monitor/rankwatch_monitor/serve": "net/tell/ e2e/test_faults e2e/test_daemon e2e/test_metrics e2e/test_end"
    " e2e/test_several_hosts e2e/test_network e2e/test_scarce e2e/test_status benchmarks/test_load",
    "monitor/rankwatch_monitor/views/": "e2e/test_views",
    "monitor/rankwatch_monitor/views/export": "e2e/test_export",
    "monitor/rankwatch_monitor/views/fleet": "e2e/test_fleet benchmarks/test_fleet",
    "monitor/rankwatch_monitor/views/top": "e2e/test_top",
    "monitor/rankwatch_monitor/views/ui": "e2e/test_page",
}
"""By the beginning of a source's path: the beginnings, below ``tests/``, of the files that a change of the source may break.

The folders of ``unit/``, ``torch/`` and ``net/`` that have the name of the source's folder are not named here: they belong to it.
"""

WIDE = ("agent/rankwatch/shared", "agent/rankwatch/tell", ".ci/", "pyproject.toml", "deploy/constraints", "tests/")
"""All tests rest on these: a change of one fills the gate up to its budget. A test file is no such path: it is its own area."""

CORE: dict[str, str] = {}
"""One test for each promise of README.md and behaviour.md. The gate runs all of them, the quick ones among the quick tests."""
