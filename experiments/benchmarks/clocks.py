"""What benchmarks measure with: clocks and memory, on a CPU and on a GPU."""

import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")


def now(device: torch.device) -> float:
    """Returns seconds: CPU time of this process; on a GPU the time, once all work there is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(
    actions: Sequence[Callable[[], object]], repeats: int, device: torch.device = CPU
) -> list[float]:
    """Returns the median of the seconds that each action takes, in turns."""
    if device.type != "cpu":
        for do in actions:
            do()  # the first call on a GPU loads its kernels
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for taken, do in zip(seconds, actions, strict=True):
            begin = now(device)
            do()
            taken.append(now(device) - begin)
    return [statistics.median(taken) for taken in seconds]


class Most:
    """The most that a number ever was, looked at now and then until it is left."""

    def __init__(self, number: Callable[[], int], seconds: float) -> None:
        self.value, self._number, self._seconds = 0, number, seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Most":
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends."""
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(self._seconds):
            self.value = max(self.value, self._number())


def peak(do: Callable[[], object], device: torch.device = CPU) -> float:
    """Returns the most bytes that the tensors made meanwhile take at a time."""
    if device.type == "cpu":
        return _peak_of_cpu(do)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    do()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


def _peak_of_cpu(do: Callable[[], object]) -> float:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        do()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held = [event["args"] for event in events if event["name"] == "[memory]"]
    before = held[0]["Total Allocated"] - held[0]["Bytes"]
    return float(max(allocation["Total Allocated"] for allocation in held) - before)
