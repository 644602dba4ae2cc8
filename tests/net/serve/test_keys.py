"""Which clients are admitted, and for which job a key is valid: a real collector, real sockets, real keys."""

from __future__ import annotations

import json
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import zmq
from torch import nn

import rankwatch
from collectors import PATIENCE, Running, until
from makers import hello
from rankwatch.errors import AddressError, ConnectionFileError, ProtocolError, UsageError
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import wire
from rankwatch.shared.link.connection import Connection
from rankwatch.shared.link.sockets import dealer, new_key_pair
from rankwatch.shared.types import messages
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor import cli
from rankwatch_monitor.serve.door import control


def answer_to(connection: Connection, message: messages.Message) -> messages.Message | None:
    """The answer to a client's message; None when the client is not admitted."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = dealer(context, connection)
    try:
        if not socket.poll(500, zmq.POLLOUT):
            return None
        socket.send(wire.encode(message))
        return wire.decode(socket.recv()) if socket.poll(1000 * PATIENCE) else None
    finally:
        context.destroy(linger=0)


def test_a_client_without_a_key_is_not_admitted(collector: Running) -> None:
    keys = new_key_pair()
    stranger = replace(collector.collector.connection, client_public=keys.public, client_secret=keys.secret)
    assert answer_to(stranger, hello()) is None
    assert collector.collector.ledger.runs == {}
    # A man in the middle, who receives what is meant for the collector, cannot read it: the ranks know the collector's key.
    other = replace(collector.collector.connection, server_public=new_key_pair().public)
    assert answer_to(other, hello()) is None


def test_strangers_by_the_hundred_leave_a_rank_alone(collector: Running) -> None:
    connection = collector.collector.connection
    host, _, port = connection.address.removeprefix("tcp://").rpartition(":")
    strangers = [socket.create_connection((host, int(port)), PATIENCE) for _ in range(200)]
    for number, stranger in enumerate(strangers):
        with suppress(OSError):
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" if number % 2 else b"\xff" * 4096)
    assert isinstance(answer_to(connection, hello()), messages.Welcome)
    for stranger in strangers:
        stranger.close()


def test_the_key_of_an_invited_job_is_valid_for_that_job_alone(collector: Running) -> None:
    master = collector.collector.connection
    mine = control.invite(master, "mine")
    theirs = answer_to(master, hello(job="theirs"))
    assert isinstance(theirs, messages.Welcome)

    assert isinstance(answer_to(mine, hello(job="mine")), messages.Welcome)
    assert isinstance(answer_to(mine, hello(job="mine", model=1)), messages.Welcome)  # a further model of the same processes
    for job in ("theirs", "mine.x", "mine.2", "mine2", ""):
        refused = answer_to(mine, hello(job=job))
        assert isinstance(refused, messages.Error)
        assert refused.remedy == "stop"
        assert "speaks for job mine alone" in refused.text
    runs = collector.collector.ledger.runs
    found = {name: (run.opened.job, run.opened.model) for name, run in runs.items()}
    assert found == {"theirs-0": ("theirs", 0), "mine-0": ("mine", 0), "mine.2-0": ("mine", 1)}


def test_an_invited_key_changes_the_options_of_its_own_runs_alone(collector: Running) -> None:
    master = collector.collector.connection
    mine = control.invite(master, "mine")
    answer_to(master, hello(job="theirs"))
    answer_to(mine, hello(job="mine"))
    assert control.tune(mine, messages.Tune(tuning=Tuning(every=10))).runs == ("mine-0",)
    with pytest.raises(UsageError, match=r"no run theirs-0; under way here: mine-0"):
        control.tune(mine, messages.Tune("theirs-0", Tuning(every=10)))
    assert set(control.tune(master, messages.Tune(tuning=Tuning(every=5))).runs) == {"mine-0", "theirs-0"}


def test_an_invited_key_invites_nobody(collector: Running) -> None:
    mine = control.invite(collector.collector.connection, "mine")
    with pytest.raises(UsageError, match="speaks for job mine alone"):
        control.invite(mine, "theirs")


def test_a_job_is_invited_once(collector: Running) -> None:
    master = collector.collector.connection
    assert control.invite(master, "mine") == control.invite(master, "mine") != control.invite(master, "theirs")


def test_an_invited_job_is_admitted_by_the_next_collector(tmp_path: Path) -> None:
    first = Running(tmp_path)
    mine = control.invite(first.collector.connection, "mine")
    first.stop(clean=False)
    second = Running(tmp_path, listen=None)
    try:
        assert isinstance(answer_to(mine, hello(job="mine")), messages.Welcome)
        refused = answer_to(mine, hello(job="theirs"))
        assert isinstance(refused, messages.Error)
        assert control.invite(second.collector.connection, "mine") == mine
    finally:
        second.stop()


def test_a_training_takes_the_name_of_the_job_it_was_invited_as(
    collector: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, invited = tmp_path / "connection.json", tmp_path / "mine.json"
    assert cli.main(["invite", "mine", "--connection", str(file), "--output", str(invited)]) == 0
    assert capsys.readouterr().out == f"ranks of job mine reach the collector by RANKWATCH_CONNECTION={invited}\n"
    assert stat.S_IMODE(invited.stat().st_mode) == 0o600
    monkeypatch.setenv("RANKWATCH_JOB", "another")
    model = nn.Linear(2, 2)
    with rankwatch.watch(model, connection=invited) as watch:
        assert watch.is_connected
        model(torch.ones(1, 2)).sum().backward()
    until(lambda: collector.reports)
    assert [report.run for report in collector.reports] == ["mine-0"]


def test_a_rank_that_speaks_for_another_job_stops_before_its_first_batch(collector: Running) -> None:
    mine = replace(control.invite(collector.collector.connection, "mine"), job="theirs")
    with pytest.raises(ProtocolError, match="speaks for job mine alone, not for theirs"):
        rankwatch.watch(nn.Linear(2, 2), connection=connections_text(mine))


def connections_text(connection: Connection) -> str:
    """A connection as text, as in the environment."""
    return json.dumps({"rankwatch_connection": list(connections.FORMAT), **asdict(connection)})


# --- plain text -----------------------------------------------------------------------------------------------------------


def test_a_collector_in_plain_text_is_for_its_own_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Running(tmp_path, insecure=True)
    connection = connections.read(tmp_path / "connection.json")
    assert connection == plain.collector.connection
    assert not connection.is_encrypted
    assert isinstance(answer_to(connection, hello()), messages.Welcome)
    keys = new_key_pair()
    encrypted = replace(connection, server_public=keys.public, client_public=keys.public, client_secret=keys.secret)
    assert answer_to(encrypted, hello()) is None
    with pytest.raises(UsageError, match="links are in plain text here, and keys mean nothing"):
        control.invite(connection, "job")
    plain.stop(clean=False)
    with pytest.raises(ConnectionFileError, match="is of a collector without encryption"):
        Running(tmp_path, listen=None)
    again = Running(tmp_path, listen=None, insecure=True)
    assert again.collector.connection == connection
    again.stop()


@pytest.mark.parametrize("listen", ["tcp://*:0", "tcp://0.0.0.0:0"])
def test_plain_text_beyond_this_machine_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(AddressError, match="plain text: that is for loopback alone"):
        Running(tmp_path, listen=listen, insecure=True)


def test_a_collector_with_keys_does_not_listen_to_plain_text(collector: Running) -> None:
    plain = replace(collector.collector.connection, server_public="", client_public="", client_secret="")
    assert answer_to(plain, hello()) is None
    with pytest.raises(ConnectionFileError, match="in use by a running collector"):
        Running(collector.folder, listen=None, insecure=True)
