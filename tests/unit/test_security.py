"""SECURITY.md's tables: each row says what an attacker can and cannot do, and is shown by tests that are named here."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from rankwatch.shared.link import sockets, wire
from rankwatch.tell import link, reception
from rankwatch_monitor.decide.keys import budget, tables
from rankwatch_monitor.serve.door import fair_queue
from rankwatch_monitor.serve.files import writer
from rankwatch_monitor.serve.metrics import server
from rankwatch_monitor.serve.processes import archiver, notifier

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "SECURITY.md"

KEYS, HOSTILE, CABLE, NETWORK, WRITER = (
    "net/serve/test_keys.py", "net/serve/test_hostile.py", "net/serve/test_wiretap.py", "e2e/test_network.py",
    "unit/serve/files/test_writer.py",
)  # fmt: skip

COUNTS = {2.0: "two", 8: "eight"}
SHARES = {0.25: "a quarter"}
BURSTS = {0.25: "a quarter of a second"}
TURNS = 0.02
"""What the turns of a rank's thread take of a core, beside what is counted."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "connects to the port, or scans it": (f"{KEYS}::test_a_client_without_a_key_is_not_admitted",),
    "reads the traffic": (f"{CABLE}::test_who_reads_the_traffic_sees_no_name",),
    "changes, repeats or reorders it": (f"{CABLE}::test_who_changes_the_traffic_only_breaks_the_connection",),
    "pretends to be the collector": (f"{KEYS}::test_a_client_without_a_key_is_not_admitted",),
    "floods the port": (f"{KEYS}::test_strangers_by_the_hundred_leave_a_rank_alone",),
    "cuts the network": (
        f"{NETWORK}::test_a_node_that_is_cut_off_alone_is_lost_and_the_others_are_stopped",
        f"{NETWORK}::test_with_on_lost_wait_a_node_that_is_cut_off_may_return",
    ),
    "floods a rank": (
        "net/tell/test_flooded.py::test_a_flood_costs_a_bounded_share_and_the_abort_gets_through",
        "net/tell/test_flooded.py::test_a_collector_that_asks_for_everything_again_and_again_gets_it_within_bounds",
        "net/tell/test_flooded.py::test_an_oversize_message_is_not_taken",
    ),
    "sends a message of several parts": (
        "net/tell/test_flooded.py::test_a_message_of_several_parts_ends_the_link_and_nothing_else",
        f"{HOSTILE}::test_a_second_part_makes_its_peer_deaf_until_it_connects_anew",
        "net/serve/door/test_inbox.py::"
        "test_the_parts_of_a_message_are_dropped_a_few_at_a_time_and_nothing_more_of_its_peer_is_heard",
    ),
    "sends an abort, or changes of options": (
        "net/tell/test_link.py::test_a_trip_brings_the_abort_to_every_rank",
        "net/tell/test_link.py::test_a_tuning_is_sent_to_every_rank_and_to_the_client_that_asked",
    ),
    "sends HELLO or TUNE for another job, also for `llama-3.1` with the key of `llama-3`": (
        f"{KEYS}::test_the_key_of_an_invited_job_is_valid_for_that_job_alone",
        f"{KEYS}::test_an_invited_key_changes_the_options_of_its_own_runs_alone",
    ),
    "sends HELLO for a rank that another process of the same start has": (
        "unit/decide/core/test_run.py::test_a_second_process_does_not_take_a_live_ranks_place",
    ),
    "starts another job of the same name": (
        "unit/decide/launch/test_launches.py::test_ranks_of_two_starts_that_come_mixed_are_kept_apart",
    ),
    "sends something that is no message, too large, or inconsistent": (
        f"{HOSTILE}::test_bad_messages_are_counted_and_the_other_run_goes_on",
        f"{HOSTILE}::test_what_is_over_the_limit_costs_its_sender_the_connection",
        "unit/decide/core/test_ledger.py::test_a_batch_that_does_not_fit_its_table_costs_its_sender_an_error",
    ),
    "sends names with escape sequences, line feeds or hidden letters": (
        "unit/shared/link/test_wire.py::test_every_text_of_a_message_is_printable",
        "net/serve/test_names.py::test_hostile_names_reach_no_output",
    ),
    "sends very much": (
        f"{HOSTILE}::test_memory_stays_flat_over_thousands_of_bad_messages",
        "net/serve/test_floods.py::test_another_runs_abort_beside_a_flood",
        "net/tell/test_link.py::"
        "test_a_trip_waits_for_a_slice_of_another_keys_messages_however_many_connections_send_at_once",
        "net/serve/test_floods.py::test_what_was_not_taken_beside_a_flood_with_the_same_key_is_sent_again",
    ),
    "says much, and often": (
        "unit/decide/keys/test_budget.py::test_what_one_rank_says_is_noted_down_within_bounds",
        "unit/decide/keys/test_budget.py::test_all_ranks_of_one_key_are_noted_down_within_bounds",
        "unit/decide/keys/test_budget.py::test_processes_that_want_one_rank_have_no_more_lines_than_other_refusals",
        "unit/decide/keys/test_budget.py::test_changes_of_options_that_come_too_fast_are_refused",
        "unit/decide/keys/test_budget.py::test_each_key_has_its_own_lines_in_the_log",
        "unit/decide/core/test_ledger.py::test_a_peer_that_sends_nonsense_for_ever_does_not_fill_the_log",
    ),
    "sends batches, fingerprints and traces of many runs": (
        f"{WRITER}::test_records_of_a_key_that_has_filled_its_share_of_the_disk_drop_their_oldest",
        f"{WRITER}::test_batches_of_one_key_leave_room_for_those_of_another",
        f"{WRITER}::test_facts_of_one_key_are_bounded_while_the_disk_does_not_answer_and_leave_room_for_those_of_another",
        "unit/decide/keys/test_budget.py::test_the_tables_of_all_runs_of_a_key_are_held_within_bounds",
        "unit/decide/keys/test_budget.py::test_a_run_that_is_taken_over_counts_for_the_key_that_began_it",
        "unit/decide/replicas/test_replica_watch.py::test_all_runs_of_a_key_hold_rounds_and_tables_within_bounds",
    ),
    "begins run after run": (
        "unit/decide/keys/test_budget.py::test_too_many_runs_of_one_key_wait_and_those_of_another_begin",
        "unit/decide/keys/test_budget.py::test_a_run_without_a_connected_rank_makes_room",
        "unit/decide/keys/test_budget.py::test_a_run_of_a_large_world_counts_for_its_ranks",
        "unit/decide/keys/test_budget.py::test_runs_that_follow_one_another_too_fast_wait",
    ),
    "makes run after run fail": (
        "unit/serve/processes/test_notifier.py::"
        "test_of_hundreds_of_failed_runs_one_command_runs_at_a_time_and_the_last_one_says_how_many_there_were",
        "unit/serve/processes/test_archiver.py::test_of_very_many_runs_some_wait_and_the_others_are_found_on_the_disk",
        "unit/decide/core/test_run.py::test_a_free_name_among_a_hundred_thousand_is_found_in_few_looks",
    ),
    "lies about its own rank": (f"{HOSTILE}::test_a_client_that_lies_leaves_the_other_run_alone",),
}
"""The first cell of each row, and the tests that show what its second cell says."""


def _mib(size: int) -> str:
    return f"{size >> 30} GiB" if size >= 1 << 30 else f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


_EACH_SECOND = {1.0: "once a second"}
FIGURES: dict[str, tuple[str, ...]] = {
    "floods a rank": (
        f"takes {reception.SHARE + TURNS:.0%} of one core".replace("%", " percent"),
        f"beside {BURSTS[reception.BURST]} at once",
        f"{sockets.RANK_HIGH_WATER} messages wait in the rank",
        f"messages of over {_mib(reception.MAX_RECEIVED_BYTES)} end the connection",
        f"changes of options pass {_EACH_SECOND[reception.TUNES_PER_SECOND]}",
        f"is sent again every {COUNTS[1 / link.WELCOMES_PER_SECOND]} seconds",
        {60.0: "the log gets one line a minute"}[reception.COMPLAINT_INTERVAL],
    ),
    "sends very much": (
        f"{SHARES[budget.WORK_PER_SECOND]} of its time while other keys have messages",
        f"what comes at once beyond {1000 * fair_queue.SLICE:g} ms",
        f"{sockets.RECEIVE_HIGH_WATER} messages of each connection and {_mib(fair_queue.MAX_WAITING)} of each key wait",
    ),
    "says much, and often": (
        f"up to {_mib(budget.WORDS_AT_ONCE)} for each rank and {_mib(budget.WORDS_PER_SECOND)} a second",
        f"for all ranks of a key up to {_mib(budget.ALL_WORDS_AT_ONCE)} and {_mib(budget.ALL_WORDS_PER_SECOND)} a second",
        f"options change {_EACH_SECOND[budget.CHANGES_PER_SECOND]}",
        f"of its refusals {budget.LINES_AT_ONCE:,} are logged",
    ),
    "sends batches, fingerprints and traces of many runs": (
        f"has {_mib(budget.DISK_AT_ONCE)} of the disk, and {_mib(budget.DISK_PER_SECOND)} a second more",
        f"Its frame tables hold {_mib(tables.MAX_BYTES)} of memory",
        f"its fingerprints {_mib(budget.ROUND_BYTES)} and {budget.FINGERPRINT_ROWS // 1_000_000} million rows",
        f"three quarters of what other keys leave free: of {_mib(writer.MAX_WAITING)} for batches",
        f"of {_mib(writer.MAX_FACTS)} for all else",
    ),
    "begins run after run": (
        f"has {budget.MAX_RUNS:,} under way, and {budget.RUNS_PER_SECOND:g} new ones a second",
        f"of {budget.PLACES_PER_SECOND:,.0f} ranks in all",
    ),
    "makes run after run fail": (
        f"{notifier.MOST_WAITING} of its events wait",
        f"{archiver.MOST_WAITING:,} runs that are over wait for `--archive`",
    ),
    "": (
        f"ZMQ_MAXMSGSIZE ({_mib(wire.MAX_MESSAGE_BYTES)} at a collector, {_mib(reception.MAX_RECEIVED_BYTES)} at a rank)",
        f"{sockets.RECEIVE_HIGH_WATER} messages of a connection wait in a collector, {sockets.RANK_HIGH_WATER} in a rank, "
        f"{sockets.SEND_HIGH_WATER:,} to be sent",
        f"by {COUNTS[server.MAX_SCRAPES]} readers at a time",
    ),
}
"""What the second cell of a row, or for the empty one the page beside the tables, says of each bound in the code."""


def rows() -> list[str]:
    """The first cells of both tables, without their heads."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    heads = {at for at, below in enumerate(lines[1:]) if below.startswith("| ---")}
    cells = [line.split("|")[1].strip() for at, line in enumerate(lines) if line.startswith("|") and at not in heads]
    return [cell for cell in cells if set(cell) - set("- ")]


@pytest.mark.parametrize(("row", "figure"), [(row, figure) for row, figures in FIGURES.items() for figure in figures])
def test_a_figure_is_that_of_the_code(row: str, figure: str) -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    said = text if not row else text.partition(f"| {row} | ")[2].partition(" | |")[0].partition(" | ")[0]
    assert figure in said.replace(" |", "")


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def test_every_row_is_shown_by_tests() -> None:
    assert list(dict.fromkeys(rows())) == list(SHOWN_BY)


@pytest.mark.parametrize("test", sorted({test for tests in SHOWN_BY.values() for test in tests}))
def test_the_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in names_in(file), f"no {name} in tests/{file}: name the test that shows this row of SECURITY.md now"
