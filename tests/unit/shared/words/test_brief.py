"""What gloo, NCCL and torch's C++ say, in one line. The long texts were taken from real jobs and from their issues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.printable import paragraph
from rankwatch.shared.words.brief import LONGEST, brief, is_timeout

REMOTE = (
    "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, remote process exited or there "
    "was a network error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.1<43213> failed : Connection reset "
    "by peer"
)
STACK = (
    "\nException raised from recvBytes at ../torch/csrc/distributed/c10d/Utils.hpp:672 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f in /usr/lib/libc10.so)\nframe #1: <unknown>"
)
TIMEOUT = (
    "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895",
            "gloo: RuntimeError: Connection closed by peer [127.0.0.1]:10895",
        ),
        (
            "RuntimeError: [/opt/conda/conda-bld/pytorch_1670525551200/work/third_party/gloo/gloo/transport/tcp/pair.cc:598] "
            "Connection closed by peer [10.0.1.17]:22780. This may be caused by a failure of the remote process",
            "gloo: RuntimeError: Connection closed by peer [10.0.1.17]:22780. This may be caused by a failure of the "
            "remote process",
        ),
        (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [fe80::1]:25266: Connection "
            "reset by peer",
            "gloo: RuntimeError: Read error [fe80::1]:25266: Connection reset by peer",
        ),
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
            "operation to complete",
            "gloo: RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
        ),
        (
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:302] op.preamble.length <= op.nbytes. "
            "8 vs 4",
            "gloo: RuntimeError: op.preamble.length <= op.nbytes. 8 vs 4",
        ),
        (
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4306: "
            "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check "
            "the logs of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f",
            "gloo: RuntimeError: Read error [127.0.0.1]:4306: Connection reset by peer",
        ),
        (
            "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
            "gloo: RuntimeError: Gloo connectFullMesh failed with no error",
        ),
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: e9",
            "gloo: RuntimeError: ifa != nullptr. Unable to find address for: e9",
        ),
        (
            REMOTE,
            "NCCL: socketProgressOpt: Call to recv from 10.0.0.1<43213> failed : Connection reset by peer",
        ),
        (
            f"DistBackendError: NCCL communicator was aborted on rank 1.  Original reason for failure was: {REMOTE}",
            "NCCL: socketProgressOpt: Call to recv from 10.0.0.1<43213> failed : Connection reset by peer",
        ),
        (
            "DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error (run "
            "with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 2 'out of memory'",
            "NCCL: Cuda failure 2 'out of memory'",
        ),
        (
            "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, invalid usage (run with "
            "NCCL_DEBUG=WARN for details), NCCL version 2.19.3\nncclInvalidUsage: This usually reflects invalid usage of NCCL "
            "library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "NCCL: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
        ),
        (
            "RuntimeError: NCCL error in: /opt/pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:825, unhandled system error, NCCL "
            "version 2.7.8",
            "NCCL: RuntimeError: NCCL error in: /opt/pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:825, unhandled system "
            "error, NCCL version 2.7.8",
        ),
        (
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
            "socketStartConnect: Connect to node2<46841> failed : Software caused connection abort",
            "NCCL: socketStartConnect: Connect to node2<46841> failed : Software caused connection abort",
        ),
        (
            "DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store "
            "by key '0', but store->get('0') got error: Connection reset by peer" + STACK,
            "NCCL: DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
            "key-value store by key '0', but store->get('0') got...",
        ),
        (
            f"RuntimeError: [Rank 0] Watchdog caught collective operation timeout: {TIMEOUT}",
            "NCCL: RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, "
            "OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Tim...",
        ),
        (
            "DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=_ALLGATHER_BASE, Timeout(ms)=1800000) ran "
            "for 1802212 milliseconds before timing out." + STACK,
            "NCCL: DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated "
            "with exception: [Rank 1] Watchdog caught collective o...",
        ),
        ("RuntimeError: Connection reset by peer" + STACK, "RuntimeError: Connection reset by peer"),
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously "
            "reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
            "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
        ),
    ],
)
def test_the_line(text: str, said: str) -> None:
    assert brief(text) == said
    assert brief(said) == said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeyError: 'gloo'",
        "ValueError: line one\nline two: nccl, gloo and pair.cc",
        "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 300000 ms",
        "AssertionError: [model.cc:12] is not a file of gloo",
        "FileNotFoundError: [Errno 2] No such file or directory: 'NCCL error.txt'",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert brief(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'x'",
        "RuntimeError: one\ntwo",
        "RuntimeError\n   two",
        "RuntimeError: [gloo/pair.cc:1] closed by peer\nmore",
    ],
)
def test_the_line_of_code_is_at_the_end_of_the_first_line(text: str) -> None:
    at = "nccl/train.py:40 in step"
    first, line_break, rest = brief(text).partition("\n")
    assert brief(text, at) == f"{first}, at {at}{line_break}{rest}"


@given(st.text(), st.sampled_from(["[gloo/pair.cc:1] ", "NCCL error: ", "NCCL error in: a.cpp:1, "]))
def test_a_line_is_one_short_line(text: str, head: str) -> None:
    said = brief(f"RuntimeError: {head}{text}")
    if said.startswith(("gloo: ", "NCCL: ")):
        assert len(said) <= LONGEST
        assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "has_waited"),
    [
        (
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv",
            True,
        ),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)", True),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]", False),
    ],
)
def test_a_timeout_says_that_a_rank_has_waited(text: str, has_waited: bool) -> None:
    assert is_timeout(text) is has_waited


OF_A_WORKER = """KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/ann/train.py", line 11, in __getitem__
    row = self.rows[i]; return row["x"], row["label"]
                                         ~~~^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/tensordict/base.py", line 5, in get
    raise KeyError(key)
KeyError: 'label'

"""


def test_an_error_of_a_worker_is_told_with_the_line_of_the_worker() -> None:
    said = "KeyError: 'label' (DataLoader worker process 0), at train.py:11 in __getitem__"
    assert brief(OF_A_WORKER, "train.py:40 in <module>") == said
    assert brief(paragraph(OF_A_WORKER), "train.py:40 in <module>") == said  # as it comes over the wire
    assert brief(OF_A_WORKER.partition("Original")[0]) == "KeyError: Caught KeyError in DataLoader worker process 0.\n"
