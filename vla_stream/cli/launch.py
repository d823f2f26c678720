"""The life of a run on this host: its flow on the server, its workers under a supervisor, its end in every case."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from vla_stream.broker.connection import REDIS_ERRORS, UNREACHABLE, Client, address, check_server, connect
from vla_stream.broker.server import EmbeddedServer
from vla_stream.broker.tail import Tail
from vla_stream.cli import beside
from vla_stream.cli.allocation import Allocator
from vla_stream.cli.beside import Beside
from vla_stream.cli.display import Display
from vla_stream.cli.finish import newest_update
from vla_stream.cli.progress import Progress
from vla_stream.cli.samples import METRICS_FILE, StreamFile, is_sample
from vla_stream.cli.signals import Signals
from vla_stream.cli.timeline import TRACE_FILE, is_trace
from vla_stream.cli.trackers import Trackers
from vla_stream.config import Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError, RunFailed
from vla_stream.flow import SCALABLE, Desired, Flow, FlowState, LastSeen
from vla_stream.streams import notices, presence
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import one_line
from vla_stream.streams.presence import EVALUATED, LAUNCHER
from workers.janitor import Janitor
from workers.supervisor import ROLES, Notice, Supervisor, worker_command

LAUNCHER_TTL_S = 30.0
BEAT_S = 1.0
STEP_S = 0.1
LOOK_S = 0.3  # between two looks at what a server that loses everything must be told again
END_DRAIN_S = 5.0  # for segments in flight once the last update is done: nobody will train them
OTHERS_LEAVE_S = 4.0  # attached workers see the end within a second
EVENT_EVERY_S = 5.0  # per kind, on the terminal; all of them stand in the stream
EVENT_KINDS = 20  # on the terminal within that time
EVENTS_AT_ONCE = 500
QUIET_EVENTS = frozenset({"started", "ended"})

Ending = Literal["finished", "interrupted", "stopped"]


@contextlib.contextmanager
def server_for(url: str | None, logs: Path) -> Iterator[tuple[str, EmbeddedServer | None]]:
    """The given server, or one of our own that ends with this context and with this process."""
    if url is not None:
        yield url, None
        return
    with EmbeddedServer.start(logs) as server:
        yield server.url, server


class Launch:
    """One session of a run. `with Launch(...) as launch:` creates the flow and, at last, clears everything away."""

    def __init__(
        self,
        config: Config,
        url: str,
        server: EmbeddedServer | None,
        signals: Signals,
        display: Display,
        *,
        resume: bool,
    ) -> None:
        self.config, self.run_dir, self.url, self.server = config, config.run_dir, url, server
        self.signals, self.display, self.resume = signals, display, resume
        self.keys = Keys(config.name)
        self.client: Client = connect(url, name="launcher", margin_s=3.0)
        self.flow = Flow(self.client, self.keys)
        self.progress = Progress(config.updates)
        self.supervisor: Supervisor | None = None
        self._janitor: Janitor | None = None
        self._beside = Beside(config, display.tell) if config.evaluation.every else None
        self._evaluated = ""
        self._token = secrets.token_hex(8)
        self.metrics = StreamFile(self.client, self.keys.metrics, self.run_dir / METRICS_FILE, display.tell, is_sample)
        self._trace = StreamFile(self.client, self.keys.trace, self.run_dir / TRACE_FILE, display.tell, is_trace)
        self._trackers = Trackers(display.tell)
        self._told: deque[str] = deque(maxlen=200)
        self._event_times: dict[str, float] = {}
        self._next_beat_s = self._next_look_s = self._next_types_s = 0.0
        self._last: LastSeen | None = None
        self._specification: Specification | None = None
        self._claimed = self._silent = self._all_running = False
        self._scaled: dict[str, int] = {}  # as done last
        self._allocator = None if config.allocation is None else Allocator(config.allocation)
        self._next_allocation_s = 0.0
        self._started_ms = int(time.time() * 1000)

    def __enter__(self) -> Launch:
        try:
            check_server(self.client)
            self._create()
            self._claim()
            self._trackers.open(self.config)
            # Ours alone from here on: no other launcher has this run on this server.
            self._janitor = Janitor(self.flow.shm_folder())
            if self.resume:
                # Now that its folder is there: of an earlier life's remote readers, those that live say so again.
                self.flow.set_lane(self.config.broker.lane, by="vla-stream run --resume")
            self._events = Tail(self.client, self.keys.events, "$")
        except BaseException:
            self._clear_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clear_up()

    # ---- the run

    def launch_workers(self, roles: Sequence[str] = ROLES) -> None:
        """Trainer, generators, simulators, as many as the config says. roles: those of them that are wanted, in an
        order in which one does not wait for another."""
        self.supervisor = Supervisor(
            self.url,
            self.config.name,
            self.config.runs_dir,
            lease_s=self.config.flow.lease_s,
            watch_roles=roles == ROLES,
            shm=self.flow.shm_folder(),
            command=partial(worker_command, interpreters=self.config.interpreters),
        )
        config = self.config
        counts = {
            "trainer": config.trainer.ranks,
            "generator": config.generators.count,
            "simulator": config.simulators.count,
        }
        for role in roles:
            self.supervisor.launch(role, counts[role])

    def drive(self) -> Ending:
        """Until the last update, an end that somebody asked for, or a failed role (RunFailed, InputError)."""
        supervisor = self.supervisor
        assert supervisor is not None
        ending: Ending = "finished"
        while True:
            self.watch(remedy=" and `--resume` to go on from its checkpoint")
            if self.signals.asked >= 2:
                supervisor.stop()
                return "interrupted"
            state = self.beat()
            if not supervisor.draining:
                self._scale(state, supervisor)
                self._allocate(state, supervisor)
                ended = self._reason_to_end(state, supervisor)
                if ended is not None:
                    ending = ended
            elif not supervisor.children:
                return ending
            time.sleep(STEP_S)

    def watch(self, remedy: str = "") -> None:
        """One round of watching this host's workers. Raises RunFailed, or InputError, for a role that failed; remedy:
        what its person may do then."""
        supervisor = self.supervisor
        assert supervisor is not None
        self._tell(supervisor.step())
        if supervisor.failures and not supervisor.draining:
            role, cause = next(iter(supervisor.failures.items()))
            if role in supervisor.refused:
                raise InputError(f"{role}: {cause}")
            raise RunFailed(f"{role}: {cause}; see {self.run_dir / 'logs'}/{remedy}")

    def _scale(self, state: FlowState | None, supervisor: Supervisor) -> None:
        """Follow `vla-stream scale`."""
        for role, count in (state.scale if state is not None else {}).items():
            if self._scaled.get(role) != count:
                with contextlib.suppress(*UNREACHABLE):  # the next look tries it again
                    supervisor.scale(role, count)
                    self._scaled[role] = count
                    self._say("scaled", f"{count} {role}{'' if count == 1 else 's'} from now on, as somebody asked for")
                    if self._allocator is not None:
                        self._allocator.forget()

    def _allocate(self, state: FlowState | None, supervisor: Supervisor) -> None:
        """Follow the config's `allocation`."""
        if self._allocator is None or time.monotonic() < self._next_allocation_s:
            return
        self._next_allocation_s = time.monotonic() + BEAT_S
        counts = {role: len(supervisor.staying(role)) for role in SCALABLE}
        working = state is not None and state.desired == "running" and not self._unreachable
        move = self._allocator.decide(counts, working and self._all_running)
        if move is None:
            return
        with contextlib.suppress(*UNREACHABLE):  # what is missing then is measured, and added, like anything else
            for role, count in move.counts.items():
                supervisor.scale(role, count)
            self._say("allocated", move.why)

    def _say(self, kind: str, sentence: str) -> None:
        self._told.append(sentence)
        self.display.tell(sentence)
        notices.say(self.client, self.keys, LAUNCHER, kind, sentence)

    def _reason_to_end(self, state: FlowState | None, supervisor: Supervisor) -> Ending | None:
        """Looks for one, and begins to drain when there is one."""
        deadline_s = self.config.flow.drain_deadline_s
        if self.signals.asked:
            self.display.tell("ending: segments in flight are finished; Ctrl-C again stops at once")
            supervisor.drain(deadline_s)
            self.desire("draining")
            return "interrupted"
        if state is not None and state.desired in ("draining", "stopped"):
            self.display.tell(f"the run is {state.desired}, as somebody asked for; its workers end")
            supervisor.drain(deadline_s if state.desired == "draining" else END_DRAIN_S)
            return "stopped"
        if supervisor.finished.get("trainer-0") != 0:
            return None
        # The server may have lost the last update, as the launcher may have; the checkpoint of it is there.
        update = max(self.progress.update if state is None else state.update, newest_update(self.run_dir))
        if update < self.config.updates:
            raise RunFailed(
                f"trainer: ended at update {update} of {self.config.updates} although nobody asked; "
                f"see {self.run_dir / 'logs' / 'trainer-0.log'}"
            )
        self.desire("draining")
        supervisor.drain(END_DRAIN_S)
        return "finished"

    def beat(self) -> FlowState | None:
        """Keep the launcher's name, read metrics and events, show them. None when the server does not answer."""
        if self.server is not None and not self.server.alive:
            self.display.tell("the embedded Redis server died; a new one takes its place")
            self.server.restart()
        state = None
        if self._unreachable:
            self.display.show(self.progress)
            return None
        with contextlib.suppress(*UNREACHABLE), notices.expendable():
            self._remove_strangers()
            state = self.flow.state()
            if state is None:
                state = self._create_anew()
            if state is not None and time.monotonic() >= self._next_look_s:
                self._next_look_s = time.monotonic() + LOOK_S
                self._last = LastSeen(state, self.flow.books())
            self._read(state)
        self.display.show(self.progress)
        return state

    @property
    def _unreachable(self) -> bool:
        """As the supervisor found out; each more look at a frozen server would take seconds."""
        return self.supervisor is not None and self.supervisor.unreachable_since_s is not None

    def _remove_strangers(self) -> None:
        if time.monotonic() >= self._next_types_s:
            self._next_types_s = time.monotonic() + BEAT_S
            for sentence in self.flow.remove_strangers():
                self._say("removed", sentence)

    def _create_anew(self) -> FlowState | None:
        """The server was restarted or flushed: the segments it held are lost, workers and checkpoints are not."""
        self.display.tell("the server lost the run's state (a restart or a flush); it goes on from what was seen last")
        self.flow.create(self.config, self._last)
        if self._specification is not None:
            self.flow.announce(self._specification)
        self._claim()
        return self.flow.state()

    def read_metrics(self) -> None:
        """What workers wrote since the last look, also after their end."""
        with contextlib.suppress(*UNREACHABLE):
            self._take_records()

    def _take_records(self) -> None:
        records = self._trackers.add(self.metrics.read())
        self.progress.add(records)
        if self._allocator is not None:
            self._allocator.pulse.add(records)
        if self.config.trace:
            for _ in self._trace.read():
                pass

    def close_books(self) -> None:
        """The last metrics and events, and what became of every segment, told, and kept in metrics.jsonl."""
        self._silent = self._unreachable
        self._ask_last(self._take_records)
        self._ask_last(self._show_events)
        self._ask_last(self._write_books)
        if self._silent:
            self.display.tell(
                f"Redis at {address(self.client)}: no answer, so the books of this session are not closed"
            )

    def _write_books(self) -> None:
        books = self.flow.books()
        self.display.tell(str(books))
        record = {"time": time.time(), "kind": "books", "started": books.started, "in_flight": books.in_flight}
        letters = notices.dead_letters_in_all(self.client, self.keys)
        self.metrics.write([{**record, **books.outcomes, "balance": books.balance, "dead_letters": letters}])

    def desire(self, desired: Desired) -> None:
        # InputError: the server lost the run a moment ago. Our own workers are told by signals anyway.
        with contextlib.suppress(*UNREACHABLE, InputError), notices.expendable():
            self.flow.set_desired(desired, by="vla-stream run")

    def idle(self) -> bool:
        """For waiting on helpers: whether the person asked to end."""
        self.beat()
        return self.signals.asked > 0

    # ---- the server's side

    def _create(self) -> None:
        """F50: a run of this name with live workers is somebody else's; what a dead one left is cleared away."""
        if self.flow.create(self.config):
            return
        others = presence.alive(self.client, self.keys)
        leaders = [item for item in others if item.role in (LAUNCHER, "trainer")]
        if leaders or (others and not self.resume):
            first = (leaders or others)[0]
            raise InputError(
                f"run {self.config.name}: already runs on this server ({len(others)} live workers, for example "
                f"{first.id} on {first.host}); give another --run NAME, "
                f"or end it with: vla-stream stop --run {self.config.name}"
            )
        if self.resume:
            # Killed in the middle: its segments and books are there, and pools that outlived it go on.
            presence.forget_ended(self.client, self.keys)
            self.flow.adopt(self.config)
            self.flow.set_desired("running", by="vla-stream run --resume")
            self.display.tell(f"taking over run {self.config.name} with {len(others)} attached workers")
            return
        delete_keys(self.client, self.keys)
        self.flow.create(self.config)

    def _claim(self) -> None:
        about: dict[str, str | int] = {
            "role": LAUNCHER,
            **presence.process_fields(),
            "state": "running",
            "started_ms": self._started_ms,
            EVALUATED: self._evaluated,
        }
        self._claimed = presence.claim(self.flow.scripts, self.keys, LAUNCHER, self._token, LAUNCHER_TTL_S, about)
        if not self._claimed:
            raise InputError(f"run {self.config.name}: another launcher has it on this server; give another --run NAME")

    def _read(self, state: FlowState | None) -> None:
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        self._claim()
        self._specification = self._specification or self.flow.specification()
        self._take_records()
        if state is not None:
            self.progress.update = state.update
        self.progress.queue_depth = int(self.client.xlen(self.keys.obs_requests))
        there = presence.alive(self.client, self.keys)
        self.progress.workers = {role: sum(item.role == role for item in there) for role in ROLES}
        self._all_running = all(
            item.state.startswith(("running", "waiting")) for item in there if item.role in SCALABLE
        )
        self.progress.trainer_state = next((item.state for item in there if item.role == "trainer"), "")
        notices.trim(self.client, self.keys)
        self._show_events()
        if self._beside is not None and self.supervisor is not None and not self.supervisor.draining:
            found = self._beside.look()
            if found is not None:
                self._evaluated = beside.sentence(found)
                notices.sample(self.client, self.keys, LAUNCHER, LAUNCHER, "evaluation", found)
                notices.say(self.client, self.keys, LAUNCHER, "evaluated", self._evaluated)

    def _show_events(self) -> None:
        """What others wrote there since the last look, a few of each kind."""
        now_s = time.monotonic()
        self._event_times = {kind: until_s for kind, until_s in self._event_times.items() if now_s < until_s}
        for entry in self._events.read(EVENTS_AT_ONCE):
            worker, kind, text = (one_line(entry.fields.get(name, b"")) for name in (b"worker", b"kind", b"text"))
            # What our own supervisor wrote there was told when it happened. And anybody may write there, of any kind.
            if kind in QUIET_EVENTS or text in self._told or kind in self._event_times:
                continue
            if len(self._event_times) < EVENT_KINDS:
                self._event_times[kind] = now_s + EVENT_EVERY_S
                self.display.tell(f"{worker}: {text}")

    def _tell(self, told: Sequence[Notice]) -> None:
        for notice in told:
            self._told.append(notice.text)
            if notice.kind not in QUIET_EVENTS:
                self.display.tell(notice.text, notice.details)

    # ---- the end

    def _clear_up(self) -> None:
        """No process, key, file or socket stays, whatever happened before; each step is tried."""
        if self._beside is not None:
            self._beside.close()
        if self.supervisor is not None:
            with contextlib.suppress(*REDIS_ERRORS):
                self.supervisor.close()
        if self._claimed:
            # Another launcher's by now, if this one slept for longer than its claim: then its run goes on.
            self._ask_last(self._claim)
        if self._claimed:
            self._ask_last(lambda: self.flow.set_desired("stopped", by="vla-stream run"))
            self._ask_last(self._let_others_leave)
            if self.server is None:
                self._ask_last(lambda: delete_keys(self.client, self.keys))
            else:
                self._ask_last(lambda: presence.release(self.flow.scripts, self.keys, LAUNCHER, self._token))
        if self._janitor is not None:
            self._janitor.close()
        self._trackers.close()
        self.client.close()

    def _ask_last(self, step: Callable[[], object]) -> None:
        """Each step of the end is tried; but a frozen server that let one of them wait is not asked again."""
        if self._silent:
            return
        try:
            step()
        except UNREACHABLE:
            self._silent = True
        except (InputError, *REDIS_ERRORS):
            pass  # such as: there is no such run any more

    def _let_others_leave(self) -> None:
        deadline_s = time.monotonic() + OTHERS_LEAVE_S
        while time.monotonic() < deadline_s and self.signals.asked < 2:
            if all(item.role == LAUNCHER for item in presence.alive(self.client, self.keys)):
                return
            time.sleep(STEP_S)


def delete_keys(client: Client, keys: Keys) -> None:
    """All keys of a run that nobody works on any more."""
    names = list(client.scan_iter(match=keys.everything_pattern, count=1000))
    for start in range(0, len(names), 500):
        client.unlink(*names[start : start + 500])
