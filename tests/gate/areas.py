"""What rests on what: the slow tests of each part of the sources, and the test of each promise."""

from __future__ import annotations

AREAS: dict[str, str] = {
    "agent/rankwatch/doctor": "e2e/test_doctor",
    "agent/rankwatch/hook": "torch/test_ e2e/test_left_out e2e/test_guard e2e/test_skip e2e/test_norms e2e/test_parallel"
    " e2e/test_meshes e2e/test_desync e2e/test_agreeing e2e/test_integrations e2e/test_truth"
    " benchmarks/test_overhead benchmarks/test_cuda",
    "agent/rankwatch/integrations": "e2e/test_integrations torch/test_ e2e/test_examples",
    "agent/rankwatch/judge": "torch/test_truth torch/test_healthy torch/test_judged e2e/test_guard e2e/test_truth"
    " e2e/test_budget torch/judge/pace/test_late_faults",
    "agent/rankwatch/measure": "torch/test_ torch/measure/test_counted e2e/test_agreeing e2e/test_meshes"
    " benchmarks/test_overhead benchmarks/test_cuda",
    "agent/rankwatch/replay": "e2e/test_replay e2e/test_closeup",
    "agent/rankwatch/replicas": "e2e/test_desync e2e/test_agreeing e2e/test_meshes e2e/test_parallel",
    "agent/rankwatch/rerun": "torch/test_truth e2e/test_closeup e2e/test_closer e2e/test_replay e2e/test_guard"
    " torch/judge/pace/test_late_faults",
    "agent/rankwatch/zero_code": "e2e/test_attach e2e/test_crash e2e/test_starts torch/zero_code/test_finder",
    "agent/rankwatch/touch": "torch/test_ e2e/test_parallel e2e/test_meshes e2e/test_stalls e2e/test_closeup"
    " benchmarks/test_overhead benchmarks/test_cuda",
    "agent/rankwatch/tell": "e2e/test_faults e2e/test_leaving e2e/test_end e2e/test_starts e2e/test_rounds e2e/test_stalls"
    " e2e/test_scarce e2e/test_main_job e2e/test_daemon e2e/test_network e2e/test_several_hosts e2e/cluster/test_slurm",
    "agent/rankwatch/": "torch/test_ torch/api/ e2e/test_attach e2e/test_main_job e2e/test_many_watches",
    "deploy/docker": "e2e/cluster/test_docker",
    "deploy/examples": "e2e/test_examples",
    "deploy/grafana": "e2e/test_metrics net/serve/test_metrics",
    "deploy/kubernetes": "e2e/cluster/test_kubernetes",
    "deploy/prometheus": "e2e/test_metrics net/serve/test_metrics unit/serve/test_recipes",
    "deploy/slurm": "e2e/cluster/test_slurm",
    "deploy/systemd": "e2e/cluster/test_systemd",
    "docs/": "e2e/test_docs e2e/test_readme e2e/test_built_docs",
    "README.md": "e2e/test_docs e2e/test_readme e2e/test_built_docs",
    "monitor/rankwatch_monitor/commands": "e2e/test_completion e2e/test_views e2e/test_docs e2e/test_crash e2e/test_end"
    " e2e/test_restarted",
    "monitor/rankwatch_monitor/decide": "e2e/test_desync e2e/test_skip e2e/test_faults e2e/test_stalls e2e/test_truth"
    " e2e/test_unequal e2e/test_restarted e2e/test_rounds e2e/test_several_hosts e2e/test_collectives torch/test_judged"
    " e2e/test_held_up e2e/test_leaking e2e/test_doubts e2e/test_measures",
    "monitor/rankwatch_monitor/record": "e2e/test_faults e2e/test_export e2e/test_views e2e/test_truth torch/test_judged",
    "monitor/rankwatch_monitor/serve": "net/tell/ net/serve/test_skips e2e/test_faults e2e/test_daemon e2e/test_metrics"
    " e2e/test_end e2e/test_several_hosts e2e/test_network e2e/test_scarce e2e/test_status e2e/test_other_user"
    " benchmarks/test_load",
    "monitor/rankwatch_monitor/views/": "e2e/test_views",
    "monitor/rankwatch_monitor/views/export": "e2e/test_export",
    "monitor/rankwatch_fleet": "e2e/test_fleet benchmarks/test_fleet unit/fleet/",
    "monitor/rankwatch_monitor/views/top": "e2e/test_top",
    "monitor/rankwatch_monitor/views/ui": "e2e/test_page",
}
"""By the beginning of a source's path: the beginnings, below ``tests/``, of the files that a change of the source may break.

The folders of ``unit/``, ``torch/`` and ``net/`` that have the name of the source's folder are not named here: they belong to it.
"""

WIDE = ("agent/rankwatch/shared", "agent/rankwatch/tell", ".ci/", "pyproject.toml", "deploy/constraints", "tests/")
"""All tests rest on these: a change of one fills the gate up to its budget. A test file is no such path: it is its own area."""

CORE: dict[str, str] = {
    "the first overflow is named": "e2e/test_main_job.py::test_overflow_on_one_rank",
    "so it is between the batches that are measured in full": "e2e/test_main_job.py::"
    "test_overflow_between_the_batches_that_are_measured_in_full",
    "bad data": "e2e/test_truth.py::test_the_verdict_is_true[data]",
    "a bad weight": "e2e/test_truth.py::test_the_verdict_is_true[weight]",
    "a bad gradient, with rank and line": "e2e/test_guard.py::test_the_rank_and_the_line_that_made_it_are_named[plain-2]",
    "a bad loss": "e2e/test_truth.py::test_the_verdict_is_true[loss_of_no_tokens]",
    "no rank is left in a collective": "e2e/test_main_job.py::test_the_others_wait_in_all_reduce",
    "the deadline, and exit code 77": "e2e/test_main_job.py::test_ranks_that_never_come_back_end_by_the_deadline",
    "the culprit is torchrun's root cause": "e2e/test_main_job.py::test_the_culprit_is_the_root_cause_under_record_too",
    "an exception of the user's": "e2e/test_main_job.py::test_a_users_own_exception_is_not_reported_as_a_trip",
    "operator, recurrence and precision": "e2e/test_closeup.py::test_the_report_for_programs_names_operator_and_line",
    "a capsule is replayed": "e2e/test_replay.py::test_a_run_is_replayed_from_its_folder",
    "FSDP2": "e2e/test_parallel.py::test_overflow_in_a_sharded_model[fsdp2]",
    "tensor parallelism": "e2e/test_parallel.py::test_overflow_in_a_sharded_model[tp]",
    "pipelines": "e2e/test_parallel.py::test_overflow_in_a_pipeline[1f1b]",
    "a reduction": "e2e/test_truth.py::test_the_verdict_is_true[row_parallel]",
    "torch.compile": "torch/test_truth.py::test_the_verdict_is_true[in_a_compiled_model]",
    "the Hugging Face Trainer": "e2e/test_integrations.py::test_the_hugging_face_trainer",
    "Lightning": "e2e/test_integrations.py::test_lightning",
    "zero code": "e2e/test_attach.py::test_the_model_is_found_and_named_as_the_user_wrote_it",
    "replicas that came apart": "e2e/test_desync.py::test_it_is_named[a_flipped_bit_looked_for_at_each_step]",
    "--on-desync abort": "e2e/test_desync.py::test_the_run_is_aborted_where_that_is_asked_for[a_flipped_bit_of_three]",
    "healthy replicas": "e2e/test_agreeing.py::test_replicas_of_a_healthy_training_are_left_in_peace[fsdp2]",
    "a killed rank is lost": "e2e/test_faults.py::test_a_killed_rank_is_named_with_its_last_frame_and_the_others_are_stopped",
    "--on-lost wait": "e2e/test_faults.py::test_with_on_lost_wait_the_others_continue_without_a_killed_rank",
    "a stalled rank, with its stack": "e2e/test_stalls.py::"
    "test_a_stall_is_seen_with_its_stacks_while_it_lasts_and_not_afterwards",
    "--on-stall abort": "e2e/test_stalls.py::test_the_report_of_a_run_that_a_stall_stopped_has_both_stacks",
    "a save is not cut": "e2e/test_faults.py::test_no_rank_ends_while_another_one_saves",
    "orphans end": "e2e/test_end.py::test_a_rank_whose_torchrun_and_collector_are_killed_ends_by_itself",
    "signals to rankwatch run": "e2e/test_end.py::test_a_second_interrupt_ends_a_command_that_ignores_them",
    "without a collector the training continues": "e2e/test_daemon.py::test_a_training_continues_without_its_collector",
    "a collector is restarted": "e2e/test_faults.py::test_a_collector_killed_and_restarted_misses_nothing_and_stops_all_ranks",
    "a full disk": "e2e/test_faults.py::test_a_full_disk_costs_the_record_and_nothing_else",
    "a bug of ours in a hook": "e2e/test_faults.py::"
    "test_an_internal_error_in_a_hook_is_logged_once_and_reported_and_the_training_continues",
    "several nodes": "e2e/test_network.py::test_ranks_on_other_hosts_are_stopped_by_a_trip",
    "SLURM": "e2e/cluster/test_slurm.py::test_an_overflow_on_the_second_node",
    "the doctor": "e2e/test_doctor.py::test_a_rank_that_hangs_is_named_and_the_others_are_checked",
    "the page": "e2e/test_page.py::test_from_the_list_to_the_verdict",
    "top": "e2e/test_top.py::test_on_a_terminal",
    "the status line": "e2e/test_status.py::test_run_shows_a_line_and_leaves_a_clean_terminal",
    "Parquet": "e2e/test_export.py::test_pyarrow_reads_the_same_as_dump_prints",
    "Prometheus": "e2e/test_metrics.py::test_a_run_from_its_first_batch_to_its_verdict",
    "the fleet": "e2e/test_fleet.py::test_a_run_is_archived_when_it_is_over",
    "--on-verdict": "e2e/test_docs.py::test_a_channel_is_told_of_a_verdict",
    "the tutorial": "e2e/test_docs.py::test_the_tutorial",
    "the README's first output": "e2e/test_readme.py::test_the_demo_prints_the_report_on_top",
    "an example of deploy/": "e2e/test_examples.py::test_each_example_fails_as_its_first_lines_say[train_fsdp.py]",
    "watching changes no number": "torch/test_healthy.py::test_a_healthy_training_is_left_in_peace[a_scaler]",
}
"""One test for each promise of README.md and behaviour.md. The gate runs all of them, the quick ones among the quick tests."""
