"""A run's metrics as workers write them, made of known costs."""

from __future__ import annotations

from vla_stream.cli.samples import Record

CONFIG = """
environment: {name: emulated, max_steps: 30}
policy: {name: emulated, chunk: 10}
simulators: {count: 2, env_batches: 4, slots: 1, envs_per_slot: 3, segment: {steps: 3}}
generators: {count: 2, max_batch_size: 6, padded_sizes: [3]}
trainer: {segments_per_update: 8, minibatch_samples: 36, epochs: 1}
"""


def second(role: str, number: int, time: float, **metrics: float) -> Record:
    return {"kind": "second", "role": role, "worker": f"{role}-{number}", "time": time, "seconds": 1.0, **metrics}


def update(number: int, **metrics: float) -> Record:
    about: Record = {"kind": "update", "role": "trainer", "worker": "trainer-0", "time": 100.0 + 2 * number}
    trained = {
        "samples": 72.0,
        "trained_env_steps": 720.0,
        "optimiser_steps": 2.0,
        "devices": 4.0,
        "ranks": 1.0,
        "apart": 1.0,
    }
    times = {"fit_s": 0.72, "fit_samples": 72.0, "step_s": 0.01, "publish_s": 0.03, "pass_s": 0.016, "weights_mb": 0.5}
    return {**about, "update": float(number), **trained, **times, **metrics}


def run() -> list[Record]:
    """Updates at 102, 104, … 110. Chunks of 100 and 140 ms in turn, inferences of 3 + 6 · rows ms, a way of 5 ms."""
    records: list[Record] = [update(number) for number in range(1, 6)]
    for time in range(96, 112):
        # All is slower while the run begins; it must not be seen.
        slow = 3.0 if time <= 104 else 1.0
        for number in (0, 1):
            chunks = {"chunks": 10.0, "chunk_ms": slow * 1200.0, "chunk_ms2": slow * 10 * (120.0**2 + 20.0**2)}
            resets = {"resets": 3.0, "reset_ms": slow * 30.0, "slots_reset": 3.0, "segments": 3.0}
            way = {"replies": 10.0, "replies_ms": slow * 400.0, "sent": 10.0, "sent_ms": slow * 10.0}
            amount = {"env_steps": 300.0, "bytes.shm": 4000.0, "bytes.inline": 1000.0, "environment_cpu_s": 0.03}
            records.append(second("simulator", number, time + 0.1, **chunks, **resets, **way, **amount, cpu=0.06))
            small, large = 2.0, 4.0  # inferences of three rows and of six
            sums = {"inferences": small + large, "inferred_rows": 3 * small + 6 * large}
            sums |= {"inferred_rows2": 9 * small + 36 * large, "inferred_ms": slow * (21 * small + 39 * large)}
            sums["inferred_rows_ms"] = slow * (3 * 21 * small + 6 * 39 * large)
            served = {"served": 10.0, "served_ms": slow * 370.0, "batches": 6.0, "swaps": 1.0, "swaps_ms": 2.0}
            busy = {"busy.read": 0.002, "busy.collate": 0.001}
            records.append(second("generator", number, time + 0.2, **sums, **served, **busy, cpu=0.09))
        records.append(second("trainer", 0, time + 0.3, segments=4.0, **{"busy.read": 0.012}, cpu=0.12))
    return sorted(records, key=lambda record: float(record["time"]))
